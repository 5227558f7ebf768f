"""The paper's tables beside ours: cells against counts by hand, and files that programs can read."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis import paper
from analysis.tables import MIXED, Results, main, tables
from decomoe.collect import file_name
from decomoe.evaluate import store

SPECS = ("dense", "fastv:prune=0.6", "vtw", "decomoe", "decomoe:p=0.5", "decomoe:keep_ratio=0.1,order=random")
RIGHT = {  # by benchmark, then method: which of its questions are right
    "ai2d": {"dense": "1111", "fastv:prune=0.6": "1100", "decomoe": "1110", "decomoe:p=0.5": "1111"},
    "drawn": {"dense": "1101", "fastv:prune=0.6": "1101", "decomoe": "0101", SPECS[5]: "0001"},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Results of a model on two benchmarks; not every method has been asked on both, and vtw on none."""
    command = {"line": "decomoe evaluate --limit 4", "date": "2026-01-02"}
    meta = {
        "run": {"model": "tiny"},
        "commands": {"evaluate": command},
        "benchmarks": {name: {"excluded": 0} for name in RIGHT},
    }
    store.write(tmp_path / "meta.json", json.dumps({"schema": 1, "methods": dict.fromkeys(SPECS), **meta}))
    for benchmark, methods in RIGHT.items():
        for method, marks in methods.items():
            ratio = 1.0 if method == "dense" else 0.5 if benchmark == "ai2d" else 0.7
            lines = [
                {
                    "number": number,
                    "kind": "name",
                    "group": f"{benchmark}/{number}",
                    "truth": "cat",
                    "answer": "cat" if mark == "1" else "dog",
                    "right": mark == "1",
                    "exit_after": 9 if method == "decomoe" else None,
                    "mean_prefix": 8.0,
                    "mean_prefix_after_exit": 6.0 if method == "decomoe" else None,
                    "flops": {"executed": ratio, "executed_dense": 1.0, "sparse": 1 + ratio, "sparse_dense": 2.0},
                }
                for number, mark in enumerate(marks)
            ]
            store.append(store.file_of(tmp_path, benchmark, method), lines)
    return tmp_path


SECONDS = [{"dense": 0.2, "decomoe": 0.1}, {"dense": 0.4, "decomoe": 0.3}, {"dense": 0.5, "decomoe": 0.1}]


def timed(folder: Path) -> None:
    """Times of three questions, the last answered in one token."""
    meta = json.loads((folder / "meta.json").read_text())
    meta["commands"]["latency"] = {"line": "decomoe collect", "date": "2026-01-03"}
    store.write(folder / "meta.json", json.dumps(meta))
    steps = [{"dense": 0.1, "decomoe": 0.1}, {"dense": 0.1, "decomoe": 0.08}, {"dense": None, "decomoe": None}]
    pairs = enumerate(zip(SECONDS, steps, strict=True))
    lines = [{"number": number, "ttft_s": ttft, "tpot_s": tpot} for number, (ttft, tpot) in pairs]
    store.append(store.file_of(folder, "drawn", file_name("latency")), lines)


def found(folder: Path, number: int) -> list[dict]:
    (table,) = [table for table in tables(Results.read(folder)) if table.number == number]
    return table.frame().to_dict("records")


def test_table1_against_a_count_by_hand(folder):
    rows = {(row["method"], row["of"]): row for row in found(folder, 1)}
    assert list(rows)[:5] == [
        ("dense", "tiny"),
        ("dense", f"paper, {paper.QWEN}"),
        ("dense", f"paper, {paper.INTERNVL}"),
        ("fastv:prune=0.6", "tiny"),
        ("fastv", f"paper, {paper.QWEN}"),
    ]
    fastv = rows["fastv:prune=0.6", "tiny"]
    assert (fastv["ai2d"], fastv["drawn"], fastv["n"]) == (50, 75, 8)
    assert fastv["Avg. Ret."] == 75  # 2 of 4 and 3 of 3
    assert fastv["pooled"] == pytest.approx(100 * 5 / 7)
    assert fastv["from"] < fastv["pooled"] < fastv["to"]
    assert (fastv["FLOPs"], fastv["sparse"]) == pytest.approx((60, 80))
    decomoe = rows["decomoe", "tiny"]
    assert decomoe["Avg. Ret."] == pytest.approx(100 * (3 / 4 + 2 / 3) / 2)
    assert list(rows)[-1] == ("decomoe", f"paper, {paper.INTERNVL}")  # no row of the sweeps
    theirs = rows["decomoe", f"paper, {paper.QWEN}"]
    assert (theirs["ai2d"], theirs["drawn"], theirs["Avg. Ret."], theirs["pooled"]) == (85.62, None, 97.91, None)
    assert theirs["FLOPs"] == pytest.approx(100 * 16.73 / 27.06)


def test_times_are_medians_of_ratios(folder):
    assert {row["TTFT"] for row in found(folder, 1) if row["of"] == "tiny"} == {None}
    timed(folder)
    rows = {(row["method"], row["of"]): (row["TTFT"], row["TPOT"]) for row in found(folder, 1)}
    assert rows["dense", "tiny"] == (100, 100)
    assert rows["decomoe", "tiny"] == pytest.approx((50, 90))  # of 50, 75 and 20; of 100 and 80
    assert rows["fastv:prune=0.6", "tiny"] == (None, None)
    assert rows["decomoe", f"paper, {paper.QWEN}"] == pytest.approx((100 * 256.53 / 370.80, 100 * 93.95 / 135.80))
    assert rows["decomoe", f"paper, {paper.INTERNVL}"] == (None, None)
    table = tables(Results.read(folder))[0]
    assert table.notes[-2:] == (
        "Times: `decomoe collect; 2026-01-03`.",
        "Ours: `decomoe evaluate --limit 4; 2026-01-02`.",
    )


