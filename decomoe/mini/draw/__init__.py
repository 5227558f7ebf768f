"""Pictures with questions and true answers, drawn from a seed: what the mini model is trained and tested on.

One kind of picture a file. Every picture also knows which thing and which colour lies under each visual token; vision
pre-training learns from that. Training never shows some combinations of shape and colour, some typefaces and one style
of pictograms, so that what the model makes of them can be measured (`UNSEEN`).
"""

import random
from collections.abc import Callable
from dataclasses import replace

from ..photos import Photos
from .base import COLORS, PLACES, SHAPES, THINGS, TINTS, TOKEN, Picture, Question, background
from .chart import draw_chart
from .objects import draw_objects
from .photo import draw_photo
from .shape import draw_shape
from .table import draw_table
from .text import draw_text

__all__ = [
    "COLORS",
    "KINDS",
    "PLACES",
    "SHAPES",
    "SIZES",
    "THINGS",
    "TINTS",
    "TOKEN",
    "UNSEEN",
    "Picture",
    "Question",
    "draw",
]

# (width, height) in pixels: 64 to 256 visual tokens, small pictures more often
SMALL = ((128, 128), (144, 128), (128, 144), (160, 112), (112, 160), (160, 128), (128, 160))
MIDDLE = ((160, 160), (192, 128), (128, 192), (192, 144), (144, 192))
LARGE = ((192, 192), (256, 160), (160, 256), (256, 192), (192, 256), (256, 256))
SIZES = (*SMALL, *MIDDLE, *LARGE)

KINDS: dict[str, tuple[int, Callable[..., None]]] = {  # weight, and what draws it
    "objects": (40, draw_objects),
    "text": (20, draw_text),
    "chart": (9, draw_chart),
    "table": (7, draw_table),
    "shape": (4, draw_shape),
    "photo": (20, draw_photo),
}
UNSEEN = {"combinations": "objects", "style": "objects", "typefaces": "text"}  # and the kind of picture that shows it


def pick_size(rng: random.Random) -> tuple[int, int]:
    """A size from `SIZES`."""
    return rng.choice(rng.choices((SMALL, MIDDLE, LARGE), (16, 3, 1))[0])


def draw(
    seed: int,
    size: tuple[int, int] | None = None,
    kind: str | None = None,
    unseen: str | None = None,
    photos: Photos | None = None,
) -> Picture:
    """The picture of `seed`, always the same one.

    Args:
        seed: any integer.
        size: (width, height) in pixels, multiples of 16; by default one of `SIZES`, by the seed.
        kind: of `KINDS`; by default by the seed. Photos are only drawn if there are `photos`.
        unseen: of `UNSEEN`, what training never shows.
    """
    rng = random.Random(seed)
    size = size or pick_size(rng)
    kinds = [name for name in KINDS if photos or name != "photo"]
    kind = kind or UNSEEN.get(unseen or "") or rng.choices(kinds, [KINDS[name][0] for name in kinds])[0]
    picture = Picture(background(rng, size))
    if kind == "photo":
        if photos is None:
            raise ValueError("Photos can't be drawn: pass `photos`.")
        draw_photo(rng, picture, photos)
    else:
        KINDS[kind][1](rng, picture, unseen)
    picture.questions = [_carelessly(rng, question) for question in picture.questions]
    return picture


def _carelessly(rng: random.Random, question: Question) -> Question:
    """One question in ten as people type it: no capitals, perhaps no question mark."""
    if question.kind == "choice" or rng.random() > 0.1:
        return question
    return replace(question, text=question.text.lower().rstrip("?." if rng.random() < 0.5 else "."))
