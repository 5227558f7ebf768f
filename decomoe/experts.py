"""How a layer's experts run, in which order they lie, and where their weights are.

The executors are registered with transformers: `model.set_experts_implementation("decomoe")` chooses by device and
size; "decomoe_loop" and "decomoe_all" are single ones, and transformers' own stay available. All compute the same
function, read only experts that some token uses (but "decomoe_all"), and skip the sentinel, index E.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface, _grouped_linear

from .families import Parts, check_room

_ORDER = "_decomoe_order"  # on the model: the native expert in each place, (L, E)
_HOST = "_decomoe_host"  # on an experts module: weights by name of the experts that lie in host memory
_WEIGHTS = ("gate_up_proj", "down_proj")
WHOLE_PREFIX = "_decomoe_prefix"  # on a router's indices: they are limited to a prefix


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
    if offloaded(parts):
        raise ValueError("Some experts lie in host memory and can't be permuted; permute first.")
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


def offloaded(parts: Parts) -> bool:
    """Whether some experts lie in host memory."""
    return any(hasattr(experts, _HOST) for experts in parts.experts)


def ranks(parts: Parts, orders: Tensor) -> Tensor:
    """(L, E): the rank, in the native-expert `orders` (L, E), of the expert in each place of the model."""
    return orders.argsort(1).gather(1, expert_order(parts))


# --- executors: (experts module, hidden (N, d), indices (N, k), scores (N, k)) -> (N, d) ----------------------------


def _run(experts: Any, expert: int, hidden: Tensor) -> Tensor:
    """One expert on some tokens (M, d); from host memory if it lies there."""
    weights, held = [getattr(experts, name) for name in _WEIGHTS], len(experts.gate_up_proj)
    if expert >= held:
        weights, expert = [getattr(experts, _HOST)[name] for name in _WEIGHTS], expert - held
    gate_up, down = (weight[expert].to(hidden.device, non_blocking=True) for weight in weights)
    return F.linear(experts._apply_gate(F.linear(hidden, gate_up)), down)


def loop(experts: Any, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """One expert after the other, on its own tokens, with small buffers. One host sync."""
    if len(hidden) == 1:
        used = [(place, expert) for place, expert in enumerate(indices[0].tolist()) if expert < experts.num_experts]
        if not used:
            return torch.zeros_like(hidden)
        weights = scores if len(used) == scores.shape[1] else scores[:, [place for place, _ in used]]
        return weights.to(hidden.dtype) @ torch.cat([_run(experts, expert, hidden) for _, expert in used])
    routes, order = indices.flatten().sort()
    tokens, weights = order // indices.shape[1], scores.flatten()[order].unsqueeze(1)
    out, start = torch.zeros_like(hidden), 0
    for expert, count in enumerate(torch.bincount(routes)[: experts.num_experts].tolist()):
        if count:
            own = slice(start, start := start + count)
            result = _run(experts, expert, hidden[tokens[own]])
            out.index_add_(0, tokens[own], result.mul_(weights[own]))
    return out


def grouped(experts: Any, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """transformers' grouped GEMM, with less around it on a CPU: a result is weighted and summed from where it lies.

    Forward only: the sentinel's rows, which the products skip, would give gradients.
    """
    routes, order = indices.flatten().sort()
    ends = torch.bincount(routes, minlength=experts.num_experts)[: experts.num_experts].cumsum(0, dtype=torch.int32)
    inputs = hidden.index_select(0, order // indices.shape[1])
    gated = experts._apply_gate(_grouped_linear(inputs, experts.gate_up_proj, ends))
    results = _grouped_linear(gated, experts.down_proj, ends)
    results[int(ends[-1]) :] = 0  # the sentinel's, sorted last, which nothing was written to
    weights = scores.to(hidden.dtype)
    return F.embedding_bag(order.argsort().view_as(indices), results, per_sample_weights=weights, mode="sum")


def all_experts(experts: Any, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """Every expert for every token, in batched products: the paper's accounting ("executed", its A.3), made real.

    In a layer that is limited to a prefix, only the experts up to the last one in use, which are a view if the model
    is permuted.
    """
    count = experts.num_experts
    if getattr(indices, WHOLE_PREFIX, False):
        count = int(indices.where(indices < count, -1).max()) + 1
    gate_up, down = (getattr(experts, name)[:count].transpose(1, 2) for name in _WEIGHTS)
    results = torch.bmm(experts._apply_gate(torch.bmm(hidden.expand(count, *hidden.shape), gate_up)), down)
    weights = hidden.new_zeros(len(hidden), experts.num_experts + 1).scatter_(1, indices, scores.to(hidden.dtype))
    return torch.einsum("ne,end->nd", weights[:, :count], results)


def automatic(experts: Any, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """The fastest that we know of: a loop for a single token on a CPU and where weights must be fetched, else grouped
    GEMM (which on a CPU is a loop too, inside torch): ours on a CPU, transformers' for gradients and on a GPU, where it
    never waits.
    """
    on_cpu = hidden.device.type == "cpu"
    if hasattr(experts, _HOST) or (on_cpu and len(hidden) == 1):
        return loop(experts, hidden, indices, scores)
    ours = on_cpu and not torch.is_grad_enabled()
    return (grouped if ours else ALL_EXPERTS_FUNCTIONS["grouped_mm"])(experts, hidden, indices, scores)


def gather(experts: Any, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    """For a compiled graph and few tokens: each route's products straight from its expert's weights. No host sync.

    The sentinel reads the last expert, with weight zero.
    """
    own = indices.clamp(max=experts.num_experts - 1)
    gate_up = (experts.gate_up_proj[own] * hidden[:, None, None]).sum(-1)
    results = (experts.down_proj[own] * experts._apply_gate(gate_up).unsqueeze(2)).sum(-1)
    return (results * scores.to(hidden.dtype).unsqueeze(-1)).sum(1)


def executor_in_graph(device: torch.device, dtype: torch.dtype) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    """The one for a compiled graph, which must not wait for the host: transformers' grouped GEMM where torch has one
    that can be captured (bf16 on a GPU), as it reads each expert once and dropped routes never.
    """
    captured = device.type == "cuda" and dtype == torch.bfloat16
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"] if captured else gather


for _name, _executor in (("decomoe", automatic), ("decomoe_loop", loop), ("decomoe_all", all_experts)):
    ExpertsInterface.register(_name, _executor)


# --- where weights are ------------------------------------------------------------------------------------------------


@torch.no_grad()
def offload_suffix(parts: Parts, prefixes: Sequence[int | None], device: str | None = None) -> None:
    """Keep only the first experts of each layer on the model's device, and the others in host memory (pinned for a
    GPU).

    An expert in host memory is fetched when a route needs it, each time anew. Sets the executor "decomoe"; the model
    can't be saved afterwards. Permute first, so that the experts in demand come first.

    Args:
        prefixes: per layer, how many experts stay; None leaves a layer alone, which layers that run dense need.
        device: where the model goes, without those others; by default it stays where it is. A model that is too large
            for its device as a whole is loaded and permuted on the CPU, and goes so.

    Raises:
        ValueError: a number does not fit, weights are elsewhere already, or there isn't one number per layer; or the
            device has no room.
    """
    count = parts.config.num_experts
    if len(prefixes) != len(parts.layers):
        raise ValueError(f"Give one number for each of the {len(parts.layers)} layers, not {len(prefixes)}.")
    chosen = [(e, n) for e, n in zip(parts.experts, prefixes, strict=True) if e is not None and n is not None]
    for experts, kept in chosen:
        if not 1 <= kept <= count:
            raise ValueError(f"A layer keeps 1 to {count} experts on its device, not {kept}.")
        if hasattr(experts, _HOST) or experts.gate_up_proj.is_meta:
            raise ValueError("Some experts are offloaded already; load the model anew.")
    if device is not None and torch.device(device).type != parts.text_model.device.type:
        stays = sum(weight.nbytes for weight in parts.model.parameters())
        stays -= sum(getattr(e, name)[kept:].nbytes for e, kept in chosen for name in _WEIGHTS)
        check_room(stays, device, "What is not offloaded takes {}")
    for experts, kept in chosen:
        host = {}
        for name in _WEIGHTS:
            weight = getattr(experts, name).data
            pinned = weight.is_cuda or torch.device(device or "cpu").type == "cuda"
            host[name] = torch.empty_like(weight[kept:], device="cpu", pin_memory=pinned).copy_(weight[kept:])
            setattr(experts, name, nn.Parameter(weight[:kept].clone(), requires_grad=False))
        setattr(experts, _HOST, host)
    parts.text_model.set_experts_implementation("decomoe")
    if device is not None:
        parts.model.to(device)
