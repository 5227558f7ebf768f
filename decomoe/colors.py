"""One colour for one thing, on the page and in the figures: Okabe and Ito's hues, safe for colour-blind people.

Lines and dots have a contrast of at least 3 on white and on the page's dark ground, bars an outline that has it. Where
colours could be mixed up in grey, figures add dashes, symbols or patterns, in the order of these tables.
"""

from typing import Any

DENSE, OURS, MUTED = "#888888", "#0078BC", "rgba(136, 136, 136, 0.35)"
GRID = "rgba(136, 136, 136, 0.3)"
OUTLINE = {"color": DENSE, "width": 0.5}
MODALITIES = {"text": "#008560", "visual": "#C88400", "generated": "#C0689A"}
METHODS = {
    "dense": DENSE,
    "decomoe": OURS,
    "fastv": "#C88400",
    "sparsevlm": "#008560",
    "dyvte": "#C0689A",
    "fastmmoe": "#D55E00",
    "vtw": "#3E95C9",
    "modes": "#8A8400",
}
PARTS = {
    "attention": "#56B4E9",
    "router": "#F0E442",
    "dispatch": "#CC79A7",
    "expert MLP": "#D55E00",
    "method": OURS,
    "other": DENSE,
    "vision encoder": "#E69F00",
    "rest": "#BBBBBB",
}
SHARE = [[0.0, "#FFCB6B"], [0.5, "#8F9A94"], [1.0, "#00614A"]]  # visual to text, darker all the way


def dot(method: str, filled: bool = True) -> dict[str, Any]:
    """The marker of a method, by its spec: a colour and a symbol of its own."""
    name = method.partition(":")[0]
    number = list(METHODS).index(name)  # plotly's open symbols come 100 later
    return {"color": METHODS[name], "symbol": number if filled else number + 100, "size": 11}


def scale(color: str) -> list[list[float | str]]:
    """A plotly colour scale from nothing to `color`, on light and dark ground alike."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return [[0.0, f"rgba({red}, {green}, {blue}, 0)"], [1.0, f"rgba({red}, {green}, {blue}, 1)"]]
