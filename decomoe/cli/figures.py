"""`decomoe figures`: the paper's figures and tables from results."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    figures = commands.add_parser("figures", help="draw the paper's figures from results; no model is needed")
    figures.set_defaults(run=run)
    figures.add_argument("--results", type=Path, required=True, help="a folder of collect and evaluate, or of tables")
    figures.add_argument("--out", type=Path, required=True, help="folder for figures and tables")
    figures.add_argument("--only", nargs="+", metavar="NAME", help="such as fig3a fig8b; all by default")
    figures.add_argument(
        "--formats", nargs="*", choices=("html", "svg", "png"), default=("html", "svg"), help="html svg by default"
    )
    return figures


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    from analysis import draw  # noqa: PLC0415 (pandas and plotly take seconds more)

    for path in draw.draw(options.results, options.out, options.only, options.formats):
        print(path)
    return 0
