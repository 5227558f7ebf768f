"""Result files -> rows of numbers -> tables. No model is needed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..benchmarks import normalize
from ..methods import Dense
from . import store

Row = dict[str, Any]
RESAMPLES = 2000


def rows(out: Path, limit: int | None = None) -> list[Row]:
    """One row a benchmark and method, over the questions that the method and dense have both answered.

    Args:
        limit: only the first so many questions of each benchmark.

    Returns:
        rows of plain JSON values, None where a number is not defined:
        n, excluded: questions asked, and left out because the calibration has seen them.
        accuracy; f1: of "presence" questions, where "yes" is positive and a wrong answer counts as the opposite one.
        retention, retention_low, retention_high: see `retention`. agreement: share of dense's answers.
        flops_ratio, flops_ratio_sparse: decoder FLOPs against dense at the same answer length, as a ratio of sums,
            under the two conventions of `trace.Flops` (executed is the paper's).
        exit_mean: mean layer of those that exit; exit_never: share of the others; exit_histogram: counts by layer.
        prefix_mean: mean experts kept over all layers; prefix_after_exit_mean: in layers after the exit only.
    """
    counts = store.read_meta(out).get("benchmarks", {})
    return [
        {"benchmark": benchmark, "method": method, **_row(records, dense), "excluded": counts[benchmark]["excluded"]}
        for benchmark, method, records, dense in _results(out, limit)
    ]


def common(out: Path, methods: Iterable[str]) -> dict[str, set[int]]:
    """The questions that dense and all of these methods have answered: numbers by benchmark, where there are any."""
    found = {}
    for benchmark in store.read_meta(out).get("benchmarks", {}):
        lines = [store.read(store.file_of(out, benchmark, method)) for method in {Dense.name, *methods}]
        if numbers := set.intersection(*({record["number"] for record in each} for each in lines)):
            found[benchmark] = numbers
    return found


def overall(out: Path, limit: int | None = None, asked: Mapping[str, Set[int]] | None = None) -> dict[str, Row]:
    """One row a method, over the questions of all benchmarks together.

    Args:
        asked: only these questions, as of `common`.

    Returns:
        rows as of `rows`, by method, and in them `retention_mean`: accuracy over dense's, averaged over benchmarks (the
            paper's Avg. Ret.), where `retention` is over all questions alike.
    """
    found: dict[str, list[tuple[Sequence[store.Record], Sequence[store.Record]]]] = defaultdict(list)
    for _, method, records, dense in _results(out, limit, asked):
        found[method].append((records, dense))
    return {
        method: {
            **_row(*(list(chain(*side)) for side in zip(*parts, strict=True))),
            "retention_mean": _mean(_ratio(records, dense) for records, dense in parts),
        }
        for method, parts in found.items()
    }


def by_kind(out: Path, limit: int | None = None) -> list[Row]:
    """Accuracy and mean exit by kind of question: benchmark, method, kind, n, accuracy, exit_mean."""
    found = []
    for benchmark, method, records, _ in _results(out, limit):
        kinds = defaultdict(list)
        for record in records:
            kinds[record["kind"]].append(record)
        found += [
            {
                "benchmark": benchmark,
                "method": method,
                "kind": kind,
                "n": len(kinds[kind]),
                "accuracy": _mean(record["right"] for record in kinds[kind]),
                "exit_mean": _mean(record["exit_after"] for record in kinds[kind]),
            }
            for kind in sorted(kinds)
        ]
    return found


def _results(
    out: Path, limit: int | None, asked: Mapping[str, Set[int]] | None = None
) -> Iterator[tuple[str, str, Sequence[store.Record], Sequence[store.Record]]]:
    """(benchmark, method, its records, dense's records of the same questions)."""
    meta = store.read_meta(out)
    for benchmark in meta.get("benchmarks", {}):
        dense = {
            record["number"]: record
            for record in store.read(store.file_of(out, benchmark, Dense.name))
            if asked is None or record["number"] in asked.get(benchmark, ())
        }
        for method in meta.get("methods", {}):
            records = [
                record
                for record in store.read(store.file_of(out, benchmark, method))
                if record["number"] in dense and (limit is None or record["number"] < limit)
            ]
            if records:
                yield benchmark, method, records, [dense[record["number"]] for record in records]


def _row(records: Sequence[store.Record], dense: Sequence[store.Record]) -> Row:
    right = np.array([record["right"] for record in records])
    groups = [record["group"] for record in records]
    kept, low, high = retention(right, np.array([record["right"] for record in dense]), groups)
    exits = Counter(record["exit_after"] for record in records)
    never = exits.pop(None, 0)
    flops = {name: sum(record["flops"][name] for record in records) for name in records[0]["flops"]}
    same = (normalize(a["answer"]) == normalize(b["answer"]) for a, b in zip(records, dense, strict=True))
    return {
        "n": len(records),
        "accuracy": float(right.mean()),
        "retention": kept,
        "retention_low": low,
        "retention_high": high,
        "agreement": _mean(same),
        "f1": _f1([record for record in records if record["kind"] == "presence"]),
        "flops_ratio": flops["executed"] / flops["executed_dense"],
        "flops_ratio_sparse": flops["sparse"] / flops["sparse_dense"],
        "exit_mean": _mean(exits.elements()),
        "exit_never": never / len(records),
        "exit_histogram": {**{str(layer): exits[layer] for layer in sorted(exits)}, "never": never},
        "prefix_mean": _mean(record["mean_prefix"] for record in records),
        "prefix_after_exit_mean": _mean(record["mean_prefix_after_exit"] for record in records),
    }


def retention(
    right: np.ndarray, dense: np.ndarray, groups: Sequence[str], seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """Accuracy over dense's on the same questions, and its 95 % interval: a paired bootstrap over pictures.

    Questions of one group, about one picture, are drawn together. Resamples in which dense is never right are left out.
    """
    if not dense.any():
        return None, None, None
    _, picture = np.unique(np.array(groups), return_inverse=True)
    ours, theirs = np.bincount(picture, right), np.bincount(picture, dense)
    random, count = np.random.default_rng(seed), len(ours)
    drawn = (random.integers(count, size=count) for _ in range(RESAMPLES))
    sums = np.array([(ours[some].sum(), theirs[some].sum()) for some in drawn])
    sums = sums[sums[:, 1] > 0]
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return float(right.sum() / dense.sum()), float(low), float(high)


def _ratio(records: Sequence[store.Record], dense: Sequence[store.Record]) -> float | None:
    theirs = sum(record["right"] for record in dense)
    return sum(record["right"] for record in records) / theirs if theirs else None


def _f1(records: Sequence[store.Record]) -> float | None:
    hits = sum(record["right"] for record in records if record["truth"] == "yes")
    misses = sum(not record["right"] for record in records)
    return 2 * hits / (2 * hits + misses) if hits + misses else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- for people -------------------------------------------------------------------------------------

COLUMNS = {  # heading, column of `rows`, format
    "benchmark": ("benchmark", ""),
    "method": ("method", ""),
    "n": ("n", "d"),
    "accuracy": ("accuracy", ".3f"),
    "retention": ("retention", ".3f"),
    "from": ("retention_low", ".3f"),
    "to": ("retention_high", ".3f"),
    "as dense": ("agreement", ".3f"),
    "FLOPs": ("flops_ratio", ".2f"),
    "sparse": ("flops_ratio_sparse", ".2f"),
    "exit": ("exit_mean", ".1f"),
    "never": ("exit_never", ".2f"),
    "prefix": ("prefix_mean", ".1f"),
    "after exit": ("prefix_after_exit_mean", ".1f"),
}


def tables(found: Sequence[Row], kinds: Sequence[Row]) -> list[pd.DataFrame]:
    """What people read: a row a benchmark and method, and accuracy by kind with a column a method."""
    main = pd.DataFrame(
        {heading: [_shown(row[name], form) for row in found] for heading, (name, form) in COLUMNS.items()}
    )
    table = pd.DataFrame(kinds).pivot(index=["benchmark", "kind", "n"], columns="method", values="accuracy")
    order = list(dict.fromkeys(row["method"] for row in kinds))
    return [main, table[order].map(lambda value: _shown(value, ".3f")).reset_index()]


def _shown(value: Any, form: str) -> str:
    return "-" if pd.isna(value) else format(value, form)


def to_markdown(table: pd.DataFrame) -> str:
    """A table in Markdown."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def write_tables(out: Path) -> tuple[list[Row], list[Row]]:
    """Write all results in `out` as table.csv, by_kind.csv and table.md; gives its `rows` and `by_kind`."""
    found, kinds = rows(out), by_kind(out)
    store.write(out / "table.csv", pd.DataFrame(found).to_csv(index=False))
    store.write(out / "by_kind.csv", pd.DataFrame(kinds).to_csv(index=False))
    store.write(out / "table.md", "\n".join(map(to_markdown, tables(found, kinds))))
    return found, kinds
