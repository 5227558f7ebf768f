"""Drawn questions as cases: which seeds are for what."""

from ..calibrate.cases import Case
from .draw import draw

# Training draws seeds from 1 000 000 up (`train.TRAIN_SEEDS`); nothing below is ever trained on.
TEST_SEED, CALIBRATION_SEED = 0, 500_000


def drawn_cases(first_seed: int, count: int, per_picture: int = 4, describe: bool = False) -> list[Case]:
    """`count` questions about fresh pictures from `first_seed` on; without the long "describe" ones by default."""
    cases: list[Case] = []
    seed = first_seed
    while len(cases) < count:
        picture = draw(seed)
        asked = [q for q in picture.questions if describe or q.kind != "describe"][:per_picture]
        cases += [Case(f"drawn/{seed}/{q.kind}", picture.image, q.text, q.answer) for q in asked]
        seed += 1
    return cases[:count]
