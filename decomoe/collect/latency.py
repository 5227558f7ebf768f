"""What a question costs in time: TTFT and TPOT by method, and by part and layer for dense and DecoMoE."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..answer import Loaded, ask, encode
from ..benchmarks import Case
from ..evaluate.run import Batch
from ..latency import PARTS, Phase, profile
from ..methods import Method

PROFILED = ("dense", "decomoe")
STEPS = 8  # decoded tokens at most; the breakdown of decode is their mean


def time_all(loaded: Loaded, methods: Mapping[str, Method], part: Batch) -> list[dict[str, Any]]:
    """What a line keeps of each question of a batch; one after the other, because together no time would be true.

    "ttft_s" and "tpot_s" have seconds to the first token and for each further one by method, in plain runs; a TPOT is
    null where the answer has one token. "parts" has, for `PROFILED`, milliseconds of one prefill and of a decode step
    by part and layer, from passes that the stopwatch slows down.
    """
    found = []
    for case in part.cases:
        picture = case.picture()
        traces = {
            spec: ask(loaded, picture, case.question, method, max_new_tokens=STEPS).trace
            for spec, method in methods.items()
        }
        found.append(
            {
                "ttft_s": {spec: trace.ttft_s for spec, trace in traces.items()},
                "tpot_s": {spec: trace.tpot_s for spec, trace in traces.items()},
                "parts": _profiled(loaded, case, {spec: methods[spec] for spec in PROFILED if spec in methods}),
            }
        )
    return found


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
