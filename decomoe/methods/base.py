"""What a method is: a small frozen dataclass that decides which tokens and which experts stay. `runtime` acts on it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..cache import LayoutCache
from ..calibration import Calibration
from ..families import Parts
from ..gate import Gate
from ..layout import take
from ..prefix import routed_mass


@dataclass
class Watched:
    """What went on inside a layer that a method watches.

    Attributes:
        hidden: (B, N, d), the layer's input. rotary: cosine and sine (B, N, D) of its tokens.
        logits: (B, N, E), of its router; None without one.
    """

    hidden: Tensor
    rotary: tuple[Tensor, Tensor]
    logits: Tensor | None = None


@dataclass(frozen=True)
class Boundary:
    """The state between two layers in prefill, when a method may let tokens go.

    Attributes:
        layer: the layer that has just run.
        hidden: (B, N, d), its output.
        cache: knows the layout of that layer.
        parts: of the model.
        readings: per row, {candidate layer: p_exit}; a gate writes what it read.
        watched: the layers that the decider watches and that have run. What enters layer 0 are the embeddings.
    """

    layer: int
    hidden: Tensor
    cache: LayoutCache
    parts: Parts
    readings: list[dict[int, float]]
    watched: Mapping[int, Watched]

    def live(self, tokens: Tensor) -> Tensor:
        """Which slots hold one of these prompt tokens; `tokens` is (B, S) bool, the result (B, N)."""
        layout = self.cache.layouts[self.layer]
        return layout.of_prompt(tokens) & layout.valid

    @property
    def text(self) -> Tensor:
        """(B, N) bool, the slots that hold text."""
        return self.live(self.cache.text)

    @property
    def visual(self) -> Tensor:
        """(B, N) bool, the slots that hold visual tokens."""
        return self.live(self.cache.visual)

    @property
    def text_after_image(self) -> Tensor:
        """(B, N) bool, the slots that hold text behind the last visual token; all text if there is no picture."""
        return self.live(self.cache.text_after_image)

    @property
    def routing(self) -> Tensor:
        """(B, N, E) fp32, what this layer's router says after its softmax. The layer must be watched and have one."""
        logits = self.watched[self.layer].logits
        assert logits is not None
        return logits.softmax(-1, dtype=torch.float)

    def attention(self, slots: Tensor) -> Tensor:
        """Attention that the tokens in some `slots` (B, R) paid in this layer, which must be watched.

        Recomputed for these rows from the layer's input and cached keys, so that sdpa and flash stay usable.

        Returns:
            (B, H, R, N) fp32, after the softmax.
        """
        inputs = self.watched[self.layer]
        hidden, *rotary = (take(values, slots, 1) for values in (inputs.hidden, *inputs.rotary))
        queries = self.parts.queries(self.layer, hidden, (rotary[0], rotary[1]))
        return self.cache.attention(self.layer, queries, slots, self.parts.attention_scaling(self.layer))

    def attention_of_last(self) -> Tensor:
        """(B, N): attention that each row's last prompt token paid in this layer, averaged over heads."""
        last = torch.full((len(self.hidden), 1), self.hidden.shape[1] - 1, device=self.cache.visual.device)
        return self.attention(last).mean(1)[:, 0]  # rows are right aligned

    def ask(self, gate: Gate, features: Tensor) -> Tensor:
        """(B,): p_exit that a gate reads in `features` (B, 2d) here. The trace will show it."""
        p_exit = gate(self.layer, features)
        for reading, value in zip(self.readings, p_exit.tolist(), strict=True):
            reading[self.layer] = value
        return p_exit

    def without_visual(self, rows: Tensor) -> "Cut | None":
        """The cut that takes the whole visual block from `rows` (B,) bool; None if there are none."""
        if not bool(rows.any()):
            return None
        return Cut(~(self.visual & rows.to(self.cache.visual.device).unsqueeze(1)))


@dataclass(frozen=True)
class Cut:
    """Which tokens go on to the next layer.

    Attributes:
        keep: (B, N) bool, the slots whose tokens do; padding doesn't matter.
        hidden: (B, N, d), states to go on with instead of the layer's output. Tokens are merged so: the merged state
            stands in the slot of one of them, at its position, and the others go. What DeepStack still adds there is
            that one token's.
    """

    keep: Tensor
    hidden: Tensor | None = None


