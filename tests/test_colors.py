"""Readable in grey, by colour-blind people, on light and on dark ground: every chart of the page and of the figures."""

import json
import re
from collections.abc import Iterator
from itertools import combinations, cycle
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageColor

from analysis.data import Data
from analysis.figures import FIGURES
from decomoe.latency import PARTS, Breakdown, Phase
from decomoe.mini.examples import examples
from decomoe.ui import plots
from decomoe.ui.compare import METHODS, Row, tradeoff
from decomoe.ui.page import THEME

GROUNDS = ("#ffffff", THEME.neutral_800)  # of charts, light and dark
CONTRAST = 3  # of graphics against their ground: WCAG 2.2, 1.4.11
GREY, HUE = 8, 20  # least distance of two series that only colour tells apart: in L*, and in Lab for the colour-blind
# Machado, Oliveira and Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009),
# for linear RGB at severity 1.
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
BLIND = np.array([PROTANOPIA, DEUTERANOPIA])
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def seen(color: str, ground: str = "#ffffff") -> np.ndarray:
    """RGB from 0 to 1 of a colour, which may let its ground through."""
    *rgb, alpha = map(float, color[5:-1].split(",")) if color.startswith("rgba") else (*ImageColor.getrgb(color), 1)
    return (alpha * np.array(rgb) + (1 - alpha) * np.array(ImageColor.getrgb(ground))) / 255


def linear(rgb: np.ndarray) -> np.ndarray:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB, white being D65."""
    ratio = np.clip(TO_XYZ @ rgb / TO_XYZ.sum(1), 0, None)
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(color: str, ground: str) -> float:
    """WCAG's."""
    dark, light = sorted(TO_XYZ[1] @ linear(seen(each, ground)) for each in (color, ground))
    return (light + 0.05) / (dark + 0.05)


def charts() -> dict[str, dict]:
    """All of them as a browser gets them: the figures from their tables, the page's from a recorded example."""
    folder = Path(__file__).parents[1] / "analysis" / "results"
    found = {name: draw(Data.read(folder / f"{name}.json")) for name, draw in FIGURES.items()}
    dense, ours = examples()[1].traces
    phase = Phase([dict.fromkeys(PARTS, 0.001)], vision=0.001, rest=0.001)
    live = [
        plots.gate_figure(ours),
        plots.prefix_figure(ours),
        plots.routing_figure(ours, [range(ours.experts)] * ours.layers),
        plots.cost_figure(dense, ours),
        plots.latency_figure(dict.fromkeys(("Dense", "DecoMoE"), Breakdown(phase, phase, 1))),
        tradeoff([Row(name, as_dense=at % 2, executed=1, ttft_ms=1) for at, name in enumerate(METHODS)]),
    ]
    views = {f"{one['name']} {name}": one | view for one in live for name, view in one.get("views", {"": one}).items()}
    return {name: json.loads(figure.to_json()) for name, figure in found.items()} | views


CHARTS = charts()
each_chart = pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS.keys())


def looks(chart: dict) -> Iterator[tuple[str, tuple]]:
    """The colour of every series, and all else by which it can be told from others."""
    for trace in chart["data"]:
        marker, line = trace.get("marker", {}), trace.get("line", {})
        colors, symbols = (
            each if isinstance(each, list) else [each]
            for each in (marker.get("color", line.get("color")), marker.get("symbol"))
        )
        style = trace["type"], trace.get("mode"), line.get("dash"), marker.get("pattern", {}).get("shape")
        yield from ((color, (*style, symbol)) for color, symbol in zip(colors, cycle(symbols)) if color)


@each_chart
def test_series_differ_in_grey_and_for_the_colour_blind(chart):
    for (one, this), (two, that) in combinations(dict.fromkeys(looks(chart)), 2):
        if this == that:
            first, second = linear(seen(one)), linear(seen(two))
            assert abs(lab(first)[0] - lab(second)[0]) >= GREY, (one, two, this)
            for sight in BLIND:
                assert np.linalg.norm(lab(sight @ first) - lab(sight @ second)) >= HUE, (one, two, this)


@each_chart
@pytest.mark.parametrize("ground", GROUNDS)
def test_scales_get_lighter_or_darker_all_the_way(chart, ground):
    for scale in (trace["colorscale"] for trace in chart["data"] if "colorscale" in trace):
        places, colors = zip(*scale, strict=True)
        stops = np.array([seen(color, ground) for color in colors]).T
        between = np.array([np.interp(np.linspace(0, 1, 21), places, channel) for channel in stops]).T
        steps = np.diff([lab(linear(color))[0] for color in between])
        assert (steps > 0).all() or (steps < 0).all()


@each_chart
@pytest.mark.parametrize("ground", GROUNDS)
def test_series_and_lines_stand_out_from_the_ground(chart, ground):
    for trace in chart["data"]:
        marker = trace.get("marker", {})
        edge = marker.get("line", {}).get("color")
        assert "opacity" not in {*trace, *marker}  # it would take contrast away
        for color, _ in looks({"data": [trace]}):
            assert max(contrast(each, ground) for each in (color, edge) if each) >= CONTRAST, (color, edge)
    for shape in chart["layout"].get("shapes", ()):
        assert contrast(shape["line"]["color"], ground) >= CONTRAST


@each_chart
def test_all_text_has_the_color_of_the_text_around_it(chart):
    """It is set in one place, to which page and files write the reader's own."""
    layout = {name: value for name, value in chart["layout"].items() if name != "font"}
    assert not re.search(r'font": {[^}]*"color"', json.dumps([chart["data"], layout]))
