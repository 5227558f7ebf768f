"""Evaluation: numbers against hand counts, results that survive a kill, and what is refused."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import killed_midway
from PIL import ImageChops

from decomoe import cli
from decomoe.answer import Loaded
from decomoe.benchmarks import BENCHMARKS, Benchmark, Case
from decomoe.evaluate import METHOD_SETS, by_kind, evaluate, parse_benchmarks, parse_method, parse_methods, rows, store
from decomoe.evaluate import run as runner
from decomoe.evaluate.tables import retention
from decomoe.methods import DecoMoE, Dense, FastMMoE, FastV, SparseVLM

# --- specs ------------------------------------------------------------------------------------------


def test_methods_are_read():
    methods = parse_methods(
        [
            "dense,decomoe",
            "decomoe:keep_ratio=0.4,order=random,seed=1",
            "decomoe:savb=no",
            "decomoe:exit_after=9,rcep=no",
        ],
        layers=16,
    )
    assert methods == {
        "dense": Dense(),
        "decomoe": DecoMoE(),
        "decomoe:keep_ratio=0.4,order=random,seed=1": DecoMoE(keep_ratio=0.4, order="random", seed=1),
        "decomoe:savb=no": DecoMoE(exit_after=9),  # 28 of 48, at 16 layers
        "decomoe:exit_after=9,rcep=no": DecoMoE(exit_after=9, rcep=False),
    }
    texts = ["decomoe:exit_after=never,p=1", "decomoe:decode_rcep=all_layers,earlier_kv=purge"]
    assert list(parse_methods(texts, 16).values()) == [
        DecoMoE(exit_after="never", p=1.0),
        DecoMoE(decode_rcep="all_layers", earlier_kv="purge"),
    ]
    texts = ["fastv:layer=3,prune=0.75,sparsevlm:layers=1/4,keep=0.5/0.25,recycle=0", "fastmmoe:merging=mlerp,layers=3"]
    assert list(parse_methods(texts, 16).values()) == [
        FastV(3, 0.75),
        SparseVLM((1, 4), (0.5, 0.25), recycle=0.0),
        FastMMoE(merging="mlerp", layers=(3,)),
    ]


def test_sets_are_the_tables_of_the_paper():
    assert {name: len(specs) for name, specs in METHOD_SETS.items()} == {
        "table1": 5,
        "table2": 4,
        "table5": 21,
        "table6": 10,
    }
    table5 = parse_methods(["table5"], 48)
    assert {(method.order, method.keep_ratio) for method in table5.values()} == {
        (order, share) for order in ("native", "random", "rcep") for share in (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
    }
    assert list(parse_methods(["table2"], 48).values()) == [
        DecoMoE(exit_after=28),
        DecoMoE(keep_ratio=0.39),
        DecoMoE(rcep=False),
        DecoMoE(),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fastest", "no method 'fastest'; there are dense, decomoe, .*, table1, table2"),
        ("sparsevlm:keep=0.5/many", "keep is a number, not 'many'"),
        ("decomoe:q=1", "no parameter 'q'; it has exit_after, theta, .*, savb"),
        ("dense:p=1", "no parameter 'p'; it has none"),
        ("decomoe:p=much", "p is a number, not 'much'"),
        ("decomoe:rcep=maybe", "rcep is yes or no, not 'maybe'"),
        ("decomoe:exit_after=late", "exit_after is a whole number or gate or never, not 'late'"),
        ("decomoe:order=best", "order is rcep or native or random, not 'best'"),
        ("decomoe:prefix=3.5", "prefix is a whole number, not '3.5'"),
        ("decomoe:p=0.5,order=native,p=0.7", "p is given twice"),
    ],
)
def test_a_method_that_is_not_one(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_methods([spec], 16)


def test_one_method_is_not_a_set():
    with pytest.raises(ValueError, match=r"no method 'table1'; there are dense, decomoe, [a-z, ]*\.$"):
        parse_method("table1", 16)


def test_benchmarks_are_read():
    wanted = parse_benchmarks(["drawn,easy-vqa", "photos=some/folder"])
    assert [(benchmark.name, source) for benchmark, source in wanted] == [
        ("drawn", None),
        ("easy-vqa", None),
        ("photos", "some/folder"),
    ]
    with pytest.raises(ValueError, match="no benchmark 'drwan'; there are drawn, "):
        parse_benchmarks(["drwan"])


# --- numbers ----------------------------------------------------------------------------------------


def line(number, answer, right, exit_after, kind="name", truth="cat", prefix=8.0) -> store.Record:
    flops = {"executed": 60.0 + number, "executed_dense": 100.0, "sparse": 30.0, "sparse_dense": 40.0}
    if exit_after is None:
        flops |= {"executed": 100.0, "sparse": 40.0}
    return {
        "number": number,
        "kind": kind,
        "group": f"picture {number}",
        "truth": truth,
        "answer": answer,
        "right": right,
        "exit_after": exit_after,
        "mean_prefix": prefix,
        "mean_prefix_after_exit": None if exit_after is None else 3.0,
        "flops": flops,
    }


@pytest.fixture
def by_hand(tmp_path) -> Path:
    """Dense has answered five questions; DecoMoE four of them, and one that dense has not."""
    meta = {"benchmarks": {"drawn": {"excluded": 7}}, "methods": {"dense": {}, "decomoe:p=0.5": {}}}
    store.write(tmp_path / "meta.json", json.dumps({"schema": 1, **meta}))
    dense = [
        line(0, "cat", True, None),
        line(1, "yes", True, None, "presence", "yes"),
        line(2, "yes", False, None, "presence", "no"),
        line(3, "dog", True, None, truth="dog"),
        line(4, "cow", False, None),
    ]
    ours = [
        line(0, "Cat.", True, 9, prefix=4.0),
        line(1, "no", False, 11, "presence", "yes"),
        line(2, "no", True, 9, "presence", "no"),
        line(3, "cat", False, None, truth="dog"),
        line(9, "cat", True, 3),
    ]
    store.append(store.file_of(tmp_path, "drawn", "dense"), dense)
    store.append(store.file_of(tmp_path, "drawn", "decomoe:p=0.5"), ours)
    return tmp_path


def test_rows_against_a_count_by_hand(by_hand):
    dense, ours = rows(by_hand)
    assert (dense["n"], dense["accuracy"], dense["retention"], dense["flops_ratio"]) == (5, 0.6, 1.0, 1.0)
    assert (dense["retention_low"], dense["retention_high"]) == (1.0, 1.0)
    assert (dense["exit_mean"], dense["exit_never"], dense["exit_histogram"]) == (None, 1.0, {"never": 5})
    assert dense["f1"] == pytest.approx(2 / 3)  # one hit, one false alarm
    assert (ours["benchmark"], ours["method"], ours["n"], ours["excluded"]) == ("drawn", "decomoe:p=0.5", 4, 7)
    assert ours["accuracy"] == 0.5
    assert ours["retention"] == pytest.approx(2 / 3)  # dense is right on three of the four
    assert ours["retention_low"] < 2 / 3 < ours["retention_high"]
    assert ours["agreement"] == 0.25
    assert ours["f1"] == 0
    assert ours["flops_ratio"] == pytest.approx((60 + 61 + 62 + 100) / 400)
    assert ours["flops_ratio_sparse"] == pytest.approx((30 * 3 + 40) / 160)
    assert ours["exit_mean"] == pytest.approx(29 / 3)
    assert ours["exit_never"] == 0.25
    assert ours["exit_histogram"] == {"9": 2, "11": 1, "never": 1}
    assert ours["prefix_mean"] == 7
    assert ours["prefix_after_exit_mean"] == 3
    assert [row["n"] for row in rows(by_hand, limit=2)] == [2, 2]
    json.dumps([dense, ours], allow_nan=False)


def test_kinds_against_a_count_by_hand(by_hand):
    found = {(row["method"], row["kind"]): row for row in by_kind(by_hand)}
    assert found["dense", "name"]["accuracy"] == pytest.approx(2 / 3)
    assert found["decomoe:p=0.5", "name"] == {
        "benchmark": "drawn",
        "method": "decomoe:p=0.5",
        "kind": "name",
        "n": 2,
        "accuracy": 0.5,
        "exit_mean": 9,
    }
    assert found["decomoe:p=0.5", "presence"]["exit_mean"] == 10


def test_retention_of_equals_is_certain():
    right, groups = np.array([True, False, True]), ["a", "b", "c"]
    assert retention(right, right, groups) == (1, 1, 1)
    assert retention(right, ~np.ones(3, bool), groups) == (None, None, None)
    assert retention(~np.ones(3, bool), right, groups)[0] == 0


@pytest.mark.parametrize("together", [1, 4])
def test_interval_against_a_slow_bootstrap(together):
    """Pictures drawn with replacement, one by one, each with all its questions."""
    rng = random.Random(1)
    dense = [rng.random() < 0.7 for _ in range(80)]
    keeps = [rng.random() < 0.8 for _ in range(80)]
    ours = [right if keeps[i // together] else not right for i, right in enumerate(dense)]
    ratios = []
    for _ in range(4000):
        pictures = [rng.randrange(80 // together) for _ in range(80 // together)]
        drawn = [together * picture + i for picture in pictures for i in range(together)]
        ratios.append(sum(ours[i] for i in drawn) / sum(dense[i] for i in drawn))
    ratios.sort()
    value, low, high = retention(np.array(ours), np.array(dense), [f"{i // together}" for i in range(80)])
    assert value == sum(ours) / sum(dense)
    assert low == pytest.approx(ratios[100], abs=0.03)
    assert high == pytest.approx(ratios[3900], abs=0.03)


# --- files ------------------------------------------------------------------------------------------


def test_torn_lines_and_leftovers_of_workers(tmp_path):
    path = store.file_of(tmp_path, "drawn", "decomoe:p=0.5")
    assert path.name == "decomoe+p=0.5.jsonl"
    store.append(path, [{"number": 0}, {"number": 3}])
    store.append(path, [{"number": 2}], worker=1)
    store.append(path, [{"number": 1}], worker=10)
    store.append(store.file_of(tmp_path, "drawn", "decomoe:p=0.51"), [{"number": 7}], worker=1)
    with path.open("ab") as file:
        file.write(b'5\n{}\nnull\n\xff\x00\n{"number": 4, "answ')
    numbers = [{"number": number} for number in range(4)]
    assert store.read(path) == numbers
    store.tidy(path)
    assert [json.loads(text) for text in path.read_text().splitlines()] == numbers
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, "decomoe+p=0.51.jsonl.1"]


def test_meta_grows_but_does_not_change(tmp_path):
    meta = store.extended_meta(tmp_path, {"run": {"weights": "a"}, "methods": {"dense": {}}})
    store.write(tmp_path / "meta.json", json.dumps(meta))
    grown = store.extended_meta(tmp_path, {"run": {"weights": "a"}, "methods": {"decomoe": {"p": (1, 2)}}})
    assert grown == {"schema": 1, "run": {"weights": "a"}, "methods": {"dense": {}, "decomoe": {"p": [1, 2]}}}
    with pytest.raises(ValueError, match="made with weights a, not b; take another folder"):
        store.extended_meta(tmp_path, {"run": {"weights": "b"}})
    for damaged in ("{", "5", '{"schema": 1, "benchmarks": 5}'):
        (tmp_path / "meta.json").write_text(damaged)
        with pytest.raises(ValueError, match="take another folder"):
            store.read_meta(tmp_path)


def test_all_commands_are_noted_once(tmp_path, monkeypatch):
    for line in ("evaluate --limit 3", "collect", "evaluate --limit 5", "evaluate --limit 3"):
        monkeypatch.setattr("sys.argv", ["decomoe", *line.split()])
        store.note_command(tmp_path, line.split()[0])
    noted = {kind: command["line"] for kind, command in store.read_meta(tmp_path)["commands"].items()}
    both = "decomoe evaluate --limit 3 && decomoe evaluate --limit 5"
    assert noted == {"evaluate": both, "collect": "decomoe collect"}


# --- with the mini model ----------------------------------------------------------------------------


def short(name: str = "drawn", count: int = 10) -> tuple[Benchmark, None]:
    """The first questions of a benchmark."""
    whole = BENCHMARKS[name]
    return Benchmark(name, lambda split, source: whole.load(split, source)[:count], whole.right), None


@pytest.fixture
def decomoe(mini, monkeypatch, capsys):
    """Run the command in this process on one loaded model: (exit status, stdout, stderr)."""
    monkeypatch.setattr("decomoe.cli.common.load_model", lambda options: mini)

    def run(*arguments) -> tuple[int, str, str]:
        status = cli.main(["evaluate", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_command(decomoe, tmp_path):
    status, out, err = decomoe(
        "--benchmarks", "easy-vqa", "--methods", "decomoe:savb=no", "--limit", 8, "--out", tmp_path, "--traces"
    )
    assert (status, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    assert [(row["benchmark"], row["method"], row["n"]) for row in found] == [
        ("easy-vqa", "dense", 8),
        ("easy-vqa", "decomoe:savb=no", 8),
    ]
    assert {"accuracy", "retention", "flops_ratio", "exit_mean", "prefix_mean"} <= found[0].keys()
    assert (found[0]["retention"], found[0]["prefix_mean"], found[1]["exit_mean"]) == (1.0, 32.0, 9.0)
    assert found[1]["flops_ratio"] < 0.9
    assert len(pd.read_csv(tmp_path / "table.csv")) == 2
    assert "| easy-vqa | decomoe:savb=no | 8 |" in (tmp_path / "table.md").read_text()
    record = json.loads((tmp_path / "easy-vqa" / "decomoe+savb=no.jsonl").read_text().splitlines()[0])
    assert record["trace"]["answer"] == record["answer"]
    prefill = record["trace"]["prefix"]["prefill"][10:]
    decode = [kept for step in record["trace"]["prefix"]["decode"] for kept in step[10:]]
    assert record["mean_prefix_after_exit"] == pytest.approx(np.mean([*prefill, *decode]))
    cases = {case.id: case for case in BENCHMARKS["easy-vqa"].load("test", None)}
    assert (record["truth"], record["kind"]) == (cases[record["id"]].answer, cases[record["id"]].kind)


def test_help_names_every_benchmark(capsys):
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    text = "".join(capsys.readouterr().out.split())  # argparse breaks lines at hyphens
    assert all(name in text for name in (*BENCHMARKS, *METHOD_SETS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmarks", "nothing"], "no benchmark 'nothing'"),
        (["--benchmarks", "photos=/no/folder"], "Can't read photos from '/no/folder'"),
        (["--methods", "decomoe:q=2"], "no parameter 'q'"),
        (["--methods", "decomoe:p=2"], "p must be above 0"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(decomoe, tmp_path, arguments, message):
    status, out, err = decomoe(*arguments, "--out", tmp_path)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_more_questions_and_methods_later_equal_all_at_once(mini, tmp_path):
    decomoe = {"decomoe": DecoMoE()}
    for limit, methods in ((3, {}), (7, decomoe), (None, decomoe)):
        evaluate(mini, [short()], methods, tmp_path / "bits", limit, batch=4, max_new_tokens=8)
    evaluate(mini, [short()], decomoe, tmp_path / "once", batch=4, max_new_tokens=8)
    assert rows(tmp_path / "bits") == rows(tmp_path / "once")
    for name in ("dense", "decomoe"):
        texts = [(tmp_path / out / "drawn" / f"{name}.jsonl").read_text() for out in ("bits", "once")]
        assert texts[0] == texts[1]
        assert texts[0].count("\n") == 10


def test_batches_of_any_size_give_the_same_numbers(mini, tmp_path):
    for batch in (1, 3, 8):
        evaluate(mini, [short(count=8)], {"decomoe": DecoMoE()}, tmp_path / str(batch), batch=batch, max_new_tokens=8)
    for name in ("dense", "decomoe"):
        sides = [store.read(tmp_path / batch / "drawn" / f"{name}.jsonl") for batch in ("1", "3", "8")]
        assert sides[0] == sides[1] == sides[2]


def test_nothing_is_asked_twice(mini, tmp_path, monkeypatch):
    evaluate(mini, [short()], {}, tmp_path, max_new_tokens=2)
    monkeypatch.setattr(runner, "run_batch", None)
    evaluate(mini, [short()], {}, tmp_path, max_new_tokens=2)


def test_an_interrupt_says_how_to_go_on(decomoe, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_batch", interrupted)
    status, _, err = decomoe("--out", tmp_path)
    assert status == 130
    assert "same command goes on" in err


def with_ids(mini: Loaded, ids) -> Loaded:
    assert mini.calibration is not None
    return dataclasses.replace(mini, calibration=dataclasses.replace(mini.calibration, provenance={"ids": ids}))


def test_questions_of_the_calibration_are_not_asked(mini, tmp_path):
    """Nor are the other questions about their pictures: of ten questions, the four about the first one."""
    cases = BENCHMARKS["drawn"].load("test", None)[:10]
    seen = {"fit": ["drawn/0/2"], "hold": ["drawn/0/3", "photos/train/1"]}
    evaluate(with_ids(mini, seen), [short()], {}, tmp_path)
    asked = {record["id"] for record in store.read(tmp_path / "drawn" / "dense.jsonl")}
    assert asked == {case.id for case in cases if not case.id.startswith("drawn/0/")}
    (row,) = rows(tmp_path)
    assert (row["n"], row["excluded"]) == (6, 4)
    with pytest.raises(ValueError, match="no question"):
        evaluate(with_ids(mini, {"fit": [case.id for case in cases]}), [short()], {}, tmp_path / "none")


def inverted(case: Case) -> Case:
    return dataclasses.replace(case, picture=lambda: ImageChops.invert(case.picture()))


def test_results_are_not_mixed(mini, tmp_path):
    evaluate(mini, [short(count=2)], {}, tmp_path, max_new_tokens=2)
    with pytest.raises(ValueError, match="max_new_tokens 2, not 3; take another folder"):
        evaluate(mini, [short(count=2)], {}, tmp_path, max_new_tokens=3)
    benchmark, _ = short(count=2)
    others = (
        short(count=3)[0],
        dataclasses.replace(benchmark, right=retention),  # scored by a rule from another file
        dataclasses.replace(benchmark, load=lambda *_: [inverted(case) for case in benchmark.load("test", None)]),
    )
    for other in others:
        with pytest.raises(ValueError, match="made with drawn"):
            evaluate(mini, [(other, None)], {}, tmp_path, max_new_tokens=2)
    assert mini.calibration is not None
    other = dataclasses.replace(mini, calibration=dataclasses.replace(mini.calibration, theta=0.123))
    with pytest.raises(ValueError, match="made with calibration"):
        evaluate(other, [short(count=2)], {}, tmp_path, max_new_tokens=2)
    weight = mini.model.lm_head.weight.data
    weight.mul_(2)  # another model of the same shape
    try:
        with pytest.raises(ValueError, match="made with weights"):
            evaluate(mini, [short(count=2)], {}, tmp_path, max_new_tokens=2)
    finally:
        weight.mul_(0.5)


def test_kill_9_and_the_same_command_again(decomoe, tmp_path):
    arguments = ["--limit", "20", "--batch", "4", "--max-new-tokens", "4"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    first = killed / "drawn" / "dense.jsonl"
    kept = killed_midway(["evaluate", *arguments, "--out", killed], first, 8)
    status, resumed, _ = decomoe(*arguments, "--out", killed)
    assert status == 0
    assert first.read_text().startswith(kept)
    _, at_once, _ = decomoe(*arguments, "--out", whole)
    assert json.loads(resumed.splitlines()[-1]) == json.loads(at_once.splitlines()[-1])
    assert [row["n"] for row in json.loads(at_once.splitlines()[-1])] == [20, 20]
