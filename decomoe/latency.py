"""Where the time of one question goes, part by part and layer by layer.

A run of its own, in which hooks read the clock around every part and wait for the device: that slows it, so shares are
to be believed, and TTFT and TPOT come from plain runs.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.overrides import TorchFunctionMode

from .ask import Loaded, encode, out_of_memory_is_told
from .families import Parts, parts_of
from .methods import Method
from .runtime import attach

PARTS = ("vision encoder", "attention", "router", "dispatch", "expert MLP", "gate", "other")
# What computes inside the experts; everything else there sorts, gathers and scatters tokens: "dispatch".
COMPUTES = frozenset("linear matmul mm bmm addmm baddbmm einsum _grouped_mm grouped_mm silu mul".split())


@dataclass(frozen=True)
class Span:
    """One stretch of work, in seconds since the run began; `own_s` is what no span within it accounts for.

    `layer` is None outside the decoder layers; `step` 0 is the prefill with the vision encoder, then each decode step.
    """

    name: str
    layer: int | None
    step: int
    start_s: float
    seconds: float
    own_s: dict[str, float]  # by part


@dataclass
class Profile:
    """Where the time of one question went, as nested spans in the order in which they ended."""

    layers: int
    spans: list[Span] = field(default_factory=list)

    def seconds(self, step: int, layer: int | None = None) -> dict[str, float]:
        """Seconds of each part in one forward, or in one layer of it."""
        total = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            if span.step == step and layer in (None, span.layer):
                for part, own in span.own_s.items():
                    total[part] += own
        return total

    @property
    def steps(self) -> int:
        """How many forwards: the prefill and the decode steps."""
        return 1 + max((span.step for span in self.spans), default=0)

    def decode(self) -> dict[str, float]:
        """Seconds of each part, the mean of the decode steps; zero if there were none."""
        steps = [self.seconds(step) for step in range(1, self.steps)]
        return {part: sum(step[part] for step in steps) / max(1, len(steps)) for part in PARTS}

    def chrome_trace(self, name: str) -> list[dict[str, Any]]:
        """Events in the format that chrome://tracing and Perfetto open; times in microseconds."""
        return [
            {
                "name": span.name if span.layer is None else f"{span.name} {span.layer}",
                "cat": "decode" if span.step else "prefill",
                "ph": "X",
                "ts": round(span.start_s * 1e6, 1),
                "dur": round(span.seconds * 1e6, 1),
                "pid": name,
                "tid": name,
            }
            for span in self.spans
        ]


def measure(loaded: Loaded, image: Image.Image, question: str, method: Method, steps: int = 4) -> Profile:
    """Time the parts of the prefill and of up to `steps` decode steps of one question.

    Raises:
        ValueError: picture, question or method don't fit.
    """
    inputs, parts = encode(loaded, [(image, question)]), parts_of(loaded.model)
    gate = loaded.calibration.gate if loaded.calibration else None
    with (
        loaded.lock,
        attach(loaded.model, method, loaded.calibration) as session,
        torch.inference_mode(),
        out_of_memory_is_told(),
        _Clock(parts, gate) as clock,
    ):
        session.generate(inputs, max_new_tokens=steps + 1, do_sample=False)
    return clock.profile


class _Clock(ExitStack):
    """Hooks that time every part of a model, for as long as one is inside it."""

    def __init__(self, parts: Parts, gate: nn.Module | None) -> None:
        super().__init__()
        self.cuda = parts.model.device.type == "cuda"
        self.profile = Profile(len(parts.layers))
        self.step = 0
        self.open: list[list[float]] = []  # of each span we are in: when it began, seconds of the spans within it
        self.began = self.now()
        self._mark(parts.vision, "vision encoder")
        self._mark(parts.text_model, "forward", part="other")
        self._mark(parts.model.get_output_embeddings(), "head", part="other")
        for index, layer in enumerate(parts.layers):
            self._mark(layer, "layer", index, part="other")
            self._mark(layer.get_submodule(parts.family.attention), "attention", index)
            self._mark(parts.routers[index], "router", index)
            self._mark(parts.experts[index], "experts", index, _Computing(self.now))
        for layer, head in gate.heads.items() if gate else ():  # type: ignore[union-attr, operator]
            self._mark(head, "gate", int(layer))
        self.callback(parts.model.register_forward_hook(self._next_step).remove)

    def now(self) -> float:
        """The time when the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _next_step(self, *_: Any) -> None:
        self.step += 1

    def _mark(
        self,
        module: nn.Module | None,
        name: str,
        layer: int | None = None,
        computing: "_Computing | None" = None,
        part: str | None = None,
    ) -> None:
        def enter(*_: Any) -> None:
            self.open.append([self.now(), 0.0])
            if computing is not None:
                computing.begin()

        def leave(*_: Any) -> None:
            computed = computing.end() if computing is not None else 0.0
            began, within = self.open.pop()
            seconds = self.now() - began
            own = {part or name: seconds - within}
            if computing is not None:
                own = {"expert MLP": computed, "dispatch": seconds - within - computed}
            if self.open:
                self.open[-1][1] += seconds
            self.profile.spans.append(Span(name, layer, self.step, began - self.began, seconds, own))

        if module is not None:  # around what `attach` has hooked there: deciding is part of the work
            self.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            self.callback(module.register_forward_hook(leave, always_call=True).remove)


class _Computing(TorchFunctionMode):
    """Adds up the seconds of those functions that compute."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self.now, self.seconds = now, 0.0

    def begin(self) -> None:
        self.seconds = 0.0
        self.__enter__()

    def end(self) -> float:
        self.__exit__(None, None, None)
        return self.seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in COMPUTES:
            return func(*args, **(kwargs or {}))
        began = self.now()
        out = func(*args, **(kwargs or {}))
        self.seconds += self.now() - began
        return out
