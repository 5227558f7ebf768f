"""`decomoe ask`: one question about one picture."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..difference import differences
from ..images import load_image
from .common import add_offload, check_counts, load_model, offload

if TYPE_CHECKING:
    from ..answer import Token
    from ..methods import Method
    from ..trace import Trace


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    ask = commands.add_parser("ask", help="ask a question about a picture")
    ask.set_defaults(run=run)
    ask.add_argument("image", type=Path)
    ask.add_argument("question")
    ask.add_argument(
        "--method",
        default="decomoe",
        metavar="NAME[:KEY=VALUE,...]",
        help="decomoe, which the switches below are for, dense, or another, such as fastv:prune=0.75",
    )
    ask.add_argument("--compare", action="store_true", help="dense and the method, with differences")
    ask.add_argument("--p", type=float, help="share of routed mass that the expert prefix covers (calibrated: 0.7)")
    ask.add_argument("--prefix", type=int, help="a fixed number of experts instead of --p")
    ask.add_argument("--keep-ratio", type=float, help="a fixed share of the experts instead of --p")
    ask.add_argument("--order", choices=["rcep", "native", "random"], help="order of the experts (rcep)")
    ask.add_argument("--seed", type=int, help="of --order random (0)")
    ask.add_argument("--drop", action="store_true", help="drop routes outside the prefix instead of re-picking")
    ask.add_argument("--purge-kv", action="store_true", help="layers up to the exit lose their visual KV for decode")
    ask.add_argument("--exit-after", type=int, metavar="N", help="visual tokens leave after layer N, counted from 0")
    ask.add_argument("--theta", type=float, help="the gate's threshold (calibrated by default)")
    ask.add_argument(
        "--no-savb",
        action="store_true",
        help="no gate: with RCEP a fixed exit at the paper's relative depth (28 of 48), without RCEP no exit at all",
    )
    ask.add_argument("--no-rcep", action="store_true", help="all experts everywhere")
    add_offload(ask)
    ask.add_argument("--max-new-tokens", type=int, default=64)
    ask.add_argument("--json", action="store_true", help="print one JSON line, the trace, instead of the answer")
    return ask


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    image = load_image(options.image)  # before the model: a bad picture is told at once
    if not options.question.strip():
        raise ValueError("The question is empty; ask something about the picture.")
    check_counts(options, "max_new_tokens")
    _methods(options, layers=48)  # a slip is told before the model loads
    loaded = load_model(options)
    from ..answer import ask  # noqa: PLC0415

    traces = []
    methods = _methods(options, loaded.model.config.get_text_config().num_hidden_layers)
    if options.offload_suffix:
        offload(loaded.model, loaded.calibration, methods, options.device)
    for method in methods if options.compare else []:  # warm-up: a first forward is slow, whoever goes first
        ask(loaded, image, options.question, method, max_new_tokens=2)
    for method in methods:
        if options.compare and not options.json:
            print(f"{method.name}: ", end="", flush=True)
        show = _Printer(quiet=options.json)
        trace = ask(loaded, image, options.question, method, max_new_tokens=options.max_new_tokens, on_token=show).trace
        traces.append(trace)
        print(trace.to_json() if options.json else f"\n  {summary(trace)}", flush=True)
    if options.compare and not options.json:
        print(f"difference: {difference(traces[0].answer, traces[1].answer)}")
    return 0


def _methods(options: argparse.Namespace, layers: int) -> "list[Method]":
    from ..evaluate import parse_method  # noqa: PLC0415
    from ..methods import DecoMoE, Dense, from_toggles  # noqa: PLC0415

    decomoe = from_toggles(
        layers,
        savb=not options.no_savb,
        rcep=not options.no_rcep,
        exit_after=options.exit_after,
        theta=options.theta,
        p=options.p,
        prefix=options.prefix,
        keep_ratio=options.keep_ratio,
        order=options.order or "rcep",
        seed=options.seed or 0,
        outside="drop" if options.drop else "reroute",
        earlier_kv="purge" if options.purge_kv else "keep",
    )
    if options.method != DecoMoE.name and decomoe != from_toggles(layers):
        raise ValueError(
            f"The switches are for plain decomoe, not for '{options.method}'; write them as NAME:KEY=VALUE,KEY=VALUE."
        )
    method = decomoe if options.method == DecoMoE.name else parse_method(options.method, layers)
    return [Dense(), method] if options.compare else [method]


class _Printer:
    """Prints what is new in a growing text."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.shown = quiet, 0

    def __call__(self, token: "Token") -> None:
        if not self.quiet:
            print(token.text[self.shown :], end="", flush=True)
            self.shown = len(token.text)


def summary(trace: "Trace") -> str:
    """One line for people."""
    exit_after = "no exit" if trace.exit_after is None else f"exit after layer {trace.exit_after} of {trace.layers}"
    left = trace.live[-1] - trace.tokens.text
    if trace.exit_after is None and left < trace.tokens.visual:
        exit_after = f"{left} of {trace.tokens.visual} visual tokens left"
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
    pieces = []
    for left, right, same in differences(dense, ours):
        pieces += [left] if same else [f"[-{left}-]"] * bool(left) + [f"{{+{right}+}}"] * bool(right)
    return " ".join(pieces)
