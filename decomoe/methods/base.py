"""What a method is: a small frozen dataclass that decides which tokens and which experts stay. `runtime` acts on it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..cache import LayoutCache
from ..calibration import Calibration
from ..families import Parts


@dataclass(frozen=True)
class Boundary:
    """The state between two layers in prefill, when a method may let tokens go.

    Attributes:
        layer: the layer that has just run.
        hidden: (B, N, d), its output.
        cache: knows the layout of that layer.
        readings: per row, {candidate layer: p_exit}; a gate writes what it read.
    """

    layer: int
    hidden: Tensor
    cache: LayoutCache
    readings: list[dict[int, float]]

    def live(self, tokens: Tensor) -> Tensor:
        """Which slots hold one of these prompt tokens; `tokens` is (B, S) bool, the result (B, N)."""
        layout = self.cache.layouts[self.layer]
        return layout.of_prompt(tokens) & layout.valid

    @property
    def text(self) -> Tensor:
        """(B, N) bool, the slots that hold text."""
        return self.live(self.cache.text)

    @property
    def text_after_image(self) -> Tensor:
        """(B, N) bool, the slots that hold text behind the last visual token; all text if there is no picture."""
        still_to_come = self.cache.visual.flip(1).cumsum(1).flip(1)
        return self.live(self.cache.text & (still_to_come == 0))


@dataclass(frozen=True)
class Routing:
    """One router's output for one invocation, and how to limit it.

    Attributes:
        layer: the layer. decoding: whether this is a decode step.
        mass: (B, E) float64, routed mass of each row's tokens, by place in the model.
        exits: per row, the layer after which its visual block left, None if it has not.
    """

    layer: int
    decoding: bool
    mass: Tensor
    exits: Sequence[int | None]


@dataclass(frozen=True)
class Prefix:
    """The experts that stay: ranks (E,) below the row's length (B,). Routes outside are re-picked, or dropped."""

    length: Tensor
    rank: Tensor
    reroute: bool


@dataclass(frozen=True)
class Method:
    """Base class: decides nothing, which is the dense model.

    `bind` returns the decider for one model: itself, or a copy with what it needs from model and calibration.
    """

    name: ClassVar[str] = "dense"

    def settings(self) -> dict[str, Any]:
        """The parameters, for the trace."""
        return asdict(self)

    def bind(self, parts: Parts, calibration: Calibration | None) -> "Decider":
        """Check the parameters against a model and its calibration.

        Raises:
            ValueError: a parameter does not fit the model, or a calibration is needed and missing.
        """
        return Decider()


class Decider:
    """A method bound to one model. The base class lets everything stay."""

    candidates: Sequence[int] = ()
    theta: float | None = None
    gate_width: int = 0
    purge: bool = False  # whether layers up to the exit lose their visual keys and values too
    drops: bool = False  # whether routes may be dropped

    def leaves(self, state: Boundary) -> Tensor | None:
        """(B,) bool: rows whose visual block leaves now. None: nobody's."""
        return None

    def prefix(self, state: Routing) -> Prefix | None:
        """The expert prefix of this invocation, or None for all experts."""
        return None
