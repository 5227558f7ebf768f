"""`decomoe evaluate`: methods on benchmarks."""

import argparse
import json
from typing import Any

from .common import add_results, prepared, results_of, resumable

LEGEND = """retention: accuracy over dense's, with its 95 % interval (from, to); as dense: the same answer; FLOPs:
executed, against dense; sparse: routes taken alone; exit: mean layer; never: share whose picture stays; prefix: mean
experts, over all layers and in those after the exit.
"""


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    evaluate = commands.add_parser("evaluate", help="measure methods on benchmarks; goes on where it was stopped")
    evaluate.set_defaults(run=run)
    add_results(evaluate, batch=32)
    evaluate.add_argument(
        "--methods",
        nargs="+",
        default=["decomoe"],
        metavar="NAME[:KEY=VALUE,...]",
        help="such as decomoe:savb=no,p=0.5 or sparsevlm:layers=2/6/15, or the rows of a table of the paper: table1, "
        "table2, table5, table6; dense always",
    )
    evaluate.add_argument("--traces", action="store_true", help="keep the whole trace of every question")
    return evaluate


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    first, loaded, benchmarks, methods = prepared(options)
    from ..evaluate import evaluate, tables, write_tables  # noqa: PLC0415
    from ..evaluate.store import note_command  # noqa: PLC0415

    out = results_of(options)
    with resumable():
        evaluate(loaded, benchmarks, methods, out, options.limit, options.batch, options.max_new_tokens, options.traces)
    if first:
        note_command(out, "evaluate")
        asked = {benchmark.name for benchmark, _ in benchmarks}, {"dense", *methods}
        found, kinds = (
            [row for row in table if row["benchmark"] in asked[0] and row["method"] in asked[1]]
            for table in write_tables(out)
        )
        for table in tables(found, kinds):
            print(table.to_string(index=False), end="\n\n")
        print(LEGEND)
        for row in found:
            if row["excluded"] and row["method"] == "dense":
                print(f"{row['benchmark']}: left out {row['excluded']} questions that the calibration has seen")
        print(json.dumps(found, allow_nan=False))
    return 0
