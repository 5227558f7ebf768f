"""The KV cache of one batch of questions, whose layers may hold different tokens."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.masking_utils import create_causal_mask

from .layout import Layout, take


class LayoutCache(DynamicCache):
    """A dynamic cache that knows which prompt tokens each layer holds.

    To `generate` it looks like a full cache: lengths count every token that was seen, so that positions and the 2-D
    attention mask stay as they are. What a layer really holds is `layouts[layer]` plus the `steps` decoded tokens.

    Args:
        visual: (B, S) bool, the visual tokens of the prompt.
        attention_mask: (B, S), 0 at padding.
    """

    def __init__(self, config: PretrainedConfig, visual: Tensor, attention_mask: Tensor) -> None:
        super().__init__(config=config)
        self.held: list[Any] = self.layers  # DynamicLayers: these families have full attention only
        layout = Layout.full(attention_mask)
        self.visual = visual & layout.valid
        self.text = ~visual & layout.valid
        self.layouts = [layout] * config.get_text_config().num_hidden_layers
        self.prompt = attention_mask.shape[1]
        self.steps = 0
        self._masks: dict[int, Tensor | None] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far, whatever a layer still holds."""
        return self.prompt + self.steps if self.held[0].is_initialized else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask that the model builds for itself, for a full cache."""
        return self.get_seq_length() + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Append; one more decode step is counted once the last layer has it."""
        if layer_idx == len(self.layouts) - 1 and self.held[layer_idx].is_initialized:
            self.steps += key_states.shape[-2]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def let_go(self, layer: int, gone: Tensor) -> Tensor:
        """The prompt tokens `gone` (B, S) don't reach the layers above `layer`.

        Returns:
            (B, N') the slots of `layer`'s output that go on.
        """
        layout = self.layouts[layer]
        rest, slots = layout.keep(~layout.of_prompt(gone))
        self.layouts[layer + 1 :] = [rest] * (len(self.layouts) - layer - 1)
        return slots

    def purge(self, layers: Iterable[int], gone: Tensor) -> None:
        """Remove the prompt tokens `gone` (B, S) from the keys and values of prefilled `layers`."""
        kept: dict[int, tuple[Layout, Tensor]] = {}  # layers with the same layout stay so
        for layer in layers:
            layout, held = self.layouts[layer], self.held[layer]
            if id(layout) not in kept:
                kept[id(layout)] = layout.keep(~layout.of_prompt(gone))
            self.layouts[layer], slots = kept[id(layout)]
            held.keys, held.values = take(held.keys, slots, 2), take(held.values, slots, 2)

    def new_step(self) -> None:
        """Forget the masks of the last forward."""
        self._masks.clear()

    def mask(self, config: PretrainedConfig, hidden: Tensor, layer: int, decoding: bool) -> Tensor | None:
        """The causal mask of `layer` for queries `hidden` (B, N, d), in the form its attention implementation wants.

        Layers with the same layout share it. None where the implementation needs none.
        """
        layout = self.layouts[layer]
        if id(layout) not in self._masks:
            valid = None
            if layout.padded:
                decoded = layout.valid.new_ones(len(layout.valid), self.steps + 1 if decoding else 0)
                valid = torch.cat([layout.valid, decoded], dim=1)
            alone = DynamicCache()  # transformers sizes the mask by a cache's first layer
            alone.layers = [self.layers[layer]]
            self._masks[id(layout)] = create_causal_mask(config, hidden, valid, alone)
        return self._masks[id(layout)]

    def element_size(self) -> int:
        """Bytes of one number in it."""
        return self.held[0].keys.element_size()
