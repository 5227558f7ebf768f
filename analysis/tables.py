"""The paper's Tables 1, 2, 5 and 6 from our results, with the paper's numbers beside ours.

    python -m analysis.tables RESULTS [--out FOLDER]

RESULTS is what `decomoe evaluate` wrote, and for times `decomoe collect --collectors latency`. The tables that it holds
are printed, and written to FOLDER as CSV and Markdown. The paper's Table 3 is missing: its numbers were out of reach.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from decomoe.evaluate import METHOD_SETS, overall, rows, store
from decomoe.evaluate.tables import to_markdown
from decomoe.methods import Dense

from . import paper
from .data import Lines

Row = dict[str, Any]
FIGURES = {  # heading: column of `overall`, factor
    "n": ("n", 1),
    "Avg. Ret.": ("retention_mean", 100),
    "pooled": ("retention", 100),
    "from": ("retention_low", 100),
    "to": ("retention_high", 100),
    "FLOPs": ("flops_ratio", 100),
    "sparse": ("flops_ratio_sparse", 100),
    "exit": ("exit_mean", 1),
    "prefix": ("prefix_after_exit_mean", 1),
}
TIMES = {"TTFT": "ttft_s", "TPOT": "tpot_s"}  # heading: name in the lines of the collector "latency"
NOTES = (  # under every table
    "In percent, but n (questions), exit (mean layer) and prefix (mean experts after the exit); - is what results or "
    "paper do not hold.",
    "Avg. Ret.: accuracy over dense's, averaged over benchmarks (the paper's definition). pooled: over all questions "
    "alike, with a 95 % interval by paired bootstrap over pictures.",
    "FLOPs, against dense's: executed, and sparse (top-k experts only). The paper's: its TFLOPs over its baseline's.",
)
MIXED = "Methods answered different questions (see n): compare rows with the same n, or evaluate the others too."
TIMED = (
    "TTFT and TPOT (seconds to the first token, and for each further one), against dense's: our medians over questions "
    "that methods answer in turns, dense through the same code. The paper's are its Table 4's, "
    "where TPOT is TTFT times 0.3662 in every row: one measurement, not two."
)


@dataclass(frozen=True)
class Results:
    """What one model did: by method, figures under headings, and accuracy under the names of `benchmarks`.

    `origins`: the commands that asked the questions and took the times, and when, as far as they were noted.
    """

    model: str
    benchmarks: Sequence[str]
    methods: Mapping[str, Row]
    origins: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """Read what `decomoe evaluate` wrote into `folder`.

        Raises:
            ValueError: there is nothing.
        """
        methods = {
            method: {heading: _scaled(row[name], factor) for heading, (name, factor) in FIGURES.items()}
            for method, row in overall(folder).items()
        }
        if not methods:
            raise ValueError(f"There are no results in {folder}; 'decomoe evaluate --out {folder}' makes some.")
        for row in (found := rows(folder)):
            methods[row["method"]][row["benchmark"]] = 100 * row["accuracy"]
        for method, times in _times(folder).items():
            methods.get(method, {}).update(times)
        meta = store.read_meta(folder)
        origins = {kind: "; ".join(command.values()) for kind, command in meta.get("commands", {}).items()}
        return cls(meta["run"]["model"], list(dict.fromkeys(r["benchmark"] for r in found)), methods, origins)


def _times(folder: Path) -> dict[str, Row]:
    """TTFT and TPOT by method, in percent of dense's: medians of the ratio, question by question."""
    lines = [line for each in Lines(folder).of("latency").values() for line in each]
    found: dict[str, Row] = {}
    for heading, name in TIMES.items():
        timed = [line[name] for line in lines if name in line]
        for method in timed[0] if timed else ():
            pairs = [(seconds[method], seconds[Dense.name]) for seconds in timed]
            ratios = [100 * ours / dense for ours, dense in pairs if ours and dense]
            found.setdefault(method, {})[heading] = median(ratios) if ratios else None
    return found


@dataclass(frozen=True)
class Table:
    """A table of the paper, by its number there: rows under `columns`; what a row lacks is shown as "-"."""

    number: int
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    more: Sequence[str] = ()  # notes of this table alone

    @property
    def notes(self) -> Sequence[str]:
        asked = {row["n"] for row in self.rows if row.get("n")}
        return (*NOTES, *paper.NOTES[self.number], *self.more, *((MIXED,) if len(asked) > 1 else ()))

    def frame(self) -> pd.DataFrame:
        """The numbers."""
        cells = [[row.get(column) for column in self.columns] for row in self.rows]
        return pd.DataFrame(cells, columns=list(self.columns), dtype=object)

    def text(self) -> str:
        """For the screen."""
        shown = self.frame().map(_shown).to_string(index=False)
        return "\n".join([f"Table {self.number}: {self.title}", shown, *self.notes, ""])

    def markdown(self) -> str:
        """For a file."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"# Table {self.number}: {self.title}\n\n{to_markdown(self.frame().map(_shown))}\n{notes}"


def _scaled(value: float | None, factor: int) -> float | None:
    return None if value is None else factor * value


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


# --- the tables -------------------------------------------------------------------------------------


def table1(ours: Results) -> Table:
    """Methods x benchmarks, and times beside those of the paper's Table 4; variants are left to the other tables."""
    variants = set().union(*map(_variants, VARIANTS))
    groups: dict[str, list[str]] = {name: [] for name in paper.TABLE1[paper.QWEN]}
    for spec in ours.methods:
        if spec not in variants:
            groups.setdefault(spec.partition(":")[0], []).append(spec)
    groups["decomoe"] = groups.pop("decomoe")  # last, as in the paper
    columns = [*ours.benchmarks, "n", "Avg. Ret.", "pooled", "from", "to", "FLOPs", "sparse", *TIMES]
    timed = {method: row | paper.TABLE4[method] for method, row in paper.TABLE1[paper.QWEN].items()}
    rows = _beside(ours, groups, {**paper.TABLE1, paper.QWEN: timed})
    return Table(1, "methods", ["method", "of", *columns], rows, (TIMED, *_origin(ours, "Times", "latency")))


