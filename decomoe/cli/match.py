"""`decomoe match`: methods at equal cost."""

import argparse
from typing import TYPE_CHECKING, Any

from .common import add_data, check_counts, load_model

if TYPE_CHECKING:
    from ..evaluate.match import Cost


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    match = commands.add_parser("match", help="find how strong methods must be to cost as much as another one")
    match.set_defaults(run=run)
    match.add_argument("--methods", nargs="+", required=True, metavar="NAME[:KEY=VALUE,...]", help="those to match")
    match.add_argument("--to", default="decomoe", metavar="NAME[:KEY=VALUE,...]", help="the one to match (decomoe)")
    add_data(match, "drawn:64", "calibration questions to count FLOPs on, such as drawn:64 easy-vqa:64")
    match.add_argument("--batch", type=int, default=32, help="questions at once")
    match.add_argument("--max-new-tokens", type=int, default=64)
    return match


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    check_counts(options, "batch", "max_new_tokens")
    from ..benchmarks import BENCHMARKS  # noqa: PLC0415
    from ..calibrate.data import load_questions  # noqa: PLC0415
    from ..evaluate import at_strength, cost_of, matched, parse_method, parse_methods  # noqa: PLC0415

    specs = list(parse_methods(options.methods, layers=48))
    parse_method(options.to, layers=48)
    cases = [question.case for question in load_questions(options.data, BENCHMARKS, seed=0)]
    loaded, sizes = load_model(options), (options.batch, options.max_new_tokens)
    for spec in specs:
        at_strength(spec, 0.5, loaded)  # what can't be matched is told before the work
    to = parse_method(options.to, loaded.model.config.get_text_config().num_hidden_layers)
    target = cost_of(loaded, cases, to, *sizes)
    found = [_said(options.to, target, target)]
    found += [_said(*matched(loaded, cases, spec, target, *sizes), target) for spec in specs]
    print("--methods", *found)
    return 0


def _said(spec: str, cost: "Cost", target: "Cost") -> str:
    """Print what a method costs as soon as it is known; the method."""
    from ..evaluate import missed  # noqa: PLC0415

    note = ", the nearest that it can" if missed(spec, cost, target) else ""
    print(
        f"{spec}: FLOPs against dense: {cost['executed']:.3f} executed, {cost['sparse']:.3f} sparse{note}", flush=True
    )
    return spec
