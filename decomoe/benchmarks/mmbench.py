"""MMBench (Liu et al., 2023): 1164 multiple-choice questions of twenty kinds, its English dev set.

Accuracy is "vanilla": every question is asked once. The leaderboard's CircularEval asks it again for every rotation of
the options and wants all answers right; the rows for that, whose index is a million and more, are left out. Columns and
that convention: lmms-eval, tasks/mmbench. The test set is published without answers.
"""

from .base import Case
from .choices import ask, right
from .rows import Picture, Published, Row

OPTIONS = ("A", "B", "C", "D")
CIRCULAR = 1_000_000


def case(row: Row, id: str, picture: Picture) -> Case | None:
    if row["index"] >= CIRCULAR:
        return None
    options = tuple(filter(None, (_text(row[letter]) for letter in OPTIONS)))
    question = ask(row["question"], options, hint=_text(row["hint"]))
    return Case(f"mmbench/{row['index']}", picture, question, row["answer"], row["category"], options=options)


def _text(value: object) -> str:
    """What a cell holds; those without text hold None, a NaN or the word nan."""
    return "" if value is None or str(value) == "nan" else str(value)


COLUMNS = ("index", "question", "hint", *OPTIONS, "answer", "category")
MMBENCH = Published("mmbench", "lmms-lab-encoder/MMBench", COLUMNS, case, "dev", configs=("en",)).scored_by(right)
