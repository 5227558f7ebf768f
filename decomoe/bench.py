"""Time, memory, bytes and FLOPs of methods, each as a ratio to the dense model's in the same run.

Every round runs every method once, one after the other, so that a disturbance of the machine hits all alike; ratios are
taken inside a round. The first round is thrown away. Medians are reported, with the quartiles beside them.
"""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import truediv
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from tqdm import tqdm
from transformers import StoppingCriteria

from .calibration import Calibration
from .decode import CompiledDecode
from .families import Parts, parts_of
from .flops import Dimensions, head_width
from .latency import profile
from .methods import Dense, Method
from .record import Record
from .runtime import Session, attach
from .trace import Trace

CHECKED = 5  # tokens; a CUDA graph is replayed from its third step on
ALL_EXPERTS = "decomoe_all"  # the executor that computes more than routes ask for
_MORE_FLOPS = {  # which torch does not count
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
}
Row = dict[str, Any]
Clock = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Variant:
    """What to measure. `method` None is plain `generate`, without any of our hooks; `experts` is the executor.

    `compiled`: decode in compiled steps, which take a method and have an executor of their own.
    """

    method: Method | None
    experts: str
    compiled: bool = False


@dataclass(frozen=True)
class Machine:
    """What this machine can do, measured: FLOP/s of a matrix product, and bytes/s read from memory."""

    flops: float
    bandwidth: float


