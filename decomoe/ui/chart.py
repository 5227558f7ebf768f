"""A live chart: plotly.js drawn in place.

`gr.Plot` sends the whole figure as a string and rebuilds the chart at every update; this keeps the chart's node and
sends what changed. Its template never mentions the value, because Gradio would run it as a JavaScript template.
"""

from pathlib import Path

import gradio as gr
import plotly

PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
HEAD = f'<script src="/gradio_api/file={PLOTLY_JS}"></script>'
DRAW = """
const box = element.querySelector('.chart-box'), note = element.querySelector('.chart-note');
const draw = () => {
  const figure = props.value;
  if (!window.Plotly) { setTimeout(draw, 100); return; }
  if (!figure || !figure.data) { note.textContent = ''; Plotly.react(box, [], {}); return; }
  note.textContent = figure.summary;
  box.setAttribute('aria-label', figure.summary);
  const color = getComputedStyle(element).color;
  const layout = {...figure.layout, autosize: true, font: {color, size: 12},
                  paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)'};
  Plotly.react(box, figure.data, layout, {responsive: true, displayModeBar: false});
};
watch('value', draw);
draw();
"""
TEMPLATE = '<div class="chart-box" role="img" style="height: 260px; width: 100%"></div><p class="chart-note"></p>'


def chart(label: str) -> gr.HTML:
    """A chart of {"data": plotly traces, "layout": plotly layout, "summary": a sentence for those who can't see it}."""
    return gr.HTML(label=label, show_label=True, html_template=TEMPLATE, js_on_load=DRAW, container=True)


def allow_plotly() -> None:
    """Let the page load plotly.js from the installed package; nothing is fetched from outside."""
    gr.set_static_paths([PLOTLY_JS])
