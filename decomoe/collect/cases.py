"""The telling cases of the paper, found among collected forced exits: how deep a question needs to look.

Three questions about one picture are rare among the first ones of a benchmark, which go from picture to picture; of
"drawn-pictures" all questions about a few pictures are asked.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from ..benchmarks import Benchmark
from ..evaluate import store
from ..evaluate.store import Record
from . import file_name


class Telling(NamedTuple):
    """A question that needs to look so deep: its `boundary`, and its line of the collector "exits"."""

    depth: int
    line: Record


@dataclass(frozen=True)
class Found:
    """Questions about one picture that show something."""

    title: str
    questions: Sequence[Telling]


def boundary(line: Record) -> int | None:
    """The exit from which on all answers are right, and before which all are wrong.

    None where dense is wrong, where an early exit breaks nothing, and where right answers come and go: yes and no are
    guessed easily.
    """
    right = line["right"]
    wrong = right.count(False)
    if not line["dense"]["right"] or wrong in (0, len(right)) or any(right[:wrong]):
        return None
    return line["layers"][wrong]


def apart(questions: Iterable[Telling], wanted: int = 3) -> list[Telling]:
    """So many questions whose depths differ, spread from the lowest to the highest; none if there are too few.

    Of questions equally deep the first counts.
    """
    by_depth: dict[int, Telling] = {}
    for question in questions:
        by_depth.setdefault(question.depth, question)
    depths = sorted(by_depth)
    if len(depths) < wanted:
        return []
    return [by_depth[depths[round(i * (len(depths) - 1) / (wanted - 1))]] for i in range(wanted)]


KINDS = 3  # of cases that `search` looks for


def search(lines: Iterable[Record]) -> list[Found]:
    """The best of each kind of case that `lines`, those of the collector "exits", hold.

    Ranks are compared, not numbers: how many questions have fewer visual tokens, how many an earlier boundary.
    """
    telling = [Telling(depth, line) for line in lines if (depth := boundary(line)) is not None]

    def surplus(question: Telling) -> int:
        """How much higher a question ranks by visual tokens than by boundary."""
        fewer = sum(other.line["visual"] < question.line["visual"] for other in telling)
        return fewer - sum(other.depth < question.depth for other in telling)

    ranked, found = sorted(telling, key=surplus), []
    if ranked and surplus(ranked[-1]) > 0:
        found.append(Found("Many visual tokens, but an early boundary", [ranked[-1]]))
    if ranked and surplus(ranked[0]) < 0:
        title = "Few visual tokens, but a late boundary: one layer earlier the answer breaks"
        found.append(Found(title, [ranked[0]]))
    by_picture: dict[str, list[Telling]] = defaultdict(list)
    for question in telling:
        by_picture[question.line["group"]].append(question)
    trios = [trio for questions in by_picture.values() if (trio := apart(questions))]
    if trios:
        found.append(Found("One picture, three questions, three boundaries", max(trios, key=_variety)))
    return found


def _variety(trio: Sequence[Telling]) -> tuple[int, int]:
    """How many exits the gate takes, and how far the boundaries lie apart."""
    return len({question.line.get("predicted") for question in trio}), trio[-1].depth - trio[0].depth


def found_in(results: Path, benchmarks: Iterable[Benchmark]) -> list[Found]:
    """The cases in what `collect` wrote of some benchmarks into `results`.

    Raises:
        ValueError: there are none.
    """
    names = [benchmark.name for benchmark in benchmarks]
    files = [store.file_of(results, name, file_name("exits")) for name in names]
    lines = [line for file in files for line in store.read(file)]
    more = f"decomoe collect --benchmarks {' '.join(names)} --collectors exits --out {results}, with your --model."
    if not lines:
        raise ValueError(f"{results} holds no forced exits of {', '.join(names)}; collect them: {more}")
    found = search(lines)
    if not found:
        raise ValueError(
            f"No question in {results} tells how deep it needs to look: right dense, and broken by early exits alone. "
            f"More of them: {more}"
        )
    return found


def picture_of(found: Found, benchmarks: Iterable[tuple[Benchmark, str | None]]) -> Image.Image:
    """The picture that a case is about, from the benchmarks with their sources."""
    wanted = found.questions[0].line["id"]
    cases = (case for benchmark, source in benchmarks for case in benchmark.load("test", source))
    return next(case.picture() for case in cases if case.id == wanted)


# --- told -------------------------------------------------------------------------------------------------------------


def told_of(found: Found, picture: str) -> dict[str, Any]:
    """A case for programs; `picture` is the name of its file. Without a gate, "gate" is empty."""
    lines = [question.line for question in found.questions]
    return {
        "title": found.title,
        "picture": picture,
        "visual": lines[0]["visual"],
        "questions": [line["question"] for line in lines],
        "truths": [line["truth"] for line in lines],
        "boundaries": [question.depth for question in found.questions],
        "gate": [line["predicted"] for line in lines if "predicted" in line],
        "layers": lines[0]["layers"],
        "answers": [[*line["answers"], line["dense"]["answer"]] for line in lines],
        "right": [[*line["right"], line["dense"]["right"]] for line in lines],
    }


def markdown(told: dict[str, Any]) -> str:
    """A case for people: picture, questions, where each breaks, and a row an exit."""
    lines = [
        f"## {told['title']}",
        "",
        f"![the picture]({told['picture']})",
        "",
        f"{told['visual']} visual tokens.",
        "",
    ]
    for i, (question, truth, depth) in enumerate(
        zip(told["questions"], told["truths"], told["boundaries"], strict=True)
    ):
        lines.append(
            f"- {question} *{truth}* Right from an exit after layer {depth} on{_gate(told['gate'][i : i + 1])}."
        )
    heads = ["exit after", *told["questions"]]
    lines += ["", f"| {' | '.join(map(_cell, heads))} |", "| --- " * len(heads) + "|"]
    for place, layer in enumerate([*told["layers"], "none"]):
        cells = [
            answers[place] if right[place] else f"✗ {answers[place]}"
            for answers, right in zip(told["answers"], told["right"], strict=True)
        ]
        lines.append(f"| {' | '.join(map(_cell, [layer, *cells]))} |")
    return "\n".join(lines) + "\n"


def _gate(exits: Sequence[int | None]) -> str:
    """What the gate, if there is one, does with a question."""
    return "".join(
        "; the gate never lets the picture go"
        if layer is None
        else f"; the gate lets the picture go after layer {layer}"
        for layer in exits
    )


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
