"""easy-VQA (Victor Zhou, 2019; MIT): questions about one coloured shape, 9673 of them in the test set."""

import json
import random
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..images import load_image
from .base import Benchmark, Case, Split

CALIBRATION_CASES = 2000  # of the train set's 38 575


def load(split: Split, source: str | None = None) -> list[Case]:
    """All test questions, or a fixed sample of the train questions.

    Args:
        source: a folder like the `data` of the Python package easy-vqa; by default the installed package's.

    Raises:
        ValueError: the package is missing, or the folder is laid out differently.
    """
    part = "test" if split == "test" else "train"
    folder = (Path(source) if source else _installed()) / part
    try:
        rows = json.loads((folder / "questions.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"easy-VQA needs {folder}/questions.json and {folder}/images, which are not there.") from None
    numbers = list(range(len(rows)))
    if split == "calibration":
        numbers = random.Random(0).sample(numbers, min(CALIBRATION_CASES, len(rows)))
    cases = []
    for number in numbers:
        question, answer, image = rows[number]
        picture = partial(load_image, folder / "images" / f"{image}.png")
        kind, group = _kind(question, answer), f"easy-vqa/{part}/image {image}"
        cases.append(Case(f"easy-vqa/{part}/{number}", picture, question, answer, kind, group))
    return cases


def _installed() -> Path:
    package = find_spec("easy_vqa")
    if package is None or package.origin is None:
        raise ValueError("easy-VQA comes in a package: pip install easy-vqa, or give a folder: easy-vqa=FOLDER.")
    return Path(package.origin).parent / "data"


def _kind(question: str, answer: str) -> str:
    words = question.rstrip("?").split()
    if answer in ("yes", "no"):
        return "absence" if "not" in words or "no" in words else "presence"
    return "color" if "color" in words else "shape"


EASY_VQA = Benchmark("easy-vqa", load)
