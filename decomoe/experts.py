"""The exact permutation of a layer's experts, which makes an expert prefix a contiguous piece of memory."""

import torch
from torch import Tensor

from .families import Parts

_ORDER = "_decomoe_order"  # on the model: the native expert in each place, (L, E)


def expert_order(parts: Parts) -> Tensor:
    """(L, E): which native expert lies in each place of `parts.model`."""
    native = torch.arange(parts.config.num_experts).expand(len(parts.layers), -1)
    return getattr(parts.model, _ORDER, native)


@torch.no_grad()
def permute_experts(parts: Parts, orders: Tensor) -> None:
    """Reorder the experts of every layer in place: place j gets native expert `orders[layer, j]`.

    Router rows move along, so that the model computes the same function (in fp32; bf16 router ties break by place).

    Raises:
        ValueError: weights are not in memory (`meta`), or the experts were permuted before.
    """
    if hasattr(parts.model, _ORDER):
        raise ValueError("The experts of this model are permuted already; load it again to use another order.")
    pairs = [(r, e, orders[i]) for i, (r, e) in enumerate(zip(parts.routers, parts.experts, strict=True)) if r and e]
    for router, experts, _ in pairs:
        if any(weight.is_meta for module in (router, experts) for weight in module.parameters()):
            raise ValueError("Some experts are offloaded (meta weights) and can't be permuted; load them into memory.")
    for router, experts, order in pairs:
        for weight in (*router.parameters(), *experts.parameters()):
            weight.copy_(weight.index_select(0, order.to(weight.device)))
    setattr(parts.model, _ORDER, orders.clone())


def ranks(parts: Parts, orders: Tensor) -> Tensor:
    """(L, E): the rank, in the native-expert `orders` (L, E), of the expert in each place of the model."""
    return orders.argsort(1).gather(1, expert_order(parts))
