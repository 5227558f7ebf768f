"""Decode as one compiled graph a step: no Python by layer, and CUDA graphs on a GPU.

What differs between questions is data, not shape: which slots of a layer's keys and values hold tokens, where the next
ones go, and between which lengths each row's expert prefix lies. So one graph serves every exit and every share `p`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from .cache import LayoutCache
from .experts import executor_in_graph, offloaded
from .families import Parts, parts_of
from .methods.base import Limits
from .prefix import covering, drop, reroute, routed_mass

SMALLEST = 128  # slots; more come in powers of two, so that few shapes are compiled


class _Buffers:
    """The tensors of one shape that a graph reads and writes, in the same place for every question.

    It takes a cache's part in transformers' attention: `update` writes one token and gives all slots.
    """

    def __init__(self, parts: Parts, position: Sequence[int], slots: int) -> None:
        config, device, dtype = parts.config, parts.model.device, parts.model.dtype
        layers, experts, rows = len(parts.layers), config.num_experts, position[-2]
        width = parts.layers[0].get_submodule(parts.family.attention).head_dim
        shape = (rows, config.num_key_value_heads, slots, width)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        whole = lambda *sizes: torch.zeros(sizes, dtype=torch.long, device=device)  # noqa: E731
        self.ids, self.position, self.step = whole(rows, 1), whole(*position), whole()
        self.valid = whole(layers, rows, slots).bool()  # slots that hold tokens of the prompt
        self.start = whole(layers)  # where decoded tokens go
        self.least, self.most = whole(layers, rows), whole(layers, rows)
        self.share, self.rank = whole().double(), whole(layers, experts)
        for tensor in (*self.keys, *self.values, *(value for value in vars(self).values() if torch.is_tensor(value))):
            torch._dynamo.mark_static_address(tensor)

    def fill(self, cache: LayoutCache, position: Tensor, limits: Limits | None) -> None:
        """A question comes from its prefill. `cache` gives its keys and values away."""
        self.position.copy_(position)
        self.step.zero_()
        self.valid.zero_()
        for layer, held in enumerate(cache.held):
            valid = cache.layouts[layer].valid
            length = valid.shape[1]
            self.start[layer] = length
            self.valid[layer, :, :length] = valid
            for mine, theirs in ((self.keys[layer], held.keys), (self.values[layer], held.values)):
                mine[:, :, :length] = theirs
                mine[:, :, length:] = 0  # no infinity stays there
            held.keys, held.values = held.keys.new_empty(0), held.values.new_empty(0)
        if limits is not None:
            for name in ("least", "most", "share", "rank"):
                getattr(self, name).copy_(getattr(limits, name))

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, C, D) of `layer`, with those of one more token (B, H, 1, D)."""
        place = (self.start[layer] + self.step).view(1)
        return self.keys[layer].index_copy_(2, place, keys), self.values[layer].index_copy_(2, place, values)

    def masks(self, dtype: torch.dtype) -> Tensor:
        """(L, B, 1, 1, C), what attention adds: 0 where a slot holds a token, this step's included."""
        slots, start = torch.arange(self.valid.shape[2], device=self.valid.device), self.start.unsqueeze(1)
        decoded = (slots >= start) & (slots <= start + self.step)
        seen = self.valid | decoded.unsqueeze(1)
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)[:, :, None, None]


