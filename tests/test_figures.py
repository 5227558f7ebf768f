"""Figures: tables against slow counts over made-up lines, and each drawn figure's own data against its table."""

import json
import math
import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import mean, median

import plotly.graph_objects as go
import pytest

from analysis import draw
from analysis.data import Data, Lines, fig5b, read
from analysis.figures import FIGURES
from decomoe import cli
from decomoe.colors import DENSE, METHODS, MODALITIES, OURS, PARTS
from decomoe.evaluate import store

LAYERS, EXPERTS, CASES, EXITS = 5, 10, 6, [1, 2, 3]
RUN = {"model": "tiny", "layers": LAYERS, "experts": EXPERTS}
COMMAND = {"line": "decomoe collect --limit 3", "date": "2026-01-02"}


def chances(rng: random.Random, count: int = EXPERTS) -> list[float]:
    values = [rng.random() ** 3 for _ in range(count)]
    return [value / sum(values) for value in values]


def routing(rng: random.Random, number: int) -> dict:
    likeness = {f"{of}_{value}": rng.random() for of in ("token", "mean") for value in ("cosine", "mae")}
    line = {
        "number": number,
        "id": f"x/{number}",
        "question": "What <b>is</b> it?",
        "layers": list(range(LAYERS)),
        **{kind: [chances(rng) for _ in range(LAYERS)] for kind in ("text", "visual")},
        "half": {kind: [rng.randint(1, 5) for _ in range(LAYERS)] for kind in ("text", "visual")},
        "evicted": {str(layer): {k: v * (layer + number) for k, v in likeness.items()} for layer in (3, 4)},
    }
    if number == 0:
        line["map"] = {
            "layer": 4,
            "visual": [0, 1, 1, 0, 0],
            "tokens": ["<a", "b", "\n"],
            "experts": [rng.sample(range(EXPERTS), 2) for _ in range(5)],
            "weights": [[0.75, 0.25]] * 5,
            "before": [chances(rng) for _ in range(3)],
            "after": [chances(rng) for _ in range(3)],
        }
    return line


def exits(rng: random.Random, number: int) -> dict:
    return {
        "number": number,
        "id": f"x/{number}",
        "group": f"x/{number // 3}",
        "question": "What is it?",
        "visual": 10 * number,
        "layers": EXITS,
        "answers": ["a", "b", "c"],
        "right": [False, number % 2 == 0, number < 4 and number != 1],  # of number 1, no exit is right
        "nll": [rng.random() * 3 for _ in EXITS],
        "dense": {"answer": "c", "right": number != 5, "nll": rng.random()},
        "predicted": (None, 1, 2, 3)[number % 4],
    }


def latency(rng: random.Random, number: int) -> dict:
    parts = {part: [rng.random() for _ in range(LAYERS)] for part in ("attention", "router")}
    times = {"dense": rng.random(), "decomoe": rng.random(), "vtw": 1.0}  # vtw was not evaluated
    return {"number": number, "ttft_s": times, "parts": {"dense": {"prefill": parts}}}


