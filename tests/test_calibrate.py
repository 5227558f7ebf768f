"""Calibration: labels, thresholds and the guarantee by hand and by simulation, replays against runs of their own."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from conftest import qwen
from tiny_calibration import CASES, TINY
from torch import nn

from decomoe import cli
from decomoe.answer import MINI, Loaded, encode
from decomoe.benchmarks import Benchmark, Case, run
from decomoe.calibrate import Question, Settings, Training, calibrate, gate_candidates, hindsight, store
from decomoe.calibrate.data import GUARANTEED, load_questions, split
from decomoe.calibrate.guarantee import (
    NEVER,
    THETAS,
    binomial_cdf,
    build_path,
    learn_then_test,
    needed,
    passing,
    replay,
)
from decomoe.calibrate.observe import Observed, Plan, observe
from decomoe.calibrate.savb import label, train_gate
from decomoe.calibration import Calibration, fingerprint
from decomoe.families import parts_of
from decomoe.methods import DecoMoE, Dense, Method
from decomoe.runtime import attach

ROOT = Path(__file__).parents[1]
QUESTIONS = [Question(case, TINY) for case in CASES]


# --- labels and gate -------------------------------------------------------------------------------------------------

CORRECT = torch.tensor([[True, True], [False, True], [False, False], [True, True]])
NLL = torch.tensor([[0.1, 0.0], [2.0, 0.2], [9.0, 9.0], [5.0, 0.0]])


def test_labels_by_hand():
    """tau is the 95th percentile of 0.1, 0.2, 5.0 (earliest correct exits): 4.52. Correct but surprised is no exit."""
    labels, tau = label(CORRECT, NLL)
    assert tau == pytest.approx(0.2 + 0.9 * 4.8)
    assert labels.tolist() == [[True, True], [False, True], [False, False], [False, True]]


def test_nothing_solved_is_said():
    with pytest.raises(ValueError, match="answered correctly"):
        label(torch.zeros_like(CORRECT), NLL)


def test_gate_learns_what_features_tell():
    torch.manual_seed(0)
    features = torch.randn(1300, 2, 8)
    labels = torch.stack([features[:, 0, 0] > 0, features[:, 1, 3] > 0], 1)
    gate, losses = train_gate(features[:1000], labels[:1000], [3, 7], Training(width=32))
    assert losses[-1] < losses[0]
    for i, layer in enumerate((3, 7)):
        guessed = gate(layer, features[1000:, i]) > 0.5
        assert (guessed == labels[1000:, i]).float().mean() > 0.85


def test_gate_candidates():
    parts = parts_of(qwen())  # 6 layers, DeepStack up to layer 2
    assert gate_candidates(parts) == (3, 5)
    assert gate_candidates(parts, 3) == (5,)  # DeepStack adds behind layer 2, which layer 3 is the first to see
    assert gate_candidates(parts_of(qwen(num_hidden_layers=48, hidden_size=32))) == tuple(range(3, 48, 4))
    with pytest.raises(ValueError, match="no layer"):
        gate_candidates(parts, 7)


# --- thresholds and the guarantee ------------------------------------------------------------------------------------


def test_replay_by_hand():
    """Question 0 leaves at the first candidate, 1 at the second, 2 never."""
    table = torch.arange(18).view(3, 3, 2)
    p_exit = torch.tensor([[0.9, 0.9], [0.2, 0.6], [0.1, 0.2]])
    assert replay(table, p_exit, [0.5]).tolist() == [[0, 8, 16], [1, 9, 17]]
    assert replay(table, torch.ones(3, 2), [1.0, NEVER]).tolist() == [[0, 6, 12], [1, 7, 13], [4, 10, 16], [5, 11, 17]]


def test_path_goes_from_dense_to_cheap_and_agreement_never_rises():
    cost = [0.5, 0.7, 0.6, 0.9, 1.0]
    agreement = [0.9, 0.95, 0.8, 1.0, 1.0]
    assert build_path(cost, agreement) == [4, 3, 1, 0]


@pytest.mark.parametrize(
    ("successes", "trials", "chance"), [(0, 299, 0.01), (3, 400, 0.01), (10, 50, 0.2), (5, 5, 0.3)]
)
def test_binomial_cdf_is_exact(successes, trials, chance):
    exact = Fraction(chance)
    expected = sum(math.comb(trials, k) * exact**k * (1 - exact) ** (trials - k) for k in range(successes + 1))
    assert binomial_cdf(successes, trials, chance) == pytest.approx(float(expected), rel=1e-9)


def test_passing_stops_at_the_first_failure():
    assert needed(0.99, 0.95) == 299
    assert passing([0], 299, 0.99, 0.95) == 1
    assert passing([0], 298, 0.99, 0.95) == 0
    assert passing([1], 473, 0.99, 0.95) == 1  # the known sizes for one failure
    assert passing([1], 472, 0.99, 0.95) == 0
    assert passing([0, 0, 9, 0], 299, 0.99, 0.95) == 2


RETAIN, CONFIDENCE, SPLITS = 0.95, 0.9, 200


def graded(size: int = 20_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A population in which earlier exits and shorter prefixes change more answers, and the gate knows in part."""
    torch.manual_seed(0)
    ease = torch.rand(size)
    risk = torch.tensor([[0.1, 0.2, 0.4], [0.04, 0.08, 0.2], [0.01, 0.02, 0.05], [0.0, 0.0, 0.0]])
    cost = torch.tensor([[0.4, 0.3, 0.2], [0.6, 0.5, 0.4], [0.8, 0.75, 0.7], [1.0, 1.0, 1.0]])
    known = ease.unsqueeze(1) - risk[:3, 1] + 0.2 * torch.randn(size, 3)
    return ease.view(-1, 1, 1) >= risk, (8 * known).sigmoid(), cost.expand(size, -1, -1)


