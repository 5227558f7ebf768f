"""AI2D (Kembhavi et al., 2016): multiple-choice questions about school diagrams, 3088 in the test set.

Columns and prompt: lmms-eval, tasks/ai2d. Only the test set is published there.
"""

from string import ascii_uppercase

from .base import Case
from .choices import ask, right
from .rows import Picture, Published, Row


def case(row: Row, id: str, picture: Picture) -> Case:
    answer = ascii_uppercase[int(row["answer"])]  # a number, as text
    return Case(id, picture, ask(row["question"], row["options"]), answer, options=tuple(row["options"]))


AI2D = Published("ai2d", "lmms-lab-encoder/ai2d", ("question", "options", "answer"), case).scored_by(right)
