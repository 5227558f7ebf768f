"""The Results tab: the committed figures and tables, each with the command that made it."""

import inspect
import json
from pathlib import Path

import gradio as gr

from analysis.data import Data
from analysis.figures import FIGURES

from .chart import chart
from .drawn import shown
from .hosting import Host

FOLDER = Path(__file__).parents[2] / "analysis" / "results"
INTRO = """What the **mini model** does, measured, beside what the paper says of its 30-billion-parameter models. Each \
figure and table comes with the command that makes it anew; what we find is written down in `analysis/README.md`."""


def tab(host: Host) -> None:
    """The tab's contents; call it inside its `gr.Tab`."""
    gr.Markdown(INTRO)
    for path in sorted(FOLDER.glob("table*.md")):
        with gr.Accordion(path.read_text().splitlines()[0].removeprefix("# "), open=False):
            gr.Markdown("\n".join(path.read_text().splitlines()[1:]))
    with gr.Row():
        for name in FIGURES:
            if (path := FOLDER / f"{name}.json").is_file():
                with gr.Column(min_width=420):
                    _figure(name, Data(**json.loads(path.read_text())))


def _figure(name: str, data: Data) -> None:
    """A figure, where it comes from, and what it measures."""
    figure, meta = FIGURES[name](data), data.meta
    chart(f"{_number(name)}: {figure.layout.title.text}").value = shown(figure, name)
    gr.Markdown(f"{meta['model']}: {meta['data']}; {meta['date']}", elem_classes="quiet")
    with gr.Accordion("What it measures, and the command", open=False):
        gr.Markdown(f"{inspect.getdoc(FIGURES[name])}\n\n`{meta['command']}`")


def _number(name: str) -> str:
    """fig3a -> Figure 3a; the others are ours."""
    return f"Figure {name.removeprefix('fig')}" if name.startswith("fig") else "Beside them"
