"""Collectors against the slow reference, on both families; and lines that survive a kill."""

import json
import math
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import BUILDERS, EXPERTS, IMAGE, LAYERS, PROMPTS, TOP_K, inputs_for, killed_midway
from reference import Seen, reference
from test_engine import make_calibration
from torch import nn

from analysis.data import Lines, fig3c
from decomoe import cli
from decomoe.answer import Loaded
from decomoe.benchmarks import BENCHMARKS, Benchmark, Case
from decomoe.collect import COLLECTORS, collect, file_name, observe_routing, sweep
from decomoe.collect.exits import append, exit_layers, gate_exits, sweep_all
from decomoe.collect.routing import experts_for, likeness, reduced, route_all
from decomoe.evaluate import store
from decomoe.evaluate.run import Batch
from decomoe.experts import permute_experts
from decomoe.families import parts_of
from decomoe.latency import PARTS
from decomoe.methods import DecoMoE

TOKENS, EXIT = 5, 3


def loaded_tiny(model, calibration=None) -> Loaded:
    """With a tokenizer that says ids."""
    decode = lambda ids, **_: " ".join(map(str, torch.as_tensor(ids).tolist()))  # noqa: E731
    return Loaded(model, SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)), calibration)


def batch(*numbers: int, first: int = 0) -> Batch:
    """Questions that are the numbers of prompts, right if the answer's first token is even; see `encode_prompts`."""
    cases = [Case(f"tiny/{number}", lambda: None, str(number), "") for number in numbers]
    tiny = Benchmark("tiny", lambda split, source: cases, lambda case, answer: int(answer.split()[0]) % 2 == 0)
    return Batch(tiny, "", first, cases)


def encode_prompts(loaded: Loaded, asked) -> dict[str, torch.Tensor]:
    """In place of a processor, which the tiny models lack."""
    return inputs_for(loaded.model, *(PROMPTS[int(question)] for _, question in asked))


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


# --- the gate --------------------------------------------------------------------------------------------------------

GATED = (2, 3, 5)  # the last layer too: what enters the final norm


@torch.no_grad()
def slow_readings(model, gate, prompt, after_image: bool) -> dict[int, float]:
    """{layer: p_exit} from the states of a plain forward of one question alone."""
    inputs, last = inputs_for(model, prompt), []
    handle = model.model.language_model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    states = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states[1:-1]
    handle.remove()
    visual = [place for place, token in enumerate(inputs["input_ids"][0].tolist()) if token == IMAGE]
    text = [*([] if after_image else range(visual[0])), *range(visual[-1] + 1, inputs["input_ids"].shape[1])]
    found = {}
    for layer in GATED:
        rows = [*states, last[0]][layer][0].tolist()
        mean = [sum(rows[token][i] for token in text[:-1]) / (len(text) - 1) for i in range(len(rows[0]))]
        values = torch.tensor([*mean, *rows[text[-1]]])
        weights = {name: value for name, value in gate.state_dict().items() if f".{layer}." in name}
        first, first_bias, second, second_bias = (weights[f"heads.{layer}.{name}"] for name in PARAMETERS)
        scores = [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in (first @ values + first_bias).tolist()]
        stay, leave = (second @ torch.tensor(scores) + second_bias).tolist()
        found[layer] = 1 / (1 + math.exp(stay - leave))
    return found


PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias")


def slow_exit(readings: dict[int, float], theta: float) -> tuple[int | None, dict[int, float]]:
    """The first layer whose reading reaches `theta`, and the readings up to there."""
    upto: dict[int, float] = {}
    for layer in GATED:
        upto[layer] = readings[layer]
        if readings[layer] >= theta:
            return layer, upto
    return None, upto


@pytest.mark.parametrize("gate_text", ["all", "after image"])
def test_the_gates_exits_against_plain_forwards(model, gate_text):
    """At thresholds between all readings, in a padded batch: what it reads, and where each row leaves."""
    calibration = make_calibration(model, candidates=GATED)
    calibration.gate_text = gate_text
    slow = [slow_readings(model, calibration.gate, prompt, gate_text == "after image") for prompt in PROMPTS]
    values = sorted(value for readings in slow for value in readings.values())
    seen = set()
    for theta in [values[0] / 2, *((one + other) / 2 for one, other in pairwise(values)), 1.0]:
        calibration.theta = theta
        found = gate_exits(loaded_tiny(model, calibration), inputs_for(model, *PROMPTS))
        for (layer, readings), expected in zip(found, slow, strict=True):
            slow_layer, slow_upto = slow_exit(expected, theta)
            assert layer == slow_layer
            assert readings == pytest.approx(slow_upto, abs=2e-5)
            seen.add(layer)
    assert seen == {*GATED, None}


