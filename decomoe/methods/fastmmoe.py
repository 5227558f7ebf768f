"""FastMMoE (arXiv 2511.17885): visual tokens use fewer experts, and those that route alike are merged or leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..calibration import Calibration
from ..families import Parts
from ..layout import top
from .base import Boundary, Cut, Decider, Method, Routes, Routing, at_depth, check_layers, check_shares


@dataclass(frozen=True)
class FastMMoE(Method):
    """Fewer routes for visual tokens from a layer on; pruning and merging after three layers.

    Written from the paper and from notes on its code, whose numbers below are of a mild third-party setting: the
    paper's own were out of reach. Where we differ: the authors prune between attention and experts of a layer, we prune
    on its output, by that layer's attention and routing. One audit says that their code narrows experts for visual
    tokens instead of using fewer; we use fewer, as the paper says.

    Attributes:
        experts_from: the first layer in which visual tokens use fewer experts.
        expert_share: of the top-k that they use, the best rated.
        renormalize: whether their weights sum to one again, where the model's router works like that (our guess).
        layers: prune after these. By default the authors' 5, 8, 12 for InternVL3.5 with its 48 layers, at the same
            relative depth.
        keep: share of the visual tokens at hand to keep at each of them.
        merge: share of those kept that are merged windows.
        window: neighbouring visual tokens that are merged into one. Those that fill no window are never merged.
        alpha: how much likeness of routing counts for merging, against the attention of the last prompt token.
        merging: the mean of a window, or its direction at the length of its longest member ("mlerp").
    """

    name: ClassVar[str] = "fastmmoe"
    experts_from: int = 2
    expert_share: float = 0.5
    renormalize: bool = True
    layers: tuple[int, ...] | None = None
    keep: float = 0.91
    merge: float = 0.025
    window: int = 3
    alpha: float = 0.5
    merging: Literal["mean", "mlerp"] = "mean"

    def bind(self, parts: Parts, calibration: Calibration | None) -> "FastMMoEDecider":
        layers = self.layers or at_depth(parts, 5, 8, 12, of=48)
        check_layers(parts, *layers)
        check_shares(expert_share=self.expert_share, keep=self.keep, merge=self.merge, alpha=self.alpha)
        if self.window < 2:
            raise ValueError(f"A window has at least 2 tokens, not {self.window}.")
        if self.merging not in ("mean", "mlerp"):
            raise ValueError(f"merging is one of mean, mlerp, not {self.merging}.")
        if without := [layer for layer in layers if parts.routers[layer] is None]:
            raise ValueError(f"Layer {without[0]} has no router to look at; prune after others.")
        return FastMMoEDecider(self, layers, parts.config.num_experts_per_tok)


class FastMMoEDecider(Decider):
    """`FastMMoE` for one model."""

    def __init__(self, method: FastMMoE, layers: tuple[int, ...], top_k: int) -> None:
        self.method, self.watches = method, layers
        self.top_k = max(1, round(method.expert_share * top_k))
        self.drops = self.top_k < top_k

    def routes(self, state: Routing) -> Routes | None:
        if not self.drops or state.decoding or state.layer < self.method.experts_from:
            return None
        best = torch.arange(state.scores.shape[2], device=state.scores.device) < self.top_k
        return Routes(best | ~state.visual.unsqueeze(2), self.method.renormalize)

    def is_idle(self, exits: Sequence[int | None]) -> bool:
        return True

    def cut(self, state: Boundary) -> Cut | None:
        if state.layer not in self.watches:
            return None
        keep, hidden, attention = ~state.visual, state.hidden.clone(), state.attention_of_last()
        routing = state.routing
        for row, slots in enumerate(state.visual):
            visual = slots.nonzero()[:, 0].to(hidden.device)
            stays, states = self._prune(hidden[row, visual], attention[row, visual], routing[row, visual])
            hidden[row, visual] = states
            keep[row, visual.to(keep.device)] = stays.to(keep.device)
        return Cut(keep, hidden)

    def _prune(self, hidden: Tensor, attention: Tensor, routing: Tensor) -> tuple[Tensor, Tensor]:
        """The visual tokens of a row that stay (V,), and their states (V, d), of which some are merged.

        Args:
            hidden: (V, d). attention: (V,), of the last prompt token. routing: (V, E), the router's softmax.
        """
        count = int(self.method.keep * len(hidden))
        members = self._to_merge(attention, routing, int(count * self.method.merge))
        others = torch.ones_like(attention, dtype=torch.bool)
        others[members] = False
        stays = top(attention[None], others[None], torch.tensor([count - len(members)], device=others.device))[0]
        stays[members[:, 0]] = True
        states = hidden.clone()
        states[members[:, 0]] = self._merged(hidden[members])
        return stays, states

    def _to_merge(self, attention: Tensor, routing: Tensor, count: int) -> Tensor:
        """(M, window), the tokens of at most `count` windows that route alike and get little attention."""
        width, alpha = self.method.window, self.method.alpha
        windows = len(attention) // width
        members = torch.arange(windows * width, device=attention.device).view(windows, width)
        if not windows or not count:
            return members[:0]
        routing, paid = routing[members], attention[members].mean(1)
        alike = nn.functional.cosine_similarity(routing, routing.mean(1, keepdim=True), dim=2).mean(1)
        score = alpha * alike - (1 - alpha) * paid / paid.max()
        return members[score.argsort(descending=True, stable=True)[:count]]

    def _merged(self, states: Tensor) -> Tensor:
        """(M, d), one state for each window of `states` (M, window, d)."""
        if self.method.merging == "mean":
            return states.mean(1)
        norms = states.norm(dim=2, keepdim=True)
        return nn.functional.normalize((states / norms).mean(1), dim=1) * norms.amax(1)
