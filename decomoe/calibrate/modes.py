"""MoDES: how much each layer's experts matter, by modality, and the thresholds that skip enough routes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..answer import Loaded
from ..calibration import Calibration
from ..families import Parts, parts_of
from ..methods import Method
from ..methods.base import Decider, Routes, Routing
from ..methods.modes import MoDESDecider
from ..runtime import Prefill, attach
from ..trace import Trace
from .data import Question
from .observe import divergence, prefills


@dataclass(frozen=True)
class _Without(Method):
    """No experts in one layer, for visual tokens or for text."""

    layer: int
    visual: bool

    def bind(self, parts: Parts, calibration: Calibration | None) -> "_WithoutDecider":
        return _WithoutDecider(self)


class _WithoutDecider(Decider):
    drops = True

    def __init__(self, method: _Without) -> None:
        self.method = method

    def routes(self, state: Routing) -> Routes | None:
        if state.layer != self.method.layer:
            return None
        return Routes((state.visual != self.method.visual).unsqueeze(2).expand_as(state.scores), renormalize=False)


@dataclass(frozen=True)
class _Skipping(Method):
    """MoDES with importances that are in no calibration yet."""

    importance: Tensor
    tau: tuple[float, float]

    def bind(self, parts: Parts, calibration: Calibration | None) -> MoDESDecider:
        return MoDESDecider(self.importance, torch.tensor(self.tau))


@torch.inference_mode()
def modes(
    loaded: Loaded, questions: Sequence[Question], batch: int, skip: float, grid: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The authors' alpha and thresholds, and how much they skip at what divergence.

    Where we differ from the authors: divergences are those of the first token, not of a whole answer, and the share of
    routes skipped is counted in prefill.

    Args:
        skip: share of the routes to skip. grid: how many thresholds to try for each modality.

    Raises:
        ValueError: no thresholds skip enough.
    """
    parts = parts_of(loaded.model)
    layers = [layer for layer, router in enumerate(parts.routers) if router is not None]
    importance = torch.zeros(2, len(parts.layers), dtype=torch.float64)
    starts: list[tuple[Prefill, Tensor]] = []
    for prefill, dense in prefills(loaded, questions, batch, [layer - 1 for layer in layers] + [-1]):
        for layer in layers:
            for modality in (0, 1):
                with attach(loaded.model, _Without(layer, visual=bool(modality))) as session:
                    importance[modality, layer] += divergence(dense, session.resume(prefill, layer - 1, 1)[1])
        embeddings, bare = {-1: prefill.states[-1]}, prefill.cache.fork(parts.config, -1)  # less to hold
        starts.append((replace(prefill, states=embeddings, cache=bare), dense))
    importance = (importance / importance.sum(1, keepdim=True)).float()

    def tried(tau: tuple[float, float]) -> tuple[float, float]:
        """The share of routes skipped and the mean divergence."""
        traces: list[Trace] = []
        cost = 0.0
        with attach(loaded.model, _Skipping(importance, tau)) as session:
            for prefill, dense in starts:
                cost += divergence(dense, session.resume(prefill, -1, 1)[1])
                traces += session.traces()
        computed = sum(sum(trace.routes.prefill) for trace in traces)
        whole = sum(trace.top_k * trace.live[layer] for trace in traces for layer in layers)
        return 1 - computed / whole, cost / len(questions)

    text, visual = ([threshold(top * i / max(1, grid - 1)) for i in range(grid)] for top in (0.71, 0.6))
    tau, found = cheapest(tried, text, visual, skip)
    return {"importance": importance, "tau": torch.tensor(tau)}, {"tau": tau, **found}


def threshold(x: float) -> float:
    """The authors' grid in terms of a parameter between 0 and 1."""
    return 2 / (1 + math.exp(-10 * (x - 1)))


def cheapest(
    tried: Callable[[tuple[float, float]], tuple[float, float]],
    text: Sequence[float],
    visual: Sequence[float],
    skip: float,
) -> tuple[tuple[float, float], dict[str, float]]:
    """The pair of thresholds, each list rising, that skips enough at the least divergence.

    Both grow with either threshold, so the best lies on the border of what skips enough: one walk along it finds it.

    Args:
        tried: the share skipped and the divergence at a pair.

    Raises:
        ValueError: none skips enough.
    """
    enough = []
    i, j = len(text) - 1, 0
    with tqdm(total=len(text) + len(visual), desc="thresholds", disable=None) as bar:
        while i >= 0 and j < len(visual):
            share, cost = tried((text[i], visual[j]))
            if share >= skip:
                enough.append((cost, share, (text[i], visual[j])))
                i -= 1
            else:
                j += 1
            bar.update()
    if not enough:
        raise ValueError(f"No thresholds skip {skip:.0%} of the routes; ask for less.")
    cost, share, tau = min(enough)
    return tau, {"skipped": share, "divergence": cost}