def evaluated(number: int, method: str) -> dict:
    flops = {"executed": 0.5, "executed_dense": 1.0, "sparse": 0.6, "sparse_dense": 1.0}
    exit_after = None if method == "dense" or number == 0 else 2 + number % 2
    same = {"kind": "name", "group": f"x/{number}", "truth": "c", "answer": "c", "right": True, "mean_prefix": 3.0}
    return {"number": number, "exit_after": exit_after, "mean_prefix_after_exit": 2.0, "flops": flops, **same}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Results of two benchmarks."""
    out, rng = tmp_path_factory.mktemp("results"), random.Random(0)
    meta = {
        "schema": 1,
        "run": RUN,
        "benchmarks": {name: {"excluded": 0} for name in ("one", "two")},
        "methods": {"dense": {}, "decomoe": {}},
        "collected": {"routing": {"exit_after": 2}, "exits": {}},
        "commands": {
            **dict.fromkeys(("routing", "exits"), COMMAND),
            "latency": {"line": "decomoe collect --collectors latency", "date": "2026-01-03"},
            "evaluate": {"line": "decomoe evaluate", "date": "2026-01-01"},
        },
    }
    store.write(out / "meta.json", json.dumps(meta))
    for name in meta["benchmarks"]:
        for make, kind in ((routing, "routing"), (exits, "exits"), (latency, "latency")):
            path = store.file_of(out, name, f"collected:{kind}")
            store.append(path, [make(rng, number) for number in range(CASES // 2 if name == "two" else CASES)])
        for method in meta["methods"]:
            store.append(store.file_of(out, name, method), [evaluated(number, method) for number in range(CASES)])
    return out


@pytest.fixture(scope="module")
def tables(folder) -> dict[str, Data]:
    return read(folder)


def lines(folder: Path, kind: str) -> list[dict]:
    return [line for name in ("one", "two") for line in store.read(store.file_of(folder, name, f"collected:{kind}"))]


# --- tables against slow counts --------------------------------------------------------------------------------------


def test_concentration(folder, tables):
    routed = lines(folder, "routing")
    for row in tables["fig3b"].rows:
        masses = [mean(line[row["modality"]][row["layer"]][e] for line in routed) for e in range(EXPERTS)]
        assert row["share"] == pytest.approx(sum(sorted(masses)[-2:]) / sum(masses))
    assert len(tables["fig3b"].rows) == 2 * LAYERS


def test_overlap_over_all_pairs(folder, tables):
    routed, sizes = lines(folder, "routing"), {"1/8": 1, "1/4": 2, "1/2": 5}
    for row in tables["fig3c"].rows:
        size, best = sizes[row["keep"]], []
        for line in routed:
            mass = line[row["modality"]][row["layer"]]
            best.append(set(sorted(range(EXPERTS), key=lambda expert: -mass[expert])[:size]))
        assert row["overlap"] == pytest.approx(mean(len(a & b) / size for a, b in combinations(best, 2)))
        assert row["chance"] == size / EXPERTS
    assert len(tables["fig3c"].rows) == 2 * 3 * LAYERS


def test_text_share(folder, tables):
    routed = lines(folder, "routing")
    for row in tables["text_share"].rows:
        text, visual = (mean(line[kind][row["layer"]][row["expert"]] for line in routed) for kind in ("text", "visual"))
        assert row["share"] == pytest.approx(text / (text + visual))


def test_perplexity_by_exit(folder, tables):
    rows, by_case = tables["fig3a"].rows, {}
    for row in rows:
        by_case.setdefault((row["benchmark"], row["case"]), []).append(row)
    assert len(by_case) == CASES - 1 + CASES // 2  # dense is wrong on one
    for line, own in zip(
        [line for line in lines(folder, "exits") if line["dense"]["right"]], by_case.values(), strict=True
    ):
        assert [row["layer"] for row in own] == [*EXITS, None]
        assert [row["perplexity"] for row in own] == pytest.approx(
            [math.exp(value) for value in [*line["nll"], line["dense"]["nll"]]]
        )
        first = line["right"].index(True) if any(line["right"]) else None
        assert [i for i, row in enumerate(own) if row["earliest"]] == ([] if first is None else [first])


def test_perplexity_around_the_boundary(folder, tables):
    gated = [line for line in lines(folder, "exits") if line["predicted"] is not None]
    assert [row["offset"] for row in tables["fig5a"].rows] == list(range(-2, 9))
    for row in tables["fig5a"].rows:
        told, dense = [], []
        for line in gated:
            layer = line["predicted"] + row["offset"]
            if layer >= 1:
                told.append(line["nll"][EXITS.index(layer)] if layer in EXITS else line["dense"]["nll"])
                dense.append(line["dense"]["nll"])
        assert row["n"] == len(told)
        assert row["perplexity"] == pytest.approx(math.exp(mean(told)))
        assert row["dense"] == pytest.approx(math.exp(mean(dense)))
    assert tables["fig5a"].rows[-1]["perplexity"] == pytest.approx(tables["fig5a"].rows[-1]["dense"])


def test_experts_and_likeness(folder, tables):
    routed = lines(folder, "routing")
    for row, line in zip(tables["fig8a"].rows, routed, strict=True):
        assert (row["text"], row["visual"]) == (mean(line["half"]["text"]), mean(line["half"]["visual"]))
    for row in tables["fig8b"].rows:
        values = [line["evicted"][str(row["layer"])] for line in routed]
        assert row["cosine"] == pytest.approx(mean(value[f"{row['of']}_cosine"] for value in values))
        assert row["mae"] == pytest.approx(mean(value[f"{row['of']}_mae"] for value in values))
    assert len(tables["fig8b"].rows) == 4


def test_exits_of_the_gate(tables):
    found = {(row["benchmark"], row["layer"]): row["share"] for row in tables["fig4"].rows}
    for name in ("one", "two"):
        assert {layer: found[name, layer] for layer in (None, 2, 3)} == {None: 1 / 6, 2: 2 / 6, 3: 3 / 6}


def test_times(folder, tables):
    timed = lines(folder, "latency")
    for row in tables["fig1a"].rows:
        expected = median(line["parts"]["dense"]["prefill"][row["part"]][row["layer"]] for line in timed)
        assert row["ms"] == pytest.approx(expected, abs=1e-4)
    assert len(tables["fig1a"].rows) == 2 * LAYERS
    assert [row["method"] for row in tables["fig5b"].rows] == ["dense", "decomoe"]
    for row in tables["fig5b"].rows:
        seconds = median(line["ttft_s"][row["method"]] for line in timed)
        assert (row["ms"], row["retention"]) == (pytest.approx(1000 * seconds, abs=1e-3), 1)


def test_retention_is_over_the_questions_that_all_have_answered(tmp_path):
    """Of two benchmarks, vtw has answered half of one; it and DecoMoE are right there, and DecoMoE nowhere else."""
    commands = {kind: {"line": f"decomoe {kind}", "date": f"2026-01-0{len(kind)}"} for kind in ("evaluate", "latency")}
    methods = {"dense": (4, 4), "decomoe": (4, 4), "vtw": (2, 0)}
    meta = {"schema": 1, "commands": commands, "methods": {name: {} for name in methods}}
    meta["benchmarks"] = {name: {"excluded": 0} for name in ("one", "two")}
    store.write(tmp_path / "meta.json", json.dumps(meta))
    for method, counts in methods.items():
        for name, count in zip(meta["benchmarks"], counts, strict=True):
            right = [method == "dense" or (name == "one" and number < 2) for number in range(count)]
            answers = [evaluated(number, method) | {"right": own} for number, own in enumerate(right)]
            store.append(store.file_of(tmp_path, name, method), answers)
    times = {"number": 0, "ttft_s": dict.fromkeys(methods, 1.0), "parts": {}}
    store.append(store.file_of(tmp_path, "two", "collected:latency"), [times])
    drawn = fig5b(Lines(tmp_path))
    assert {row["method"]: row["retention"] for row in drawn.rows} == dict.fromkeys(methods, 1)
    assert drawn.meta["data"] == "time: 1 of two; retention: 2 of one"
    assert drawn.meta["command"] == "decomoe evaluate && decomoe latency"
    assert drawn.meta["date"] == "2026-01-08"


def test_origin(tables):
    assert tables["fig3b"].meta | RUN == tables["fig3b"].meta
    assert tables["fig3b"].meta["data"] == "6 of one, 3 of two"
    assert tables["fig3b"].meta["command"] == COMMAND["line"]
    assert tables["fig4"].meta["command"] == "decomoe evaluate"
    assert tables["fig1a"].meta["date"] == "2026-01-03"
    assert tables["fig5a"].meta["command"] == COMMAND["line"]
    assert tables["fig6"].meta["data"] == "1 of one"


# --- drawn figures against their tables ------------------------------------------------------------------------------

TIMES = [
    {"method": method, "phase": phase, "layer": layer, "part": part, "ms": 1.0 + layer + len(part)}
    for method in ("dense", "decomoe")
    for phase in ("prefill", "decode")
    for layer in range(3)
    for part in PARTS
    if part not in ("vision encoder", "rest")
]
TRADE = [
    {"method": "dense", "ms": 20.0, "retention": 1.0, "low": 1.0, "high": 1.0},
    {"method": "decomoe", "ms": 12.0, "retention": 0.97, "low": 0.95, "high": 0.99},
]


@pytest.fixture(scope="module")
def all_tables(tables) -> dict[str, Data]:
    meta = {"model": "tiny", "data": "1 of one", "command": "decomoe collect", "date": "2026-01-02"}
    return {**tables, "fig1a": Data(TIMES, meta), "fig5b": Data(TRADE, meta)}


def drawn(tables: dict[str, Data], name: str) -> tuple[list[dict], list]:
    """The table's rows, and the figure's traces as a browser gets them."""
    return tables[name].rows, list(go.Figure(json.loads(FIGURES[name](tables[name]).to_json())).data)


def points(trace, *columns: str) -> Iterator[tuple]:
    return zip(*(trace[column] for column in columns), strict=True)


def test_drawn_times(all_tables):
    rows, traces = drawn(all_tables, "fig1a")
    axes = {
        ("dense", "prefill"): None,
        ("dense", "decode"): "x2",
        ("decomoe", "prefill"): "x3",
        ("decomoe", "decode"): "x4",
    }
    found = {(t.name, t.xaxis, x): y for t in traces for x, y in points(t, "x", "y")}
    expected = {(r["part"], axes[r["method"], r["phase"]] or "x", r["layer"]): r["ms"] for r in rows}
    assert found == expected
    assert {t.name: t.marker.color for t in traces}.items() <= PARTS.items()
    meta = FIGURES["fig1a"](all_tables["fig1a"]).layout.meta
    assert meta["summary"].startswith("Of the decoder layers' time attention takes")


def test_drawn_perplexity(all_tables):
    rows, traces = drawn(all_tables, "fig3a")
    *cases, dots = traces
    number = iter(rows)
    for trace in cases:
        for x, y in points(trace, "x", "y"):
            row = next(number)
            assert (trace.name, x, y) == (row["case"], 5 if row["layer"] is None else row["layer"], row["perplexity"])
    assert next(number, None) is None
    assert list(points(dots, "x", "y")) == [(r["layer"], r["perplexity"]) for r in rows if r["earliest"]]


@pytest.mark.parametrize(("name", "value"), [("fig3b", "share"), ("fig3c", "overlap")])
def test_drawn_lines_by_modality(all_tables, name, value):
    rows, traces = drawn(all_tables, name)
    found = {}
    for trace in traces:
        (kind,) = [kind for kind, color in MODALITIES.items() if color == trace.line.color]
        keep = trace.name.removeprefix("keep ") if name == "fig3c" else None
        found |= {(kind, keep, x): y for x, y in points(trace, "x", "y")}
    assert found == {(row["modality"], row.get("keep"), row["layer"]): row[value] for row in rows}


def test_drawn_exits(all_tables):
    rows, traces = drawn(all_tables, "fig4")
    found = {(t.name, x): (y, c) for t in traces for x, y, c in zip(t.x, t.y, t.marker.color, strict=True)}
    assert found == {
        (r["benchmark"], LAYERS + 1 if r["layer"] is None else r["layer"]): (
            r["share"],
            DENSE if r["layer"] is None else OURS,
        )
        for r in rows
    }
    figure = FIGURES["fig4"](all_tables["fig4"])
    assert list(figure.layout.xaxis.tickvals) == [2, 3, LAYERS + 1]  # where the exits are
    assert {trace.width for trace in figure.data} == {0.8}


def test_drawn_boundary(all_tables):
    rows, (ours, dense) = drawn(all_tables, "fig5a")
    assert list(points(ours, "x", "y")) == [(row["offset"], row["perplexity"]) for row in rows]
    assert list(points(dense, "x", "y")) == [(row["offset"], row["dense"]) for row in rows]


def test_drawn_trade_off(all_tables):
    rows, traces = drawn(all_tables, "fig5b")
    for row, trace in zip(rows, traces, strict=True):
        assert (trace.name, trace.x[0], trace.y[0]) == (row["method"], row["ms"], row["retention"])
        assert trace.y[0] + trace.error_y.array[0] == pytest.approx(row["high"])
        assert trace.y[0] - trace.error_y.arrayminus[0] == pytest.approx(row["low"])
        assert trace.marker.color == METHODS[row["method"]]


def test_drawn_tokens(all_tables):
    rows, traces = drawn(all_tables, "fig6")
    found = []
    for trace in traces:
        places = list(dict.fromkeys(row["token"] for row in rows if row["modality"] == trace.name))
        for token, weights in zip(places, trace.z, strict=True):
            found += [(token, trace.name, expert, w) for expert, w in enumerate(weights) if w]
    assert sorted(found) == sorted((r["token"], r["modality"], r["expert"], r["weight"]) for r in rows)
    assert traces[1].customdata[0][0] == "&lt;a"  # never a tag


def test_experts_that_text_and_picture_share():
    """Of the experts 0 to 2 of text, 1 and 2 are the picture's too; they get half of text's mass."""
    routes = [("visual", 1, 0.75), ("visual", 2, 0.25), ("text", 0, 0.75), ("text", 1, 0.25), ("text", 0, 0.25)]
    routes.append(("text", 2, 0.75))
    rows = [
        {"token": token // 2, "modality": kind, "label": "a", "expert": expert, "weight": weight}
        for token, (kind, expert, weight) in enumerate(routes)
    ]
    figure = FIGURES["fig6"](Data(rows, {"layer": 3, "experts": 4}))
    assert figure.layout.meta["summary"] == (
        "At layer 3, 1 visual tokens use 2 of 4 experts, 2 text tokens use 3. "
        "Both use 2 experts; these get 50% of text's mass."
    )


def test_drawn_distributions(all_tables):
    rows, traces = drawn(all_tables, "fig7")
    for trace, side in zip(traces, ("before", "after"), strict=True):
        assert [list(row) for row in trace.z] == [row[side] for row in rows]
    assert traces[0].zmax == traces[1].zmax


def test_drawn_halves_and_likeness(all_tables):
    rows, (dots,) = drawn(all_tables, "fig8a")
    assert list(points(dots, "x", "y", "text")) == [(row["visual"], row["text"], row["case"]) for row in rows]
    rows, traces = drawn(all_tables, "fig8b")
    names = {"token by token": "token", "in the mean of tokens": "mean"}
    for number, trace in enumerate(traces):
        own = [row for row in rows if row["of"] == names[trace.name]]
        assert list(points(trace, "x", "y")) == [(row["layer"], row[("cosine", "mae")[number // 2]]) for row in own]


def test_drawn_text_share(all_tables):
    rows, (heat,) = drawn(all_tables, "text_share")
    found = {(y, x): heat.z[i][j] for i, y in enumerate(heat.y) for j, x in enumerate(heat.x)}
    assert found == {(row["layer"], row["expert"]): row["share"] for row in rows}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_where_it_comes_from(all_tables, name):
    figure, meta = FIGURES[name](all_tables[name]), all_tables[name].meta
    origin = figure.layout.annotations[-1].text.replace("<br>", " ")
    assert all(meta[key] in origin for key in ("model", "data", "command", "date"))
    assert figure.layout.meta["summary"].endswith(".")
    assert "Fig." in FIGURES[name].__doc__ or "SMoES" in FIGURES[name].__doc__


# --- the command -----------------------------------------------------------------------------------------------------


def test_command_from_lines_and_from_tables(folder, tables, tmp_path, capsys):
    once, again = tmp_path / "once", tmp_path / "again"
    assert cli.main(["figures", "--results", str(folder), "--out", str(once), "--formats", "html"]) == 0
    printed = capsys.readouterr().out.split()
    assert sorted(printed) == sorted(str(path) for path in once.iterdir())
    drawn = {path.stem for path in once.glob("fig*.html")}
    assert drawn == {"fig1a", "fig5b", "fig3a", "fig3b", "fig3c", "fig4", "fig5a", "fig6", "fig7", "fig8a", "fig8b"}
    assert (once / "table1.csv").is_file()
    assert cli.main(["figures", "--results", str(once), "--out", str(again), "--formats", "html"]) == 0
    for path in once.glob("*.json"):
        assert (again / path.name).read_text() == path.read_text()
    page = (once / "fig3a.html").read_text()
    assert "What is it?" in page
    assert "earliest right answer" in page
    assert 'src="plotly.min.js"' in page
    assert not any(where in page for where in ("http://", "https://cdn"))
    assert FIGURES["fig3a"](tables["fig3a"]).layout.meta["summary"] in (once / "index.md").read_text()


@pytest.mark.parametrize(
    ("formats", "link"),
    [
        (["html"], "\n[fig3b](fig3b.html)"),
        (["html", "png"], "\n![fig3b](fig3b.png)"),
        (["svg", "png"], "\n![fig3b](fig3b.svg)"),
        ([], "\n[fig3b](fig3b.json)"),
    ],
)
def test_the_list_links_what_was_drawn(tables, formats, link):
    assert link in draw.told("fig3b", FIGURES["fig3b"](tables["fig3b"]), formats)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_pictures(folder, tmp_path, kind):
    pytest.importorskip("kaleido")
    arguments = ["--results", str(folder), "--out", str(tmp_path), "--only", "fig3b", "--formats", kind]
    assert cli.main(["figures", *arguments]) == 0
    start = (tmp_path / f"fig3b.{kind}").read_bytes()[:200]
    assert b"<svg" in start if kind == "svg" else start.startswith(b"\x89PNG")


def test_no_browser_is_said(folder, tmp_path, capsys, monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("\n\nKaleido requires Google Chrome to be installed.\n\nEither")

    monkeypatch.setattr("plotly.io.write_images", missing)
    assert cli.main(["figures", "--results", str(folder), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--formats html" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ['{"meta"', "5", '{"meta": {}}', '{"meta": {}, "rows": []}', "\xff"])
def test_a_damaged_table_is_named(tmp_path, capsys, text):
    (tmp_path / "fig3a.json").write_text(text, encoding="latin-1")
    assert cli.main(["figures", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "fig3a.json is damaged" in error
    assert error.count("\n") == 1


def test_some_figures_leave_the_list_of_all(folder, tmp_path):
    store.write(tmp_path / "index.md", "of all")
    list(draw.draw(folder, tmp_path, ["fig3b"], []))
    assert (tmp_path / "index.md").read_text() == "of all"
    assert (tmp_path / "fig3b.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--only", "fig9"], "no figure 'fig9'; there are fig1a"), ([], "nothing in")]
)
def test_bad_input_is_one_sentence_and_status_2(tmp_path, capsys, arguments, message):
    assert cli.main(["figures", "--results", str(tmp_path), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
