"""RCEP: from routed mass to the shortest expert prefix that covers a share of it, and routing inside that prefix."""

import torch
from torch import Tensor


def shares(scores: Tensor) -> Tensor:
    """A token's routed mass on each of its routes: its weights (..., k), summing to one, in float64."""
    weights = scores.double()
    return weights / weights.sum(-1, keepdim=True)


def routed_mass(scores: Tensor, indices: Tensor, num_experts: int, tokens: Tensor) -> Tensor:
    """The routed mass of some of each row's tokens on every expert, (B, E) float64. A token puts 1 on its top-k.

    Args:
        scores, indices: (B, N, k), the router's top-k weights and experts.
        tokens: (B, N) bool, those that count.
    """
    mass = shares(scores).masked_fill_(~tokens.unsqueeze(-1), 0)
    return mass.new_zeros(len(mass), num_experts).scatter_add_(1, indices.flatten(1), mass.flatten(1))


def shortest_prefix(mass: Tensor, share: float, top_k: int) -> Tensor:
    """The fewest leading experts that hold `share` of each row's mass, never fewer than `top_k` (paper, Eq. 12).

    Args:
        mass: (B, E) float64, routed mass in prefix order.
        share: the paper's p. From 1 upwards all experts stay: a float sum must not decide that.

    Returns:
        (B,) int64.
    """
    if share >= 1:
        return mass.new_full((len(mass),), mass.shape[1], dtype=torch.long)
    return covering(mass, share).clamp(min=top_k, max=mass.shape[1])


def covering(mass: Tensor, share: float | Tensor) -> Tensor:
    """(B,) int64, the fewest leading places that hold `share` of each row's `mass` (B, E); of infinity, more than E."""
    covered = mass.cumsum(1)
    return (covered < share * covered[:, -1:]).sum(1) + 1


def reroute(
    logits: Tensor, inside: Tensor, top_k: int, normalize: bool = True, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """New softmax and new top-k among the experts that are `inside` (paper, Sec. A.2.2).

    Args:
        logits: (tokens, E) router logits; inside: (tokens, E) bool.
        normalize: whether the family renormalises its top-k weights.

    Returns:
        scores and indices, (tokens, k).
    """
    probabilities = logits.masked_fill(~inside, -torch.inf).softmax(-1, dtype=torch.float)
    scores, indices = probabilities.topk(top_k, dim=-1)
    if normalize:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores.to(dtype or logits.dtype), indices


def skip(
    scores: Tensor, indices: Tensor, stay: Tensor, num_experts: int, normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """Keep only some routes, `stay` (tokens, k); the others go to the sentinel expert E with weight zero.

    `normalize`: the weights of a token that loses some sum to one again.
    """
    left = scores.masked_fill(~stay, 0)
    if normalize:
        left = torch.where(stay.all(-1, keepdim=True), left, left / left.sum(-1, keepdim=True))
    return left, indices.masked_fill(~stay, num_experts)


def drop(scores: Tensor, indices: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Keep only the routes that end `inside` (tokens, E).

    Our guess where the paper is silent: the weights of the routes that stay are not renormalised.
    """
    return skip(scores, indices, inside.gather(1, indices), inside.shape[1])
