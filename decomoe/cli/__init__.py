"""The command line, one command a file."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from PIL import Image

from . import ask, bench, calibrate, cases, collect, evaluate, figures, match, serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    options = parser().parse_args(arguments)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `load_image` says it in its own words
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has seen enough
        return 0
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
    except RuntimeError as error:
        from ..answer import is_out_of_memory  # noqa: PLC0415 (torch is there by now)

        if not is_out_of_memory(error):
            raise
        message = "The model ran out of memory; take a smaller model, or a smaller --batch where there is one."
    print(f"decomoe: {message}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    top = argparse.ArgumentParser(prog="decomoe", description="See, and cut, the waste in a multimodal MoE.")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    with_model = (ask, bench, calibrate, evaluate, collect, match, serve)
    commands = {command: command.add(subparsers) for command in with_model}
    for without_model in (cases, figures):
        without_model.add(subparsers)
    for command, options in commands.items():
        options.add_argument("--model", help="a folder or a Hub id; the mini model by default")
        options.add_argument("--device", help="cpu, cuda, cuda:1, or auto for several GPUs; a GPU if there is one")
        if command is not calibrate:
            options.add_argument("--calibration", help="a folder; by default the model's own")
    return top
