"""`decomoe cases`: the telling cases among collected forced exits, with their pictures."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .common import add_benchmarks


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    cases = commands.add_parser("cases", help="find telling cases in what 'collect' wrote; no model is needed")
    cases.set_defaults(run=run)
    cases.add_argument("--results", type=Path, default=Path("results/mini"), help="of 'collect' (results/mini)")
    add_benchmarks(cases)
    cases.add_argument("--out", type=Path, help="folder for the cases as Markdown and JSON, with their pictures")
    return cases


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    from ..collect.cases import KINDS, found_in, markdown, picture_of, told_of  # noqa: PLC0415
    from ..evaluate import parse_benchmarks, store  # noqa: PLC0415

    benchmarks = parse_benchmarks(options.benchmarks)
    found = found_in(options.results, [benchmark for benchmark, _ in benchmarks])
    told = [told_of(one, f"case{number}.png") for number, one in enumerate(found, 1)]
    text = "\n".join(map(markdown, told))
    print(text)
    if len(found) < KINDS:
        print(f"decomoe: {len(found)} of {KINDS} kinds of case found; more questions may hold others", file=sys.stderr)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for one, shown in zip(found, told, strict=True):
            picture_of(one, benchmarks).save(options.out / shown["picture"], optimize=True)
        store.write(options.out / "cases.json", json.dumps(told, indent=1) + "\n")
        store.write(options.out / "cases.md", text)
    return 0
