"""Where the time of one question goes: seconds per decoder layer and part, for prefill and decode.

A profiled pass is slower than a plain one, because the device is waited for at every border. Take shares from here, and
TTFT and TPOT from `bench` or a trace.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .calibration import Calibration
from .methods import Method
from .runtime import Session, attach

# "method" is what the method itself costs: gate, cuts and expert prefixes. "dispatch" is all that an experts
# implementation does around its matrix products: sorting and gathering tokens, weighting and summing results.
PARTS = ("attention", "router", "dispatch", "expert MLP", "method", "other")
_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback", "silu")


@dataclass
class Phase:
    """Seconds of one phase.

    Attributes:
        layers: {part: seconds} of each decoder layer, over `PARTS`. "other": norms, residuals, layers without experts.
        vision: the vision encoder.
        rest: embeddings, masks, final norm, LM head, and what `generate` does between forwards.
    """

    layers: list[dict[str, float]]
    vision: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.vision + self.rest + sum(sum(parts.values()) for parts in self.layers)

    @property
    def parts(self) -> dict[str, float]:
        """All of it by part, layers summed."""
        summed = {part: sum(layer[part] for layer in self.layers) for part in PARTS}
        return {"vision encoder": self.vision, **summed, "rest": self.rest}


@dataclass(frozen=True)
class Span:
    """A stretch of work on one part, in seconds since the answer began. `forward` 0 is the prefill."""

    part: str
    layer: int | None
    forward: int
    start: float
    end: float


@dataclass
class Breakdown:
    """One answer. `decode` is the mean over its `steps` forwards after the first token; None without any."""

    prefill: Phase
    decode: Phase | None
    steps: int
    spans: list[Span] = field(default_factory=list)

    def chrome_trace(self, name: str) -> list[dict[str, Any]]:
        """Events in the format that chrome://tracing and Perfetto open; times in microseconds."""
        return [
            {
                "name": span.part if span.layer is None else f"{span.part} {span.layer}",
                "cat": "decode" if span.forward else "prefill",
                "ph": "X",
                "ts": round(span.start * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "pid": name,
                "tid": name,
            }
            for span in self.spans
        ]


@dataclass
class _Stopwatch:
    """Seconds go to whoever is on top of the stack."""

    device: torch.device
    stack: list[tuple[str, int | None]] = field(default_factory=lambda: [("rest", None)])
    spans: list[Span] = field(default_factory=list)
    forward: int = 0
    since: float = 0.0

    def split(self) -> None:
        """Charge what has passed since the last split."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.spans.append(Span(*self.stack[-1], self.forward, self.since, now))
        self.since = now

    def start(self, part: str, layer: int | None, *_: Any) -> None:
        self.split()
        self.stack.append((part, layer))

    def stop(self, *_: Any) -> None:
        self.split()
        self.stack.pop()

    def next_forward(self, *_: Any) -> None:
        self.split()
        self.forward += 1


class _Products(TorchDispatchMode):
    """Inside an experts module, charges matrix products and activations to "expert MLP"."""

    def __init__(self, watch: _Stopwatch, layer: int) -> None:
        super().__init__()
        self.watch, self.layer = watch, layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        self.watch.start("expert MLP", self.layer)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watch.stop()


@contextmanager
def _watched(session: Session, watch: _Stopwatch) -> Iterator[None]:
    """Hooks that only look; to be entered after a method is attached, so that its hooks lie between them.

    Those at layers come and go, so what they do is watched itself.
    """
    parts, enter = session.parts, session.enter
    with ExitStack() as stack:

        def timed_enter(layer: int, *args: Any) -> Any:
            watch.start("method", layer)
            try:
                return enter(layer, *args)
            finally:
                watch.stop()

        session.hook_layers(())
        session.enter = timed_enter  # type: ignore[assignment]

        def around(module: nn.Module, part: str, layer: int | None) -> None:
            hook = module.register_forward_pre_hook(partial(watch.start, part, layer))
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(watch.stop, always_call=True).remove)

        def around_router(router: nn.Module, layer: int) -> None:
            pre = router.register_forward_pre_hook(partial(watch.start, "router", layer))
            stack.callback(pre.remove)

            def decide(*_: Any) -> None:
                watch.stop()
                watch.start("method", layer)

            stack.callback(router.register_forward_hook(decide, prepend=True).remove)
            stack.callback(router.register_forward_hook(watch.stop).remove)

        def around_experts(experts: nn.Module, layer: int) -> None:
            inside = stack.enter_context(ExitStack())
            around(experts, "dispatch", layer)
            pre = experts.register_forward_pre_hook(lambda *_: inside.enter_context(_Products(watch, layer)) and None)
            stack.callback(pre.remove)
            post = experts.register_forward_hook(lambda *_: inside.close(), prepend=True, always_call=True)
            stack.callback(post.remove)

        stack.callback(parts.model.register_forward_hook(watch.next_forward).remove)
        for tower in parts.vision:
            around(tower, "vision", None)
        norm, last = parts.text_model.norm, len(parts.layers) - 1
        first = norm.register_forward_pre_hook(partial(watch.start, "method", last), prepend=True)
        stack.callback(first.remove)
        stack.callback(norm.register_forward_pre_hook(watch.stop).remove)
        for index, layer in enumerate(parts.layers):
            around(layer, "other", index)
            around(layer.get_submodule(parts.family.attention), "attention", index)
            if parts.routers[index] is not None:
                around_router(parts.routers[index], index)
                around_experts(parts.experts[index], index)
        yield


def profile(
    model: Any,
    method: Method,
    inputs: dict[str, Any],
    calibration: Calibration | None = None,
    max_new_tokens: int = 8,
) -> Breakdown:
    """Answer once to warm up and once with a stopwatch at every border.

    Args:
        inputs: what the processor made of one or several questions.
        max_new_tokens: exactly so many are decoded, whatever the answer; 1 leaves decode out.

    Raises:
        ValueError: the method does not fit the model.
    """
    options = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens, "do_sample": False}
    with attach(model, method, calibration) as session, torch.inference_mode():
        session.generate(inputs, **options)
        watch = _Stopwatch(model.device)
        with _watched(session, watch):
            watch.split()
            watch.spans, began = [], watch.since
            session.generate(inputs, **options)
    spans = [replace(span, start=span.start - began, end=span.end - began) for span in watch.spans]
    layers, steps = len(session.parts.layers), watch.forward - 1
    prefill, decode = (_phase(spans, forwards, layers) for forwards in (range(1), range(1, watch.forward)))
    return Breakdown(prefill, decode if steps else None, steps, spans)


def _phase(spans: Sequence[Span], forwards: range, layers: int) -> Phase:
    """The mean of some forwards. What comes after the last one belongs to none."""
    spent: dict[tuple[str, int | None], float] = defaultdict(float)
    for span in spans:
        if span.forward in forwards:
            spent[span.part, span.layer] += (span.end - span.start) / len(forwards)
    table = [{part: spent[part, layer] for part in PARTS} for layer in range(layers)]
    return Phase(table, spent["vision", None], spent["rest", None])
