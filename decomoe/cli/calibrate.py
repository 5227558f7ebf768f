"""`decomoe calibrate`: expert orders, exit gate, and what other methods need."""

import argparse
import json
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import add_data, check_counts, load_model, resumable

if TYPE_CHECKING:
    from ..calibration import Calibration

SWITCHES = {  # those that not every method takes
    "decomoe": ("every", "label", "p", "retain", "confidence", "max_new_tokens", "work"),
    "vtw": ("eta",),
    "dyvte": ("max_new_tokens", "work"),
    "modes": ("skip",),
}


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    calibrate = commands.add_parser("calibrate", help="make expert orders and exit gate for a model")
    calibrate.set_defaults(run=run)
    calibrate.add_argument("--out", type=Path, required=True, help="folder for the artifact")
    add_data(calibrate, "drawn:1200", "calibration questions, such as drawn:1200 easy-vqa:600 photos=FOLDER")
    calibrate.add_argument(
        "--method",
        choices=SWITCHES,
        default="decomoe",
        help="the others are added to the decomoe artifact in OUT, or else to the model's own; a new one drops them",
    )
    calibrate.add_argument("--eta", type=float, help="vtw: mean KL divergence that is fine (0.003)")
    calibrate.add_argument("--skip", type=float, help="modes: share of the routes to skip (0.5)")
    calibrate.add_argument("--every", type=int, help="a gate candidate every so many layers (4 of 48, 2 of 16)")
    calibrate.add_argument(
        "--label",
        choices=["right", "same"],
        help="the gate learns to keep right answers (the paper's way), or the same ones as dense, right or wrong",
    )
    calibrate.add_argument("--p", type=float, help="share of routed mass that the expert prefix covers (0.7)")
    calibrate.add_argument("--retain", type=float, help="guarantee that this share of answers stays the dense model's")
    calibrate.add_argument("--confidence", type=float, help="of that guarantee (0.95)")
    calibrate.add_argument("--max-new-tokens", type=int, help="of an answer (64)")
    calibrate.add_argument("--batch", type=int, default=8, help="questions at once")
    calibrate.add_argument("--seed", type=int, default=0, help="of the choice and the split of questions")
    calibrate.add_argument("--work", type=Path, help="folder for observations, shared by all machines (OUT.work)")
    return calibrate


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    _check_calibrate(options)
    from accelerate import PartialState  # noqa: PLC0415

    from ..benchmarks import BENCHMARKS  # noqa: PLC0415
    from ..calibrate import Settings, calibrate, gate_candidates, load_parts  # noqa: PLC0415
    from ..families import parts_of  # noqa: PLC0415

    PartialState(timeout=timedelta(days=7))  # before the model: each process takes its own GPU; the fast ones wait
    if options.method != "decomoe":
        return _calibrate_other(options)
    parts = load_parts(options.data, BENCHMARKS, options.seed, guaranteed=options.retain is not None)
    loaded = load_model(options, calibrated=False)
    settings = Settings(
        gate_candidates(parts_of(loaded.model), options.every),
        **_given(options, "label", "p", "retain", "confidence", "max_new_tokens", "batch"),
    )
    work = _work(options)
    with resumable():
        artifact = calibrate(loaded, parts, settings, work)
    if artifact is not None:
        artifact.provenance |= {"data": options.data, "seed": options.seed}
        artifact.save(options.out)
        print(calibration_summary(artifact))
        print(f"Written to {options.out}; the observations in {work} are for further runs, delete them when done.")
    return 0


def _work(options: argparse.Namespace) -> Path:
    return options.work or options.out.with_name(f"{options.out.name}.work")


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those options that were given; for the others the settings have their own values."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _calibrate_other(options: argparse.Namespace) -> int:
    from ..benchmarks import BENCHMARKS  # noqa: PLC0415
    from ..calibrate import OtherSettings, calibrate_other, load_questions  # noqa: PLC0415
    from ..calibration import META  # noqa: PLC0415

    questions = load_questions(options.data, BENCHMARKS, options.seed)
    options.calibration = options.out if (options.out / META).is_file() else None
    loaded = load_model(options)
    settings = OtherSettings(**_given(options, "eta", "skip", "max_new_tokens", "batch"))
    with resumable() if options.method == "dyvte" else nullcontext():
        artifact = calibrate_other(options.method, loaded, questions, settings, _work(options))
    if artifact is not None:
        artifact.provenance[options.method] |= {"data": options.data, "seed": options.seed}
        artifact.save(options.out)
        report = artifact.provenance[options.method]
        print(json.dumps({name: value for name, value in report.items() if name != "gate_loss"}))
        print(f"Written to {options.out}.")
    return 0


def _check_calibrate(options: argparse.Namespace) -> None:
    for name in {name for names in SWITCHES.values() for name in names} - {*SWITCHES[options.method]}:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not for --method {options.method}; leave it out.")
    check_counts(options, "every", "max_new_tokens", "batch")
    if options.out.is_file():
        raise ValueError(f"--out is a folder for the artifact, and '{options.out}' is a file.")
    for name in ("retain", "confidence"):
        if (value := getattr(options, name)) is not None and not 0 < value < 1:
            raise ValueError(f"--{name} must be above 0 and below 1, not {value}.")
    if options.p is not None and not 0 < options.p <= 1:
        raise ValueError(f"--p must be above 0 and at most 1, not {options.p}.")
    if options.eta is not None and options.eta <= 0:
        raise ValueError(f"--eta must be above 0, not {options.eta}.")
    if options.skip is not None and not 0 < options.skip < 1:
        raise ValueError(f"--skip must be above 0 and below 1, not {options.skip}.")
    if options.confidence is not None and options.retain is None:
        raise ValueError("--confidence is of a guarantee; say with --retain what to guarantee.")
    if options.p is not None and options.retain is not None:
        raise ValueError("--retain chooses p; leave --p out.")


def calibration_summary(artifact: "Calibration") -> str:
    """What was chosen, and what it does, for people."""
    guarantee, sizes = artifact.provenance["guarantee"], {k: len(v) for k, v in artifact.provenance["ids"].items()}
    part, measured = list(artifact.provenance["measured"].items())[-1]
    lines = [
        f"theta {artifact.theta}, p {artifact.p}: on the {sizes[part]} questions of part '{part}' "
        f"{measured['agreement']:.1%} of answers are the dense model's; accuracy {measured['accuracy']:.3f} "
        f"(dense {measured['dense_accuracy']:.3f}) at {measured['cost']:.2f} of its executed FLOPs. "
        f"With hindsight, each question's earliest fine exit, it would be {measured['hindsight']:.2f}."
    ]
    if artifact.theta > 1:
        lines.append("No threshold was good enough, so the gate never lets the picture go: give more questions.")
    elif not guarantee:
        lines.append("theta was chosen on these questions, which flatters it.")
    if guarantee:
        lines.append(
            f"With confidence {guarantee['confidence']}, at least {guarantee['retain']:.1%} of answers stay the dense "
            f"model's; assumed: {guarantee['assumption']}."
        )
        if measured["cost"] == 1:
            lines.append("Nothing cheaper than the dense model passed: ask for less, or give more held-out questions.")
    return "\n".join(lines)
