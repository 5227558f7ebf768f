"""HallusionBench (Guan et al., 2024): 951 questions for yes or no about 346 figures that invite mistakes.

Columns: lmms-eval, tasks/hallusion_bench. Its 178 questions without a figure are not asked. The authors let GPT-4 judge
answers; here the rule of VLMEvalKit does.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

from .base import Case
from .rows import Picture, Published, Row

PROMPT = "Please answer yes or no."  # MME's; the questions don't say


def case(row: Row, id: str, picture: Picture) -> Case:
    kind = f"{row['category']}/{row['subcategory']}"
    group = f"hallusionbench/{kind}/{row['set_id']}/{row['figure_id']}"
    answer = "yes" if str(row["gt_answer"]) == "1" else "no"
    return Case(f"{group}/{row['question_id']}", picture, f"{row['question']}\n{PROMPT}", answer, kind, group)


def right(case: Case, answer: str) -> bool:
    """Whether the true one of "yes" and "no" is said and the other is not (VLMEvalKit, dataset/utils/yorn.py)."""
    return set(re.findall(r"\w+", answer.lower())) & {"yes", "no"} == {case.answer}


def scores(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """HallusionBench's own scores, from the records of an evaluation.

    Returns:
        percentages: "aAcc" of questions that are right, "fAcc" of figures with all questions right, "qAcc" of
        questions that are right on all figures they are asked about.
    """
    questions, figures, pairs = (defaultdict[tuple[str, ...], list[bool]](list) for _ in range(3))
    for record in records:
        *topic, figure, question = record["id"].split("/")
        for answers, key in ((questions, [figure, question]), (figures, [figure]), (pairs, [question])):
            answers[tuple(topic + key)].append(record["right"])
    found = {"aAcc": questions, "fAcc": figures, "qAcc": pairs}
    return {name: 100 * mean(map(all, answers.values())) for name, answers in found.items()}


COLUMNS = ("category", "subcategory", "set_id", "figure_id", "question_id", "question", "gt_answer")
HALLUSIONBENCH = Published("hallusionbench", "lmms-lab-encoder/HallusionBench", COLUMNS, case, test="image").scored_by(
    right
)
