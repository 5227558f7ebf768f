"""Calibration: labels and thresholds by hand, orders against masses summed by hand, one run from end to end."""

import json

import pytest
import torch
from torch import nn

from decomoe.ask import Loaded, load
from decomoe.calibrate import calibrate
from decomoe.calibrate.cases import run
from decomoe.calibrate.orders import expert_orders
from decomoe.calibrate.savb import Observed, label, observe, train_gate, tune_theta
from decomoe.calibration import Calibration, fingerprint
from decomoe.families import parts_of
from decomoe.methods import DecoMoE, Dense
from decomoe.mini.cases import CALIBRATION_SEED, drawn_cases


@pytest.fixture(scope="module")
def mini() -> Loaded:
    return load()


def observed() -> Observed:
    """Four cases, candidates 3 and 7."""
    return Observed(
        [3, 7],
        torch.zeros(4, 2, 4),
        correct=torch.tensor([[True, True], [False, True], [False, False], [True, True]]),
        nll=torch.tensor([[0.1, 0.0], [2.0, 0.2], [9.0, 9.0], [5.0, 0.0]]),
        dense_correct=torch.tensor([True, True, False, True]),
    )


def test_labels_by_hand():
    """tau is the 95th percentile of 0.1, 0.2, 5.0 (earliest correct exits): 4.52. Correct but surprised is no exit."""
    labels, tau = label(observed(), range(4))
    assert tau == pytest.approx(0.2 + 0.9 * 4.8)
    assert labels.tolist() == [[True, True], [False, True], [False, False], [False, True]]
    labels, tau = label(observed(), range(2))  # tau from the first two cases only
    assert tau == pytest.approx(0.1 + 0.95 * 0.1)
    assert labels.tolist() == [[True, True], [False, False], [False, False], [False, True]]


def test_nothing_solved_is_said():
    seen = observed()
    seen.correct[:] = False
    with pytest.raises(ValueError, match="answered correctly"):
        label(seen, range(4))


def test_gate_learns_what_features_tell():
    torch.manual_seed(0)
    features = torch.randn(1300, 2, 8)
    labels = torch.stack([features[:, 0, 0] > 0, features[:, 1, 3] > 0], 1)
    gate, losses = train_gate(features[:1000], labels[:1000], [3, 7], width=32)
    assert losses[-1] < losses[0]
    for i, layer in enumerate((3, 7)):
        guessed = gate(layer, features[1000:, i]) > 0.5
        assert (guessed == labels[1000:, i]).float().mean() > 0.85


class FixedGate(nn.Module):
    """p_exit by candidate and case, given."""

    candidates = (3, 7)

    def forward(self, layer, features):
        return torch.tensor({3: [0.9, 0.6, 0.2, 0.1], 7: [0.9, 0.9, 0.9, 0.9]}[layer])


def test_theta_is_the_lowest_mean_exit_that_retains():
    """Case 1 breaks if it leaves after 3 (p 0.6): theta must pass 0.6, and then case 0 alone leaves early."""
    theta, report = tune_theta(FixedGate(), observed(), range(4), retain=1.0)
    assert 0.6 < theta <= 0.9
    assert report["accuracy"] == report["dense_accuracy"] == 0.75
    assert report["mean_exit"] == (3 + 7 + 7 + 7) / 4
    theta, report = tune_theta(FixedGate(), observed(), range(4), retain=0.5)
    assert report["mean_exit"] == 3
    assert theta <= 0.1


def test_orders_follow_the_text_mass(mini):
    cases = drawn_cases(CALIBRATION_SEED, 4)
    orders = expert_orders(mini, cases)
    total = torch.zeros(orders.shape, dtype=torch.float64)
    for outcome in run(mini, cases, DecoMoE(exit_after=8, rcep=False), batch=1, max_new_tokens=1):
        total += torch.tensor(outcome.trace.mass["text"], dtype=torch.float64) / outcome.trace.tokens.text
    ranked = total.gather(1, orders)
    assert (ranked.diff(dim=1) <= 1e-6).all()
    assert torch.equal(orders.sort(1).values, torch.arange(32).expand(16, -1))


def test_observed_features_and_nll_are_a_plain_forwards(mini):
    cases = drawn_cases(CALIBRATION_SEED, 2)
    seen = observe(mini, cases, [7, 15])
    dense = [outcome.first_logits for outcome in run(mini, cases, Dense(), batch=1)]
    # An exit after the last layer changes nothing for the first token.
    expected = [nn.functional.cross_entropy(logits, logits.argmax()).item() for logits in dense]
    assert seen.nll[:, 1].tolist() == pytest.approx(expected, abs=1e-4)
    assert seen.features.shape == (2, 2, 256)


def test_from_end_to_end(mini, tmp_path):
    cases = drawn_cases(CALIBRATION_SEED, 40)
    artifact = calibrate(mini, cases, [5, 9, 13])
    artifact.save(tmp_path)
    again = Calibration.load(tmp_path)
    again.check(parts_of(mini.model))
    assert again.model == fingerprint(parts_of(mini.model))
    assert again.gate.candidates == [5, 9, 13]
    assert again.provenance["ids"] == [case.id for case in cases]
    assert json.dumps(again.provenance)


def test_no_candidate_is_said(mini):
    with pytest.raises(ValueError, match="no layer"):
        observe(mini, drawn_cases(CALIBRATION_SEED, 2), [])


def test_asking_between_batches_does_not_hang(mini):
    cases = drawn_cases(CALIBRATION_SEED, 4)
    both = zip(run(mini, cases, Dense(), batch=2), run(mini, cases, DecoMoE(), batch=2), strict=True)
    assert len(list(both)) == 4
