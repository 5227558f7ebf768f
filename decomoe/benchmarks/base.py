"""What a benchmark is: questions about pictures with known answers, and a rule that says which answers are right."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from PIL import Image

Split = Literal["test", "calibration"]


@dataclass(frozen=True)
class Case:
    """One question about one picture with its true answer.

    Attributes:
        id: where it comes from, such as "photos/test/17": for exclusion lists and to resume.
        picture: gives the picture when it is needed, so that thousands of cases need no memory.
        kind: groups cases in reports; "presence" asks for yes or no.
        group: shared by the questions about one picture, which intervals treat as one draw; the id if empty.
        options: what there is to choose from, if the answer is a letter.
    """

    id: str
    picture: Callable[[], Image.Image]
    question: str
    answer: str
    kind: str = ""
    group: str = ""
    options: tuple[str, ...] = ()


def normalize(answer: str) -> str:
    """How answers are compared: lower case, single spaces, no final full stop."""
    return " ".join(answer.lower().split()).rstrip(".")


def exact(case: Case, answer: str) -> bool:
    """The scoring rule "exact match" after `normalize`."""
    return normalize(answer) == normalize(case.answer)


@dataclass(frozen=True)
class Benchmark:
    """A named set of cases.

    Attributes:
        load: (split, source) -> cases. The splits are disjoint, or the calibration cases are some of the test cases,
            with the same ids. Calibration cases come in random order: take as many as you need. `source` is a folder
            (or Hub id) with the data, None for where it is published. A ValueError says what is missing.
        right: whether an answer to a case is right.
    """

    name: str
    load: Callable[[Split, str | None], Sequence[Case]]
    right: Callable[[Case, str], bool] = exact

    @cached_property
    def rule(self) -> str:
        """Identifies the scoring rule: the code of the file with `right`, and of this one, which it builds on."""
        files = [Path(inspect.getfile(self.right)), Path(__file__)]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
