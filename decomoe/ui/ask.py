"""The Ask tab: a picture, a question, the dense and the DecoMoE answer, and what was cut."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from ..ask import MINI, Answer, Loaded, stream
from ..methods import Dense, from_toggles
from .chart import chart
from .common import read_picture, sentence
from .plots import gate_figure, prefix_figure, table

EXAMPLES = Path(__file__).parents[2] / "assets" / "examples"
MINI_NOTE = """The **mini model** behind this page is very small. It knows 224 pictograms, coloured shapes, words and \
numbers, simple charts and tables, and ten kinds of small photos, and it makes mistakes with all of them; about \
anything else its answers mean nothing. Try the examples."""


def tab(loaded: Loaded) -> None:
    """The tab's contents; call it inside its `gr.Tab`."""
    layers = loaded.model.config.get_text_config().num_hidden_layers
    calibrated = loaded.calibration is not None
    gated = loaded.calibration is not None and loaded.calibration.gate is not None

    def compare(image: Any, question: str, savb: bool, rcep: bool, p: float) -> Iterator[tuple[Any, ...]]:
        """Dense, then DecoMoE, each streaming; one after the other, because together neither time would be true."""
        shown: list[Any] = ["", "", None, None, table(None, None)]
        try:
            picture = read_picture(image)
            ours = from_toggles(layers, savb=savb, rcep=rcep, p=p if rcep else None)
            traces = []
            for pane, method in enumerate((Dense(), ours)):
                for event in stream(loaded, picture, question or "", method, max_new_tokens=96):
                    if isinstance(event, Answer):
                        traces.append(event.trace)
                        shown[pane], shown[4] = event.text, table(traces[0], traces[1] if pane else None)
                    elif event is not None:
                        shown[pane] = event.text
                    yield tuple(shown)
            shown[2], shown[3] = gate_figure(traces[1]), prefix_figure(traces[1])
            yield tuple(shown)
        except Exception as error:
            raise gr.Error(sentence(error), duration=None, print_exception=False) from error

    with gr.Row():
        with gr.Column(scale=2):
            picture = gr.Image(type="filepath", label="Picture", sources=["upload", "clipboard"], height=300)
            question = gr.Textbox(label="Question", placeholder="Ask about the picture and press Enter", max_lines=1)
            with gr.Row():
                go = gr.Button("Ask", variant="primary")
                stop = gr.Button("Stop")
            with gr.Row():
                savb = gr.Checkbox(gated, label="SAVB", info="the gate picks the exit layer", interactive=gated)
                rcep = gr.Checkbox(calibrated, label="RCEP", info="keep a prefix of experts", interactive=calibrated)
            p = gr.Slider(
                0.05,
                1.0,
                value=loaded.calibration.p if loaded.calibration else 0.7,
                step=0.05,
                label="p",
                info="share of the routed mass that the prefix covers",
            )
            if (EXAMPLES / "examples.json").is_file():
                rows = json.loads((EXAMPLES / "examples.json").read_text())
                gr.Examples([[str(EXAMPLES / row["image"]), row["question"]] for row in rows], [picture, question])
            if Path(loaded.model.name_or_path) == MINI:
                gr.Markdown(MINI_NOTE)
        with gr.Column(scale=3):
            with gr.Row():
                dense = gr.Textbox(label="Dense answer", lines=3, interactive=False, elem_id="dense-answer")
                ours = gr.Textbox(label="DecoMoE answer", lines=3, interactive=False, elem_id="decomoe-answer")
            gate = chart("Exit: the gate's probability per candidate layer")
            prefix = chart("Experts kept per layer")
            numbers = gr.Markdown(table(None, None), elem_id="numbers")
    asked = gr.on(
        [question.submit, go.click],
        compare,
        [picture, question, savb, rcep, p],
        [dense, ours, gate, prefix, numbers],
        preprocess=False,  # the picture's own file: gr.Image would not turn it upright
        show_progress="minimal",
        concurrency_limit=1,
        concurrency_id="model",
        trigger_mode="once",
        api_name="compare",
    )
    stop.click(None, cancels=[asked], api_visibility="private")
