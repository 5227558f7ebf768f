"""Collectors against the slow reference, on both families; and lines that survive a kill."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import EXPERTS, LAYERS, PROMPTS, TOP_K, inputs_for, killed_midway
from reference import Seen, reference
from torch import nn

from decomoe import cli
from decomoe.answer import Loaded
from decomoe.benchmarks import BENCHMARKS, Benchmark
from decomoe.collect import COLLECTORS, collect, file_name, observe_routing, sweep
from decomoe.collect.exits import append, exit_layers, gate_exits
from decomoe.collect.routing import experts_for, likeness, reduced
from decomoe.evaluate import store
from decomoe.families import parts_of
from decomoe.latency import PARTS
from decomoe.methods import DecoMoE

TOKENS, EXIT = 5, 3


def loaded_tiny(model) -> Loaded:
    """With a tokenizer that says ids."""
    decode = lambda ids, **_: " ".join(map(str, torch.as_tensor(ids).tolist()))  # noqa: E731
    return Loaded(model, SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)))


def nll(logits, answer: list[int]) -> float:
    return nn.functional.cross_entropy(logits, torch.tensor(answer)).item()


# --- exits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_forced_exits_against_the_reference(model, rows):
    """Answers of each exit, and how likely the dense answer is under it, in a padded batch."""
    loaded = loaded_tiny(model)
    first = parts_of(model).first_exit
    found = list(sweep(loaded, inputs_for(model, *PROMPTS[:rows]), TOKENS))
    assert [swept.layer for swept in found] == [None, *range(LAYERS - 2, first - 1, -1)]
    for row, prompt in enumerate(PROMPTS[:rows]):
        inputs = inputs_for(model, prompt)
        dense = [int(token) for token in found[0].answers[row].split()]
        assert len(dense) == TOKENS
        for swept in found:
            expected, _ = reference(model, inputs, dense, swept.layer)
            assert swept.nll[row] == pytest.approx(nll(expected, dense), abs=1e-4)
            answer = [int(token) for token in swept.answers[row].split()]
            own, _ = reference(model, inputs, answer, swept.layer)
            if swept.layer is None:
                own[:, parts_of(model).visual_token_ids] = -torch.inf  # the reference answer never says them
            assert own.argmax(1).tolist() == answer
    assert max(abs(swept.nll[0] - found[0].nll[0]) for swept in found) > 0.01  # exits matter


def test_answers_are_put_behind_their_prompts(model):
    inputs = inputs_for(model, *PROMPTS)
    answers = [torch.tensor([31, 32, 33]), torch.tensor([34]), torch.tensor([35, 36])]
    longer = append(inputs, answers)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        alone = append(inputs_for(model, prompt), [answer])
        length = alone["input_ids"].shape[1]
        assert alone["input_ids"][0].tolist() == [*prompt.before, *[60] * 4, *prompt.after, *answer.tolist()]
        for name in {"input_ids", "attention_mask", "mm_token_type_ids"} & longer.keys():
            assert longer[name][row, -length:].tolist() == alone[name][0].tolist()
        assert longer["attention_mask"][row].sum() == length
    assert longer["pixel_values"] is inputs["pixel_values"]


# --- routing ---------------------------------------------------------------------------------------------------------


def routers(model, inputs, exit_after=None) -> list[list[list[float]]]:
    """[layer][token][expert], by the reference."""
    found = []

    def look(seen: Seen) -> None:
        found.append(seen.router.tolist())

    reference(model, inputs, [1], exit_after, after=look)
    return found


def slow_mass(chances: list[float]) -> list[float]:
    best = sorted(range(EXPERTS), key=lambda expert: -chances[expert])[:TOP_K]
    return [chances[expert] / sum(chances[e] for e in best) if expert in best else 0.0 for expert in range(EXPERTS)]


def slow_cosine(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))


def slow_mean(rows: list[list[float]]) -> list[float]:
    return [sum(row[expert] for row in rows) / len(rows) for expert in range(EXPERTS)]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_routing_against_the_reference(model, prompt):
    inputs = inputs_for(model, prompt)
    routed = observe_routing(loaded_tiny(model), inputs, EXIT)
    line = json.loads(json.dumps(reduced(routed)))
    before, after = routers(model, inputs), routers(model, inputs, EXIT)
    visual = (inputs["input_ids"][0] == 60).tolist()
    tokens = {kind: [t for t, v in enumerate(visual) if v == (kind == "visual")] for kind in ("text", "visual")}
    assert line["tokens"] == {kind: len(places) for kind, places in tokens.items()}
    assert line["layers"] == list(range(LAYERS))
    for kind, places in tokens.items():
        for layer in range(LAYERS):
            mass = slow_mean([slow_mass(before[layer][token]) for token in places])
            assert line[kind][layer] == pytest.approx(mass, abs=2e-4)
            total = [sum(before[layer][token][expert] for token in places) for expert in range(EXPERTS)]
            count, covered = 0, 0.0
            for value in sorted(total, reverse=True):
                if covered >= sum(total) / 2:
                    break
                count, covered = count + 1, covered + value
            assert line["half"][kind][layer] == count
    assert set(line["evicted"]) == {str(layer) for layer in range(EXIT + 1, LAYERS)}
    for layer in range(EXIT + 1, LAYERS):
        pairs = [(before[layer][token], after[layer][token]) for token in tokens["text"]]
        means = [slow_mean([pair[side] for pair in pairs]) for side in (0, 1)]
        likely = line["evicted"][str(layer)]
        errors = [sum(abs(a - b) for a, b in zip(*pair, strict=True)) / EXPERTS for pair in pairs]
        assert likely["token_cosine"] == pytest.approx(sum(slow_cosine(*pair) for pair in pairs) / len(pairs), abs=1e-5)
        assert likely["token_mae"] == pytest.approx(sum(errors) / len(errors), abs=1e-5)
        assert likely["mean_cosine"] == pytest.approx(slow_cosine(*means), abs=1e-5)
        mean_mae = sum(abs(a - b) for a, b in zip(*means, strict=True)) / EXPERTS
        assert likely["mean_mae"] == pytest.approx(mean_mae, abs=1e-5)
    assert line["evicted"][str(LAYERS - 1)]["token_cosine"] < 0.9999  # eviction matters in a random model


def test_half_of_the_mass_by_hand():
    assert experts_for(torch.tensor([[0.55, 0.25, 0.2]])) == 1
    assert experts_for(torch.tensor([[0.4, 0.35, 0.25]])) == 2
    assert experts_for(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.6) == 2
    same = torch.rand(4, 8)
    assert likeness(same, same) == pytest.approx(
        {"token_cosine": 1, "token_mae": 0, "mean_cosine": 1, "mean_mae": 0}, abs=1e-9
    )


# --- with the mini model: lines ---------------------------------------------------------------------------------------


def short(count: int) -> tuple[Benchmark, None]:
    whole = BENCHMARKS["drawn"]
    return Benchmark("drawn", lambda split, source: whole.load(split, source)[:count], whole.right), None


def lines(out: Path, name: str) -> list[dict]:
    return store.read(store.file_of(out, "drawn", file_name(name)))


def test_what_a_line_says(mini, tmp_path):
    collect(mini, [short(3)], list(COLLECTORS), tmp_path, {"decomoe": DecoMoE()}, max_new_tokens=4)
    cases = {case.id: case for case in BENCHMARKS["drawn"].load("test", None)[:3]}
    assert {line["id"] for line in lines(tmp_path, "exits")} == set(cases)
    for line in lines(tmp_path, "exits"):
        case = cases[line["id"]]
        assert (line["question"], line["truth"], line["kind"]) == (case.question, case.answer, case.kind)
        assert line["layers"] == list(exit_layers(mini))
        right = [BENCHMARKS["drawn"].right(case, answer) for answer in line["answers"]]
        assert line["right"] == right
        inputs = {"width": case.picture().width, "height": case.picture().height}
        assert line["visual"] == inputs["width"] * inputs["height"] // 256
    for number, line in enumerate(lines(tmp_path, "routing")):
        assert ("map" in line) == (number == 0)
        for kind in ("text", "visual"):
            assert all(sum(mass) == pytest.approx(1, abs=1e-2) for mass in line[kind])
    for line in lines(tmp_path, "latency"):
        assert list(line["ttft_s"]) == list(line["parts"]) == ["dense", "decomoe"]
        assert list(line["tpot_s"]) == ["dense", "decomoe"]
        assert min(line["ttft_s"].values()) > 0
        assert min(seconds for seconds in line["tpot_s"].values() if seconds is not None) > 0
        for phases in line["parts"].values():
            assert list(phases) == ["prefill", "decode"]
            for parts in phases.values():
                assert list(parts) == list(PARTS)
                assert all(len(layers) == 16 for layers in parts.values())
    mapped = lines(tmp_path, "routing")[0]["map"]
    assert len(mapped["experts"]) == len(mapped["visual"])
    assert len(mapped["tokens"]) == len(mapped["before"]) == len(mapped["after"]) == mapped["visual"].count(0)


def test_the_boundary_is_that_of_a_run(mini):
    from decomoe.answer import ask, encode  # noqa: PLC0415

    cases = BENCHMARKS["drawn"].load("test", None)[:4]
    inputs = encode(mini, [(case.picture(), case.question) for case in cases])
    for (exit_after, readings), case in zip(gate_exits(mini, inputs), cases, strict=True):
        trace = ask(mini, case.picture(), case.question, DecoMoE(), max_new_tokens=1).trace
        assert exit_after == trace.exit_after
        assert readings == pytest.approx(
            {reading.layer: reading.p_exit for reading in trace.gate if reading.p_exit is not None}, abs=1e-4
        )


def test_killed_it_goes_on_to_the_same_lines(mini, tmp_path, monkeypatch, capsys):
    names = ["routing", "exits"]  # times differ from run to run
    arguments = ["collect", "--collectors", *names, "--limit", "6", "--batch", "2", "--max-new-tokens", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    first = store.file_of(killed, "drawn", file_name("routing"))
    kept = killed_midway([*arguments, "--out", killed], first, 2)
    monkeypatch.setattr("decomoe.cli.common.load_model", lambda options: mini)
    for out in (killed, whole):
        assert cli.main([*arguments, "--out", str(out)]) == 0
    assert first.read_text().startswith(kept)
    for name in names:
        assert len(lines(whole, name)) == 6
        for ours, theirs in zip(lines(killed, name), lines(whole, name), strict=True):
            assert ours == theirs
    assert set(json.loads((whole / "meta.json").read_text())["commands"]) == set(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmarks", "nothing"], "no benchmark 'nothing'"),
        (["--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(tmp_path, capsys, arguments, message):
    assert cli.main(["collect", *arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_knows_every_collector():
    assert cli.collect.COLLECTORS == COLLECTORS
