"""`decomoe serve`: the page."""

import argparse
from typing import Any


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    serve = commands.add_parser("serve", help="open the page")
    serve.set_defaults(run=run)
    serve.add_argument("--port", type=int, default=None)
    return serve


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    print("Starting; torch and Gradio take some seconds to load.", flush=True)
    from ..answer import MINI  # noqa: PLC0415
    from ..ui.hosting import Host  # noqa: PLC0415
    from ..ui.page import serve  # noqa: PLC0415

    serve(Host(options.model or MINI, options.calibration, options.device), options.port)
    return 0
