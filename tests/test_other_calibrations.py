"""What other methods are calibrated to: against runs of their own, and the walk along thresholds against trying all."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_calibration import CASES, TINY

from decomoe import cli
from decomoe.answer import Loaded, encode
from decomoe.calibrate import OtherSettings, Question, Training, calibrate_other
from decomoe.calibrate.modes import _Without, cheapest
from decomoe.calibrate.observe import divergence
from decomoe.calibrate.others import dyvte_training
from decomoe.calibration import Calibration
from decomoe.families import parts_of
from decomoe.gate import text_features
from decomoe.methods import VTW, Dense, DyVTE, Method, MoDES
from decomoe.runtime import attach

QUESTIONS = [Question(case, TINY) for case in CASES[:3]]


def first_logits(mini: Loaded, method: Method) -> torch.Tensor:
    inputs = encode(mini, [(question.case.picture(), question.case.question) for question in QUESTIONS])
    with attach(mini.model, method, mini.calibration) as session:
        options = dict(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
        return session.generate(inputs, **options).logits[0]


def test_divergence_by_hand():
    one, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert divergence(one, other) == pytest.approx(0.5 * torch.log(torch.tensor(4 / 3)).item())
    assert divergence(one, one) == 0


def test_vtw_takes_the_first_layer_that_hardly_matters(mini, tmp_path):
    artifact = calibrate_other("vtw", mini, QUESTIONS, OtherSettings(eta=1.0, batch=2), tmp_path)
    measured = artifact.provenance["vtw"]["divergence"]
    dense = first_logits(mini, Dense())
    for layer in (3, 9, 14):
        expected = divergence(first_logits(mini, VTW(layer)), dense) / len(QUESTIONS)
        assert measured[layer] == pytest.approx(expected, rel=1e-3)
    exit_after = int(artifact.others["vtw"]["exit_after"])
    assert measured[exit_after] < 1.0 <= min(value for layer, value in measured.items() if layer < exit_after)
    assert artifact.ids >= {question.case.id for question in QUESTIONS} | mini.calibration.ids
    artifact.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert VTW().bind(parts_of(mini.model), again).exit_after == exit_after
    with pytest.raises(ValueError, match="the least is"):
        calibrate_other("vtw", mini, QUESTIONS, OtherSettings(eta=1e-9), tmp_path)


def test_dyvte_learns_where_exits_change_nothing(mini, tmp_path):
    artifact = calibrate_other("dyvte", mini, QUESTIONS, OtherSettings(max_new_tokens=2), tmp_path)
    artifact.save(tmp_path / "out")
    again = Calibration.load(tmp_path / "out")
    decider = DyVTE().bind(parts_of(mini.model), again)
    assert (list(decider.candidates), decider.gate_width) == (list(range(3, 15)), 128)
    assert not any("bias" in name for name in again.others["dyvte"])
    assert sum(weight.nbytes for weight in again.others["dyvte"].values()) == 12 * 4 * 128 * (2 * 128 + 2)
    assert artifact.provenance["dyvte"]["training"] == asdict(Training(width=128, bias=False))
    inputs = encode(mini, [(question.case.picture(), question.case.question) for question in QUESTIONS])
    with attach(mini.model, DyVTE(theta=1), again) as session:
        session.keep = (14,)
        session.generate(inputs, max_new_tokens=1)
        features = text_features(session.states[14], session.cache.text_after_image)
        read = [trace.gate[-1].p_exit for trace in session.traces()]
    assert read == pytest.approx(decider.gate(14, features).tolist(), abs=1e-5)


def test_dyvte_gates_of_large_models_are_the_authors():
    assert [dyvte_training(size).width for size in (128, 2048, 4096)] == [128, 2048, 2048]
    assert dyvte_training(4096, width=512) == Training(width=512, bias=False)


def test_modes_measures_what_experts_matter(mini, tmp_path):
    artifact = calibrate_other("modes", mini, QUESTIONS, OtherSettings(skip=0.3, grid=3), tmp_path)
    importance, tau = (artifact.others["modes"][name] for name in ("importance", "tau"))
    dense = first_logits(mini, Dense())
    places = ((0, 0), (0, 9), (1, 3), (1, 12))
    expected = [divergence(dense, first_logits(mini, _Without(layer, bool(modality)))) for modality, layer in places]
    for pair in (slice(0, 2), slice(2, 4)):  # of one modality
        ours = [importance[place].item() for place in places[pair]]
        assert ours[0] / ours[1] == pytest.approx(expected[pair][0] / expected[pair][1], rel=1e-2)
    assert importance.sum(1).tolist() == pytest.approx([1, 1])
    report = artifact.provenance["modes"]
    assert report["skipped"] >= 0.3
    mini_with = Loaded(mini.model, mini.processor, artifact)
    again = divergence(dense, first_logits(mini_with, MoDES(*tau.tolist()))) / len(QUESTIONS)
    assert again == pytest.approx(report["divergence"], rel=1e-2, abs=1e-6)


@given(st.data(), st.floats(0.1, 0.9))
@settings(deadline=None)
def test_the_walk_finds_what_trying_all_finds(data, skip):
    steps = st.lists(st.floats(0, 1), min_size=5, max_size=5).map(sorted)
    share, cost = ([data.draw(steps), data.draw(steps)] for _ in range(2))

    def tried(pair):
        i, j = pair
        return (share[0][int(i)] + share[1][int(j)]) / 2, cost[0][int(i)] + cost[1][int(j)]

    enough = [tried((i, j))[1] for i in range(5) for j in range(5) if tried((i, j))[0] >= skip]
    if not enough:
        with pytest.raises(ValueError, match="ask for less"):
            cheapest(tried, range(5), range(5), skip)
    else:
        assert cheapest(tried, range(5), range(5), skip)[1]["divergence"] == min(enough)


def test_the_command_adds_to_the_artifact(tmp_path, capsys):
    arguments = ["--data", "drawn:2", "--out", str(tmp_path / "out")]
    assert cli.main(["calibrate", "--method", "vtw", "--eta", "100", *arguments]) == 0
    assert '"exit_after": 3' in capsys.readouterr().out
    artifact = Calibration.load(tmp_path / "out")
    assert artifact.gate is not None
    assert int(artifact.others["vtw"]["exit_after"]) == 3
    assert artifact.provenance["vtw"]["data"] == ["drawn:2"]
    assert cli.main(["calibrate", "--method", "vtw", "--eta", "0", *arguments]) == 2
    assert "--eta must be above 0" in capsys.readouterr().err


def test_there_must_be_something_to_add_to(mini, tmp_path):
    with pytest.raises(ValueError, match="make one first, of decomoe"):
        calibrate_other("vtw", Loaded(mini.model, mini.processor), QUESTIONS, OtherSettings(), tmp_path)