@dataclass(eq=False)
class Routing:
    """One router's output for one invocation, and how to limit it. Made for every layer and step: nothing is computed
    before somebody asks.

    Attributes:
        layer: the layer. decoding: whether this is a decode step.
        exits: per row, the layer after which its visual block left, None if it has not.
        output: the router's logits (B * N, E), by place in the model; and weights and experts of the routes,
            (B * N, k), weights falling.
        slots: gives (B, N) bool each, the slots that hold tokens, and visual ones.
    """

    layer: int
    decoding: bool
    exits: Sequence[int | None]
    output: tuple[Tensor, Tensor, Tensor]
    slots: Callable[[], tuple[Tensor, Tensor]]

    @cached_property
    def live(self) -> Tensor:
        """(B, N) bool, the slots that hold tokens."""
        return self.slots()[0]

    @cached_property
    def visual(self) -> Tensor:
        """(B, N) bool, whose tokens are visual."""
        return self.slots()[1]

    def _by_row(self, values: Tensor) -> Tensor:
        return values.view(len(self.exits), -1, values.shape[1])

    @cached_property
    def logits(self) -> Tensor:
        """(B, N, E), what the router says of each expert, by place in the model."""
        return self._by_row(self.output[0])

    @cached_property
    def scores(self) -> Tensor:
        """(B, N, k), weights of the routes, falling."""
        return self._by_row(self.output[1])

    @cached_property
    def indices(self) -> Tensor:
        """(B, N, k), experts of the routes, by place in the model."""
        return self._by_row(self.output[2])

    @cached_property
    def mass(self) -> Tensor:
        """(B, E) float64, routed mass of each row's tokens, by place in the model."""
        return routed_mass(self.scores, self.indices, self.logits.shape[2], self.live)

    def split(self, blocks: int) -> "list[Routing]":
        """So many of them, each with an equal block of the rows."""
        rows = len(self.exits) // blocks
        outputs = zip(*(values.chunk(blocks) for values in self.output), strict=True)
        return [
            Routing(
                self.layer,
                self.decoding,
                self.exits[number * rows :][:rows],
                (logits, scores, indices),
                partial(self._rows, slice(number * rows, (number + 1) * rows)),
            )
            for number, (logits, scores, indices) in enumerate(outputs)
        ]

    def _rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self.live[rows], self.visual[rows]


@dataclass(frozen=True)
class Prefix:
    """The experts that stay: ranks (E,) below the row's length (B,). Routes outside are re-picked, or dropped."""

    length: Tensor
    rank: Tensor
    reroute: bool


@dataclass(frozen=True)
class Limits:
    """The prefixes of all decode steps, as data for a compiled graph.

    Attributes:
        layers: those with a prefix, for some row at least.
        least, most: (L, B) int64, between which a prefix's length lies; both E where all experts stay.
        share: () float64, of its routed mass that a token's prefix covers; infinity for all of it.
        rank: (L, E), as in `Prefix`, and so is `reroute`.
    """

    layers: Collection[int]
    least: Tensor
    most: Tensor
    share: Tensor
    rank: Tensor
    reroute: bool

    def to(self, device: torch.device) -> "Limits":
        """The same on `device`."""
        least, most, share, rank = (tensor.to(device) for tensor in (self.least, self.most, self.share, self.rank))
        return Limits(self.layers, least, most, share, rank, self.reroute)


@dataclass(frozen=True)
class Routes:
    """The routes (B, N, k) that stay, token by token; the others aren't computed.

    `renormalize`: weights of those that stay sum to one again, if the family's router works like that.
    """

    stay: Tensor
    renormalize: bool


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
    theta: Any = None  # a gate's threshold
    gate_width: int = 0
    purge: bool = False  # whether layers up to the exit lose their visual keys and values too
    drops: bool = False  # whether routes may be dropped
    watches: Collection[int] = ()  # layers whose insides it wants to see in prefill

    def cut(self, state: Boundary) -> Cut | None:
        """The tokens that go on, or None for all. Not asked any more once every row's visual block has left."""
        return None

    def prefix(self, state: Routing) -> Prefix | None:
        """The expert prefix of this invocation, or None for all experts."""
        return None

    def routes(self, state: Routing) -> Routes | None:
        """The routes that stay, or None for all."""
        return None

    def is_idle(self, exits: Sequence[int | None]) -> bool:
        """Whether `prefix` and `routes` will always say None in decode, after a prefill with these `exits`."""
        return type(self).prefix is Decider.prefix and type(self).routes is Decider.routes

    def limits(self, exits: Sequence[int | None]) -> Limits | None:
        """What `prefix` and `routes` will say in decode, after a prefill with these `exits`; None if it is None always.

        Raises:
            ValueError: it can't be told beforehand.
        """
        if not self.is_idle(exits):
            raise ValueError("This method chooses routes token by token, which compiled decode can't follow.")
        return None


def check_layers(parts: Parts, *layers: int) -> None:
    """Refuse to cut after layers that the model does not have.

    Raises:
        ValueError: so it is, or they don't ascend.
    """
    last = len(parts.layers) - 1
    for layer in layers:
        if not 0 <= layer <= last:
            raise ValueError(f"Visual tokens can leave this model after layers 0 to {last}, not after layer {layer}.")
    if sorted(set(layers)) != list(layers):
        raise ValueError(f"Layers are given once each, from low to high, not as {', '.join(map(str, layers))}.")


def check_shares(**shares: float) -> None:
    """Refuse shares that are none.

    Raises:
        ValueError: one is not between 0 and 1.
    """
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name.replace('_', ' ')} must be from 0 to 1, not {share}.")


def at_depth(parts: Parts, *layers: int, of: int) -> tuple[int, ...]:
    """The layers of this model that lie as deep as `layers` in a model `of` so many; different ones stay different."""
    found: list[int] = []
    for layer in layers:
        found.append(max(round(layer / of * len(parts.layers)), *(before + 1 for before in found), 0))
    return tuple(found)
