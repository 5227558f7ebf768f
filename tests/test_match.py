"""Methods at equal cost."""

import pytest

from decomoe import cli
from decomoe.benchmarks import BENCHMARKS
from decomoe.evaluate import parse_method
from decomoe.evaluate.match import TOLERANCE, cost_of, matched
from decomoe.methods import VTW, Dense


@pytest.fixture(scope="module")
def cases():
    return BENCHMARKS["drawn"].load("calibration", None)[:4]


@pytest.mark.parametrize("spec", ["fastv:layer=3", "sparsevlm", "fastmmoe", "modes"])
def test_strength_reaches_the_target(mini, cases, spec):
    found, cost = matched(mini, cases, spec, {"executed": 0.7, "sparse": 0.8}, max_new_tokens=2)
    wanted, convention = (0.8, "sparse") if spec in ("modes", "fastmmoe") else (0.7, "executed")
    assert found.startswith(spec)
    assert cost[convention] == pytest.approx(wanted, abs=3 * TOLERANCE)
    assert cost == cost_of(mini, cases, parse_method(found, 16), max_new_tokens=2)


def test_a_layer_is_matched_as_nearly_as_there_are_layers(mini, cases):
    target = cost_of(mini, cases, VTW(9), max_new_tokens=2)
    near = {name: value + 0.01 for name, value in target.items()}
    assert matched(mini, cases, "vtw", near, max_new_tokens=2) == ("vtw:exit_after=9", target)


def test_dense_costs_one_and_has_no_strength(mini, cases):
    assert cost_of(mini, cases, Dense(), max_new_tokens=2) == {"executed": 1, "sparse": 1}
    with pytest.raises(ValueError, match="'dense' has no strength to match; fastv, "):
        matched(mini, cases, "dense", {"executed": 0.7, "sparse": 0.8})


def test_command(mini, monkeypatch, capsys):
    monkeypatch.setattr("decomoe.cli.match.load_model", lambda options: mini)
    command = ["match", "--data", "drawn:4", "--max-new-tokens", "1", "--methods"]
    assert cli.main([*command, "vtw", "--to", "decomoe:exit_after=9,rcep=no"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "--methods decomoe:exit_after=9,rcep=no vtw:exit_after=9"
    assert [line.split(": ", 1)[1] for line in lines] == [lines[0].split(": ", 1)[1]] * 2  # both cost the same
    assert cli.main([*command, "vtw", "--to", "decomoe:exit_after=9,prefix=24"]) == 0
    assert "the nearest that it can" in capsys.readouterr().out.splitlines()[1]
    monkeypatch.setattr("decomoe.evaluate.cost_of", None)  # what can't be matched is told before the work
    assert cli.main([*command, "vtw", "dense"]) == 2
    assert "'dense' has no strength to match" in capsys.readouterr().err
    assert cli.main([*command, "fastv:prune=0.5"]) == 2
    assert "prune is given twice in 'fastv:prune=0.5,prune=0.5'" in capsys.readouterr().err
