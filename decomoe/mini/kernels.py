"""What makes training faster than plain transformers: batched vision attention and compiled layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface


def equal_grids_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """Vision attention of a batch of equal grids as one call; transformers' own loop goes picture by picture.

    query, key, value: (1, heads, pictures * patches, head_dim).
    """
    pictures = len(kwargs["cu_seq_lens_q"]) - 1
    heads, total, width = query.shape[1:]
    q, k, v = (x.view(heads, pictures, total // pictures, width).transpose(0, 1) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, scale=kwargs["scaling"])
    return out.transpose(1, 2).reshape(1, total, heads, width), None


# The name starts with "flash" because only then does the vision tower hand over the whole batch with `cu_seq_lens_q`.
AttentionInterface.register("flash_equal_grids", equal_grids_attention)


def compile_layers(model: Any) -> None:
    """Fuse the element-wise work of both towers with `torch.compile` (on two cores: 1.3 times as fast)."""
    visual = model.model.visual
    modules = [*visual.blocks, visual.merger, *visual.deepstack_merger_list]
    for layer in model.model.language_model.layers:
        modules += [layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm]
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=True)
