"""VTW, Visual Tokens Withdrawal (Lin et al., AAAI 2025): all visual tokens leave after one layer."""

from dataclasses import dataclass
from typing import ClassVar

from ..calibration import Calibration
from ..families import Parts
from .base import Boundary, Cut, Decider, Method, at_depth, check_layers


@dataclass(frozen=True)
class VTW(Method):
    """The simplest exit, and the one that a trained gate has to beat.

    As in the authors' code earlier layers keep their visual keys and values, and positions stay.

    Attributes:
        exit_after: the last layer that sees visual tokens. By default the calibration's; without one the authors' for
            LLaVA-1.5-7B, whose layer 15 of 32 is the first without, at the same relative depth.
    """

    name: ClassVar[str] = "vtw"
    exit_after: int | None = None

    def bind(self, parts: Parts, calibration: Calibration | None) -> "VTWDecider":
        found = calibration.of(self.name, parts) if calibration else {}
        default = int(found["exit_after"]) if found else at_depth(parts, 14, of=32)[0]
        exit_after = default if self.exit_after is None else self.exit_after
        check_layers(parts, exit_after)
        return VTWDecider(exit_after)


class VTWDecider(Decider):
    """`VTW` for one model."""

    def __init__(self, exit_after: int) -> None:
        self.exit_after = exit_after

    def cut(self, state: Boundary) -> Cut | None:
        return Cut(~state.visual) if state.layer == self.exit_after else None
