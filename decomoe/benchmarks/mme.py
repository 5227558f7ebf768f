"""MME (Fu et al., 2023): 2374 questions for yes or no in fourteen subtasks, two about each picture.

Columns: lmms-eval, tasks/mme. Its questions end with "Please answer yes or no." themselves.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

from .base import Case
from .rows import Picture, Published, Row, digest

COGNITION = ("code_reasoning", "commonsense_reasoning", "numerical_calculation", "text_translation")


def case(row: Row, id: str, picture: Picture) -> Case:
    question, kind = row["question"].strip(), row["category"]
    group = f"mme/{kind}/{row['question_id']}"  # of a picture, though called a question's
    return Case(f"{group}/{digest(question.encode())}", picture, question, row["answer"].strip().lower(), kind, group)


def parsed(answer: str) -> str:
    """The word among the first four characters, or a letter alone: the rule of MME's own script (in lmms-eval too)."""
    text = answer.lower().strip().replace(".", "")
    return {"y": "yes", "n": "no"}.get(text) or next((word for word in ("yes", "no") if word in text[:4]), "other")


def right(case: Case, answer: str) -> bool:
    return parsed(answer) == case.answer


def scores(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """MME's own scores, from the records of an evaluation.

    Returns:
        by subtask the percentage of questions that are right plus that of pictures with both right ("accuracy+"), at
        most 200; and their sums, "perception" and "cognition". Pictures with one record only don't count.
    """
    subtasks: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        subtasks[record["kind"]][record["group"]].append(record["right"])
    found = {}
    for subtask, pictures in subtasks.items():
        pairs = [pair for pair in pictures.values() if len(pair) == 2]
        if pairs:
            found[subtask] = 100 * mean(sum(pair) / 2 + all(pair) for pair in pairs)
    cognition = sum(found.get(subtask, 0.0) for subtask in COGNITION)
    return {**found, "perception": sum(found.values()) - cognition, "cognition": cognition}


COLUMNS = ("question_id", "question", "answer", "category")
MME = Published("mme", "lmms-lab-encoder/MME", COLUMNS, case, calibration="test").scored_by(right)
