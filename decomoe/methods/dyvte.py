"""DyVTE (Wu et al., NeurIPS 2025): a small gate after every layer decides when all visual tokens leave."""

from dataclasses import dataclass
from typing import ClassVar

from ..calibration import Calibration
from ..families import Parts
from ..gate import Gate, text_features
from .base import Boundary, Cut, Decider, Method, check_shares


@dataclass(frozen=True)
class DyVTE(Method):
    """The forerunner of SAVB: gates without biases, 2048 wide, which look at the text behind the picture.

    Earlier layers keep their visual keys and values, positions stay. Where we differ: there are gates only from the
    layer on in which the whole picture has been seen (DeepStack), gates are asked at prefill alone, and beside a small
    model they are narrower (`calibrate.others.dyvte_training`).

    Attributes:
        theta: visual tokens leave where p_exit is above it. The authors take the likelier class: 0.5.
    """

    name: ClassVar[str] = "dyvte"
    theta: float = 0.5

    def bind(self, parts: Parts, calibration: Calibration | None) -> "DyVTEDecider":
        check_shares(theta=self.theta)
        weights = calibration.of(self.name, parts) if calibration else {}
        if not weights:
            raise ValueError("This model has no gates for dyvte; train them with 'decomoe calibrate --method dyvte'.")
        return DyVTEDecider(Gate.of(weights).to(parts.text_model.device), self.theta)


class DyVTEDecider(Decider):
    """`DyVTE` for one model."""

    def __init__(self, gate: Gate, theta: float) -> None:
        self.gate, self.theta = gate, theta
        self.candidates, self.gate_width = gate.candidates, gate.width

    def cut(self, state: Boundary) -> Cut | None:
        if state.layer not in self.candidates:
            return None
        features = text_features(state.hidden, state.text_after_image)
        return state.without_visual(state.ask(self.gate, features) > self.theta)
