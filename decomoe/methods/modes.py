"""MoDES (CVPR 2026): routes whose weight, times the importance of the layer, is below a threshold are skipped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..calibration import Calibration
from ..families import Parts
from .base import Decider, Method, Routes, Routing, check_shares


@dataclass(frozen=True)
class MoDES(Method):
    """Skips experts, token by token, in prefill and decode; the weights of those that stay are not renormalised.

    Skipped routes are not computed, where the authors' published code sets their weights to zero. Where we differ: they
    exempt special tokens, which are text to us.

    Attributes:
        tau_text, tau_visual: thresholds for text and visual tokens; by default the calibration's. 0 skips nothing.
    """

    name: ClassVar[str] = "modes"
    tau_text: float | None = None
    tau_visual: float | None = None

    def bind(self, parts: Parts, calibration: Calibration | None) -> "MoDESDecider":
        found = calibration.of(self.name, parts) if calibration else {}
        if not found and (self.tau_text is None or self.tau_visual is None):
            raise ValueError(
                "This model has no calibration for modes; give tau_text and tau_visual, or make one with "
                "'decomoe calibrate --method modes'."
            )
        text, visual = found["tau"].tolist() if found else (0.0, 0.0)
        text = text if self.tau_text is None else self.tau_text
        visual = visual if self.tau_visual is None else self.tau_visual
        check_shares(tau_text=text, tau_visual=visual)
        layers = len(parts.layers)
        importance = found["importance"] if found else torch.full((2, layers), 1 / layers)
        return MoDESDecider(importance, torch.tensor([text, visual]))


class MoDESDecider(Decider):
    """`MoDES` for one model.

    Args:
        importance: (2, L), the authors' alpha of each layer for text and visual tokens; each sums to one over layers.
            Without a calibration all layers count alike.
        thresholds: (2,), for text and visual tokens.
    """

    def __init__(self, importance: Tensor, thresholds: Tensor) -> None:
        self.importance, self.thresholds = importance.tolist(), thresholds.tolist()
        self.drops = any(self.thresholds)

    def is_idle(self, exits: Sequence[int | None]) -> bool:
        return not self.drops

    def routes(self, state: Routing) -> Routes | None:
        if not self.drops:
            return None
        weights = state.scores / state.scores.sum(2, keepdim=True)
        text, visual = (
            weights * alpha[state.layer] >= tau for alpha, tau in zip(self.importance, self.thresholds, strict=True)
        )
        return Routes(torch.where(state.visual.unsqueeze(2), visual, text), renormalize=False)
