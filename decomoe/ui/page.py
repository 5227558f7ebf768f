"""The page: ask about a picture, watch the dense and the DecoMoE answer, see what was cut."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from ..ask import MINI, Answer, Loaded, stream
from ..methods import Dense, from_toggles
from . import api
from . import compare as compare_tab
from .chart import HEAD, allow_plotly, chart
from .common import sentence, warm_up
from .guard import MAX_SESSIONS, MAX_UPLOAD, GuardedBlocks, app_options, read_picture, read_question
from .hosting import on_gpu
from .plots import gate_figure, prefix_figure, table

EXAMPLES = Path(__file__).parents[2] / "assets" / "examples"
INTRO = """# DecoMoE
A multimodal mixture-of-experts model wastes work in two ways. **SAVB**: after some layer the question no longer needs \
the picture, so all its tokens leave. **RCEP**: after that, most of the experts are not needed either. \
Ask something and see what leaves, layer by layer."""
MINI_NOTE = """The **mini model** behind this page is very small. It knows 224 pictograms, coloured shapes, words and \
numbers, simple charts and tables, and ten kinds of small photos, and it makes mistakes with all of them; about \
anything else its answers mean nothing. Try the examples."""
CSS = ".chart-note {font-size: 0.9rem; margin: 0.2rem 0.5rem} footer {display: none !important}"


def build(loaded: Loaded) -> gr.Blocks:  # noqa: PLR0915 (a layout)
    """The page for one loaded model; nothing is launched."""
    allow_plotly()
    warm_up(loaded)
    layers = loaded.model.config.get_text_config().num_hidden_layers
    calibrated = loaded.calibration is not None
    gated = loaded.calibration is not None and loaded.calibration.gate is not None

    @on_gpu(2, 96)
    def compare(image: Any, question: str, savb: bool, rcep: bool, p: float) -> Iterator[tuple[Any, ...]]:
        """Dense, then DecoMoE, each streaming; one after the other, because together neither time would be true."""
        shown: list[Any] = ["", "", None, None, table(None, None)]
        try:
            picture, asked = read_picture(image), read_question(question)
            ours = from_toggles(layers, savb=savb, rcep=rcep, p=p if rcep else None)
            traces = []
            for pane, method in enumerate((Dense(), ours)):
                for event in stream(loaded, picture, asked, method, max_new_tokens=96):
                    if isinstance(event, Answer):
                        traces.append(event.trace)
                        shown[pane], shown[4] = event.text, table(traces[0], traces[1] if pane else None)
                    else:
                        shown[pane] = event
                    yield tuple(shown)
            shown[2], shown[3] = gate_figure(traces[1]), prefix_figure(traces[1])
            yield tuple(shown)
        except Exception as error:
            raise gr.Error(sentence(error), duration=None, print_exception=False) from error

    with GuardedBlocks(title="DecoMoE", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        api.add(loaded)  # first, so that its names are free
        gr.Markdown(INTRO)
        with gr.Tab("Ask"), gr.Row():
            with gr.Column(scale=2):
                picture = gr.Image(type="filepath", label="Picture", sources=["upload", "clipboard"], height=300)
                question = gr.Textbox(
                    label="Question", placeholder="Ask about the picture and press Enter", max_lines=1
                )
                with gr.Row():
                    go = gr.Button("Ask", variant="primary")
                    stop = gr.Button("Stop")
                with gr.Row():
                    savb = gr.Checkbox(gated, label="SAVB", info="the gate picks the exit layer", interactive=gated)
                    rcep = gr.Checkbox(
                        calibrated, label="RCEP", info="keep a prefix of experts", interactive=calibrated
                    )
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
            api_visibility="private",
        )
        stop.click(None, cancels=[asked], api_visibility="private")
        with gr.Tab("Compare"):
            compare_tab.tab(loaded)
    return page.queue(max_size=32, api_open=False)


def serve(loaded: Loaded, port: int | None = None) -> None:
    """Build the page and serve it until interrupted."""
    build(loaded).launch(**launch_options(loaded, port))


def launch_options(loaded: Loaded, port: int | None = None) -> dict[str, Any]:
    """What the page needs at launch."""
    return {
        "server_port": port,
        "head": HEAD,
        "css": CSS,
        "theme": gr.themes.Soft(font=["system-ui", "sans-serif"]),
        "max_file_size": MAX_UPLOAD,
        "state_session_capacity": MAX_SESSIONS,
        "show_error": False,
        "app_kwargs": app_options(loaded),
        "mcp_server": True,
        "ssr_mode": False,
        "run_history": False,
        "enable_monitoring": False,
    }
