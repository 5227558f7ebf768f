"""The Ask tab: a picture, a question, the dense and the DecoMoE answer, and what was cut."""

import random
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import gradio as gr
from PIL import Image

from ..answer import Answer, Loaded, Token, apart, encode, out_of_memory_is_told, stream
from ..benchmarks.drawn import FRESH_SEEDS
from ..latency import Breakdown, profile
from ..methods import METHODS, DecoMoE, Dense, Method, from_toggles
from ..mini.draw import draw
from ..mini.examples import Example, examples
from ..trace import Trace
from . import panes
from .chart import chart
from .common import sentence
from .guard import MAX_TOKENS, read_number, read_picture, read_question
from .hosting import LOADING, Host, on_gpu
from .plots import (
    cost_figure,
    gate_figure,
    latency_figure,
    latest_experts,
    latest_prefix,
    numbers,
    prefix_figure,
    routing_figure,
)
from .predict import predict

MINI_NOTE = """The **mini model** behind this page is very small. It knows 224 pictograms, coloured shapes, words and \
numbers, simple charts and tables, and ten kinds of small photos, and it makes mistakes with all of them; about \
anything else, most photos too, its answers mean nothing."""
PROFILED = 5  # tokens of a profiled answer
TRY = 5  # questions offered about a fresh picture
SAME: dict[str, Any] = {"latest": []}
ORDERS = {"calibrated": "rcep", "native": "native", "random": "random"}
OUTSIDE = {"re-pick inside the prefix": "reroute", "drop": "drop"}
LAST: dict[str, Any] = {"trigger_mode": "always_last"}  # of a moving slider only where it stops counts
NAMES = {name: name for name in METHODS} | {"dense": "Dense"}


def tab(host: Host) -> None:
    """The tab's contents; call it inside its `gr.Tab`."""
    recorded = examples() if host.is_mini else []
    truths, traces = gr.State({}), gr.State(None)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picture, question = _picture()
            with gr.Row():
                go = gr.Button("Ask", variant="primary", min_width=80)
                stop = gr.Button("Stop", min_width=80)
            line = gr.HTML("", elem_id="line")
            fresh = gr.Button("Draw a fresh picture", visible=host.is_mini)
            tryouts = gr.Radio([], label="Questions to try", visible=False)
            if recorded:
                gr.Markdown("## Examples\nRecorded answers, shown at once.", elem_classes="quiet")
            buttons = [
                gr.Button(example.question, icon=example.image, size="sm", elem_classes="example")
                for example in recorded
            ]
            if host.is_mini:
                gr.Markdown(MINI_NOTE, elem_classes="quiet")
        with gr.Column(scale=3, min_width=300):
            answers = panes.panes()
            knobs, baseline, length = _knobs(host)
            with gr.Row():
                with gr.Column(min_width=300):
                    gate = chart("Exit: how sure the gate is, layer by layer")
                with gr.Column(min_width=300):
                    prefix = chart("Experts kept per layer")
            routing = chart("Routing: which experts the tokens go to")
            table = gr.HTML(numbers(None, None), elem_id="numbers")
            cost = chart("Costs against the baseline")
            profiling = gr.Button("Where did the time go?")
            latency = chart("Time by part and layer, from a profiled run of its own")

    shown = [answers, table, gate, prefix, routing, cost, traces]
    hidden: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    # preprocess=False: the picture's own file; gr.Image would not turn it upright
    slow: dict[str, Any] = {"preprocess": False, "concurrency_limit": 1, "concurrency_id": "model", **hidden}
    slow |= {"trigger_mode": "once"}
    quick: dict[str, Any] = {"queue": False, **hidden}
    asking = [picture, question, truths, baseline, length, *knobs]
    asked = gr.on(
        [question.submit, go.click],
        on_gpu(2, 96)(partial(_run, host)),
        asking,
        shown,
        **slow | {"show_progress": "minimal", "show_progress_on": line},
    )
    slow["show_progress"] = "minimal"
    profiling.click(
        on_gpu(4, PROFILED)(partial(_profile, host)), [picture, question, baseline, *knobs], [latency], **slow
    )
    stop.click(_stopped, [answers], [answers], cancels=[asked], **quick)
    turned: list[Any] = [knob.change for knob in knobs]
    gr.on(turned, partial(_predict, host), [traces, *knobs], [gate, prefix, routing], **quick | LAST)
    for button, example in zip(buttons, recorded, strict=True):
        button.click(partial(_recorded, host, example), None, [picture, question, truths, tryouts, *shown], **quick)
    fresh.click(_fresh, None, [picture, question, truths, tryouts], **quick)
    tryouts.input(lambda chosen: chosen, [tryouts], [question], **quick)
    picture.input(lambda: ({}, gr.Radio([], visible=False)), None, [truths, tryouts], **quick)


def _picture() -> tuple[gr.Image, gr.Textbox]:
    picture = gr.Image(
        type="filepath",
        format="png",
        label="Picture",
        sources=["upload", "clipboard", "webcam"],
        height=260,
        elem_id="picture",
    )
    return picture, gr.Textbox(label="Question", placeholder="Ask about the picture and press Enter", max_lines=1)


