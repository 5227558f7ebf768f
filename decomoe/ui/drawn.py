"""The figures of `analysis` on the page: the same functions, drawn like the live charts."""

import json
from typing import Any

import plotly.graph_objects as go


def shown(figure: go.Figure, name: str) -> dict[str, Any]:
    """What `chart` takes, from a figure; its title stays out, because the chart has a label.

    Args:
        name: of the files that its data is downloaded as.
    """
    whole = json.loads(figure.to_json())
    layout = whole["layout"]
    summary, height = layout.pop("meta")["summary"], layout.pop("height")
    layout.pop("title")
    layout["margin"]["t"] -= 20
    return {"data": whole["data"], "layout": layout, "summary": summary, "height": height, "name": name}
