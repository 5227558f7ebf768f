"""A live chart: plotly.js drawn in place, with its data to take away.

`gr.Plot` sends the whole figure as a string and rebuilds the chart at every update; this keeps the chart's node and
sends what changed. Its template never mentions the value, because Gradio would run it as a JavaScript template.
"""

from pathlib import Path

import gradio as gr
import plotly

from ..colors import GRID

PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
HEAD = f'<script src="/gradio_api/file={PLOTLY_JS}"></script>'
TEMPLATE = """<h2 class="chart-title">{title}</h2>
<div class="chart-views" role="group"></div>
<div class="chart-box" role="img"></div>
<p class="chart-note"></p>
<div class="chart-tools"></div>"""
DRAW = """
const find = (name) => element.querySelector('.chart-' + name);
const box = find('box'), note = find('note'), views = find('views'), tools = find('tools');
let chosen = null, figures = null, latest = [];  // the last figure; marks over it
const button = (parent, text, act) => {
  const made = document.createElement('button');
  made.type = 'button';
  made.textContent = text;
  made.addEventListener('click', act);
  parent.append(made);
  return made;
};
const save = (name, type, text) => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};
const current = () => {
  const names = Object.keys(figures?.views || {});
  if (!names.length) return figures;
  return {...figures, ...figures.views[names.includes(chosen) ? chosen : names[0]]};
};
const rows = (data) => data.flatMap((trace) => {
  const name = [trace.meta, trace.name].filter(Boolean).join(', ');  // a figure of several panels has meta
  if (trace.z) return trace.z.flatMap((row, i) => row.map((z, j) => [name, trace.x ? trace.x[j] : j,
                                                                     trace.y ? trace.y[i] : i, z]));
  return (trace.x || []).map((x, i) => [name, x, trace.y[i], '']);
});
const cell = (value) => '"' + String(value ?? '').replaceAll('"', '""') + '"';
const csv = (figure) => {
  const title = (axis, other) => figure.layout?.[axis]?.title?.text || other;
  const head = ['series', title('xaxis', 'x'), title('yaxis', 'y'), 'value'];
  return [head, ...rows(figure.data)].map((row) => row.map(cell).join(',')).join('\\n') + '\\n';
};
const bare = (data) => data.map(({type, meta, name, x, y, z}) => ({type, meta, name, x, y, z}));
const file = () => figures.name || 'chart';
const plot = () => {
  const figure = current(), {xaxis, yaxis} = figure.layout;
  const style = getComputedStyle(element), grid = {gridcolor: '{grid}', zeroline: false};
  const layout = {...figure.layout, xaxis: {...grid, ...xaxis}, yaxis: {...grid, ...yaxis}, autosize: true,
                  font: {color: style.color, family: style.fontFamily, size: 12},
                  hoverlabel: {align: 'left', font: {size: 12}},
                  paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)'};
  Plotly.react(box, [...figure.data, ...latest], layout, {responsive: true, displayModeBar: false});
};
const draw = () => {
  const figure = current(), filled = Boolean(figure && figure.data);
  element.classList.toggle('chart-empty', !filled);
  note.textContent = filled ? figure.summary : 'Nothing to show yet.';
  views.replaceChildren();
  tools.replaceChildren();
  if (!filled) return;
  const names = Object.keys(figure.views || {});
  for (const name of names) {
    const pressed = name === (names.includes(chosen) ? chosen : names[0]);
    button(views, name, () => { chosen = name; draw(); views.querySelector('[aria-pressed=true]').focus(); })
      .setAttribute('aria-pressed', pressed);
  }
  button(tools, 'CSV', () => save(file() + '.csv', 'text/csv', csv(current())));
  button(tools, 'JSON', () => save(file() + '.json', 'application/json',
    JSON.stringify({summary: current().summary, data: bare(current().data)})));
  for (const [name, content] of Object.entries(figure.downloads || {}))
    button(tools, name, () => save(file() + '.trace.json', 'application/json', JSON.stringify(content)));
  for (const made of tools.children) made.setAttribute('aria-label', `Download as ${made.textContent}: ${file()}`);
  box.setAttribute('aria-label', figure.summary);
  box.style.height = (figure.height || 240) + 'px';
  plot();
};
const update = () => {
  if (!window.Plotly) { setTimeout(update, 100); return; }
  const value = props.value;
  latest = value?.latest || [];
  if (!value?.latest) { figures = value; draw(); } else if (figures?.data) plot();
};
new ResizeObserver(() => { if (box.data && box.offsetWidth) Plotly.Plots.resize(box); }).observe(box);
watch('value', update);
update();
""".replace("{grid}", GRID)
CSS = """
.chart-title {font-size: 0.9375rem; font-weight: 600; margin: 0 0 0.5rem}
.chart-note {font-size: 0.875rem; margin: 0.25rem 0 0; color: var(--body-text-color-subdued)}
.chart-box {width: 100%}
.chart-empty .chart-box {display: none}
.chart-views, .chart-tools {display: flex; flex-wrap: wrap; gap: 0.375rem}
.chart-views:not(:empty) {margin-bottom: 0.25rem}
.chart-tools:not(:empty) {margin-top: 0.5rem}
.chart-views button, .chart-tools button, .pane-tools button {font-size: 0.8125rem; padding: 0.125rem 0.625rem;
  margin: 0; font-weight: 500; box-shadow: none;
  border: 1px solid var(--border-color-primary); border-radius: 999px; color: var(--body-text-color);
  background: var(--background-fill-primary); cursor: pointer}
.chart-views button[aria-pressed=true] {background: var(--ours); border-color: var(--ours); color: white}
"""


def chart(label: str) -> gr.HTML:
    """A chart of a figure: {"data": plotly traces, "layout": plotly layout, "summary": a sentence that says the same}.

    {"latest": traces} are marks over the figure that is there already, until the next one comes.
    A figure may also have "name" (of downloaded files), "height" in pixels, "views" ({button: figure} to choose
    from; what they lack is taken from the figure) and "downloads" ({button: JSON}).
    """
    template = TEMPLATE.replace("{title}", label)
    return gr.HTML(label=label, show_label=False, html_template=template, js_on_load=DRAW, container=True, padding=True)


def allow_plotly() -> None:
    """Let the page load plotly.js from the installed package; nothing is fetched from outside."""
    gr.set_static_paths([PLOTLY_JS])
