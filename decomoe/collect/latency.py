"""What a question costs in time: by part and layer for dense and DecoMoE, and its first token by every method."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..ask import Loaded, ask, encode
from ..benchmarks import Case
from ..evaluate.run import Batch
from ..latency import PARTS, Phase, profile
from ..methods import Method

PROFILED = ("dense", "decomoe")
STEPS = 8  # decoded tokens; the breakdown of decode is their mean


def time_all(loaded: Loaded, methods: Mapping[str, Method], part: Batch) -> list[dict[str, Any]]:
    """What a line keeps of each question of a batch; one after the other, because together no time would be true.

    "ttft_s" has seconds to the first token by method, in plain runs. "parts" has, for `PROFILED`, milliseconds of one
    prefill and of a decode step by part and layer, from passes that the stopwatch slows down.
    """
    return [
        {
            "ttft_s": {spec: _first_token(loaded, case, method) for spec, method in methods.items()},
            "parts": _profiled(loaded, case, {spec: methods[spec] for spec in PROFILED if spec in methods}),
        }
        for case in part.cases
    ]


def _first_token(loaded: Loaded, case: Case, method: Method) -> float | None:
    return ask(loaded, case.picture(), case.question, method, max_new_tokens=1).trace.ttft_s


def _profiled(loaded: Loaded, case: Case, methods: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    inputs, found = encode(loaded, [(case.picture(), case.question)]), {}
    for spec, method in methods.items():
        with loaded.lock:
            seen = profile(loaded.model, method, inputs, loaded.calibration, STEPS)
        phases = {"prefill": seen.prefill, "decode": seen.decode}
        found[spec] = {name: _milliseconds(phase) for name, phase in phases.items() if phase is not None}
    return found


def _milliseconds(phase: Phase) -> dict[str, Sequence[float]]:
    return {part: [round(1000 * layer[part], 4) for layer in phase.layers] for part in PARTS}
