"""FastV (Chen et al., ECCV 2024): after the second layer, the visual tokens that get little attention leave."""

from dataclasses import dataclass
from typing import ClassVar

from ..calibration import Calibration
from ..families import Parts
from ..layout import top
from .base import Boundary, Cut, Decider, Method, check_layers, check_shares


@dataclass(frozen=True)
class FastV(Method):
    """Keeps the visual tokens to which the last prompt token pays most attention in the layer before.

    As in the authors' code, which looks at the last token only where the paper speaks of all; and as in its in-place
    variant with a cache: tokens leave once, at prefill, and keep their positions. Heads are averaged after the softmax.

    Attributes:
        layer: the authors' K, the first layer without the tokens that leave (paper: 2; their demos: 3).
        prune: the authors' R, the share of visual tokens that leaves (paper: 0.5).
    """

    name: ClassVar[str] = "fastv"
    layer: int = 2
    prune: float = 0.5

    def bind(self, parts: Parts, calibration: Calibration | None) -> "FastVDecider":
        check_layers(parts, self.layer - 1)
        check_shares(prune=self.prune)
        return FastVDecider(self)


class FastVDecider(Decider):
    """`FastV` for one model."""

    def __init__(self, method: FastV) -> None:
        self.after, self.keep = method.layer - 1, 1 - method.prune
        self.watches = (self.after,)

    def cut(self, state: Boundary) -> Cut | None:
        if state.layer != self.after:
            return None
        count = (self.keep * state.visual.sum(1).double()).round()
        return Cut(~state.visual | top(state.attention_of_last(), state.visual, count))
