"""ScienceQA (Lu et al., 2022): school questions with several options; the 2017 of the test set that have a picture.

Columns and prompt: lmms-eval, tasks/scienceqa (the configuration ScienceQA-IMG).
"""

from string import ascii_uppercase

from .base import Case
from .choices import ask, right
from .rows import Picture, Published, Row


def case(row: Row, id: str, picture: Picture) -> Case:
    question = ask(row["question"], row["choices"], hint=f"Context: {row['hint']}" if row["hint"] else "")
    answer = ascii_uppercase[row["answer"]]
    return Case(id, picture, question, answer, row["subject"], options=tuple(row["choices"]))


COLUMNS = ("question", "choices", "answer", "hint", "subject")
SCIENCEQA = Published(
    "scienceqa", "lmms-lab-encoder/ScienceQA", COLUMNS, case, calibration="train", configs=("ScienceQA-IMG",)
).scored_by(right)
