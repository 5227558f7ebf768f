"""`decomoe serve`: the page."""

import argparse
from typing import Any

from .common import load_model


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    serve = commands.add_parser("serve", help="open the page")
    serve.set_defaults(run=run)
    serve.add_argument("--port", type=int, default=None)
    return serve


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    from ..ui.page import serve  # noqa: PLC0415

    serve(load_model(options), options.port)
    return 0
