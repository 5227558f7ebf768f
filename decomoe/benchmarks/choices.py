"""Multiple choice: how to ask, and which option an answer chooses."""

import re
from collections.abc import Sequence
from string import ascii_uppercase

from .base import Case, normalize

PROMPT = "Answer with the option's letter from the given choices directly."  # LLaVA-1.5's; lmms-eval has it too


def ask(question: str, options: Sequence[str], hint: str = "") -> str:
    """The question with its options, a line each, as LLaVA-1.5 and lmms-eval write them."""
    lines = [f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options, strict=False)]
    return "\n".join([*([hint] if hint else []), question, *lines, PROMPT])


def chosen(answer: str, options: Sequence[str]) -> str | None:
    """The letter of the option that a free answer means, None if that is unclear.

    First comes what lmms-eval takes for ScienceQA and AI2D (tasks/scienceqa/utils.py, tasks/ai2d/utils.py): nothing
    but a letter, or a letter and a full stop at the start. The rest follows VLMEvalKit, MMBench's own evaluation code
    (vlmeval/utils/matching_util.py) without its language model as a judge: the only letter said, if it is among the
    last four words or after "answer is" or "option"; then the only option whose text the answer contains, unless the
    answer is far longer than the options. An answer that equals an option is that option.

    An A before a word may be the article. MMBench's code (also lmms-eval, tasks/mmbench/mmbench_evals.py) then takes no
    letter, but only in answers of more than three words; here in all, so that "A red car." is not option A.
    """
    letters = dict(zip(ascii_uppercase, options, strict=False))
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    said = letters.keys() & set(words)
    article = said == {"A"} and re.search(r"\bA\s+\w", answer)
    rules = (
        [words[0].upper()] if len(words) == 1 else [],
        [letter for letter, option in letters.items() if normalize(option) == normalize(answer)],
        re.findall(r"^\s*([A-Z])\.", answer),
        words[-4:] if len(said) == 1 and not article else [],
        re.findall(r"(?i:answer\s+is|option)\W+([A-Z])\b", answer),
        [letter for letter, option in letters.items() if option.lower() in answer.lower()]
        if len(answer) <= 2 * sum(map(len, options))
        else [],
    )
    for found in rules:
        meant = letters.keys() & set(found)
        if len(meant) == 1:
            return meant.pop()
    return None


def right(case: Case, answer: str) -> bool:
    """Whether the answer chooses the true option."""
    return chosen(answer, case.options) == case.answer
