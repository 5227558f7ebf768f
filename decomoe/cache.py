"""The KV cache of one batch of questions, whose layers may hold different tokens."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.masking_utils import create_causal_mask

from .layout import Layout, take


def blocks(values: Tensor, copies: int) -> Tensor:
    """All rows `copies` times, one block after the other."""
    return values.repeat(copies, *[1] * (values.ndim - 1)) if copies > 1 else values


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
        self.full = layout
        self.layouts = [layout] * config.get_text_config().num_hidden_layers
        self.prompt = attention_mask.shape[1]
        self.steps = 0
        self._masks: dict[int, Tensor | None] = {}
        self._slots: dict[int, tuple[Layout | None, Tensor, Tensor]] = {}

    @property
    def text_after_image(self) -> Tensor:
        """(B, S) bool, the text behind the last visual token; all text if there is no picture."""
        still_to_come = self.visual.flip(1).cumsum(1).flip(1)
        return self.text & (still_to_come == 0)

    def slots(self, layout: Layout | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B, N) bool each: the slots of `layout` that hold tokens, and visual ones. Gathered once a layout.

        None stands for decode steps: one text token a row, also after a row's end, which is cut later.
        """
        if id(layout) not in self._slots:
            live = self.text.new_ones(len(self.text), 1) if layout is None else layout.valid
            visual = ~live if layout is None else live & layout.of_prompt(self.visual)
            self._slots[id(layout)] = layout, live, visual  # holding the layout keeps its id its own
        _, live, visual = self._slots[id(layout)]
        return live.to(device), visual.to(device)

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

    def fork(self, config: PretrainedConfig, layer: int, copies: int = 1) -> "LayoutCache":
        """A cache of the same prompt that only the layers up to `layer` have seen; nothing must have left them.

        All rows come `copies` times, one block after the other. A single copy shares keys and values: a cache layer
        that grows or shrinks makes new tensors.
        """
        visual, text = blocks(self.visual, copies), blocks(self.text, copies)
        fork = LayoutCache(config, visual, visual | text)
        for mine, theirs in zip(fork.held[: layer + 1], self.held[: layer + 1], strict=True):
            mine.lazy_initialization(theirs.keys, theirs.values)
            mine.keys, mine.values = (
                blocks(held[:, :, : self.prompt], copies) for held in (theirs.keys, theirs.values)
            )
        return fork

    def let_go(self, layer: int, keep: Tensor) -> Tensor | None:
        """Only the tokens in the slots `keep` (B, N) bool of `layer` reach the layers above it.

        Returns:
            (B, N') the slots of `layer`'s output that go on; None if all do.
        """
        layout = self.layouts[layer]
        if not bool((layout.valid & ~keep).any()):
            return None
        rest, slots = layout.keep(keep)
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

    def attention(self, layer: int, queries: Tensor, slots: Tensor, scaling: float) -> Tensor:
        """Attention that some tokens of the prompt pay in prefilled `layer`, from its cached keys.

        Args:
            queries: (B, H, R, D), with rotary angles. slots: (B, R), where their tokens lie.
            scaling: of the products, before the softmax.

        Returns:
            (B, H, R, N) fp32, after the softmax.
        """
        keys = self.held[layer].keys.unsqueeze(2)  # (B, KV heads, 1, N, D)
        grouped = queries.unflatten(1, (keys.shape[1], -1))  # the heads that share a KV head stand together
        scores = (grouped @ keys.transpose(-1, -2)).flatten(1, 2) * scaling
        past = torch.arange(keys.shape[3], device=slots.device) <= slots.unsqueeze(-1)
        seen = (past & self.layouts[layer].valid.unsqueeze(1)).to(scores.device)
        return scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1, dtype=torch.float)

    def new_step(self) -> None:
        """Forget the masks of the last forward."""
        self._masks.clear()

    def mask(self, config: PretrainedConfig, hidden: Tensor, layer: int, decoding: bool) -> Tensor | None:
        """The causal mask of `layer` for queries `hidden` (B, N, d), in the form its attention implementation wants.

        Layers with the same layout share it. None where the implementation needs none.
        """
        layout = self.layouts[layer]
        if decoding and not layout.padded:
            return None  # one token sees all
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
