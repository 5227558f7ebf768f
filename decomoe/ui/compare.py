"""The Compare tab: one picture and one question through many methods, in one table and one trade-off plot."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import gradio as gr
from PIL import Image

from ..answer import Answer, Loaded, apart, ask, stream
from ..colors import DENSE, dot
from ..evaluate import parse_methods
from ..families import parts_of
from ..methods import METHODS, Method
from ..trace import Trace
from .chart import chart
from .common import sentence
from .guard import MAX_TOKENS, read_number, read_picture, read_question
from .hosting import LOADING, Host, on_gpu
from .plots import Figure

ALL = " ".join(METHODS)  # dense first: the others are measured against it
MAX_METHODS = 12
TOKENS = 48
NOTES = """FLOPs are of the decoder, against dense at the same answer length. **executed**: every expert of a prefix \
for every token, the paper's convention. **sparse**: only the routes that a grouped kernel computes. Visual tokens, \
experts and routes are means over layers; for visual tokens over the prefill. **TTFT** is the time to the first \
token, **TPOT** the mean time of every further one, on this machine; every method ran once unmeasured before. **as \
dense** is the share of words that both answers have in common, in order."""


@dataclass
class Row:
    """One method's answer and what it cost; without an answer, `problem` says why.

    Attributes:
        as_dense: share of words that this answer and the dense model's have in common, in order.
        executed, sparse: decoder FLOPs against dense at the same answer length, under both conventions.
        exit_after: the layer after which all visual tokens had left, None if some stayed.
        visual_tokens: visual tokens a layer, mean over layers in prefill; `of_visual_tokens` came in.
        experts: experts kept, mean over layers and steps; `of_experts` there are.
        routes: experts that a token runs through, mean over layers and steps.
    """

    method: str
    problem: str | None = None
    answer: str | None = None
    as_dense: float | None = None
    executed: float | None = None
    sparse: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    exit_after: int | None = None
    visual_tokens: float | None = None
    of_visual_tokens: int | None = None
    experts: float | None = None
    of_experts: int | None = None
    routes: float | None = None

    @classmethod
    def of(cls, method: str, trace: Trace, dense: str | None) -> "Row":
        """The row of one trace; `dense` is the dense model's answer, if it is known."""
        layers = trace.expert_layers
        steps = len(trace.routes.decode)
        routes = sum(step[layer] for step in (trace.routes.prefill, *trace.routes.decode) for layer in layers)
        return cls(
            method,
            answer=trace.answer,
            as_dense=None if dense is None else agreement(dense, trace.answer),
            executed=trace.flops.executed / trace.flops.executed_dense,
            sparse=trace.flops.sparse / trace.flops.sparse_dense,
            ttft_ms=None if trace.ttft_s is None else trace.ttft_s * 1000,
            tpot_ms=None if trace.tpot_s is None else trace.tpot_s * 1000,
            exit_after=trace.exit_after,
            visual_tokens=sum(trace.live) / trace.layers - trace.tokens.text,
            of_visual_tokens=trace.tokens.visual,
            experts=trace.mean_prefix,
            of_experts=trace.experts,
            routes=routes / (sum(trace.live[layer] for layer in layers) + steps * len(layers)),
        )

    def to_json(self) -> dict[str, Any]:
        """What is known, as plain data."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def agreement(dense: str, answer: str) -> float:
    """The share of words that two answers have in common, in order; 1 if they are the same."""
    return difflib.SequenceMatcher(None, dense.split(), answer.split(), autojunk=False).ratio()


def check_methods(methods: Any, layers: int, most: int = MAX_METHODS) -> dict[str, Method]:
    """The methods that a request names, by their specs, for a model of so many layers.

    Raises:
        ValueError: there is no such method, or there are none or too many.
    """
    texts = methods.split() if isinstance(methods, str) else None
    if texts is None or any(len(text) > 200 for text in texts):
        raise ValueError("Methods are names, with parameters if you like, such as: decomoe fastv:prune=0.75")
    found = parse_methods(texts, layers, sets=most > 1)
    if not 0 < len(found) <= most:
        raise ValueError(f"Name {'one method' if most == 1 else f'1 to {most} methods'} at a time, not {len(found)}.")
    return found


def compare(
    loaded: Loaded, picture: Image.Image, question: str, methods: dict[str, Method], max_new_tokens: int
) -> Iterator[tuple[list[Row], str]]:
    """Run the methods one after the other; all the while, the rows that are ready and how the next one goes.

    Each runs once unmeasured first. One that does not fit the model, or was not calibrated, gets a row that says so.
    """
    rows: list[Row] = []
    dense = None
    for number, (spec, method) in enumerate(methods.items(), 1):
        status = f"{number} of {len(methods)}: {spec}"
        yield rows, status
        try:
            method.bind(parts_of(loaded.model), loaded.calibration)
        except ValueError as error:
            rows = [*rows, Row(spec, str(error))]
            continue
        apart(partial(ask, loaded, picture, question, method, max_new_tokens=1))
        said = status
        for event in stream(loaded, picture, question, method, max_new_tokens=max_new_tokens):
            if isinstance(event, Answer):
                dense = event.text if method.name == "dense" else dense
                rows = [*rows, Row.of(spec, event.trace, dense)]
                continue
            if event is not None:
                said = f"{status}: {event.text}"
            yield rows, said
    yield rows, ""


def plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text.split()))


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    names = ["method", "answer", "as dense", "FLOPs executed", "FLOPs sparse", "TTFT", "TPOT", "exit after layer"]
    names += ["visual tokens", "experts", "routes a token"]
    lines = ["| " + " | ".join(names) + " |", "|---|---|" + "---:|" * (len(names) - 2)]
    for row in rows:
        if row.problem:
            cells = [plain(row.method), plain(row.problem), *["–"] * (len(names) - 2)]
        else:
            cells = [
                plain(row.method),
                plain(row.answer or ""),
                _show(row.as_dense),
                _show(row.executed),
                _show(row.sparse),
                _show(row.ttft_ms, "{:.0f} ms"),
                _show(row.tpot_ms, "{:.0f} ms"),
                _show(row.exit_after, "{}"),
                _show(row.visual_tokens, f"{{:.0f}} of {row.of_visual_tokens}"),
                _show(row.experts, f"{{:.1f}} of {row.of_experts}"),
                _show(row.routes),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _show(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def tradeoff(rows: Sequence[Row]) -> Figure:
    """FLOPs against time to first token, both as ratios to dense; filled where the answer is the dense model's."""
    dense = next((row for row in rows if row.as_dense is not None), None)
    shown = [row for row in rows if row.as_dense is not None and row.ttft_ms]
    data = []
    for same, name in ((True, "same answer"), (False, "other answer")):
        some = [row for row in shown if (row.as_dense == 1) == same]
        dots = [dot(row.method, filled=same) for row in some]
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": name,
                "x": [row.executed for row in some],
                "y": [row.ttft_ms / dense.ttft_ms for row in some],  # type: ignore[operator, union-attr]
                "text": [row.method for row in some],
                "textposition": "top center",
                "cliponaxis": False,
                "marker": {key: [each[key] for each in dots] for key in ("color", "symbol", "size")},
                "hovertemplate": "%{text}: %{x:.2f} of dense's FLOPs, %{y:.2f} of its TTFT<extra></extra>",
            }
        )
    line = {"type": "line", "line": {"dash": "dot", "color": DENSE}}
    layout = {
        "margin": {"l": 50, "r": 40, "t": 50, "b": 40},
        "xaxis": {"title": {"text": "FLOPs, executed, against dense"}},
        "yaxis": {"title": {"text": "TTFT against dense"}},
        "legend": {"orientation": "h", "y": 1.15},
        "shapes": [
            {**line, "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1},
            {**line, "y0": 1, "y1": 1, "xref": "paper", "x0": 0, "x1": 1},
        ],
        "uirevision": "keep",
    }
    agree = sum(row.as_dense == 1 for row in shown)
    summary = (
        f"{agree} of {len(shown)} methods answer as dense does (filled); left and down is cheaper." if shown else ""
    )
    return {"name": "trade-off", "height": 320, "data": data, "layout": layout, "summary": summary}


def tab(host: Host) -> None:
    """Lay the tab out, inside a `gr.Tab`."""

    @on_gpu(2 * len(METHODS), TOKENS)
    def run(image: Any, question: Any, methods: Any, tokens: Any) -> Iterator[tuple[str, Figure, str]]:
        try:
            asked = read_picture(image), read_question(question), check_methods(methods, host.layers)
            limit = int(read_number("The answer's length", tokens, 1, MAX_TOKENS))
            done: list[Row] = []
            shown = table([]), tradeoff([])
            for _ in host.waiting():
                yield *shown, LOADING
            for rows, status in compare(host.loaded, *asked, limit):
                if len(rows) > len(done):
                    done, shown = rows, (table(rows), tradeoff(rows))
                yield *shown, plain(status)
        except Exception as error:
            raise gr.Error(sentence(error), duration=None, print_exception=False) from error

    gr.Markdown("One question, every method, one after the other: what each answers and what it costs.")
    with gr.Row():
        picture = gr.Image(type="filepath", label="Picture", sources=["upload", "clipboard"], height=240)
        with gr.Column():
            question = gr.Textbox(label="Question", placeholder="Ask about the picture and press Enter", max_lines=1)
            with gr.Row():
                go = gr.Button("Compare", variant="primary")
                stop = gr.Button("Stop")
            with gr.Accordion("Methods and their parameters", open=False):
                methods = gr.Textbox(
                    ALL,
                    label="Methods",
                    info="Their authors' parameters, unless you say so, as in fastv:prune=0.75 or vtw:exit_after=11.",
                    max_lines=3,
                )
                tokens = gr.Slider(1, MAX_TOKENS, TOKENS, step=1, label="Longest answer, in tokens")
    status = gr.Markdown(elem_id="compare-status")
    rows = gr.Markdown(table([]), elem_id="compare-table")
    plot = chart("Trade-off: FLOPs against time to first token")
    gr.Markdown(NOTES)
    asked = gr.on(
        [question.submit, go.click],
        run,
        [picture, question, methods, tokens],
        [rows, plot, status],
        preprocess=False,
        show_progress="minimal",
        concurrency_limit=1,
        concurrency_id="model",
        trigger_mode="once",
        api_visibility="private",
    )
    stop.click(None, cancels=[asked], api_visibility="private")