class _Clock(StoppingCriteria):
    """Notes when each token is there."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock, self.times = device, clock, [now(device, clock)]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(now(self.device, self.clock))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def now(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


@contextmanager
def executor(model: Any, name: str) -> Iterator[None]:
    """Experts run under this implementation inside the `with`."""
    parts = parts_of(model)
    before = parts.config._experts_implementation
    parts.text_model.set_experts_implementation(name)
    try:
        yield
    finally:
        parts.text_model.set_experts_implementation(before)


@contextmanager
def _attached(
    model: Any, variant: Variant, calibration: Calibration | None, decode: CompiledDecode | None = None
) -> Iterator[Session | None]:
    """The variant at work inside the `with`; None for plain `generate`."""
    with executor(model, variant.experts):
        if variant.method is None:
            yield None
            return
        with attach(model, variant.method, calibration, decode if variant.compiled else None) as session:
            yield session


@dataclass
class _Run:
    """One answer to each row of a prompt: seconds from the call to each token, the tokens (B, G), and memory held."""

    seconds: list[float]
    tokens: Tensor
    peak: int | None = None

    @property
    def ttft(self) -> float:
        return self.seconds[0]

    @property
    def tpot(self) -> float:
        return (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


def _generate(
    model: Any, session: Session | None, inputs: Mapping[str, Any], tokens: int, clock: Clock = time.perf_counter
) -> _Run:
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    watch = _Clock(model.device, clock)
    with torch.inference_mode():
        if session is None:
            ids = model.generate(**inputs, stopping_criteria=[watch], **options)
        else:
            ids = session.generate(dict(inputs), stopping_criteria=[watch], **options)
    return _Run([moment - watch.times[0] for moment in watch.times[1:]], ids[:, -tokens:].cpu())


def measure(
    model: Any,
    variants: Mapping[str, Variant],
    prompts: Sequence[Mapping[str, Any]],
    calibration: Calibration | None = None,
    tokens: int = 16,
    rounds: int = 10,
    breakdown: bool = False,
    clock: Clock = time.perf_counter,
) -> list[Row]:
    """A row for each of `variants`; the first is the one that the others are compared with.

    Args:
        prompts: of one or several questions each, as the processor makes them; rounds take them in turns.
        tokens: to decode, exactly so many; TPOT needs 2. rounds: that count.
        breakdown: also say where the time goes, in rounds of their own; not of compiled ones.
        clock: `time.process_time` counts CPU seconds, which others on the machine disturb less.

    Raises:
        ValueError: a method does not fit the model.
    """
    if rounds < 1 or tokens < 2:
        raise ValueError(f"At least 1 round of at least 2 tokens, not {rounds} of {tokens}.")
    compiled = {name: variant for name, variant in variants.items() if variant.compiled}
    decode = CompiledDecode(model) if compiled else None

    def answer(variant: Variant, inputs: Mapping[str, Any]) -> _Run:
        with _attached(model, variant, calibration, decode) as session, peak_memory(model.device) as peak:
            run = _generate(model, session, inputs, tokens, clock)
        run.peak = peak.get("bytes")
        return run

    alike = {  # compiles for every shape
        name: [_same_answers(answer, variant, inputs) for inputs in prompts]
        for name, variant in tqdm(compiled.items(), "compiling", disable=None if compiled else True)
    }
    runs = _rounds(rounds, variants.values(), lambda number, one: answer(one, prompts[number % len(prompts)]), "times")
    machine, rows = measure_machine(model.device, model.dtype, clock), []
    for (name, variant), mine in zip(variants.items(), runs, strict=True):
        row: Row = {"method": name, "experts": variant.experts, "compiled": variant.compiled}
        row |= _spread("ttft", [run.ttft for run in mine], [run.ttft for run in runs[0]])
        row |= _spread("tpot", [run.tpot for run in mine], [run.tpot for run in runs[0]])
        row["peak_bytes"] = statistics.median(run.peak for run in mine if run.peak) if mine[0].peak else None
        works = [_work(model, variant, calibration, inputs, tokens) for inputs in prompts]
        row |= _mean(works) | _roofline(machine, works, mine)
        if name in alike:
            row["answers_as_plain"] = statistics.mean(alike[name])
        rows.append(row)
    if breakdown:
        _add_breakdown(rows, model, variants, calibration, prompts, tokens, rounds)
    for row in rows:
        for figure in ("peak_bytes", "prefill_flops", "decode_flops", "prefill_bytes", "decode_bytes", "kv_bytes"):
            if row[figure] and rows[0][figure]:
                row[f"{figure}_ratio"] = row[figure] / rows[0][figure]
    return rows


def _rounds(rounds: int, variants: Collection[Variant], work: Callable[[int, Variant], T], label: str) -> list[list[T]]:
    """[variant][round] of `work`, every variant once in each round; the first round, which warms up, is left out."""
    bar = tqdm(range(rounds + 1), label, unit="round", disable=None)
    done = [[work(number, variant) for variant in variants] for number in bar]
    return [list(of_variant) for of_variant in zip(*done[1:], strict=True)]


def _same_answers(
    answer: Callable[[Variant, Mapping[str, Any]], _Run], compiled: Variant, inputs: Mapping[str, Any]
) -> float:
    """The share of rows whose tokens are those of the plain path, every one."""
    plain = replace(compiled, compiled=False, method=compiled.method or Dense())
    return (answer(compiled, inputs).tokens == answer(plain, inputs).tokens).all(1).float().mean().item()


def _roofline(machine: Machine, works: Sequence[Row], runs: Sequence[_Run]) -> Row:
    """The least time that arithmetic and memory allow, and the share of it in what was measured; medians of rounds.

    A prefill includes the vision encoder.
    """
    row: Row = {}
    for phase, seconds in (("prefill", [run.ttft for run in runs]), ("decode", [run.tpot for run in runs])):
        floors = []
        for work in works:
            flops, read = work[f"{phase}_flops"], work[f"{phase}_bytes"]
            if phase == "prefill":
                flops, read = flops + work["vision_flops"], read + work["vision_bytes"]
            floors.append(max(flops / machine.flops, read / machine.bandwidth))
        of_round = [floors[number % len(works)] for number in range(1, len(runs) + 1)]
        row[f"{phase}_floor_s"] = statistics.median(of_round)
        row[f"{phase}_achieved"] = statistics.median(map(truediv, of_round, seconds))
    return row


def _mean(works: Sequence[Row]) -> Row:
    """Means over prompts; exits are listed."""
    mean = {name: statistics.mean(work[name] for work in works) for name in works[0] if name != "exit_after"}
    return mean | {"exit_after": [layer for work in works for layer in work["exit_after"]]}


def _spread(name: str, values: Sequence[float], against: Sequence[float]) -> Row:
    """Median of `values` in seconds; median and quartiles of their ratio to `against`, round by round."""
    ratios = [value / other for value, other in zip(values, against, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        f"{name}_s": statistics.median(values),
        f"{name}_ratio": middle,
        f"{name}_ratio_low": low,
        f"{name}_ratio_high": high,
    }


# --- what was done ----------------------------------------------------------------------------------------------------


def _work(model: Any, variant: Variant, calibration: Calibration | None, inputs: Mapping[str, Any], tokens: int) -> Row:
    """FLOPs and bytes of one prefill and one decode step over the whole batch, in the decoder and LM head; and, apart
    from them, of the vision encoder.

    From the traces of runs of their own. FLOPs are sparse ones, what a grouped GEMM computes; with all experts, the
    executed ones. Bytes: each weight once that a forward needs, of experts those with a route or, with all experts,
    those of the prefix; and the keys and values that it reads or writes.
    """
    flops, whole = [], variant.experts == ALL_EXPERTS
    with executor(model, variant.experts), attach(model, variant.method or Dense(), calibration) as session:
        for length in (1, tokens):
            with _vision_flops(session.parts) as vision:
                _generate(model, session, inputs, length)
            traces = session.traces()
            flops.append(sum(trace.flops.executed if whole else trace.flops.sparse for trace in traces))
    parts, size = session.parts, model.dtype.itemsize
    head = 2 * parts.config.hidden_size * parts.config.vocab_size * len(traces)
    read = bytes_read(parts, session.record, traces, whole)
    return {
        "prefill_flops": flops[0] + head,
        "decode_flops": (flops[1] - flops[0]) / (tokens - 1) + head,
        "prefill_bytes": read[0] * size,
        "decode_bytes": sum(read[1:]) / (tokens - 1) * size,
        "vision_flops": sum(counter.get_total_flops() for counter in vision),
        "vision_bytes": sum(weight.nbytes for tower in parts.vision for weight in tower.parameters()),
        "kv_bytes": sum(trace.kv_bytes for trace in traces),
        "exit_after": [trace.exit_after for trace in traces],
        "mean_prefix": statistics.mean(trace.mean_prefix for trace in traces),
        "layers": len(parts.layers),
        "visual": traces[0].tokens.visual,
        "text": traces[0].tokens.text,
        "batch": len(traces),
    }


@contextmanager
def _vision_flops(parts: Parts) -> Iterator[list[FlopCounterMode]]:
    """Counters of what the vision encoder computes inside the `with`."""
    counters: list[FlopCounterMode] = []

    def begin(*_: Any) -> None:
        counters.append(FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS))
        counters[-1].__enter__()

    with ExitStack() as stack:
        for tower in parts.vision:
            stack.callback(tower.register_forward_pre_hook(begin).remove)
            end = tower.register_forward_hook(lambda *_: counters[-1].__exit__(None, None, None))
            stack.callback(end.remove)
        yield counters


def bytes_read(parts: Parts, record: Record, traces: Sequence[Trace], all_experts: bool = False) -> list[int]:
    """Numbers (not bytes) that each forward must read or write at least: weights once, keys and values once."""
    size = Dimensions.of(parts.config, [router is not None for router in parts.routers])
    entry = 2 * parts.config.num_key_value_heads * head_width(parts.config)
    read = []
    for number, used in enumerate(record.used_experts()):
        total = parts.config.hidden_size * parts.config.vocab_size
        for layer in range(len(parts.layers)):
            width, experts = size.dense_widths[layer], used[layer]
            if all_experts:
                experts = max(record.kept(row, number)[layer] or size.experts for row in range(len(traces)))
            weights = experts * size.expert() if width is None else 6 * size.hidden * width
            total += (size.projections() + size.router() * (width is None) + weights) // 2  # 2 FLOPs a weight
            held = [trace.live[layer] if not number else trace.cached[layer] + number for trace in traces]
            total += entry * sum(held)
        read.append(total)
    return read


def _add_breakdown(
    rows: Sequence[Row],
    model: Any,
    variants: Mapping[str, Variant],
    calibration: Calibration | None,
    prompts: Sequence[Mapping[str, Any]],
    tokens: int,
    rounds: int,
) -> None:
    """To each row that is not compiled (a graph has no parts to look into), {phase: {part: {seconds, of_dense}}}.

    `of_dense` is the share of all that the first row's phase takes, so that the shares of a row sum to its ratio.
    Medians of rounds, ratios taken inside them. Plain `generate` is broken down with an idle method attached.
    """

    def spent(number: int, variant: Variant) -> dict[str, dict[str, float]]:
        with executor(model, variant.experts):
            inputs = dict(prompts[number % len(prompts)])
            found = profile(model, variant.method or Dense(), inputs, calibration, tokens)
        assert found.decode is not None
        return {"prefill": found.prefill.parts, "decode": found.decode.parts}

    def summary(phase: str, part: str, mine: Sequence[Any], first: Sequence[Any]) -> dict[str, float]:
        seconds = [run[phase][part] for run in mine]
        whole = [sum(run[phase].values()) for run in first]
        return {"seconds": statistics.median(seconds), "of_dense": statistics.median(map(truediv, seconds, whole))}

    plain = [row for row in rows if not row["compiled"]]
    runs = _rounds(rounds, [variants[row["method"]] for row in plain], spent, "breakdown")
    for row, mine in zip(plain, runs, strict=True):
        row["breakdown"] = {
            phase: {part: summary(phase, part, mine, runs[0]) for part in parts} for phase, parts in mine[0].items()
        }


@torch.inference_mode()
def check(
    model: Any, variants: Mapping[str, Variant], inputs: Mapping[str, Any], calibration: Calibration | None = None
) -> dict[str, float]:
    """How far the logits of prefill and decode are from those in fp32 with transformers' eager experts, relative to
    their norm.

    Leaves `model` in fp32.
    """
    options = {"max_new_tokens": CHECKED, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}

    def logits(variant: Variant, decode: CompiledDecode | None = None) -> Tensor:
        """(CHECKED, B, vocabulary), after the same tokens whatever the logits say."""
        with _attached(model, variant, calibration, decode) as session:
            assert session is not None
            asked = {**inputs, "pixel_values": inputs["pixel_values"].to(model.dtype)}
            out = session.generate(asked, prefix_allowed_tokens_fn=lambda row, ids: [len(ids) % 50], **options)
            return torch.stack(out.logits).float()

    decode = CompiledDecode(model) if any(variant.compiled for variant in variants.values()) else None
    attached = {name: replace(variant, method=variant.method or Dense()) for name, variant in variants.items()}
    found = {name: logits(variant, decode) for name, variant in attached.items()}
    model.float()
    expected = {name: logits(replace(variant, experts="eager", compiled=False)) for name, variant in attached.items()}
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in variants}


# --- the machine ------------------------------------------------------------------------------------------------------


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Afterwards "bytes" is the most that was held inside the `with`: on the GPU, or by the process (Linux only)."""
    peak: dict[str, int] = {}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak["bytes"] = torch.cuda.max_memory_allocated(device)
        return
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        reset.write_text("5")  # starts the high-water mark anew
    except OSError:
        yield peak
        return
    yield peak
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    peak["bytes"] = int(line.split()[1]) * 1024


def measure_machine(device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter) -> Machine:
    """Best of a few: a square matrix product, and the sum of a large vector."""
    size = 8192 if device.type == "cuda" else 1024
    square = torch.randn(size, size, device=device, dtype=dtype)
    vector = torch.zeros(16 * size * size, device=device, dtype=dtype)

    def fastest(work: Any) -> float:
        seconds = []
        for _ in range(5):
            began = now(device, clock)
            work()
            seconds.append(now(device, clock) - began)
        return min(seconds)

    return Machine(2 * size**3 / fastest(lambda: square @ square), vector.nbytes / fastest(vector.sum))