def test_a_sweep_has_no_table_of_methods(folder):
    """Else it would be written over that of other results."""
    meta = json.loads((folder / "meta.json").read_text())
    meta["methods"] = {spec: {} for spec in ("dense", "decomoe:p=0.5")}
    store.write(folder / "meta.json", json.dumps(meta))
    assert [table.number for table in tables(Results.read(folder))] == [6]
    del meta["methods"]["decomoe:p=0.5"]
    store.write(folder / "meta.json", json.dumps(meta))
    assert [table.number for table in tables(Results.read(folder))] == [1]


def test_what_is_missing_is_a_dash(folder):
    table = tables(Results.read(folder))[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.markdown().splitlines() if "|" in line]
    assert ["sparsevlm", "tiny", *"-" * 11] in lines
    assert [
        "fastv",
        f"paper, {paper.QWEN}",
        "82.93",
        "-",
        "-",
        "96.32",
        "-",
        "-",
        "-",
        "61.53",
        "-",
        "86.51",
        "86.51",
    ] in lines
    assert {len(line) for line in lines} == {len(table.columns)}
    assert not any(method == "vtw" for method, *_ in lines)


def test_other_tables_where_the_results_hold_them(folder):
    assert [table.number for table in tables(Results.read(folder))] == [1, 5, 6]
    grid = {(row["order"], row["of"], row["figure"]): row for row in found(folder, 5)}
    assert grid["random", "tiny", "Avg. Ret."]["0.1"] == pytest.approx(100 / 3)
    assert grid["random", "tiny", "FLOPs"]["0.1"] == pytest.approx(70)
    assert grid["random", "tiny", "Avg. Ret."]["0.15"] is None
    assert grid["rcep", "paper", "Avg. Ret."]["0.4"] == 97.91
    sweep = {(row["method"], row["of"]): row for row in found(folder, 6)}
    assert sweep["decomoe:p=0.5", "tiny"]["Avg. Ret."] == 100
    assert sweep["decomoe:p=0.5", f"paper, {paper.QWEN}"]["prefix"] == 17
    assert sweep["decomoe:p=1.0", f"paper, {paper.QWEN}"]["prefix"] == 128


def test_table2(folder):
    meta = json.loads((folder / "meta.json").read_text())
    meta["methods"]["decomoe:rcep=no"] = {}
    store.write(folder / "meta.json", json.dumps(meta))
    lines = store.read(store.file_of(folder, "ai2d", "decomoe"))
    store.append(store.file_of(folder, "ai2d", "decomoe:rcep=no"), lines)
    ours, theirs = (row for row in found(folder, 2) if row["method"] == "decomoe:rcep=no")
    assert (ours["ai2d"], ours["exit"], ours["prefix"], ours["Avg. Ret."]) == (75, 9, 6, 75)
    assert (theirs["ai2d"], theirs["exit"], theirs["prefix"], theirs["Avg. Ret."]) == (85.85, 28.08, 128, 97.41)


def test_rows_about_different_questions_are_told(folder):
    table = next(table for table in tables(Results.read(folder)) if table.number == 1)
    rows = [{**row, "n": 4} if row.get("n") else row for row in table.rows]
    assert MIXED not in replace(table, rows=rows).notes
    first = next(number for number, row in enumerate(rows) if row.get("n"))
    rows[first] = {**rows[first], "n": 5}
    assert MIXED in replace(table, rows=rows).notes


def test_command(folder, capsys):
    out = folder / "tables"
    assert main([str(folder), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Table 1: methods" in text
    assert "does not follow from its rows" in text
    assert sorted(file.name for file in out.iterdir()) == sorted(
        f"table{n}.{kind}" for n in (1, 5, 6) for kind in ("csv", "md")
    )
    assert "Ours: `decomoe evaluate --limit 4; 2026-01-02`." in (out / "table1.md").read_text()
    table = pd.read_csv(out / "table1.csv")
    assert table.loc[table.method == "fastv:prune=0.6", "Avg. Ret."].item() == 75
    file = folder / "meta.json"
    for arguments in ([folder / "nothing"], [file], [folder, "--out", file]):
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("analysis: ")
        assert error.count("\n") == 1


def test_the_papers_retention_from_its_own_rows():
    """Table 2's follows from its rows, most of Table 1's does not, and the notes say so."""
    for method, value in paper.mean_of_ratios(paper.TABLE2[paper.QWEN], paper.BENCHMARKS_2).items():
        assert value == pytest.approx(paper.TABLE2[paper.QWEN][method]["Avg. Ret."], abs=0.006)
    qwen, internvl, _ = paper.NOTES[1]
    assert "fastv 96.97 (printed: 96.32)" in qwen
    assert "decomoe 98.18 (printed: 97.87)" in internvl
    assert {round(row["TPOT"] / row["TTFT"], 4) for row in paper.TABLE4.values()} == {0.3662}
