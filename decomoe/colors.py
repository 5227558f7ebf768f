"""One colour for one thing, on the page and in the figures (Okabe and Ito's palette, safe for colour-blind people).

Where colours could be mixed up in grey, figures add dashes, symbols or patterns, in the order of these tables.
"""

from typing import Any

DENSE, OURS, MUTED = "#888888", "#0072B2", "rgba(136, 136, 136, 0.35)"
GRID = "rgba(136, 136, 136, 0.3)"
MODALITIES = {"text": "#009E73", "visual": "#E69F00", "generated": "#CC79A7"}
METHODS = {
    "dense": DENSE,
    "decomoe": OURS,
    "fastv": "#E69F00",
    "sparsevlm": "#009E73",
    "dyvte": "#CC79A7",
    "fastmmoe": "#D55E00",
    "vtw": "#56B4E9",
    "modes": "#A8A000",
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
SHARE = [[0.0, MODALITIES["visual"]], [0.5, "rgba(136, 136, 136, 0.08)"], [1.0, MODALITIES["text"]]]


def dot(method: str, filled: bool = True) -> dict[str, Any]:
    """The marker of a method, by its spec: a colour and a symbol of its own."""
    name = method.partition(":")[0]
    number = list(METHODS).index(name)  # plotly's open symbols come 100 later
    return {"color": METHODS[name], "symbol": number if filled else number + 100, "size": 11}


def scale(color: str) -> list[list[float | str]]:
    """A plotly colour scale from nothing to `color`, on light and dark ground alike."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return [[0.0, f"rgba({red}, {green}, {blue}, 0)"], [1.0, f"rgba({red}, {green}, {blue}, 1)"]]
