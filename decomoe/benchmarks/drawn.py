"""Questions about drawn pictures: which seeds are for what, and the sets of what training never draws."""

from functools import partial

from PIL import Image

from ..mini.draw import UNSEEN, draw
from .base import Benchmark, Case, Split

# Training draws seeds from 1 000 000 up (`mini.train.TRAIN_SEEDS`); nothing below is ever trained on.
TEST_SEED, CALIBRATION_SEED = 0, 500_000
FRESH_SEEDS = range(700_000, 1_000_000)  # for people who want to see a picture that nothing has seen


def drawn_image(seed: int, unseen: str | None) -> Image.Image:
    return draw(seed, unseen=unseen).image


def drawn_cases(first_seed: int, count: int, per_picture: int = 4, unseen: str | None = None) -> list[Case]:
    """`count` questions about fresh pictures from `first_seed` on."""
    name = f"drawn-{unseen}" if unseen else "drawn"
    cases: list[Case] = []
    seed = first_seed
    while len(cases) < count:
        picture, group = partial(drawn_image, seed, unseen), f"{name}/{seed}"
        cases += [
            Case(f"{group}/{number}", picture, q.text, q.answer, q.kind, group)
            for number, q in enumerate(draw(seed, unseen=unseen).questions[:per_picture])
        ]
        seed += 1
    return cases[:count]


def _load(count: int, unseen: str | None, split: Split, source: str | None, per_picture: int = 4) -> list[Case]:
    if source is not None:
        raise ValueError(f"Drawn pictures are made by the code and are in no folder; leave '={source}' out.")
    if split == "calibration":  # few questions a picture: a guarantee counts pictures
        return drawn_cases(CALIBRATION_SEED, 2 * count, per_picture=2, unseen=unseen)
    return drawn_cases(TEST_SEED, count, per_picture, unseen)


DRAWN = [
    Benchmark("drawn", partial(_load, 2000, None)),
    Benchmark("drawn-pictures", partial(_load, 200, None, per_picture=20)),  # few pictures, all that can be asked
    *(Benchmark(f"drawn-{unseen}", partial(_load, 500, unseen)) for unseen in UNSEEN),
]
