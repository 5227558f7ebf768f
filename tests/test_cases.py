"""The search for telling cases: boundaries and choices by hand, and what the command writes."""

import json

import pytest
from PIL import Image

from decomoe import cli
from decomoe.benchmarks import BENCHMARKS, Benchmark, Case
from decomoe.collect import file_name
from decomoe.collect.cases import Telling, apart, boundary, markdown, search, told_of
from decomoe.evaluate import store


def line(number: int, marks: str, visual: int, dense: bool = True, group: str | None = None) -> dict:
    """A swept question; `marks` says which exits, after layers 2, 3, ..., give the right answer."""
    right = [mark == "1" for mark in marks]
    return {
        "number": number,
        "id": f"some/{number}",
        "group": group or f"some/{number}",
        "question": "How | many?",
        "truth": "two",
        "visual": visual,
        "layers": list(range(2, 2 + len(marks))),
        "answers": ["two" if one else "three" for one in right],
        "right": right,
        "dense": {"answer": "two", "right": dense},
        "predicted": 4 if number else None,
    }


@pytest.mark.parametrize(
    ("marks", "dense", "expected"),
    [
        ("00111", True, 4),
        ("10011", True, None),  # right by chance at first
        ("11111", True, None),  # nothing breaks it
        ("00000", True, None),
        ("00001", True, 6),
        ("00110", True, None),  # the last exit breaks it
        ("00111", False, None),
    ],
)
def test_boundary(marks, dense, expected):
    assert boundary(line(0, marks, 9, dense)) == expected


def test_apart():
    questions = [Telling(depth, {"id": name}) for depth, name in [(5, "a"), (2, "b"), (5, "c"), (9, "d"), (3, "e")]]
    assert [question.line["id"] for question in apart(questions)] == ["b", "a", "d"]
    assert apart(questions[:3]) == []
    assert apart(questions[:2], wanted=2) == questions[1::-1]


LINES = [
    line(0, "00011", 60),
    line(1, "00001", 40),  # few tokens, late
    line(2, "01111", 250),  # many tokens, early
    line(3, "01111", 100, group="picture"),
    line(4, "00111", 100, group="picture"),
    line(5, "00001", 100, group="picture"),
    line(6, "00111", 300, dense=False),
]


def test_search():
    found = search(LINES)
    assert [[question.line["id"] for question in one.questions] for one in found] == [
        ["some/2"],
        ["some/1"],
        ["some/3", "some/4", "some/5"],
    ]
    assert [[question.depth for question in one.questions] for one in found] == [[3], [6], [3, 4, 6]]
    assert len(search(LINES[:3])) == 2
    assert search(LINES[:1]) == []  # neither many tokens nor few
    assert search(LINES[6:]) == []


@pytest.fixture
def results(tmp_path, monkeypatch):
    cases = [Case(f"some/{i}", lambda i=i: Image.new("RGB", (8 + i, 8)), "How many?", "two") for i in range(7)]
    monkeypatch.setitem(BENCHMARKS, "some", Benchmark("some", lambda split, source: cases))
    store.append(store.file_of(tmp_path, "some", file_name("exits")), LINES)
    return tmp_path


def test_command(results, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["cases", "--results", str(results), "--benchmarks", "some", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert (out / "cases.md").read_text() in text
    told = json.loads((out / "cases.json").read_text())
    assert [one["boundaries"] for one in told] == [[3], [6], [3, 4, 6]]
    assert [Image.open(out / one["picture"]).width for one in told] == [10, 9, 11]
    assert "| 2 | ✗ three | ✗ three | ✗ three |" in text
    assert "How \\| many?" in text
    assert "after layer 3 on; the gate lets the picture go after layer 4." in text


def test_kinds_that_are_not_there_are_told(results, capsys):
    assert cli.main(["cases", "--results", str(results), "--benchmarks", "some"]) == 0
    assert not capsys.readouterr().err
    some = "".join(json.dumps(one) + "\n" for one in LINES[:3])
    store.write(store.file_of(results, "some", file_name("exits")), some)
    assert cli.main(["cases", "--results", str(results), "--benchmarks", "some"]) == 0
    assert "2 of 3 kinds of case found" in capsys.readouterr().err


def test_a_model_without_a_gate():
    lines = [{name: value for name, value in one.items() if name != "predicted"} for one in LINES]
    assert all("gate" not in markdown(told_of(found, "case.png")) for found in search(lines))


def test_nothing_is_said(tmp_path, capsys, results):
    store.write(store.file_of(tmp_path, "some", file_name("exits")), "")
    assert cli.main(["cases", "--results", str(results), "--benchmarks", "some"]) == 2
    assert "holds no forced exits of some; collect them" in capsys.readouterr().err
