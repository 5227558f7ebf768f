"""Every question of every benchmark with every method, on one or several devices; and other work that is shared so."""

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from ..answer import Loaded
from ..benchmarks import Benchmark, Case, Outcome, run_batch
from ..calibration import weights_digest
from ..families import parts_of
from ..methods import Dense, Method
from ..trace import Trace
from . import store

PICTURES = 16  # of a benchmark tell whether it was drawn or scaled otherwise; all would take minutes


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some questions of one benchmark for one job; `first` is the number of the first."""

    benchmark: Benchmark
    job: str
    first: int
    cases: Sequence[Case]


Job = Callable[[Batch], list[store.Record]]  # one record a question, with its "number"
Groups = dict[str, dict[str, Any]]  # of names with values, for `store.extended_meta`


def evaluate(
    loaded: Loaded,
    benchmarks: Iterable[tuple[Benchmark, str | None]],
    methods: Mapping[str, Method],
    out: Path,
    limit: int | None = None,
    batch: int = 32,
    max_new_tokens: int = 64,
    traces: bool = False,
) -> None:
    """Ask what `out` does not hold yet; `tables.rows` then reads the results.

    Started by `accelerate launch`, every process asks its share and the first one collects. Batches are cut at the same
    places in every run, so the answers depend neither on interruptions nor on the number of processes.

    Args:
        benchmarks: each with its source.
        methods: by the spec that names them. Dense is asked first, always: retention needs it.
        limit: so many questions of each benchmark, from a fixed random order.
        traces: whether to keep every question's whole trace (10 to 100 kB each).

    Raises:
        ValueError: a method does not fit the model, data is missing, or `out` holds results of something else.
    """
    methods = {Dense.name: Dense(), **methods}
    for method in methods.values():
        method.bind(parts_of(loaded.model), loaded.calibration)  # refuses before any work is done
    settings = {spec: {"name": method.name, **method.settings()} for spec, method in methods.items()}
    jobs: dict[str, Job] = {
        spec: partial(_ask, loaded, method, max_new_tokens, traces) for spec, method in methods.items()
    }
    meta: Groups = {"run": {"max_new_tokens": max_new_tokens}, "methods": settings}
    work_through(loaded, benchmarks, jobs, out, meta, limit, batch)


def work_through(
    loaded: Loaded,
    benchmarks: Iterable[tuple[Benchmark, str | None]],
    jobs: Mapping[str, Job],
    out: Path,
    meta: Groups,
    limit: int | None,
    batch: int,
) -> None:
    """Do every job with every question that `out` has no line of yet; see `evaluate`.

    Args:
        jobs: by the name of their files. meta: what `out` is to say of them, beside model and questions.
    """
    workers = PartialState()
    cases, counts = _load(benchmarks, loaded.calibration.ids if loaded.calibration else frozenset())
    identity = {**_identity(loaded), **meta["run"]}
    known = store.extended_meta(out, {**meta, "run": identity, "benchmarks": counts})
    paths = [store.file_of(out, benchmark.name, name) for benchmark in cases for name in jobs]

    def collect() -> None:
        workers.wait_for_everyone()
        for path in paths if workers.is_main_process else ():
            store.tidy(path)
        workers.wait_for_everyone()

    collect()
    if workers.is_main_process:
        store.write(out / store.META, json.dumps(known, indent=1) + "\n")
    todo = _todo(cases, jobs, out, limit, batch)
    workers.wait_for_everyone()  # nobody writes before all have read what is done
    mine = todo[workers.process_index :: workers.num_processes]
    with tqdm(total=sum(len(part.cases) for part in mine), disable=None if workers.is_main_process else True) as bar:
        for part in mine:
            bar.set_description(f"{part.benchmark.name}, {part.job}")
            records = jobs[part.job](part)
            store.append(store.file_of(out, part.benchmark.name, part.job), records, workers.process_index)
            bar.update(len(records))
    collect()


def _load(
    benchmarks: Iterable[tuple[Benchmark, str | None]], excluded: Set[str]
) -> tuple[dict[Benchmark, list[Case]], dict[str, Any]]:
    """The questions of each benchmark in the order of asking, and what the meta data says of them.

    Other questions about a picture that the calibration has seen are left out too.
    """
    cases, counts = {}, {}
    for benchmark, source in benchmarks:
        listed = benchmark.load("test", source)
        seen = {case.group for case in listed if case.id in excluded and case.group}
        asked = [case for case in listed if case.id not in excluded and case.group not in seen]
        if not asked:
            raise ValueError(f"{benchmark.name} has no question{' that the calibration has not seen' * bool(listed)}.")
        random.Random(0).shuffle(asked)  # always the same order, whose first few are a fair sample
        cases[benchmark] = asked
        counts[benchmark.name] = {
            "questions": len(asked),
            "excluded": len(listed) - len(asked),
            "digest": _digest((case.id, case.question, case.answer) for case in asked),
            "pictures": _digest(hashlib.sha256(case.picture().tobytes()).hexdigest() for case in asked[:PICTURES]),
            "rule": benchmark.rule,
        }
    return cases, counts


def _todo(
    cases: Mapping[Benchmark, Sequence[Case]], jobs: Iterable[str], out: Path, limit: int | None, batch: int
) -> list[Batch]:
    """The batches with a question that has no line yet."""
    todo = []
    for benchmark, order in cases.items():
        asked = order[:limit]
        for job in jobs:
            done = {record["number"] for record in store.read(store.file_of(out, benchmark.name, job))}
            todo += [
                Batch(benchmark, job, first, asked[first : first + batch])
                for first in range(0, len(asked), batch)
                if not done.issuperset(range(first, min(first + batch, len(asked))))
            ]
    return todo


def _ask(loaded: Loaded, method: Method, max_new_tokens: int, traces: bool, part: Batch) -> list[store.Record]:
    outcomes = run_batch(loaded, part.cases, method, max_new_tokens)
    return [
        record(part.first + i, case, outcome, part.benchmark.right(case, outcome.answer), traces)
        for i, (case, outcome) in enumerate(zip(part.cases, outcomes, strict=True))
    ]


def record(number: int, case: Case, outcome: Outcome, right: bool, traces: bool) -> store.Record:
    """What a result file keeps of one question; `number` is its place in the order of questions."""
    trace = outcome.trace
    return {
        "number": number,
        "id": case.id,
        "kind": case.kind,
        "group": case.group or case.id,
        "truth": case.answer,
        "answer": outcome.answer,
        "right": right,
        "exit_after": trace.exit_after,
        "mean_prefix": trace.mean_prefix,
        "mean_prefix_after_exit": _mean_prefix_after_exit(trace),
        "tokens": dataclasses.asdict(trace.tokens),
        "flops": dataclasses.asdict(trace.flops),
        **({"trace": json.loads(trace.to_json())} if traces else {}),
    }


def _mean_prefix_after_exit(trace: Trace) -> float | None:
    """Mean experts kept in layers that run after the exit, the paper's "prefix"; None where there are none."""
    if trace.exit_after is None:
        return None
    layers = [layer for layer in trace.expert_layers if layer > trace.exit_after]
    kept = [step[layer] for step in (trace.prefix.prefill, *trace.prefix.decode) for layer in layers]
    return sum(trace.experts if m is None else m for m in kept) / len(kept) if kept else None


def _identity(loaded: Loaded) -> dict[str, Any]:
    """What must stay the same for results to be comparable."""
    parts, calibration = parts_of(loaded.model), loaded.calibration
    state = {}
    if calibration is not None:
        state = {field.name: getattr(calibration, field.name) for field in dataclasses.fields(calibration)}
        state["gate"] = calibration.gate and calibration.gate.state_dict()
        state.pop("mass")  # what it decides is in the orders
    return {
        "model": Path(parts.model.name_or_path or parts.family.name).name,
        "layers": len(parts.layers),
        "experts": parts.config.num_experts,
        "dtype": str(parts.model.dtype).removeprefix("torch."),
        "calibration": _digest(state.items()) if state else None,
        "weights": weights_digest(parts.model),
    }


def _digest(values: Iterable[Any]) -> str:
    """Identifies plain values and tensors in them."""

    def of_tensor(tensor: Tensor) -> str:
        return hashlib.sha256(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()

    return hashlib.sha256(json.dumps(list(values), default=of_tensor).encode()).hexdigest()[:16]