def borderline(size: int = 20_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A population in which every exit changes just more answers than allowed, and the gate knows nothing."""
    torch.manual_seed(1)
    same = torch.rand(size, 4, 3) >= 0.0501 - 1e-4 * torch.arange(3)
    same[:, 0] = torch.rand(size, 3) >= 0.052
    same[:, -1] = True
    same[:, :-1] = same[:, :1, :1]  # one coin a question: a lucky split is lucky for all configurations
    return same, torch.ones(size, 3), torch.tensor([0.4, 0.6, 0.8, 1.0]).view(1, 4, 1).expand(size, -1, 3)


@pytest.mark.parametrize("population", [graded, borderline])
def test_the_promise_holds_over_resampled_splits(population):
    """Learn on a split, look at the population: the target is missed no more often than 1 - confidence."""
    same, p_exit, cost = population()
    true_risk = 1 - replay(same, p_exit).double().mean(1)
    assert (true_risk > 1 - RETAIN).any()
    missed, costs = 0, []
    for number in range(SPLITS):
        torch.manual_seed(100 + number)
        tune, hold = torch.randint(len(same), (300,)), torch.randint(len(same), (400,))
        path, passed = learn_then_test(
            replay(cost[tune], p_exit[tune]).double().mean(1).tolist(),
            replay(same[tune], p_exit[tune]).double().mean(1).tolist(),
            (~replay(same[hold], p_exit[hold])).sum(1).tolist(),
            len(hold),
            RETAIN,
            CONFIDENCE,
        )
        assert passed >= 1
        chosen = path[passed - 1]
        missed += bool(true_risk[chosen] > 1 - RETAIN)
        costs.append(replay(cost[tune], p_exit[tune])[chosen].mean().item())
    by_chance = 1 - binomial_cdf(missed - 1, SPLITS, 1 - CONFIDENCE)
    assert by_chance > 1e-3, f"missed {missed} times of {SPLITS}"
    if population is graded:
        assert sorted(costs)[SPLITS // 2] < 0.6  # something is won
    else:
        assert missed >= SPLITS * (1 - CONFIDENCE) / 4  # the bound is nearly tight: the test could fail


# --- data ------------------------------------------------------------------------------------------------------------


def test_data_is_chosen_by_name_count_and_source():
    asked = []

    def cases(split, source):
        asked.append((split, source))
        return CASES

    known = {"a": Benchmark("a", cases), "b": Benchmark("b", lambda *_: [Case("b/0", CASES[0].picture, "What?", "x")])}
    questions = load_questions(["a:7=some/folder:with=signs", "b"], known, seed=0)
    assert asked == [("calibration", "some/folder:with=signs")]
    assert Counter(question.benchmark.name for question in questions) == {"a": 7, "b": 1}
    assert questions == load_questions(["a:7=some/folder:with=signs", "b"], known, seed=0)
    assert questions != load_questions(["a:7=some/folder:with=signs", "b"], known, seed=1)
    for wanted, message in (
        (["c"], "there are: a, b"),
        (["a:many"], "NAME"),
        (["a:99"], f"has {len(CASES)}"),
        (["a:0"], "1 to"),
        (["a", "a:3"], "once"),
    ):
        with pytest.raises(ValueError, match=message):
            load_questions(wanted, known, seed=0)


def test_parts_share_no_picture_and_what_is_held_out_is_independent():
    cases = [Case(f"x/{n}", CASES[n // 4].picture, "What?", "word " * (n % 5)) for n in range(4 * len(CASES))]
    parts = split([Question(case, TINY) for case in cases], GUARANTEED)
    pictures = {name: [int(q.case.id[2:]) // 4 for q in part] for name, part in parts.items()}
    assert not any(set(pictures[a]) & set(pictures[b]) for a, b in (("fit", "tune"), ("fit", "hold"), ("tune", "hold")))
    assert len(set(pictures["hold"])) == len(pictures["hold"])
    assert len(parts["hold"]) == pytest.approx(2 * len(parts["tune"]), abs=4)
    for part in parts.values():
        lengths = [len(question.case.answer) for question in part]
        assert lengths == sorted(lengths)


# --- observations ----------------------------------------------------------------------------------------------------

BATCH = QUESTIONS[:5]
TRIED = (3, 8, 15)


def runs(mini: Loaded, method: Method, tokens: int = 12) -> list:
    return list(run(mini, [question.case for question in BATCH], method, max_new_tokens=tokens))


def first_logits(mini: Loaded, method: Method) -> torch.Tensor:
    inputs = encode(mini, [(question.case.picture(), question.case.question) for question in BATCH])
    with attach(mini.model, method, mini.calibration) as session:
        options = dict(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
        return session.generate(inputs, **options).logits[0]


def test_replays_equal_runs_of_their_own(mini):
    seen = observe(mini, BATCH, Plan(TRIED, 12, (1.0, 0.6), mini.calibration))
    dense, chosen = runs(mini, Dense()), first_logits(mini, Dense()).argmax(-1)
    for g, layer in enumerate((*TRIED, None)):
        for k, share in enumerate((1.0, 0.6)):
            method = Dense() if layer is None else DecoMoE(exit_after=layer, p=share, rcep=share < 1)
            nll = nn.functional.cross_entropy(first_logits(mini, method), chosen, reduction="none")
            torch.testing.assert_close(seen.nll[:, g, k].double(), nll.double(), atol=1e-4, rtol=0)
            for row, (question, outcome, plain) in enumerate(zip(BATCH, runs(mini, method), dense, strict=True)):
                assert seen.right[row, g, k] == question.right(outcome.answer)
                assert seen.same[row, g, k] == (outcome.answer.lower().rstrip(".") == plain.answer.lower().rstrip("."))
                flops = outcome.trace.flops
                assert seen.cost[row, g, k].item() == pytest.approx(flops.executed / flops.executed_dense)
    assert not seen.same.all()
    assert seen.mass.numel() == 0


def test_features_are_a_plain_forwards(mini):
    features = observe(mini, BATCH[:1], Plan(TRIED, 1)).features
    inputs = encode(mini, [(BATCH[0].case.picture(), BATCH[0].case.question)])
    with torch.no_grad():
        states = mini.model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
    text = inputs["input_ids"][0] != mini.model.config.image_token_id
    for g, layer in enumerate(TRIED[:-1]):  # the last layer's state is normed in transformers' output
        hidden = states[layer + 1][0, text]
        expected = torch.cat([hidden[:-1].mean(0), hidden[-1]])
        torch.testing.assert_close(features[0, g], expected, atol=1e-4, rtol=1e-4)


def test_mass_is_that_of_an_exit_after_the_middle_layer(mini):
    mass = observe(mini, BATCH, Plan((3,), 1)).mass
    outcomes = runs(mini, DecoMoE(exit_after=8, rcep=False), tokens=1)
    for ours, outcome in zip(mass, outcomes, strict=True):
        expected = torch.tensor(outcome.trace.mass["text"], dtype=torch.float64) / outcome.trace.tokens.text
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)


def test_pictures_and_lower_layers_run_once(mini):
    visits: Counter = Counter()
    modules = {"vision": mini.model.model.visual, **dict(enumerate(parts_of(mini.model).layers))}
    handles = [
        module.register_forward_hook(lambda *_, name=name: visits.update([name])) for name, module in modules.items()
    ]
    observe(mini, BATCH, Plan((7, 11, 15), 1, (1.0, 0.8, 0.6), mini.calibration))
    for handle in handles:
        handle.remove()
    assert [visits[name] for name in ("vision", 7, 8, 11, 12, 15)] == [1, 1, 1 + 1, 1 + 1, 1 + 2, 1 + 2]


# --- the whole -------------------------------------------------------------------------------------------------------

SETTINGS = Settings(candidates=(3, 9, 15), max_new_tokens=4, batch=8)
PARTS = split(QUESTIONS, GUARANTEED)


def test_from_end_to_end(mini, tmp_path):
    artifact = calibrate(mini, PARTS, SETTINGS, tmp_path / "work")
    artifact.save(tmp_path / "out")
    again = Calibration.load(tmp_path / "out")
    again.check(parts_of(mini.model))
    assert again.model == fingerprint(parts_of(mini.model))
    assert again.gate.candidates == [3, 9, 15]
    assert again.ids == {case.id for case in CASES}
    assert again.provenance["ids"]["hold"] == [question.case.id for question in PARTS["hold"]]
    assert again.theta in THETAS
    assert again.p == 0.7
    mass = observe(mini, PARTS["fit"], Plan((3,), 1)).mass.mean(0)
    assert (mass.gather(1, again.orders).diff(dim=1) <= 1e-9).all()
    torch.testing.assert_close(again.mass, mass)
    measured = again.provenance["measured"]["tune"]
    assert measured["accuracy"] >= 0.98 * measured["dense_accuracy"]


def test_hindsight_by_hand():
    """Two questions, two exits and dense, two shares: the cheapest that keeps, and dense if none does."""
    right = torch.tensor([[[1, 0], [1, 1], [1, 1]], [[0, 0], [0, 0], [0, 0]]]).bool()
    cost = torch.tensor([[[0.5, 0.4], [0.7, 0.6], [1.0, 1.0]], [[0.5, 0.4], [0.7, 0.6], [0.9, 0.8]]])
    nothing = torch.zeros(0)
    seen = Observed(nothing, right, ~right, nothing, cost, nothing)
    assert hindsight(seen, "right", 0) == pytest.approx((0.5 + 0.9) / 2)
    assert hindsight(seen, "right", 1) == pytest.approx((0.6 + 0.8) / 2)
    assert hindsight(seen, "same", 0) == pytest.approx((1.0 + 0.5) / 2)


@pytest.mark.parametrize("wanted", ["right", "same"])
def test_the_gate_learns_to_keep_right_answers_or_the_same(mini, tmp_path, monkeypatch, wanted):
    given = []
    monkeypatch.setattr("decomoe.calibrate.label", lambda kept, nll: given.append(kept) or label(kept, nll))
    calibrate(mini, PARTS, replace(SETTINGS, label=wanted), tmp_path)
    seen = observe(mini, PARTS["fit"], Plan(SETTINGS.candidates, SETTINGS.max_new_tokens))
    assert given[0].tolist() == getattr(seen, wanted)[:, :-1, 0].tolist()
    if wanted == "same":  # an exit after the last layer changes no answer, right or wrong
        assert given[0][:, -1].all()
        assert not seen.right.all()


def test_observations_are_used_again_and_never_mixed_up(mini, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        store, "observe", lambda loaded, batch, plan: asked.append(len(batch)) or observe(loaded, batch, plan)
    )
    first = calibrate(mini, PARTS, SETTINGS, tmp_path)
    assert sum(asked) == len(QUESTIONS)
    asked.clear()
    again = calibrate(mini, PARTS, SETTINGS, tmp_path)
    assert asked == []
    assert json.dumps(first.provenance) == json.dumps(again.provenance)
    promised = Settings(SETTINGS.candidates, max_new_tokens=4, batch=8, retain=0.7, confidence=0.8, shares=(0.7, 1.0))
    artifact = calibrate(mini, PARTS, promised, tmp_path)
    assert sum(asked) == len(PARTS["tune"]) + len(PARTS["hold"])  # another grid of shares; orders and gate are the same
    assert artifact.provenance["guarantee"]["path"][0]["differences"] == 0
    assert artifact.provenance["guarantee"]["passed"] >= 1
    asked.clear()
    with torch.no_grad():
        next(parts_of(mini.model).layers[0].parameters()).mul_(1 + 1e-6)
    calibrate(mini, PARTS, SETTINGS, tmp_path)
    assert sum(asked) == len(QUESTIONS)  # another training of the same shape


def test_too_few_questions_are_told(mini, tmp_path):
    with pytest.raises(ValueError, match="too few"):
        calibrate(mini, split(QUESTIONS[:9], GUARANTEED), SETTINGS, tmp_path)
    strict = Settings((3,), retain=0.99)
    with pytest.raises(ValueError, match="at least 299"):
        calibrate(mini, PARTS, strict, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SCHEMA", store.SCHEMA + 1),
        ("DecoMoE", lambda: DecoMoE(outside="drop")),  # as if that were the default
        ("weights_digest", lambda model: "other"),
    ],
)
def test_what_changes_observations_changes_the_names_of_their_files(mini, tmp_path, monkeypatch, name, value):
    seen = observe(mini, QUESTIONS[:2], Plan((3,), 1))
    asked = []
    monkeypatch.setattr(store, "observe", lambda loaded, batch, plan: asked.append(len(batch)) or seen)

    def observe_all(questions=QUESTIONS[:2]):
        asked.clear()
        store.observe_all(mini, questions, Plan((3,), 1), 2, tmp_path, "")
        return asked

    assert (observe_all() == [2], observe_all() == []) == (True, True)
    otherwise = Benchmark(TINY.name, TINY.load, store.observe_all)  # a rule from another file
    assert observe_all([Question(question.case, otherwise) for question in QUESTIONS[:2]]) == [2]
    monkeypatch.setattr(store, name, value)
    assert observe_all() == [2]


def test_ids_of_a_calibration():
    assert Calibration("", torch.zeros(1, 1), provenance={"ids": {"fit": ["a"], "hold": ["b"]}}).ids == {"a", "b"}
    assert Calibration("", torch.zeros(1, 1)).ids == frozenset()


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retain", "1.5"], "--retain must be above 0 and below 1"),
        (["--retain", "0.9", "--confidence", "0"], "--confidence must be"),
        (["--confidence", "0.9"], "--retain"),
        (["--retain", "0.9", "--p", "0.5"], "leave --p out"),
        (["--p", "0"], "--p must be"),
        (["--every", "0"], "--every must be"),
        (["--batch", "0"], "--batch must be"),
        (["--data", "nothing:5"], "there are: drawn"),
        (["--method", "dyvte", "--retain", "0.97"], "--retain is not for --method dyvte"),
        (["--method", "vtw", "--max-new-tokens", "4"], "--max-new-tokens is not for --method vtw"),
        (["--method", "modes", "--skip", "1"], "--skip must be"),
        (["--eta", "0.01"], "--eta is not for --method decomoe"),
        (["--device", "abacus"], "There is no device 'abacus'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, message):
    assert cli.main(["calibrate", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_gate_that_never_fires_is_told(mini):
    never = replace(mini.calibration, theta=1.01)
    assert "the gate never lets the picture go" in cli.calibrate.calibration_summary(never)
    assert "flatters it" in cli.calibrate.calibration_summary(mini.calibration)


def test_a_file_in_place_of_the_folder_is_told_before_the_work(tmp_path, capsys, monkeypatch):
    (tmp_path / "out").touch()
    monkeypatch.setattr(cli.calibrate, "load_model", lambda *_: pytest.fail("it loaded the model"))
    monkeypatch.setitem(sys.modules["decomoe.benchmarks"].BENCHMARKS, "tiny", TINY)
    assert cli.main(["calibrate", "--data", "tiny", "--out", str(tmp_path / "out")]) == 2
    assert "out' is a file" in capsys.readouterr().err


COMMAND = "calibrate --data tiny --every 4 --batch 4 --max-new-tokens 2 --retain 0.7 --confidence 0.8".split()
SCRIPT = str(Path(__file__).with_name("tiny_calibration.py"))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def in_a_process(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run of the command."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert "stay the dense model's" in in_a_process(SCRIPT, *COMMAND, "--out", str(out))
    return out


def test_killed_in_the_middle_it_goes_on(whole, tmp_path):
    out, work = tmp_path / "out", tmp_path / "out.work"
    command = [sys.executable, SCRIPT, *COMMAND, "--out", str(out)]
    killed = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while len(list(work.glob("*.safetensors"))) < 2:
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = {path: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert 2 <= len(before) < len(list(whole.with_name("out.work").iterdir()))
    assert not out.exists()
    in_a_process(SCRIPT, *COMMAND, "--out", str(out))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert contents(out) == contents(whole)


def test_a_chunk_that_was_cut_short_is_made_again(mini, tmp_path):
    questions, plan = QUESTIONS[:2], Plan((7,), 1)
    before = store.observe_all(mini, questions, plan, 2, tmp_path, "fit")
    (chunk,) = tmp_path.glob("*.safetensors")
    whole = chunk.read_bytes()
    for kept in (0, 100, len(whole) - 1):
        chunk.write_bytes(whole[:kept])
        again = store.observe_all(mini, questions, plan, 2, tmp_path, "fit")
        assert torch.equal(again.features, before.features)
        assert chunk.read_bytes() == whole


def test_two_processes_make_the_same_artifact(whole, tmp_path):
    launch = "-m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no".split()
    out = tmp_path / "out"
    printed = in_a_process(*launch, "--dynamo_backend", "no", SCRIPT, *COMMAND, "--out", str(out))
    assert printed.count("Written to") == 1
    assert contents(out) == contents(whole)
    assert contents(tmp_path / "out.work") == contents(whole.with_name("out.work"))


def test_interrupted_it_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "observe", interrupted)
    monkeypatch.setitem(sys.modules["decomoe.benchmarks"].BENCHMARKS, "tiny", TINY)
    assert cli.main(["calibrate", "--data", "tiny", "--out", str(tmp_path / "out")]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_the_shipped_calibration_loads():
    artifact = Calibration.load(MINI / "calibration")
    assert len(artifact.ids) > 100
