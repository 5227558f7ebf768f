"""MMMU (Yue et al., 2024): college questions of thirty subjects, 900 for validation; its test set has no answers.

Prompts and scoring: the authors' repository (MMMU-Benchmark/MMMU: mmmu/configs/llava1.5.yaml, utils/eval_utils.py).
Where nothing is chosen they guess; here the answer is wrong. Questions that refer to several pictures, at most 80 of
the 900, are left out, as in the evaluation of Cambrian-1.
"""

import re
from ast import literal_eval
from collections.abc import Sequence
from string import ascii_uppercase

from .base import Case
from .choices import ask
from .rows import Picture, Published, Row

OPEN_PROMPT = "Answer the question using a single word or phrase."
SUBJECTS = """
    Accounting Agriculture Architecture_and_Engineering Art Art_Theory Basic_Medical_Science Biology Chemistry
    Clinical_Medicine Computer_Science Design Diagnostics_and_Laboratory_Medicine Economics Electronics Energy_and_Power
    Finance Geography History Literature Manage Marketing Materials Math Mechanical_Engineering Music Pharmacy Physics
    Psychology Public_Health Sociology
""".split()
PUNCTUATION = " \n,.!?;:'"
LEAD_INS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
NUMBER = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d*\.?\d+(?:e[+-]?\d+)?")


def case(row: Row, id: str, picture: Picture) -> Case | None:
    if set(re.findall(r"<image (\d)>", row["question"] + row["options"])) - {"1"}:
        return None
    options = tuple(map(str, literal_eval(row["options"])))
    question = ask(row["question"], options) if options else f"{row['question']}\n{OPEN_PROMPT}"
    subject = row["id"].split("_", 1)[1].rpartition("_")[0]
    return Case(f"mmmu/{row['id']}", picture, question, row["answer"], subject, options=options)


def right(case: Case, answer: str) -> bool:
    """Whether the true option is chosen; of an open question, whether a true answer is in what is said."""
    if case.options:
        return chosen(answer, case.options) == case.answer
    truths = literal_eval(case.answer) if case.answer.startswith("[") else [case.answer]
    true = {form for truth in truths for form in forms(truth)}
    texts = [form for form in true if isinstance(form, str)]
    return any(
        form in true if isinstance(form, float) else any(text in form for text in texts) for form in said(answer)
    )


def chosen(answer: str, options: Sequence[str]) -> str | None:
    """The last letter in brackets; without any the last one alone; else the last option, in more than five words.

    A letter with a full stop counts too, as in lmms-eval.
    """
    text = f" {answer.strip(PUNCTUATION)} "
    letters = ascii_uppercase[: len(options)]
    rules = [(text, [form.format(letter) for letter in letters]) for form in ("({})", " {} ", " {}.")]
    if len(text.split()) > 5:
        rules.append((text.lower(), [option.lower() for option in options]))
    for where, wanted in rules:
        places = {where.rfind(part): letter for part, letter in zip(wanted, letters, strict=True)}
        if max(places) >= 0:
            return places[max(places)]
    return None


def said(answer: str) -> list[str | float]:
    """What an answer to an open question says: the ends of its lines, after words like "is", and the numbers there."""
    lines = answer.strip(PUNCTUATION).lower().splitlines()
    ends = []
    for number, line in enumerate(lines):
        words = (*LEAD_INS, "=") if number == len(lines) - 1 else LEAD_INS
        found = [line.rpartition(word)[2].strip(PUNCTUATION) for word in words if word in line]
        ends += [min(filter(None, found), key=len)] if any(found) else []
    return [form for end in ends or ["\n".join(lines)] for text in (end, *NUMBER.findall(end)) for form in forms(text)]


def forms(text: str) -> list[str | float]:
    """A number rounded to two places, or a text in lower case; a single character needs a space beside it."""
    text = text.strip().lower()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


COLUMNS = ("id", "question", "options", "answer")
MMMU = Published("mmmu", "MMMU/MMMU", COLUMNS, case, "validation", "dev", SUBJECTS, "image_1").scored_by(right)
