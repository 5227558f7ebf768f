"""What several commands need."""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..answer import Loaded
    from ..benchmarks import Benchmark
    from ..calibration import Calibration
    from ..methods import Method


def load_model(options: argparse.Namespace, calibrated: bool = True) -> "Loaded":
    """The model of `--model`, with the calibration of `--calibration` unless `calibrated` is off.

    Under `--offload-suffix` it stays in host memory until `offload`, as it may not fit its device as a whole.

    Raises:
        ValueError: it can't be loaded.
    """
    from transformers.utils import logging  # noqa: PLC0415 (seconds more; not for a bad picture)

    from .. import families  # noqa: PLC0415
    from ..answer import MINI, Loaded, load  # noqa: PLC0415

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        source = options.model or MINI
        if not calibrated:
            return Loaded(*families.load_model(source, options.device))
        if getattr(options, "offload_suffix", False):
            dtype = families.default_dtype(options.device or families.default_device())
            return load(source, options.calibration, "cpu", dtype)
        return load(source, options.calibration, options.device)
    except OSError as error:
        raise ValueError(f"Can't load the model '{options.model or MINI}': {str(error).splitlines()[0]}") from error


def add_benchmarks(command: argparse.ArgumentParser) -> None:
    """Add `--benchmarks`, which `evaluate.parse_benchmarks` reads."""
    command.add_argument(
        "--benchmarks",
        nargs="+",
        default=["drawn"],
        metavar="NAME[=FOLDER]",
        help="drawn, drawn-pictures, drawn-combinations, drawn-style, drawn-typefaces, easy-vqa, photos, mmbench, "
        "scienceqa, ai2d, a-okvqa, mmmu, hallusionbench, pope, mme",
    )


def add_results(command: argparse.ArgumentParser, batch: int) -> None:
    """Add which questions are asked, how many at once (`batch`), and where the results go; `prepared` reads it."""
    add_benchmarks(command)
    command.add_argument("--limit", type=int, help="questions a benchmark, from a fixed random order; all by default")
    command.add_argument("--out", type=Path, help="folder for the results (results/MODEL)")
    command.add_argument("--batch", type=int, default=batch, help="questions at once")
    command.add_argument("--max-new-tokens", type=int, default=64)


def prepared(
    options: argparse.Namespace,
) -> "tuple[bool, Loaded, Sequence[tuple[Benchmark, str | None]], dict[str, Method]]":
    """Whether this process is the one that reports, the model, and what `--benchmarks` and `--methods` say.

    Raises:
        ValueError: an option does not fit; told before the model loads.
    """
    check_counts(options, "limit", "batch", "max_new_tokens")
    from accelerate import PartialState  # noqa: PLC0415

    from ..evaluate import parse_benchmarks, parse_methods  # noqa: PLC0415

    benchmarks = parse_benchmarks(options.benchmarks)
    parse_methods(options.methods, layers=48)
    first = PartialState().is_main_process  # before the model: each process takes its own GPU
    loaded = load_model(options)
    methods = parse_methods(options.methods, loaded.model.config.get_text_config().num_hidden_layers)
    return first, loaded, benchmarks, methods


def results_of(options: argparse.Namespace) -> Path:
    """The folder for the results."""
    from ..answer import MINI  # noqa: PLC0415

    return options.out or Path("results") / Path(options.model or MINI).resolve().name


def add_data(command: argparse.ArgumentParser, default: str, text: str) -> None:
    """Add `--data`, the calibration questions that `calibrate.data.load_questions` reads."""
    command.add_argument("--data", nargs="+", default=[default], metavar="NAME[:COUNT][=SOURCE]", help=text)


def add_offload(command: argparse.ArgumentParser) -> None:
    """Add `--offload-suffix`, which `offload` obeys."""
    command.add_argument(
        "--offload-suffix",
        action="store_true",
        help="keep only the experts of decomoe's prefix on the device, in layers after the earliest exit: its fixed "
        "number, or as many as hold p of the calibrated mass; others are fetched from host memory when they are needed",
    )


def offload(
    model: Any, calibration: "Calibration | None", methods: "Iterable[Method | None]", device: str | None
) -> None:
    """Leave in host memory the experts that lie behind the prefixes of all those `methods` that have prefixes, and move
    the rest of the model, and the gate, to the device.

    Raises:
        ValueError: there are none, the device has no room, or see `usual_prefixes`.
    """
    from ..experts import offload_suffix  # noqa: PLC0415
    from ..families import default_device, parts_of  # noqa: PLC0415
    from ..methods import DecoMoE  # noqa: PLC0415
    from ..methods.decomoe import usual_prefixes  # noqa: PLC0415

    parts, device = parts_of(model), device or default_device()
    if device == "auto":
        raise ValueError("--offload-suffix is for one device; name it with --device.")
    limited = [method for method in methods if isinstance(method, DecoMoE) and method.rcep]
    lengths = [usual_prefixes(method, parts, calibration) for method in limited]
    if not lengths:
        raise ValueError("--offload-suffix is for decomoe, whose prefix says which experts stay.")
    kept = [max(layer, key=lambda kept: kept or math.inf) for layer in zip(*lengths, strict=True)]
    offload_suffix(parts, kept, device)
    if calibration is not None and calibration.gate is not None:
        calibration.gate.to(device)


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C says that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        print("decomoe: stopped; the same command goes on from here", file=sys.stderr)
        raise
