"""What the paper's figures show of a model, reduced while it is observed: a JSON line a question and collector.

A command of its own beside `evaluate`: collectors look at the dense model and at forced exits of it, whatever methods
are evaluated. Lines lie in the same folder, of the same questions, and go on after a kill in the same way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..answer import Loaded
from ..benchmarks import Benchmark
from ..evaluate.run import Batch, Groups, Job, work_through
from ..evaluate.store import Record
from ..families import parts_of
from ..methods import Dense, Method
from ..methods.decomoe import paper_fixed_exit
from .exits import Swept, sweep, sweep_all
from .latency import time_all
from .routing import Routed, observe_routing, route_all

__all__ = ["COLLECTORS", "Routed", "Swept", "collect", "file_name", "observe_routing", "sweep"]

COLLECTORS = ("routing", "exits", "latency")


def file_name(collector: str) -> str:
    """The name of a collector's files among those of methods."""
    return f"collected:{collector}"


def collect(
    loaded: Loaded,
    benchmarks: Iterable[tuple[Benchmark, str | None]],
    collectors: Sequence[str],
    out: Path,
    methods: Mapping[str, Method],
    limit: int | None = None,
    batch: int = 8,
    max_new_tokens: int = 64,
) -> None:
    """Observe what `out` does not hold yet; arguments and errors are those of `evaluate`.

    Args:
        collectors: "routing": mass per layer and expert by modality, and text routing before and after eviction (8 kB a
            question; 100 kB with 48 layers of 128 experts). "exits": answer and perplexity at every forced exit, and
            the gate's (0.7 kB; 2 kB). "latency": TTFT and TPOT by method, and time by part and layer (4 kB; 10 kB).
        methods: to time, by the specs that name them; dense always.
        batch: questions at once. Only they are in memory; "routing" and "latency" take one after the other.
    """
    parts, methods = parts_of(loaded.model), {Dense.name: Dense(), **methods}
    for method in methods.values() if "latency" in collectors else ():
        method.bind(parts, loaded.calibration)  # refuses before any work is done
    exit_after = paper_fixed_exit(len(parts.layers))
    known: dict[str, Job] = {
        "routing": partial(_lines, partial(route_all, loaded, exit_after)),
        "exits": partial(_lines, partial(sweep_all, loaded, max_new_tokens)),
        "latency": partial(_lines, partial(time_all, loaded, methods)),
    }
    settings = {"routing": {"exit_after": exit_after}, "exits": {}, "latency": {"methods": list(methods)}}
    meta: Groups = {
        "run": {"max_new_tokens": max_new_tokens},
        "collected": {name: settings[name] for name in collectors},
    }
    jobs = {file_name(name): known[name] for name in collectors}
    work_through(loaded, benchmarks, jobs, out, meta, limit, batch)


def _lines(observe: Callable[[Batch], list[Record]], part: Batch) -> list[Record]:
    """What `observe` says of each question of a batch, with what identifies the question."""
    return [
        {
            "number": part.first + i,
            "id": case.id,
            "kind": case.kind,
            "group": case.group or case.id,
            "question": case.question,
            "truth": case.answer,
            **seen,
        }
        for i, (case, seen) in enumerate(zip(part.cases, observe(part), strict=True))
    ]