def table2(ours: Results) -> Table:
    """What each half of DecoMoE does alone."""
    columns = ["method", "of", *ours.benchmarks, *FIGURES]
    return Table(2, "the halves of DecoMoE", columns, _beside(ours, _each(paper.TABLE2), paper.TABLE2))


def table5(ours: Results) -> Table:
    """Retention and FLOPs by order of the experts and share of them that is kept."""
    shares = list(paper.TABLE5["rcep"])
    found: list[Row] = []
    for order, theirs in paper.TABLE5.items():
        mine = {share: ours.methods.get(f"decomoe:keep_ratio={share},order={order}", {}) for share in shares}
        for figure in ("Avg. Ret.", "pooled", "from", "to", "FLOPs"):
            cells = {share: row.get(figure) for share, row in mine.items()}
            found.append({"order": order, "of": ours.model, "figure": figure, **cells})
        found.append({"order": order, "of": "paper", "figure": "Avg. Ret.", **theirs})
    return Table(5, "order of the experts, and share of them that is kept", ["order", "of", "figure", *shares], found)


def table6(ours: Results) -> Table:
    """By p, the share of routed mass that the prefix covers."""
    columns = ["method", "of", *FIGURES]
    return Table(6, "share of routed mass to cover", columns, _beside(ours, _each(paper.TABLE6), paper.TABLE6))


def _each(theirs: Mapping[str, paper.Rows]) -> dict[str, list[str]]:
    """Groups of one: the specs of a table of the paper."""
    return {spec: [spec] for table in theirs.values() for spec in table}


def _beside(ours: Results, groups: Mapping[str, Sequence[str]], theirs: Mapping[str, paper.Rows]) -> list[Row]:
    """For each name our rows of its specs, then the paper's row of each of its models."""
    found: list[Row] = []
    for name, specs in groups.items():
        found += [{"method": spec, "of": ours.model, **ours.methods.get(spec, {})} for spec in specs or [name]]
        for model, table in theirs.items():
            if row := table.get(name):
                costs = {"FLOPs": "TFLOPs", "TTFT": "TTFT", "TPOT": "TPOT"}
                shares = {to: 100 * row[of] / table[Dense.name][of] for to, of in costs.items() if of in row}
                found.append({"method": name, "of": f"paper, {model}", **row, **shares})
    return found


VARIANTS = {"table2": table2, "table5": table5, "table6": table6}  # of DecoMoE


def _variants(name: str) -> set[str]:
    """The specs that a table has for itself."""
    return {*METHOD_SETS[name]} - {"decomoe"}


def _origin(ours: Results, what: str, kind: str) -> list[str]:
    """Where our numbers come from, if it was noted."""
    return [f"{what}: `{ours.origins[kind]}`."] if kind in ours.origins else []


def tables(ours: Results) -> list[Table]:
    """Those of which the results hold a row of their own; Table 1 if they hold no other."""
    held = [name for name in VARIANTS if ours.methods.keys() & _variants(name)]
    others = ours.methods.keys() - {Dense.name}.union(*map(_variants, held))
    makers = [*([table1] if others or not held else []), *(VARIANTS[name] for name in held)]
    origin = _origin(ours, "Ours", "evaluate")
    return [replace(table, more=(*table.more, *origin)) for table in (make(ours) for make in makers)]


def write(table: Table, out: Path) -> list[Path]:
    """Write a table as CSV and Markdown."""
    paths = [out / f"table{table.number}.{kind}" for kind in ("csv", "md")]
    for path, text in zip(paths, (table.frame().to_csv(index=False), table.markdown()), strict=True):
        store.write(path, text)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write them; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m analysis.tables", description="The paper's tables, ours beside.")
    parser.add_argument("results", type=Path, help="a folder that 'decomoe evaluate' wrote")
    parser.add_argument("--out", type=Path, help="a folder for the tables as CSV and Markdown")
    options = parser.parse_args(arguments)
    try:
        for table in tables(Results.read(options.results)):
            print(table.text())
            if options.out:
                write(table, options.out)
    except (ValueError, OSError) as error:
        print(f"analysis: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
