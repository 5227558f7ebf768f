"""The telling cases of the paper, found among collected forced exits: how deep a question needs to look."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..evaluate.store import Record

Item = TypeVar("Item")


@dataclass(frozen=True)
class Found:
    """Questions about one picture that show something; `boundaries` go along with `lines`."""

    title: str
    lines: Sequence[Record]
    boundaries: Sequence[int]


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


def apart(found: Iterable[tuple[int, Item]], wanted: int = 3) -> list[Item]:
    """So many items whose depths differ, spread from the lowest to the highest; none if there are too few.

    Of items equally deep the first counts.
    """
    by_depth: dict[int, Item] = {}
    for depth, item in found:
        by_depth.setdefault(depth, item)
    depths = sorted(by_depth)
    if len(depths) < wanted:
        return []
    return [by_depth[depths[round(i * (len(depths) - 1) / (wanted - 1))]] for i in range(wanted)]


def search(lines: Iterable[Record]) -> list[Found]:
    """The best of each kind of case that `lines`, those of the collector "exits", hold.

    Ranks are compared, not numbers: how many questions have fewer visual tokens, how many an earlier boundary.
    """
    telling = [(line, depth) for line in lines if (depth := boundary(line)) is not None]
    if not telling:
        return []
    visual, depths = [line["visual"] for line, _ in telling], [depth for _, depth in telling]

    def surplus(case: tuple[Record, int]) -> float:
        """How much higher a case ranks by visual tokens than by boundary."""
        line, depth = case
        return sum(other < line["visual"] for other in visual) - sum(other < depth for other in depths)

    early, late = max(telling, key=surplus), min(telling, key=surplus)
    found = [
        Found("Many visual tokens, but an early boundary", [early[0]], [early[1]]),
        Found("Few visual tokens, but a late boundary: one layer earlier the answer breaks", [late[0]], [late[1]]),
    ]
    by_picture: dict[str, list[tuple[int, Record]]] = defaultdict(list)
    for line, depth in telling:
        by_picture[line["group"]].append((depth, line))
    trios = [trio for each in by_picture.values() if (trio := apart(each))]
    if trios:
        spread: Callable[[Sequence[Record]], int] = lambda trio: (boundary(trio[-1]) or 0) - (boundary(trio[0]) or 0)  # noqa: E731
        best = max(trios, key=spread)
        found.append(
            Found("One picture, three questions, three boundaries", best, [boundary(line) or 0 for line in best])
        )
    return found
