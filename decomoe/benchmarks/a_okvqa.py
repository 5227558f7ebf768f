"""A-OKVQA (Schwenk et al., 2022), multiple choice: questions that need knowledge of the world, 1145 for validation.

Columns: the dataset's own repository (allenai/aokvqa) and HuggingFaceM4/A-OKVQA. The answers of its test set are not
public, so its validation set is the test here.
"""

from string import ascii_uppercase

from .base import Case
from .choices import ask, right
from .rows import Picture, Published, Row


def case(row: Row, id: str, picture: Picture) -> Case:
    answer, options = ascii_uppercase[row["correct_choice_idx"]], tuple(row["choices"])
    return Case(f"a-okvqa/{row['question_id']}", picture, ask(row["question"], options), answer, options=options)


COLUMNS = ("question_id", "question", "choices", "correct_choice_idx")
A_OKVQA = Published("a-okvqa", "HuggingFaceM4/A-OKVQA", COLUMNS, case, "validation", "train").scored_by(right)
