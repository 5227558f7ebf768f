"""What each figure is drawn from: plain rows, reduced from the lines that `decomoe collect` and `evaluate` wrote.

A folder of such tables (`figN.json` each, a few kB to 100 kB) can stand for the lines, which are far larger.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decomoe.collect import file_name
from decomoe.evaluate import common, overall, rows, store

Row = dict[str, Any]
TOP = 0.2  # of the experts: Fig. 3b
KEEPS = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2}  # Fig. 3c
OFFSETS = range(-8, 9)  # Fig. 5a
CASES = 12  # lines of Fig. 3a


@dataclass(frozen=True)
class Data:
    """The rows of one figure, and "model", "data", "command" and "date" of where they come from.

    What else a figure needs to know, such as the number of layers, is in `meta` too.
    """

    rows: list[Row]
    meta: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Data":
        """Read what `to_json` gave.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            found = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            found = None
        if found is None or not found.rows:
            raise ValueError(f"The table {path} is damaged; draw it anew from results, or remove it.")
        return found

    def to_json(self) -> str:
        """Row by row, so that changes can be read."""
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in self.rows)
        return f'{{"meta": {json.dumps(self.meta)},\n"rows": [\n{lines}\n]}}\n'


def read(folder: Path) -> dict[str, Data]:
    """The tables of all figures that `folder` can give, by file name: fig1a, fig3a, ...

    Raises:
        ValueError: there is nothing.
    """
    found = {}
    lines = Lines(folder)
    for name, make in TABLES.items():
        path = folder / f"{name}.json"
        if path.is_file():
            found[name] = Data.read(path)
        elif (data := make(lines)) is not None:
            found[name] = data
    if not found:
        raise ValueError(f"There is nothing in {folder} to draw; run: decomoe collect --out {folder}")
    return found