class CompiledDecode:
    """Compiled decode steps of one model, for `attach(..., decode=...)`; keep it, for graphs to be used again.

    A graph is made for each number of rows, of slots (in powers of two) and way to limit routes. It reads all slots,
    so what a layer has let go saves no time in its attention here.

    Args:
        model: of a family in `families.FAMILIES`, on one device, with sdpa or eager attention.
        backend: of torch.compile. "inductor" makes CUDA graphs on a GPU.

    Raises:
        ValueError: the model can't be compiled so.
    """

    def __init__(self, model: Any, backend: str | Callable = "inductor") -> None:
        self.parts = parts = parts_of(model)
        self.check(parts)
        # looked up now: what is compiled must not look
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._text_model, self._renormalizes = parts.text_model, parts.renormalizes
        self._layers = list(zip(parts.layers, parts.routers, parts.experts, strict=True))
        mode = "reduce-overhead" if backend == "inductor" and model.device.type == "cuda" else None
        self._run = torch.compile(self._forward, backend=backend, mode=mode, fullgraph=True, dynamic=False)
        self._execute = executor_in_graph(model.device, model.dtype)
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._in_use: Any = None
        self._reroute: bool | None = None

    def check(self, parts: Parts) -> None:
        """Refuse what a graph can't run.

        Raises:
            ValueError: these are parts of another model, or of one that can't be compiled.
        """
        if parts.model is not self.parts.model:
            raise ValueError("This compiled decode was made for another model.")
        if offloaded(parts) or len({parameter.device for parameter in parts.model.parameters()}) > 1:
            raise ValueError("Compiled decode needs the whole model on one device.")
        if parts.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError("Compiled decode needs the attention implementation sdpa or eager.")

    def start(self, cache: LayoutCache, position: Tensor, room: int, limits: Limits | None) -> None:
        """Go on from a finished prefill.

        Args:
            cache: of the prefill; its keys and values are moved from it.
            position: (B, 1) or in M-RoPE (3, B, 1), of the first decoded token. room: how many tokens may be decoded.
            limits: of the routers.
        """
        rows, longest = position.shape[-2], max(layout.valid.shape[1] for layout in cache.layouts)
        slots = max(SMALLEST, 1 << (longest + room - 1).bit_length())
        with torch.inference_mode(False), torch.no_grad():
            if (rows, slots) not in self._buffers:
                self._buffers[rows, slots] = _Buffers(self.parts, position.shape, slots)
            self._in_use = self._buffers[rows, slots]
            self._in_use.fill(cache, position, limits)
        self._reroute = limits.reroute if limits else None

    def step(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """One token (B, 1) a row.

        Returns:
            Logits (B, vocabulary); and of the R routers their logits (R, B, E), weights and experts of the routes
            (R, B, k), the experts that were run, index E for none, and the lengths of the prefixes (R, B).
        """
        with torch.inference_mode(False), torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
            self._in_use.ids.copy_(ids)
            torch.compiler.cudagraph_mark_step_begin()
            logits, *routed = (out.clone() for out in self._run(self._in_use, self._reroute))
        return logits, routed

    # --- what is compiled ------------------------------------------------------------------------------------------

    def _forward(self, buffers: _Buffers, reroutes: bool | None) -> tuple[Tensor, ...]:
        """The model's own modules, but without hooks, and with routes limited in between."""
        hidden = self._embed(buffers.ids)
        rotary = self._text_model.rotary_emb(hidden, buffers.position + buffers.step)
        masks, routed = buffers.masks(hidden.dtype), []
        for index, (layer, router, experts) in enumerate(self._layers):
            attended, _ = layer.self_attn(
                layer.input_layernorm(hidden), position_embeddings=rotary, attention_mask=masks[index], cache=buffers
            )
            hidden = hidden + attended
            normed = layer.post_attention_layernorm(hidden)
            if router is None:
                hidden = hidden + layer.mlp(normed)
                continue
            output = router.forward(normed)
            scores, chosen, length = self._limit(buffers, index, output, reroutes)
            results = self._execute(experts, normed.squeeze(1), chosen, scores)
            hidden = hidden + results.unsqueeze(1)
            routed.append((*output, chosen, length))
        buffers.step += 1
        logits = self._head(self._text_model.norm.forward(hidden))[:, -1]
        return logits, *(torch.stack(kind) for kind in zip(*routed, strict=True))

    def _limit(
        self, buffers: _Buffers, layer: int, output: tuple[Tensor, Tensor, Tensor], reroutes: bool | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and experts (B, k) inside each row's prefix, and its length (B,)."""
        logits, scores, indices = output
        if reroutes is None:
            return scores, indices, buffers.most[layer]
        rank, live = buffers.rank[layer], torch.ones_like(indices[:, :1], dtype=torch.bool)
        mass = routed_mass(scores.unsqueeze(1), indices.unsqueeze(1), len(rank), live)
        length = covering(torch.empty_like(mass).index_copy_(1, rank, mass), buffers.share)
        length = length.clamp(buffers.least[layer], buffers.most[layer])
        inside = rank < length.unsqueeze(1)
        if reroutes:
            scores, chosen = reroute(logits, inside, indices.shape[1], self._renormalizes, scores.dtype)
        else:
            scores, chosen = drop(scores, indices, inside)
        return scores, chosen, length


def complete(
    ids: Tensor,
    logits: Tensor,
    step: Callable[[Tensor], Tensor],
    processors: Callable[[Tensor, Tensor], Tensor],
    criteria: Any,
    config: Any,
) -> Any:
    """The decode loop of `model.generate`, on any `step` from tokens (B, 1) to logits (B, vocabulary).

    Args:
        ids: (B, S), the prompt. logits: (B, vocabulary), after it.
        processors, criteria, config: as `generate` prepares them.

    Returns:
        (B, S + G) token ids, or with `return_dict_in_generate` sequences, scores and logits.
    """
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    going = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    kept: Any = []
    while True:
        logits = logits.float()
        scores = processors(ids, logits)
        if config.return_dict_in_generate:
            kept.append((scores, logits))
        chosen = torch.multinomial(scores.softmax(-1), 1) if config.do_sample else scores.argmax(-1, keepdim=True)
        if ends:
            chosen = chosen.where(going.unsqueeze(1), config._pad_token_tensor)
        ids = torch.cat([ids, chosen], 1)
        going = going & ~criteria(ids, None)
        if not going.any():
            break
        logits = step(chosen)
    sequences: Any = ids
    if not config.return_dict_in_generate:
        return sequences
    all_scores, all_logits = zip(*kept, strict=True)
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=all_scores if config.output_scores else None,
        logits=all_logits if config.output_logits else None,
    )
