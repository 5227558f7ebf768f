"""The figures of `analysis` on the page: the same functions, drawn like the live charts."""

import json
from typing import Any

import plotly.graph_objects as go


def shown(figure: go.Figure, name: str) -> dict[str, Any]:
    """What `chart` takes, from a figure. Title and origin stay out: the chart has a label, and a phone no room.

    Args:
        name: of the files that its data is downloaded as.
    """
    whole = json.loads(figure.to_json())
    layout = whole["layout"]
    summary, height = layout.pop("meta")["summary"], layout.pop("height")
    layout.pop("title")
    layout["annotations"].pop()
    layout["legend"]["y"] = 1  # where the title was
    margin, bottom = layout["margin"], 50  # pixels, without the origin
    height -= margin["b"] - bottom
    margin.update(t=margin["t"] - 20, b=bottom)
    return {"data": whole["data"], "layout": layout, "summary": summary, "height": height, "name": name}
