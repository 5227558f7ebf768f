"""`decomoe collect`: what the figures need to know of a model."""

import argparse
from typing import Any

from .common import add_results, check_counts, load_model, results_of, resumable

COLLECTORS = ("routing", "exits", "latency")


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    collect = commands.add_parser("collect", help="observe routing and forced exits for the figures; goes on as well")
    collect.set_defaults(run=run)
    add_results(collect)
    collect.add_argument(
        "--collectors",
        nargs="+",
        choices=COLLECTORS,
        default=COLLECTORS,
        help="what to observe, all by default: routing (8 kB a question; 100 kB of the 30B models), exits (2; 6), "
        "latency (4; 10)",
    )
    collect.add_argument(
        "--methods",
        nargs="+",
        default=["decomoe"],
        metavar="NAME[:KEY=VALUE,...]",
        help="whose TTFT and TPOT to take, as for evaluate; dense always",
    )
    collect.add_argument("--batch", type=int, default=8, help="questions at once")
    collect.add_argument("--max-new-tokens", type=int, default=64)
    return collect


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    check_counts(options, "limit", "batch", "max_new_tokens")
    from accelerate import PartialState  # noqa: PLC0415

    from ..collect import collect  # noqa: PLC0415
    from ..evaluate import parse_benchmarks, parse_methods, store  # noqa: PLC0415

    benchmarks = parse_benchmarks(options.benchmarks)
    parse_methods(options.methods, layers=48)  # a slip is told before the model loads
    first = PartialState().is_main_process  # before the model: each process takes its own GPU
    loaded, out = load_model(options), results_of(options)
    methods = parse_methods(options.methods, loaded.model.config.get_text_config().num_hidden_layers)
    sizes = (options.limit, options.batch, options.max_new_tokens)
    with resumable():
        collect(loaded, benchmarks, options.collectors, out, methods, *sizes)
    if first:
        store.note_command(out, *options.collectors)
        print(f"Written to {out}; draw it with: decomoe figures --results {out} --out FOLDER")
    return 0
