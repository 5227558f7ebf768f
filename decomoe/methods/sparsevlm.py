"""SparseVLM (Zhang et al., ICML 2025): the text tokens that matter for the picture choose its tokens that stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..calibration import Calibration
from ..families import Parts
from ..layout import top
from .base import Boundary, Cut, Decider, Method, at_depth, check_layers, check_shares


@dataclass(frozen=True)
class SparseVLM(Method):
    """Prunes after three layers, by the attention of a few text tokens (raters); some of what leaves is merged.

    Written from the paper and its code up to v1.5. Where we differ: positions stay, and a merged token stands at its
    first member's place (theirs renumbers, and puts merged tokens behind the visual ones); decoded tokens take
    their position from the whole prompt (theirs from each layer's own cache).

    Attributes:
        layers: prune after these. By default the authors' 2, 6, 15 for LLaVA-1.5-7B with its 32 layers, at the same
            relative depth (theirs for 13B with its 40, 2, 8, 20, are about there).
        keep: share of the picture's visual tokens to keep at each of them. The authors give numbers for 576 tokens; by
            default those of their setting "192": 300, 200, 110, which as shares are our reading.
        recycle: share of the tokens that leave, the best rated of them, that is merged into few; 0 merges nothing.
        per_cluster: one merged token for so many of them.
        seed: of the noise of 1e-6 by which clustering breaks ties.
    """

    name: ClassVar[str] = "sparsevlm"
    layers: tuple[int, ...] | None = None
    keep: tuple[float, ...] = (0.521, 0.347, 0.191)
    recycle: float = 0.3
    per_cluster: int = 10
    seed: int = 0

    def bind(self, parts: Parts, calibration: Calibration | None) -> "SparseVLMDecider":
        layers = self.layers or at_depth(parts, 2, 6, 15, of=32)
        check_layers(parts, *layers)
        check_shares(**{f"keep[{i}]": share for i, share in enumerate(self.keep)}, recycle=self.recycle)
        if len(layers) != len(self.keep):
            raise ValueError(f"keep has one share for each of the layers {', '.join(map(str, layers))}.")
        if self.per_cluster < 1:
            raise ValueError(f"per_cluster must be at least 1, not {self.per_cluster}.")
        return SparseVLMDecider(self, layers)


class SparseVLMDecider(Decider):
    """`SparseVLM` for one model."""

    def __init__(self, method: SparseVLM, layers: tuple[int, ...]) -> None:
        self.method = method
        self.keep = dict(zip(layers, method.keep, strict=True))
        self.watches = (0, *layers)  # 0: its input are the embeddings

    def cut(self, state: Boundary) -> Cut | None:
        if state.layer not in self.keep:
            return None
        visual, scores = state.visual, self._scores(state)
        count = (self.keep[state.layer] * state.cache.visual.sum(1).double()).round()
        keep, hidden = ~visual | top(scores, visual, count), state.hidden.clone()
        for row in range(len(keep)):
            self._recycle(hidden[row], keep[row], scores[row])
        return Cut(keep, hidden)

    def _scores(self, state: Boundary) -> Tensor:
        """(B, N): attention that a row's raters pay on average, over heads too."""
        prompt = [
            tokens.unbind() for tokens in (state.watched[0].hidden, state.cache.visual, state.cache.text_after_image)
        ]
        raters = state.live(torch.stack([_raters(*row) for row in zip(*prompt, strict=True)]))
        slots = raters.int().argsort(dim=1, descending=True, stable=True)[:, : int(raters.sum(1).max())]
        own = raters.gather(1, slots)
        paid = state.attention(slots.where(own, raters.shape[1] - 1)).mean(1)  # (B, R, N)
        own = own.to(paid.device).unsqueeze(-1)
        return (torch.where(own, paid, 0).sum(1) / own.sum(1)).to(raters.device)

    def _recycle(self, hidden: Tensor, keep: Tensor, scores: Tensor) -> None:
        """Merge some of a row's tokens that leave: write into `hidden` (N, d) and `keep` (N,)."""
        gone = (~keep).nonzero()[:, 0]
        if not len(gone) or not self.method.recycle:
            return
        count = min(len(gone), int(self.method.recycle * len(gone)) + 1)
        best = gone[scores[gone].argsort(descending=True, stable=True)[:count]].sort().values
        states = hidden[best.to(hidden.device)]
        clusters = count // self.method.per_cluster + 1
        noise = torch.rand(count, generator=torch.Generator().manual_seed(self.method.seed)).to(hidden.device)
        cluster_of = density_peaks(states, min(clusters, count), 1e-6 * noise).to(best.device)
        for cluster in range(int(cluster_of.max()) + 1):
            members = cluster_of == cluster
            first = best[members][0]
            hidden[first] = states[members.to(hidden.device)].mean(0)
            keep[first] = True


def _raters(embeddings: Tensor, visual: Tensor, asks: Tensor) -> Tensor:
    """(S,) bool: the text tokens behind the picture that its embeddings (S, d) point to more than on average.

    Where the mean singles nobody out (a single token, for one), the last token rates.
    """
    pictured, text = embeddings[visual.to(embeddings.device)].float(), embeddings[asks.to(embeddings.device)].float()
    relevance = (pictured @ text.T).softmax(1).mean(0)
    raters = torch.zeros_like(asks)
    raters[asks] = (relevance > relevance.mean()).to(asks.device)
    raters[-1] |= ~raters.any()
    return raters


def density_peaks(states: Tensor, clusters: int, noise: Tensor) -> Tensor:
    """Cluster `states` (m, d) around density peaks (DPC-KNN); `noise` (m,) is added to the densities.

    Returns:
        (m,) the cluster of each, from 0.
    """
    states = states.float()
    distance = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist") / states.shape[1] ** 0.5
    density = (-distance.topk(clusters, largest=False).values.square().mean(1)).exp() + noise
    denser = density > density.unsqueeze(1)  # (m, m): whether the second is denser than the first
    gap = distance.where(denser, distance.max()).amin(1)  # to the nearest that is denser
    centres = (gap * density).topk(clusters).indices
    cluster_of = distance[:, centres].argmin(1)
    cluster_of[centres] = torch.arange(clusters, device=centres.device)
    return cluster_of