def test_a_line_of_exits_against_the_reference(model, monkeypatch):
    """Every number of it, in the order of its layers and of the questions."""
    monkeypatch.setattr("decomoe.collect.exits.encode", encode_prompts)
    calibration, order = make_calibration(model, candidates=GATED), (2, 0)
    slow = [slow_readings(model, calibration.gate, PROMPTS[number], False) for number in order]
    calibration.theta = sum(sorted(max(readings.values()) for readings in slow)) / 2  # one leaves, the other stays
    lines = sweep_all(loaded_tiny(model, calibration), 2, batch(*order))
    first = 3 if model.config.model_type == "qwen3_vl_moe" else 1  # DeepStack adds up to layer 2
    for line, number, readings in zip(lines, order, slow, strict=True):
        inputs, prompt = inputs_for(model, PROMPTS[number]), PROMPTS[number]
        assert (line["visual"], line["text"]) == (4, len(prompt.before) + len(prompt.after))
        assert line["layers"] == list(range(first, LAYERS - 1))
        assert (line["predicted"], line["p_exit"]) == (
            slow_exit(readings, calibration.theta)[0],
            pytest.approx(slow_exit(readings, calibration.theta)[1], abs=2e-5),
        )
        dense = [int(token) for token in line["dense"]["answer"].split()]
        exits = zip([*line["layers"], None], [*line["nll"], line["dense"]["nll"]], strict=True)
        for layer, value in exits:
            assert value == pytest.approx(nll(reference(model, inputs, dense, layer)[0], dense), abs=1e-4)
        for layer, answer in zip(line["layers"], line["answers"], strict=True):
            tokens = [int(token) for token in answer.split()]
            assert reference(model, inputs, tokens, layer)[0].argmax(1).tolist() == tokens
        answers, right = [*line["answers"], line["dense"]["answer"]], [*line["right"], line["dense"]["right"]]
        assert right == [int(answer.split()[0]) % 2 == 0 for answer in answers]
    assert sum(line["predicted"] is None for line in lines) == 1
    calibration.gate = None
    for loaded in (loaded_tiny(model), loaded_tiny(model, calibration)):
        assert not {"predicted", "p_exit"} & sweep_all(loaded, 1, batch(1))[0].keys()


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


@pytest.mark.parametrize("permuted", [False, True])
def test_the_map_against_the_reference(family, monkeypatch, permuted):
    """Token by token, of the first question only; experts are told by their place in the model."""
    monkeypatch.setattr("decomoe.collect.routing.encode", encode_prompts)
    native, model = BUILDERS[family](), BUILDERS[family]()
    order = list(range(EXPERTS))
    if permuted:
        orders = make_calibration(model).orders
        permute_experts(parts_of(model), orders)
        order = orders[LAYERS - 1].tolist()  # the native expert in each place
        assert order != sorted(order)
    line, second = route_all(loaded_tiny(model), EXIT, batch(2, 0))
    assert "map" not in second
    assert "map" not in route_all(loaded_tiny(model), EXIT, batch(2, first=1))[0]
    inputs, table = inputs_for(native, PROMPTS[2]), line["map"]
    assert table["layer"] == 5  # of 4 and 5 behind the exit
    before, after = routers(native, inputs)[5], routers(native, inputs, EXIT)[5]
    ids = inputs["input_ids"][0].tolist()
    text = [token for token, told in enumerate(ids) if told != IMAGE]
    assert table["visual"] == [int(token not in text) for token in range(len(ids))]
    assert table["tokens"] == [str(ids[token]) for token in text]
    assert len(table["experts"]) == len(table["weights"]) == len(ids)
    for places, weights, chances in zip(table["experts"], table["weights"], before, strict=True):
        mass = slow_mass(chances)
        best = sorted(range(EXPERTS), key=lambda expert: -mass[expert])[:TOP_K]
        assert [order[place] for place in places] == best
        assert weights == pytest.approx([mass[expert] for expert in best], abs=2e-4)
    for name, slow in (("before", before), ("after", after)):
        for chances, token in zip(table[name], text, strict=True):
            assert chances == pytest.approx([slow[token][expert] for expert in order], abs=2e-4)
    mean = slow_mean([slow_mass(before[token]) for token in text])
    assert line["text"][5] == pytest.approx([mean[expert] for expert in order], abs=2e-4)


def test_overlap_against_the_reference(model, monkeypatch, tmp_path):
    """From collected lines to Fig. 3c: of each pair of questions, the experts that are among the most used of both."""
    monkeypatch.setattr("decomoe.collect.routing.encode", encode_prompts)
    found = [line for number in range(3) for line in route_all(loaded_tiny(model), EXIT, batch(number, first=number))]
    numbered = [{"number": number, **line} for number, line in enumerate(found)]
    store.append(store.file_of(tmp_path, "tiny", file_name("routing")), numbered)
    store.write(tmp_path / "meta.json", json.dumps({"schema": 1, "benchmarks": {"tiny": {}}}))
    rows = fig3c(Lines(tmp_path)).rows
    masses, fewer = [slow_masses(model, prompt) for prompt in PROMPTS], 0
    for row in rows:
        size, best = {"1/8": 1, "1/4": 2, "1/2": 4}[row["keep"]], []
        for mass in (kinds[row["modality"]][row["layer"]] for kinds in masses):
            falling = sorted((value, expert) for expert, value in enumerate(mass) if value)[::-1]
            best.append({expert for _, expert in falling[:size]})
            fewer += len(best[-1]) < size
        shared = [len(one & other) / len(one) for one, other in permutations(best, 2)]
        assert row["overlap"] == pytest.approx(sum(shared) / len(shared))
        assert row["chance"] == size / EXPERTS
    assert len(rows) == 2 * 3 * LAYERS
    assert fewer  # some questions don't use half of the experts


def slow_masses(model, prompt) -> dict[str, list[list[float]]]:
    """{modality: [layer][expert]}: the mean routed mass of a token."""
    inputs = inputs_for(model, prompt)
    kinds = ["visual" if token == IMAGE else "text" for token in inputs["input_ids"][0].tolist()]
    return {
        kind: [
            slow_mean([slow_mass(chances[token]) for token, own in enumerate(kinds) if own == kind])
            for chances in routers(model, inputs)
        ]
        for kind in ("text", "visual")
    }


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