def _knobs(host: Host) -> tuple[list[Any], gr.Dropdown, gr.Number]:
    """The knobs that `_method` takes, the baseline and the answer's length."""
    calibration, gated = host.calibration, host.gated
    p_value, theta_value = (calibration.p, calibration.theta) if calibration else (0.7, 0.5)
    orders = list(ORDERS) if calibration else list(ORDERS)[1:]
    with gr.Row():
        savb = gr.Checkbox(gated, label="SAVB", info="the gate picks the exit layer", interactive=gated)
        rcep = gr.Checkbox(calibration is not None, label="RCEP", info="keep a prefix of the experts")
    with gr.Row():
        p = gr.Slider(0.05, 1, p_value, step=0.05, label="p", info="share of routed mass to cover")
        theta = gr.Slider(
            0.01, 1, theta_value, step=0.01, label="θ", info="how sure the gate must be", interactive=gated
        )
    with gr.Accordion("More", open=False):
        with gr.Row():
            exit_after = gr.Number(
                0, precision=0, minimum=0, label="Forced exit", info="after this layer; 0: by the switches"
            )
            keep = gr.Number(0, minimum=0, maximum=1, step=0.05, label="Keep ratio", info="share of experts; 0: by p")
        with gr.Row():
            order = gr.Radio(orders, value=orders[0], label="Order of the experts")
            outside = gr.Radio(list(OUTSIDE), value=next(iter(OUTSIDE)), label="Routes outside the prefix")
        with gr.Row():
            methods = [(title, name) for name, title in NAMES.items() if name != DecoMoE.name]
            baseline = gr.Dropdown(methods, value=Dense.name, label="Baseline", info="on the left")
            length = gr.Number(96, precision=0, minimum=1, maximum=MAX_TOKENS, label="Length", info="tokens at most")
    return [savb, rcep, p, theta, exit_after, keep, order, outside], baseline, length


def _method(
    host: Host,
    savb: bool,
    rcep: bool,
    p: float,
    theta: float,
    exit_after: float | None,
    keep_ratio: float | None,
    order: str,
    outside: str,
) -> DecoMoE:
    """What the knobs mean; those of a half that is off mean nothing."""
    options: dict[str, Any] = {}
    if rcep:
        share = {"keep_ratio": keep_ratio} if keep_ratio else {"p": p}
        options |= {**share, "order": ORDERS[order], "outside": OUTSIDE[outside]}
    if savb and not exit_after:
        options["theta"] = theta
    return from_toggles(host.layers, savb=savb, rcep=rcep, exit_after=int(exit_after or 0) or None, **options)


_running: dict[str, threading.Event] = {}  # what stops a run of this process, by the name that only its own page knows


def _run(
    host: Host,
    image: Any,
    question: str,
    truths: dict[str, str],
    baseline: str,
    length: float | None,
    *knobs: Any,
) -> Iterator[tuple[Any, ...]]:
    """The baseline, then DecoMoE, each streaming; one after the other, because together neither time would be true."""
    run, stop = secrets.token_hex(8), threading.Event()
    _running[run] = stop
    try:
        picture, asked = read_picture(image), read_question(question)
        ours = _method(host, *knobs)
        first = METHODS[baseline]()
        view = _View(host, (NAMES[baseline], "DecoMoE"), run)
        for _ in host.waiting():
            yield view.loading()
        yield view.token(None)  # so that the page knows what to stop
        for method in (first, ours):
            events: Any = stream(
                host.loaded,
                picture,
                asked,
                method,
                max_new_tokens=int(read_number("Length", length, 1, MAX_TOKENS)),
                read_gate=first == Dense() and method is first,
                stop=stop,
            )
            with closing(events):
                for event in events:
                    if stop.is_set():
                        return
                    yield view.answer(event, ours) if isinstance(event, Answer) else view.token(event)
        yield view.done(truths.get(question.strip()), question)
    except Exception as error:
        if run in _running:
            raise gr.Error(sentence(error), duration=None, print_exception=False) from error
    finally:
        _running.pop(run, None)


