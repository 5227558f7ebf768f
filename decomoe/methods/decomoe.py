"""DecoMoE (paper, Sec. 2 and Appendix A): SAVB drops the visual block, RCEP then keeps a prefix of the experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from ..calibration import Calibration
from ..experts import ranks
from ..families import Parts
from ..gate import text_features
from ..prefix import shortest_prefix
from .base import Boundary, Cut, Decider, Limits, Method, Prefix, Routing, check_layers


def paper_fixed_exit(layers: int) -> int:
    """The paper's fixed exit (Table 2: after layer 28 of 48), at the same relative depth."""
    return round(28 / 48 * layers)


def _choices(hint: Any) -> list[str]:
    """The strings that a type hint admits."""
    return [hint] if isinstance(hint, str) else [choice for part in get_args(hint) for choice in _choices(part)]


@dataclass(frozen=True)
class DecoMoE(Method):
    """SAVB and RCEP.

    Attributes:
        exit_after: the last layer that sees the visual block: "gate" lets SAVB decide per question, a number fixes it,
            "never" keeps the block. RCEP starts after it; a question that never exits stays dense (paper, Alg. 2).
        theta: the gate's threshold; by default the calibration's.
        picture: whether the visual block leaves at the exit, or stays: what RCEP does alone behind a fixed exit.
        rcep: whether to limit the experts at all.
        p: share of routed mass to cover; by default the calibration's (the paper's 0.7).
        prefix: a fixed number of experts instead of `p`. keep_ratio: a fixed share of all experts instead.
        order: of the experts: by calibrated text mass, as the model has them, or shuffled (Table 5's rivals).
        seed: of the shuffled order.
        outside: what happens to routes outside the prefix: the paper re-picks top-k inside it; "drop" saves more.
        earlier_kv: whether layers up to the exit keep their visual keys and values for decode. The paper's algorithm
            says the block leaves the cache but not in which layers; its Eq. 19 fits "purge". The first token is the
            same under both. We keep: longer answers of the mini model break under "purge" (its card has the figures).
        decode_rcep: which layers are limited in decode. The paper's text says those after the exit, its Eq. 19 sums
            over all.
    """

    name: ClassVar[str] = "decomoe"
    exit_after: int | Literal["gate", "never"] = "gate"
    theta: float | None = None
    picture: Literal["leaves", "stays"] = "leaves"
    rcep: bool = True
    p: float | None = None
    prefix: int | None = None
    keep_ratio: float | None = None
    order: Literal["rcep", "native", "random"] = "rcep"
    seed: int = 0
    outside: Literal["reroute", "drop"] = "reroute"
    earlier_kv: Literal["keep", "purge"] = "keep"
    decode_rcep: Literal["after_exit", "all_layers"] = "after_exit"

    def _check_choices(self) -> None:
        hints = get_type_hints(DecoMoE)
        for field in fields(self):
            value, known = getattr(self, field.name), _choices(hints[field.name])
            if isinstance(value, str) and value not in known:
                raise ValueError(f"{field.name} is one of {', '.join(known)}, not {value}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is a whole number from 0 to {2**32 - 1}, not {self.seed}.")

    def bind(self, parts: Parts, calibration: Calibration | None) -> "DecoMoEDecider":
        experts, top_k = parts.config.num_experts, parts.config.num_experts_per_tok
        self._check_choices()
        if self.picture == "stays" and not (self.rcep and isinstance(self.exit_after, int)):
            raise ValueError("For RCEP alone, where the picture stays, fix the layer after which it starts.")
        if isinstance(self.exit_after, int):
            check_layers(parts, self.exit_after)
        for name, value in (("p", self.p), ("theta", self.theta), ("keep ratio", self.keep_ratio)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {value}.")
        if self.prefix is not None and not top_k <= self.prefix <= experts:
            raise ValueError(f"A prefix of this model has {top_k} (its top-k) to {experts} experts, not {self.prefix}.")
        if sum(value is not None for value in (self.p, self.prefix, self.keep_ratio)) > 1:
            raise ValueError("Give one of p, prefix and keep_ratio.")
        needs_gate, needs_order = self.exit_after == "gate", self.rcep and self.order == "rcep"
        if calibration is None and (needs_gate or needs_order):
            raise ValueError(
                "This model has no calibration, which the gate and the rcep order need. Calibrate it with "
                "'decomoe calibrate', or fix the exit layer (exit after N) and take the experts' native order."
            )
        if calibration is not None:
            calibration.check(parts)
            if needs_gate and calibration.gate is None:
                raise ValueError("This calibration has no gate; fix the exit layer (exit after N).")
        return DecoMoEDecider(self, parts, calibration)


def from_toggles(
    layers: int, *, savb: bool = True, rcep: bool = True, exit_after: int | None = None, **options: Any
) -> DecoMoE:
    """The method that the switches of page and command line mean.

    Without SAVB, RCEP still needs an exit to start from: the paper's "RCEP only" fixes one (Table 2). Without both,
    nothing leaves.

    Raises:
        ValueError: one of `options` would do nothing beside the switches.
    """
    of_rcep = {"p": None, "prefix": None, "keep_ratio": None, "order": "rcep", "outside": "reroute"}
    for names, off, half in (
        (of_rcep, not rcep, "RCEP, which is off"),
        ({"theta": None}, not savb or exit_after is not None, "the gate, which a fixed exit or no SAVB replaces"),
        ({"picture": "leaves"}, not rcep or (savb and exit_after is None), "RCEP alone, which needs a fixed exit"),
        ({"seed": 0}, options.get("order") != "random", "a random order"),
    ):
        for name in names if off else ():
            if options.get(name, names[name]) not in (None, names[name]):
                raise ValueError(f"{name} is of {half}; leave one out.")
    if exit_after is not None:
        return DecoMoE(exit_after=exit_after, rcep=rcep, **options)
    if savb:
        return DecoMoE(exit_after="gate", rcep=rcep, **options)
    return DecoMoE(exit_after=paper_fixed_exit(layers) if rcep else "never", rcep=rcep, **options)


class DecoMoEDecider(Decider):
    """`DecoMoE` for one model."""

    def __init__(self, method: DecoMoE, parts: Parts, calibration: Calibration | None) -> None:
        self.method = method
        self.top_k, self.experts = parts.config.num_experts_per_tok, parts.config.num_experts
        self.stays = method.picture == "stays"
        self.purge = method.earlier_kv == "purge"
        self.drops = method.outside == "drop"
        self.p = method.p or (calibration.p if calibration else 0.7)
        self.fixed = method.prefix
        if method.keep_ratio is not None:
            self.fixed = max(self.top_k, round(method.keep_ratio * self.experts))
        self.rank: list[Tensor] | None = None  # per layer; each goes once to where its router is
        if method.rcep:
            self.rank = list(ranks(parts, self._orders(parts, calibration)))
            self.in_order = all(torch.equal(rank, torch.arange(self.experts)) for rank in self.rank)
        self.gate = calibration.gate if calibration and method.exit_after == "gate" else None
        if self.gate is not None and calibration is not None:
            self.candidates = self.gate.candidates
            self.theta = method.theta or calibration.theta
            self.gate_width = self.gate.width
            self.after_image = calibration.gate_text == "after image"

    def _orders(self, parts: Parts, calibration: Calibration | None) -> Tensor:
        shape = (len(parts.layers), self.experts)
        if self.method.order == "rcep" and calibration is not None:
            return calibration.orders
        if self.method.order == "random":
            generator = torch.Generator().manual_seed(self.method.seed)
            return torch.stack([torch.randperm(shape[1], generator=generator) for _ in range(shape[0])])
        return torch.arange(shape[1]).expand(shape)

    def cut(self, state: Boundary) -> Cut | None:
        if self.stays:
            return None
        if self.gate is None:
            return state.without_visual(state.cache.visual.any(1)) if state.layer == self.method.exit_after else None
        if state.layer not in self.candidates:
            return None
        features = text_features(state.hidden, state.text_after_image if self.after_image else state.text)
        return state.without_visual(state.ask(self.gate, features) >= self.theta)

    def prefix(self, state: Routing) -> Prefix | None:
        if self.rank is None:
            return None
        limited = [self._limits(exit_after, state.layer, state.decoding) for exit_after in state.exits]
        if not any(limited):
            return None
        rank = self.rank[state.layer] = self.rank[state.layer].to(state.logits.device)
        if self.fixed is not None:
            length = torch.full((len(limited),), self.fixed, device=rank.device)
        else:
            mass = state.mass
            if not self.in_order:
                mass = torch.empty_like(mass).index_copy_(1, rank, mass)
            length = shortest_prefix(mass, self.p, self.top_k)
        if not all(limited):
            length = length.where(torch.tensor(limited, device=length.device), self.experts)
        return Prefix(length, rank, self.method.outside == "reroute")

    def is_idle(self, exits: Sequence[int | None]) -> bool:
        return self.rank is None or not (self.stays or any(exit_after is not None for exit_after in exits))

    def limits(self, exits: Sequence[int | None]) -> Limits | None:
        if self.rank is None:
            return None
        layers = range(len(self.rank))
        limited = torch.tensor([[self._limits(exit_after, layer, True) for exit_after in exits] for layer in layers])
        least, most = (self.fixed, self.fixed) if self.fixed is not None else (self.top_k, self.experts)
        return Limits(
            limited.any(1).nonzero().flatten().tolist(),
            least=torch.where(limited, least, self.experts),
            most=torch.where(limited, most, self.experts),
            share=torch.tensor(self.p if self.p < 1 else math.inf, dtype=torch.double),
            rank=torch.stack([rank.cpu() for rank in self.rank]),
            reroute=self.method.outside == "reroute",
        )

    def _limits(self, exit_after: int | None, layer: int, decoding: bool) -> bool:
        """Whether a row that exited after `exit_after` runs this layer on a prefix."""
        start = self.method.exit_after if self.stays else exit_after
        if not isinstance(start, int):
            return False
        return start < layer or (decoding and self.method.decode_rcep == "all_layers")


def usual_prefixes(method: DecoMoE, parts: Parts, calibration: Calibration | None) -> list[int | None]:
    """Per layer, how many experts its prefix keeps: a fixed number, or as many as hold p of the calibrated mass.

    None for layers before the earliest exit, which need all. For `experts.offload_suffix`.

    Raises:
        ValueError: the method never takes a prefix, not of the experts as they lie, or its length isn't known.
    """
    decider = method.bind(parts, calibration)
    first = method.exit_after if decider.gate is None else decider.candidates[0]
    if decider.rank is None or not isinstance(first, int):
        raise ValueError("Only experts behind a prefix can be offloaded: RCEP and an exit are needed.")
    if not decider.in_order:
        raise ValueError("The experts of this model lie in the rcep order, and its last ones are to be offloaded.")
    lengths = [decider.fixed] * len(parts.layers)
    if decider.fixed is None:
        if calibration is None or calibration.mass is None:
            raise ValueError("No calibrated mass tells how long prefixes are; fix the prefix, or calibrate anew.")
        lengths = shortest_prefix(calibration.mass.gather(1, calibration.orders), decider.p, decider.top_k).tolist()
    return [None] * (first + 1) + lengths[first + 1 :]
