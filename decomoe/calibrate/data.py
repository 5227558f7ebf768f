"""The questions to calibrate on: chosen by name, shuffled, and split into parts that share no picture."""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..benchmarks import Benchmark, Case

PAPER = {"fit": 1.0, "tune": 1.0}  # relative sizes of the parts
GUARANTEED = {"fit": 2.0, "tune": 1.0, "hold": 2.0}
WANTED = re.compile(r"(?P<name>[^:=]+)(:(?P<count>\d+))?(=(?P<source>.+))?")


@dataclass(frozen=True)
class Question:
    """A case, and the benchmark whose rule scores its answers."""

    case: Case
    benchmark: Benchmark

    def right(self, answer: str) -> bool:
        return self.benchmark.right(self.case, answer)

    @cached_property
    def picture(self) -> str:
        """Identifies the picture by its pixels: data sets repeat pictures, and folders change."""
        return hashlib.sha256(self.case.picture().tobytes()).hexdigest()


def load_parts(
    wanted: Sequence[str], benchmarks: Mapping[str, Benchmark], seed: int, guaranteed: bool
) -> dict[str, list[Question]]:
    """The calibration questions of some benchmarks, in parts: halves like the paper's, or with a part held out.

    Raises:
        ValueError: see `load_questions`.
    """
    return split(load_questions(wanted, benchmarks, seed), GUARANTEED if guaranteed else PAPER)


def load_questions(wanted: Sequence[str], benchmarks: Mapping[str, Benchmark], seed: int) -> list[Question]:
    """The calibration questions of some benchmarks, shuffled.

    Args:
        wanted: "NAME[:COUNT][=SOURCE]" each, such as "drawn:1200" or "photos:400=pictures/mine"; all without a count.

    Raises:
        ValueError: it can't be read, there is no such benchmark, or it has fewer questions.
    """
    order = random.Random(seed)
    questions: list[Question] = []
    for item in wanted:
        match = WANTED.fullmatch(item)
        if match is None:
            raise ValueError(f"Data is given as NAME[:COUNT][=SOURCE], such as drawn:1200, not as '{item}'.")
        name, source = match["name"], match["source"]
        if name not in benchmarks:
            raise ValueError(f"There is no benchmark '{name}'; there are: {', '.join(benchmarks)}.")
        cases = list(benchmarks[name].load("calibration", source))
        count = int(match["count"] or len(cases))
        if not 0 < count <= len(cases):
            raise ValueError(f"'{name}' has {len(cases)} calibration questions; ask for 1 to that many, not {count}.")
        questions += [Question(case, benchmarks[name]) for case in order.sample(cases, count)]
    order.shuffle(questions)
    if len({question.case.id for question in questions}) < len(questions):
        raise ValueError("Some questions were asked for twice; name each benchmark once.")
    return questions


def split(questions: Sequence[Question], shares: Mapping[str, float]) -> dict[str, list[Question]]:
    """Parts of about these relative sizes. All questions about one picture go to one part.

    A part called "hold" takes one question a picture: what is tested on it counts independent questions. Inside a
    part, questions with answers of like length stand together, so that few rows of a batch wait for others.
    """
    pictures: dict[str, list[Question]] = {}
    for question in questions:
        pictures.setdefault(question.picture, []).append(question)
    parts: dict[str, list[Question]] = {name: [] for name in shares}
    for about_one in pictures.values():
        name = min(shares, key=lambda name: len(parts[name]) / shares[name])
        parts[name] += about_one[:1] if name == "hold" else about_one
    return {name: sorted(part, key=lambda question: len(question.case.answer)) for name, part in parts.items()}