class _View:
    """What the outputs show while one question runs.

    A chart that stays as it is gets SAME and not `gr.skip()`, for which Gradio builds a component anew each time.
    """

    def __init__(self, host: Host, titles: tuple[str, str], run: str) -> None:
        self.host, self.titles, self.run = host, titles, run
        self.traces: list[Trace] = []
        self.start: Trace | None = None  # of DecoMoE, as far as it has come
        self.status, self.text = f"{titles[0]} is answering.", ""

    def _out(self, gate: Any = SAME, prefix: Any = SAME, routing: Any = SAME, note: str = "") -> tuple[Any, ...]:
        dense = self.traces[0] if self.traces else None
        answers = panes.running(self.titles, dense, self.text, self.status, self.run, note)
        return answers, numbers(dense, None, self.titles[0]), gate, prefix, routing, SAME, None

    def loading(self) -> tuple[Any, ...]:
        """The model is not there yet."""
        return self._out(note=LOADING)

    def token(self, token: Token | None) -> tuple[Any, ...]:
        """Tokens have come, of which this is the last, or none for a while."""
        if token is None:
            return self._out()
        if self.traces and self.start is None:
            self.text, self.start = token.text, token.start()
            self.status = f"DecoMoE is answering. {panes.exit_sentence(self.start)}"
            return self._out(
                gate=gate_figure(self.start),
                prefix=prefix_figure(self.start),
                routing=routing_figure(self.start, self.host.orders),
            )
        self.text = token.text
        if self.start is None:
            return self._out()
        kept, ran = token.prefix(), token.experts()
        return self._out(prefix={"latest": latest_prefix(self.start, kept)}, routing={"latest": latest_experts(ran)})

    def answer(self, answer: Answer, ours: DecoMoE) -> tuple[Any, ...]:
        """One method is done; from a dense run follows what DecoMoE will do."""
        self.traces.append(answer.trace)
        self.text, self.status = "", "DecoMoE is answering."
        if len(self.traces) > 1:
            self.text = answer.text
            return self._out()
        if not answer.trace.gate:
            return self._out()
        foreseen = predict(self.host.loaded, answer.trace, ours)
        return self._out(
            gate_figure(foreseen, predicted=True),
            prefix_figure(foreseen, predicted=True),
            routing_figure(foreseen, self.host.orders, predicted=True),
        )

    def done(self, truth: str | None, question: str) -> tuple[Any, ...]:
        """Both are done."""
        traces = (self.traces[0], self.traces[1])
        return _everything(traces, self.host.orders, self.titles, truth, "", self.run)


def _everything(
    traces: tuple[Trace, Trace],
    orders: list[list[int]],
    titles: tuple[str, str],
    truth: str | None,
    label: str,
    run: str | None,
) -> tuple[Any, ...]:
    """All outputs for two finished traces."""
    dense, ours = traces
    return (
        panes.done(traces, titles, truth, label, run),
        numbers(dense, ours, titles[0]),
        gate_figure(ours),
        prefix_figure(ours),
        routing_figure(ours, orders),
        cost_figure(dense, ours, titles[0]),
        traces,
    )


def _stopped(shown: panes.Shown) -> panes.Shown:
    """The run ends with the layer at hand, on ZeroGPU with its next output; what has come so far stays."""
    if running := _running.pop(str(shown.get("run")), None):
        running.set()
    return {**shown, "state": "stopped", "status": "Stopped."} if shown.get("state") == "running" else shown


def _predict(host: Host, traces: tuple[Trace, Trace] | None, *knobs: Any) -> tuple[Any, ...]:
    """What the knobs would do to the last question, from its dense run."""
    if not host.ready or not traces or not traces[0].gate:
        return gr.skip(), gr.skip(), gr.skip()
    try:
        foreseen = predict(host.loaded, traces[0], _method(host, *knobs))
    except ValueError as error:
        raise gr.Error(sentence(error), duration=None, print_exception=False) from error
    figures = gate_figure(foreseen, True), prefix_figure(foreseen, True)
    return *figures, routing_figure(foreseen, host.orders, True)


def _profile(host: Host, image: Any, question: str, baseline: str, *knobs: Any) -> Any:
    """Where the time of this question goes, in a run of its own."""
    try:
        picture, asked = read_picture(image), read_question(question)
        methods = {NAMES[baseline]: METHODS[baseline](), "DecoMoE": _method(host, *knobs)}
        return latency_figure(apart(partial(_profiles, host.loaded, picture, asked, methods)))
    except Exception as error:
        raise gr.Error(sentence(error), duration=None, print_exception=False) from error


def _profiles(loaded: Loaded, picture: Image.Image, question: str, methods: dict[str, Method]) -> dict[str, Breakdown]:
    with out_of_memory_is_told(), loaded.lock:
        inputs = encode(loaded, [(picture, question)])
        return {
            name: profile(loaded.model, method, inputs, loaded.calibration, PROFILED)
            for name, method in methods.items()
        }


def _recorded(host: Host, example: Example) -> tuple[Any, ...]:
    """An example with what was recorded of it; the model is not asked."""
    label = f"Recorded on {example.date}, {example.machine}. Press Ask to run it here."
    everything = _everything(example.traces, host.orders, ("Dense", "DecoMoE"), example.answer, label, None)
    truths = {example.question: example.answer}
    return Image.open(example.image), example.question, truths, gr.Radio([], visible=False), *everything


def _fresh() -> tuple[Any, ...]:
    """A picture that neither training nor calibration nor evaluation has seen, and questions with true answers."""
    drawn = draw(random.choice(FRESH_SEEDS))
    truths = {question.text: question.answer for question in drawn.questions if "\n" not in question.text}
    choices = random.sample(list(truths), min(TRY, len(truths)))
    return drawn.image, choices[0], truths, gr.Radio(choices, value=choices[0], visible=True)