class Lines:
    """The lines in a results folder, by collector and benchmark."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.meta = folder, store.read_meta(folder)

    def of(self, collector: str) -> dict[str, list[Row]]:
        """{benchmark: its lines}, empty where there are none."""
        files = {name: store.file_of(self.folder, name, file_name(collector)) for name in self.benchmarks}
        return {name: found for name, file in files.items() if (found := store.read(file))}

    def has(self, method: str) -> bool:
        """Whether a method has been evaluated."""
        return any(store.file_of(self.folder, name, method).exists() for name in self.benchmarks)

    @property
    def benchmarks(self) -> Sequence[str]:
        return list(self.meta.get("benchmarks", {}))

    def data(self, found: Iterable[Row], counts: dict[str, int], *kinds: str, **more: Any) -> Data | None:
        """A table with its origin, the commands that made lines of these kinds and the last day; None without rows."""
        table = list(found)
        run, commands = self.meta.get("run", {}), self.meta.get("commands", {})
        by = [commands[kind] for kind in kinds if kind in commands]
        origin = {
            "model": run.get("model", ""),
            "data": _told(counts),
            "command": " && ".join(each["line"] for each in by),
            "date": max((each["date"] for each in by), default=""),
            "layers": run.get("layers"),
            "experts": run.get("experts"),
        }
        return Data(table, {**origin, **more}) if table else None


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in counts.items())


def _counts(lines: dict[str, list[Row]]) -> dict[str, int]:
    return {name: len(found) for name, found in lines.items()}


# --- from forced exits -----------------------------------------------------------------------------------------------


def fig3a(lines: Lines) -> Data | None:
    """Perplexity of the dense answer by exit: some cases of every benchmark that dense answers rightly and exits break.

    Rows: case, benchmark, question, answer, layer (null: no exit), perplexity, right, earliest (the first right exit).
    """
    swept, found = lines.of("exits"), []
    telling = {
        name: [line for line in each if line["dense"]["right"] and not all(line["right"])]
        for name, each in swept.items()
    }
    share = -(-CASES // max(1, len(telling)))
    for name, each in telling.items():
        for line in each[:share]:
            earliest = next((layer for layer, right in zip(line["layers"], line["right"], strict=True) if right), None)
            exits = [*zip(line["layers"], line["nll"], line["right"], strict=True)]
            for layer, nll, right in [*exits, (None, line["dense"]["nll"], True)]:
                found.append(
                    {
                        "case": line["id"],
                        "benchmark": name,
                        "question": line["question"],
                        "answer": line["dense"]["answer"],
                        "layer": layer,
                        "perplexity": math.exp(nll),
                        "right": right,
                        "earliest": layer is not None and layer == earliest,
                    }
                )
    return lines.data(found, _counts(swept), "exits")


def fig5a(lines: Lines) -> Data | None:
    """Perplexity of the dense answer around the gate's exit, over the questions that the gate lets go.

    Behind the last layer an exit changes nothing; where it would lie before the first possible one, a question is left
    out, and "dense" is the perplexity without an exit of the same questions. Means are of the NLL.
    Rows: offset, n, perplexity, dense.
    """
    swept, found = lines.of("exits"), []
    gated = [line for each in swept.values() for line in each if line.get("predicted") is not None]
    for offset in OFFSETS:
        pairs = [
            (_nll_at(line, line["predicted"] + offset), line["dense"]["nll"])
            for line in gated
            if line["predicted"] + offset >= line["layers"][0]
        ]
        if pairs:
            nll, dense = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            row = {"offset": offset, "n": len(pairs), "perplexity": math.exp(nll), "dense": math.exp(dense)}
            found.append(row)
    return lines.data(found, _counts(swept), "exits")


def _nll_at(line: Row, layer: int) -> float:
    return line["nll"][line["layers"].index(layer)] if layer <= line["layers"][-1] else line["dense"]["nll"]


# --- from routing ----------------------------------------------------------------------------------------------------


def _mass(lines: Iterable[Row], kind: str) -> np.ndarray:
    """(C, L, E): mean routed mass of a token, by case."""
    return np.array([line[kind] for line in lines])


def _routing(lines: Lines) -> tuple[dict[str, list[Row]], list[Row], list[int]]:
    """By benchmark, all together, and the layers with experts."""
    routed = lines.of("routing")
    together = [line for each in routed.values() for line in each]
    return routed, together, together[0]["layers"] if together else []


def fig3b(lines: Lines) -> Data | None:
    """Share of routed mass on the fifth of the experts that gets most, all cases together.

    Rows: layer, modality, share.
    """
    routed, together, layers = _routing(lines)
    found = []
    for kind in ("text", "visual") if together else ():
        mass = np.sort(_mass(together, kind).mean(0), 1)[:, ::-1]
        count = round(TOP * mass.shape[1])
        shares = mass[:, :count].sum(1) / mass.sum(1)
        found += [
            {"layer": layer, "modality": kind, "share": float(share)}
            for layer, share in zip(layers, shares, strict=True)
        ]
    return lines.data(found, _counts(routed), "routing", top=TOP)


def fig3c(lines: Lines) -> Data | None:
    """How many of a case's most used experts are another case's too: the mean over all pairs of cases.

    An expert that a case does not use is not one of them, however many are asked for.
    Rows: layer, modality, keep, overlap, chance (what random sets of that size share).
    """
    routed, together, layers = _routing(lines)
    found = []
    for kind in ("text", "visual") if len(together) > 1 else ():
        mass = _mass(together, kind)
        rank = (-mass).argsort(2, kind="stable").argsort(2)
        cases, _, experts = mass.shape
        for keep, share in KEEPS.items():
            size = max(1, round(share * experts))
            best = (rank < size) & (mass > 0)  # (C, L, E)
            others = best.sum(0) - 1  # cases, beside one of its own, that have an expert
            overlaps = ((best * others).sum(2) / best.sum(2)).mean(0) / (cases - 1)
            found += [
                {"layer": layer, "modality": kind, "keep": keep, "overlap": float(overlap), "chance": size / experts}
                for layer, overlap in zip(layers, overlaps, strict=True)
            ]
    return lines.data(found, _counts(routed), "routing")


def fig8a(lines: Lines) -> Data | None:
    """Experts that hold half of the routers' probability mass, the mean over layers, for each case.

    Rows: benchmark, case, text, visual.
    """
    routed, _, _ = _routing(lines)
    found = [
        {
            "benchmark": name,
            "case": line["id"],
            **{kind: float(np.mean(line["half"][kind])) for kind in ("text", "visual")},
        }
        for name, each in routed.items()
        for line in each
    ]
    return lines.data(found, _counts(routed), "routing")


def fig8b(lines: Lines) -> Data | None:
    """How alike text routing is before and after the visual tokens leave, by layer behind the exit; means over cases.

    Rows: layer, of ("token": compared one by one; "mean": their averages), cosine, mae.
    """
    routed, together, _ = _routing(lines)
    by_layer: dict[int, list[Row]] = defaultdict(list)
    for line in together:
        for layer, values in line["evicted"].items():
            by_layer[int(layer)].append(values)
    found = [
        {
            "layer": layer,
            "of": of,
            **{name: sum(values[f"{of}_{name}"] for values in each) / len(each) for name in ("cosine", "mae")},
        }
        for layer, each in sorted(by_layer.items())
        for of in ("token", "mean")
    ]
    return lines.data(found, _counts(routed), "routing", exit_after=_exit_of(lines))


def _exit_of(lines: Lines) -> int | None:
    return lines.meta.get("collected", {}).get("routing", {}).get("exit_after")


def text_share(lines: Lines) -> Data | None:
    """Whose expert is it: text's routed mass over text's and visual's, each the mean of a token (0.5: both alike).

    SMoES counts tokens instead, which a long picture dominates.
    Rows: layer, expert (by its place in the model), share, mass (both together).
    """
    routed, together, layers = _routing(lines)
    found = []
    if together:
        text, visual = (_mass(together, kind).mean(0) for kind in ("text", "visual"))
        for i, layer in enumerate(layers):
            for expert, (ours, theirs) in enumerate(zip(text[i], visual[i], strict=True)):
                whole = float(ours + theirs)
                share = float(ours) / whole if whole else None
                found.append({"layer": layer, "expert": expert, "share": share, "mass": whole})
    return lines.data(found, _counts(routed), "routing")


def _first_map(lines: Lines) -> tuple[dict[str, int], Row | None]:
    """The first question that was mapped token by token."""
    routed, together, _ = _routing(lines)
    line = next((line for line in together if "map" in line), None)
    return {name: 1 for name, each in routed.items() if line in each}, line


def fig6(lines: Lines) -> Data | None:
    """One question's tokens and the experts that they go to, at one layer.

    Rows: token (its place in the prompt), modality, label, expert (by its place in the model), weight.
    """
    counts, line = _first_map(lines)
    if line is None:
        return None
    table, texts, found = line["map"], iter(line["map"]["tokens"]), []
    for token, (visual, experts, weights) in enumerate(
        zip(table["visual"], table["experts"], table["weights"], strict=True)
    ):
        label = "" if visual else next(texts)
        kind = "visual" if visual else "text"
        found += [
            {"token": token, "modality": kind, "label": label, "expert": expert, "weight": weight}
            for expert, weight in zip(experts, weights, strict=True)
        ]
    return lines.data(found, counts, "routing", layer=table["layer"], question=line["question"])


def fig7(lines: Lines) -> Data | None:
    """The routers' softmax for one question's text tokens at one layer, before and after the visual tokens leave.

    Rows: token (its place among the text), label, before, after (lists by expert).
    """
    counts, line = _first_map(lines)
    if line is None:
        return None
    table = line["map"]
    found = [
        {"token": token, "label": label, "before": before, "after": after}
        for token, (label, before, after) in enumerate(
            zip(table["tokens"], table["before"], table["after"], strict=True)
        )
    ]
    more = {"layer": table["layer"], "question": line["question"], "exit_after": _exit_of(lines)}
    return lines.data(found, counts, "routing", **more)


# --- from time -------------------------------------------------------------------------------------------------------


def fig1a(lines: Lines) -> Data | None:
    """Milliseconds by layer and part: the median over questions. Rows: method, phase, layer, part, ms."""
    timed, found = lines.of("latency"), []
    together = [line["parts"] for each in timed.values() for line in each]
    for method, phases in together[0].items() if together else ():
        for phase, parts in phases.items():
            for part in parts:
                medians = np.median([parts_of[method][phase][part] for parts_of in together], 0)
                found += [
                    {"method": method, "phase": phase, "layer": layer, "part": part, "ms": round(float(ms), 5)}
                    for layer, ms in enumerate(medians)
                ]
    return lines.data(found, _counts(timed), "latency")


def fig5b(lines: Lines) -> Data | None:
    """Median time to the first token against retention, over all benchmarks, of methods with both.

    Retention is over the questions that all of them have answered. Rows: method, ms, retention, low, high.
    """
    timed, found = lines.of("latency"), []
    together = [line["ttft_s"] for each in timed.values() for line in each]
    methods = [method for method in (together[0] if together else ()) if lines.has(method)]
    asked = common(lines.folder, methods)
    kept = overall(lines.folder, asked=asked) if asked else {}
    for method in methods:
        if (row := kept.get(method)) and row["retention"] is not None:
            ms = 1000 * float(np.median([times[method] for times in together]))
            spread = {"low": row["retention_low"], "high": row["retention_high"]}
            found.append({"method": method, "ms": round(ms, 3), "retention": row["retention"], **spread})
    answered = {name: len(numbers) for name, numbers in asked.items()}
    origin = f"time: {_told(_counts(timed))}; retention: {_told(answered)}"
    return lines.data(found, {}, "evaluate", "latency", data=origin)


# --- from evaluation -------------------------------------------------------------------------------------------------


def fig4(lines: Lines) -> Data | None:
    """After which layer DecoMoE lets the picture go. Rows: benchmark, layer (null: not triggered), share, n."""
    found, counts = [], {}
    for row in rows(lines.folder) if "methods" in lines.meta else ():
        if row["method"] == "decomoe":
            counts[row["benchmark"]] = row["n"]
            for layer, count in row["exit_histogram"].items():
                place = None if layer == "never" else int(layer)
                share = count / row["n"]
                found.append({"benchmark": row["benchmark"], "layer": place, "share": share, "n": row["n"]})
    return lines.data(found, counts, "evaluate")


TABLES: dict[str, Callable[[Lines], Data | None]] = {
    "fig1a": fig1a,
    "fig3a": fig3a,
    "fig3b": fig3b,
    "fig3c": fig3c,
    "fig4": fig4,
    "fig5a": fig5a,
    "fig5b": fig5b,
    "fig6": fig6,
    "fig7": fig7,
    "fig8a": fig8a,
    "fig8b": fig8b,
    "text_share": text_share,
}
