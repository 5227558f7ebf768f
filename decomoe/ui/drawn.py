"""The figures of `analysis` on the page: the same functions, drawn in place like the live charts."""

import json
from typing import Any

import gradio as gr
import plotly.graph_objects as go

from .chart import DRAW, TEMPLATE


def drawn(label: str, height: int = 400, **options: Any) -> gr.HTML:
    """A chart of what `shown` makes."""
    template = TEMPLATE.replace("height: 260px", f"height: {height}px")
    return gr.HTML(label=label, show_label=True, html_template=template, js_on_load=DRAW, container=True, **options)


def shown(figure: go.Figure) -> dict[str, Any]:
    """A figure as a chart takes it; its own title stays out, because the chart has a label."""
    whole = json.loads(figure.to_json())
    layout = whole["layout"]
    summary = layout.pop("meta")["summary"]
    layout["margin"]["t"] = 40
    for name in ("height", "title"):
        layout.pop(name, None)
    return {"data": whole["data"], "layout": layout, "summary": summary}
