"""POPE (Li et al., 2023): is an object in the picture? 9000 questions about 500 pictures of COCO.

Columns and prompt: lmms-eval, tasks/pope. Accuracy and F1 are over its three ways to choose absent objects together.
"""

from .base import Case
from .rows import Picture, Published, Row

PROMPT = "Answer the question using a single word or phrase."


def case(row: Row, id: str, picture: Picture) -> Case:
    id, group = f"pope/{row['category']}/{row['question_id']}", f"pope/{row['image_source']}"
    return Case(id, picture, f"{row['question'].strip()}\n{PROMPT}", row["answer"].strip().lower(), "presence", group)


def parsed(answer: str) -> str:
    """Everything is yes that does not deny in its first sentence: the rule of POPE's evaluate.py (AoiDragon/POPE)."""
    words = answer.split(".", 1)[0].replace(",", "").split()
    return "no" if {"No", "no", "not"} & set(words) else "yes"


def right(case: Case, answer: str) -> bool:
    return parsed(answer) == case.answer


COLUMNS = ("category", "question_id", "question", "answer", "image_source")
POPE = Published("pope", "lmms-lab-encoder/POPE", COLUMNS, case, calibration="test").scored_by(right)
