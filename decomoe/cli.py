"""The command line: `decomoe ask`, `decomoe calibrate`, `decomoe serve`."""

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from .images import load_image

if TYPE_CHECKING:
    from .ask import Loaded
    from .methods import Method
    from .trace import Trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `load_image` says it in its own words
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has seen enough
        return 0
    except (ValueError, OSError) as error:
        print(f"decomoe: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="decomoe", description="See, and cut, the waste in a multimodal MoE.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ask = commands.add_parser("ask", help="ask a question about a picture")
    ask.set_defaults(run=_ask)
    ask.add_argument("image", type=Path)
    ask.add_argument("question")
    ask.add_argument("--method", choices=["dense", "decomoe"], default="decomoe")
    ask.add_argument("--compare", action="store_true", help="dense and decomoe one after the other, with differences")
    ask.add_argument("--p", type=float, help="share of routed mass that the expert prefix covers (calibrated: 0.7)")
    ask.add_argument("--prefix", type=int, help="a fixed number of experts instead of --p")
    ask.add_argument("--keep-ratio", type=float, help="a fixed share of the experts instead of --p")
    ask.add_argument("--order", choices=["rcep", "native", "random"], default="rcep", help="order of the experts")
    ask.add_argument("--seed", type=int, default=0, help="of --order random")
    ask.add_argument("--drop", action="store_true", help="drop routes outside the prefix instead of re-picking")
    ask.add_argument("--purge-kv", action="store_true", help="layers up to the exit lose their visual KV for decode")
    ask.add_argument("--exit-after", type=int, metavar="N", help="visual tokens leave after layer N")
    ask.add_argument("--theta", type=float, help="the gate's threshold (calibrated by default)")
    ask.add_argument(
        "--no-savb",
        action="store_true",
        help="no gate: with RCEP a fixed exit at the paper's relative depth (28 of 48), without RCEP no exit at all",
    )
    ask.add_argument("--no-rcep", action="store_true", help="all experts everywhere")
    ask.add_argument("--max-new-tokens", type=int, default=64)
    ask.add_argument("--json", action="store_true", help="print one JSON line, the trace, instead of the answer")
    calibrate = commands.add_parser("calibrate", help="make expert orders and exit gate for a model")
    calibrate.set_defaults(run=_calibrate)
    calibrate.add_argument("--out", type=Path, required=True, help="folder for the artifact")
    calibrate.add_argument("--cases", type=int, default=1600, help="drawn questions; half train, half tune theta")
    calibrate.add_argument("--every", type=int, default=2, help="a gate candidate every so many layers (paper: 4)")
    serve = commands.add_parser("serve", help="open the page")
    serve.set_defaults(run=_serve)
    serve.add_argument("--port", type=int, default=None)
    for command in (ask, calibrate, serve):
        command.add_argument("--model", help="a folder or a Hub id; the mini model by default")
    for command in (ask, serve):
        command.add_argument("--calibration", help="a folder; by default the model's own")
    return parser


def _load(options: argparse.Namespace, calibrated: bool = True) -> "Loaded":
    from transformers.utils import logging  # noqa: PLC0415 (seconds; not for --help or a bad picture)

    from .ask import MINI, Loaded, load  # noqa: PLC0415
    from .families import load_model  # noqa: PLC0415

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        source = options.model or MINI
        return load(source, options.calibration) if calibrated else Loaded(*load_model(source))
    except OSError as error:
        raise ValueError(f"Can't load the model '{options.model or MINI}': {str(error).splitlines()[0]}") from error


def _methods(options: argparse.Namespace, layers: int) -> "list[Method]":
    from .methods import DecoMoE, Dense, from_toggles  # noqa: PLC0415

    decomoe = from_toggles(
        layers,
        savb=not options.no_savb,
        rcep=not options.no_rcep,
        exit_after=options.exit_after,
        theta=options.theta,
        p=options.p,
        prefix=options.prefix,
        keep_ratio=options.keep_ratio,
        order=options.order,
        seed=options.seed,
        outside="drop" if options.drop else "reroute",
        earlier_kv="purge" if options.purge_kv else "keep",
    )
    if options.compare:
        return [Dense(), decomoe]
    return [decomoe if options.method == DecoMoE.name else Dense()]


def _ask(options: argparse.Namespace) -> int:
    image = load_image(options.image)  # before the model: a bad picture is told at once
    if not options.question.strip():
        raise ValueError("The question is empty; ask something about the picture.")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, not {options.max_new_tokens}.")
    loaded = _load(options)
    from .ask import ask  # noqa: PLC0415

    traces = []
    methods = _methods(options, loaded.model.config.get_text_config().num_hidden_layers)
    for method in methods if options.compare else []:  # warm-up: a first forward is slow, whoever goes first
        ask(loaded, image, options.question, method, max_new_tokens=2)
    for method in methods:
        if options.compare and not options.json:
            print(f"{method.name}: ", end="", flush=True)
        show = _Printer(quiet=options.json)
        trace = ask(loaded, image, options.question, method, max_new_tokens=options.max_new_tokens, on_text=show).trace
        traces.append(trace)
        print(trace.to_json() if options.json else f"\n  {summary(trace)}", flush=True)
    if options.compare and not options.json:
        print(f"difference: {difference(traces[0].answer, traces[1].answer)}")
    return 0


class _Printer:
    """Prints what is new in a growing text."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.shown = quiet, 0

    def __call__(self, text: str) -> None:
        if not self.quiet:
            print(text[self.shown :], end="", flush=True)
            self.shown = len(text)


def summary(trace: "Trace") -> str:
    """One line for people."""
    exit_after = "no exit" if trace.exit_after is None else f"exit after layer {trace.exit_after} of {trace.layers}"
    tpot = "" if trace.tpot_s is None else f", TPOT {trace.tpot_s * 1000:.0f} ms"
    flops = trace.flops
    return (
        f"{exit_after} | mean prefix {trace.mean_prefix:.1f} of {trace.experts} experts | "
        f"TTFT {(trace.ttft_s or 0) * 1000:.0f} ms{tpot} | FLOPs against dense: "
        f"{flops.executed / flops.executed_dense:.2f} executed, {flops.sparse / flops.sparse_dense:.2f} sparse"
    )


def difference(dense: str, ours: str) -> str:
    """Where two answers differ: [-only dense-] {+only ours+}."""
    if dense == ours:
        return "none"
    left, right = dense.split(), ours.split()
    words = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            words += left[a:b]
        else:
            words += [f"[-{' '.join(left[a:b])}-]"] * (a < b) + [f"{{+{' '.join(right[c:d])}+}}"] * (c < d)
    return " ".join(words)


def _calibrate(options: argparse.Namespace) -> int:
    if options.cases < 20 or options.every < 1:
        raise ValueError("--cases must be at least 20 and --every at least 1.")
    loaded = _load(options, calibrated=False)
    from .calibrate import calibrate  # noqa: PLC0415
    from .families import parts_of  # noqa: PLC0415
    from .mini.cases import CALIBRATION_SEED, drawn_cases  # noqa: PLC0415

    parts = parts_of(loaded.model)
    candidates = [
        layer for layer in range(options.every - 1, len(parts.layers), options.every) if layer >= parts.first_exit
    ]
    if not candidates:
        raise ValueError(f"--every {options.every} leaves no layer of {len(parts.layers)} to ask the gate at.")
    artifact = calibrate(loaded, drawn_cases(CALIBRATION_SEED, options.cases), candidates)
    artifact.save(options.out)
    print(f"theta {artifact.theta}, {artifact.provenance['theta_report']}; written to {options.out}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from .ui.page import serve  # noqa: PLC0415

    serve(_load(options), options.port)
    return 0
