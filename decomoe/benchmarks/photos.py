"""Small photos: CIFAR-10 (Krizhevsky, 2009), whose test set has 10 000 of ten classes."""

import random
import re
from functools import partial

from PIL import Image

from ..mini.photos import CLASSES, DATASET, HELD_OUT, Photos, load_photos
from .base import Benchmark, Case, Split
from .rows import explained

QUESTION = "What is in the photo?"
SIDE = 128  # pixels; 32 in the data


def load(split: Split, source: str | None = None) -> list[Case]:
    """One question a photo; calibration's are those that training leaves out.

    Args:
        source: a Hub id or folder in the schema of `DATASET` (columns img {bytes, path} and label).

    Raises:
        ValueError: the package datasets or the data is missing.
    """
    part = "test" if split == "test" else f"train[-{HELD_OUT}:]"
    with explained("photos", source or DATASET):
        photos = load_photos(source, part)
    rows = list(range(len(photos)))
    if split == "calibration":
        random.Random(0).shuffle(rows)
    return [
        Case(f"photos/{split}/{row}", partial(enlarged, photos, row), QUESTION, CLASSES[photos.labels[row]], "photo")
        for row in rows
    ]


def enlarged(photos: Photos, row: int) -> Image.Image:
    """A photo as the mini model knows photos."""
    return photos[row][0].resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def right(case: Case, answer: str) -> bool:
    """Whether the one class that the answer names is the true one; "automobile", the dataset's word, is a car."""
    words = re.findall("[a-z]+", answer.lower().replace("automobile", "car"))
    return set(words) & set(CLASSES) == {case.answer}


PHOTOS = Benchmark("photos", load, right)
