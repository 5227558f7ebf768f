"""`decomoe collect`: what the figures need to know of a model."""

import argparse
from typing import Any

from .common import add_results, prepared, results_of, resumable

COLLECTORS = ("routing", "exits", "latency")


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    collect = commands.add_parser(
        "collect", help="observe routing and forced exits for the figures; goes on where it was stopped"
    )
    collect.set_defaults(run=run)
    add_results(collect, batch=8)
    collect.add_argument(
        "--collectors",
        nargs="+",
        choices=COLLECTORS,
        default=COLLECTORS,
        help="what to observe, all by default: routing (8 kB a question; 100 kB of the 30B models), exits (0.7; 2), "
        "latency (4; 10)",
    )
    collect.add_argument(
        "--methods",
        nargs="+",
        default=["decomoe"],
        metavar="NAME[:KEY=VALUE,...]",
        help="whose TTFT and TPOT to take, as for evaluate; dense always",
    )
    return collect


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    first, loaded, benchmarks, methods = prepared(options)
    from ..collect import collect  # noqa: PLC0415
    from ..evaluate.store import note_command  # noqa: PLC0415

    out = results_of(options)
    sizes = (options.limit, options.batch, options.max_new_tokens)
    with resumable():
        collect(loaded, benchmarks, options.collectors, out, methods, *sizes)
    if first:
        note_command(out, *options.collectors)
        print(f"Written to {out}; next: decomoe figures --results {out} --out FOLDER, or decomoe cases --results {out}")
    return 0
