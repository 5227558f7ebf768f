"""Attaches a method to a model. The only file that registers hooks; they live inside a `with`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .cache import LayoutCache
from .calibration import Calibration
from .families import Parts, parts_of
from .layout import take
from .methods import Method
from .methods.base import Boundary, Decider, Routing
from .prefix import drop, reroute, routed_mass
from .record import Record
from .trace import Trace


class Session:
    """One method at work on one model, one batch of questions at a time. Made by `attach`."""

    def __init__(self, parts: Parts, method: Method, decider: Decider) -> None:
        self.parts, self.method, self.decider = parts, method, decider
        self.cache: Any = None  # the LayoutCache of the batch at hand
        self.record: Any = None  # its Record

    # --- what callers use ------------------------------------------------------------------------------------------

    def new_cache(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> LayoutCache:
        """A cache for this prompt (B, S), left padded; pass it to `generate` or to the model as `cache`.

        Raises:
            ValueError: several rows without a mask that tells their padding.
        """
        if attention_mask is None:
            if len(input_ids) > 1:
                raise ValueError("Several rows need an attention_mask that tells padding from text.")
            attention_mask = torch.ones_like(input_ids)
        visual = torch.isin(input_ids, torch.tensor(self.parts.visual_token_ids, device=input_ids.device))
        self.cache = LayoutCache(self.parts.config, visual, attention_mask)
        self.record = Record(self.parts, self.cache)
        self.decoding = False
        self.rotary: tuple[Any, ...] = (None,)
        return self.cache

    def generate(self, inputs: dict[str, Any], **options: Any) -> Any:
        """`model.generate` on a processor's output, with the method at work.

        Returns:
            What `generate` does: (B, S + G) token ids, or what `return_dict_in_generate` asks for.

        Raises:
            ValueError: an option that the method can't follow (beam search, another cache).
        """
        if options.get("num_beams", 1) != 1 or "cache" in options or "past_key_values" in options:
            raise ValueError("A method runs one beam on its own cache; leave out num_beams and cache.")
        cache = self.new_cache(inputs["input_ids"], inputs.get("attention_mask"))
        out = self.parts.model.generate(**inputs, cache=cache, **options)
        ids = out if isinstance(out, Tensor) else out.sequences
        settings = options.get("generation_config") or self.parts.model.generation_config
        ends = options.get("eos_token_id", settings.eos_token_id)
        self.record.lengths = _lengths(ids[:, cache.prompt :].cpu(), ends)
        return out

    def traces(self) -> list[Trace]:
        """What happened to each row of the last batch, up to its end token."""
        traces = []
        for row in range(len(self.record.exits)):
            trace = self.record.trace(row, self.decider.purge)
            trace.method, trace.settings = self.method.name, self.method.settings()
            trace.theta, trace.gate = self.decider.theta, self.record.gate(row, self.decider.candidates)
            self.record.add_flops(trace, self.decider.gate_width)
            traces.append(trace)
        return traces

    # --- hooks -----------------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Pre-hook of the text model: a forward starts."""
        cache: Any = kwargs.get("cache")
        length = kwargs["inputs_embeds"].shape[1]
        if not isinstance(cache, LayoutCache) or cache is not self.cache:
            raise ValueError(
                "With a method attached, run the model on session.new_cache(...) or session.generate(...)."
            )
        self.decoding = cache.get_seq_length() > 0
        if length != (1 if self.decoding else cache.prompt):
            raise ValueError("A method needs the whole prompt in one prefill, and then one token at a time.")
        if len(kwargs["inputs_embeds"]) != len(self.record.exits):
            raise ValueError("A method can't follow beams or several sequences a row; ask for one.")
        self.record.new_step()
        cache.new_step()

    def enter(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Pre-hook of a decoder layer: let tokens go, then give the layer what belongs to those that are left."""
        hidden = args[0]
        if not self.decoding and layer > 0:
            slots = self._let_go(layer - 1, hidden)
            if slots is not None:
                hidden = take(hidden, slots, 1)
        if not any(exit_after is not None for exit_after in self.record.exits):
            return None  # nothing has happened: the layer's own arguments, bit for bit
        kwargs = {
            **kwargs,
            "attention_mask": self.cache.mask(self.parts.config, hidden, layer, self.decoding),
            "position_ids": None,  # flash attention would take the gaps for packed sequences
        }
        if not self.decoding:
            kwargs["position_embeddings"] = self._rotary(layer, kwargs["position_embeddings"])
        return (hidden, *args[1:]), kwargs

    def route(self, layer: int, module: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> tuple | None:
        """Hook of a router: record its mass, then limit it to the method's prefix."""
        logits, scores, indices = output
        rows, experts = len(self.record.exits), logits.shape[-1]
        each = routed_mass(scores, indices, experts).view(rows, -1, experts)
        mass = self.record.add_mass(layer, each, self.decoding)
        prefix = self.decider.prefix(Routing(layer, self.decoding, mass, self.record.exits))
        if prefix is None:
            return None
        inside = prefix.rank < prefix.length.unsqueeze(1)  # (B, E)
        per_token = inside.repeat_interleave(each.shape[1], dim=0)
        if prefix.reroute:
            scores, indices = reroute(logits, per_token, indices.shape[1], self.parts.renormalizes, scores.dtype)
        else:
            scores, indices = drop(scores, indices, per_token)
        routes = (indices < experts).view(rows, -1, indices.shape[1])
        if not self.decoding:
            routes = routes & self.cache.layouts[layer].valid.to(routes.device).unsqueeze(-1)
        coverage = torch.where(inside, mass, 0).sum(1) / mass.sum(1)
        self.record.limited[-1][layer] = torch.stack([prefix.length.double(), coverage, routes.sum((1, 2)).double()])
        return logits, scores, indices

    def end(self, module: nn.Module, args: tuple) -> None:
        """Pre-hook of the final norm: after prefill, earlier layers lose what has left."""
        if self.decoding:
            return
        self._let_go(len(self.parts.layers) - 1, args[0])
        last = max((exit_after for exit_after in self.record.exits if exit_after is not None), default=-1)
        if self.decider.purge and last >= 0:
            self.cache.purge(range(last + 1), self._gone())

    # --- their parts -----------------------------------------------------------------------------------------------

    def _gone(self) -> Tensor:
        """(B, S) bool: the prompt tokens that have left."""
        exited = [exit_after is not None for exit_after in self.record.exits]
        return self.cache.visual & torch.tensor(exited, device=self.cache.visual.device).unsqueeze(1)

    def _let_go(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Ask the method after `layer`. If rows exit: set the layout of the layers to come, return slots (B, N')."""
        exits = self.record.exits
        if all(exit_after is not None for exit_after in exits):
            return None
        leaves = self.decider.leaves(Boundary(layer, hidden, self.cache, self.record.readings))
        leaving = [] if leaves is None else leaves.tolist()
        rows = [row for row, left in enumerate(leaving) if left and exits[row] is None]
        if not rows:
            return None
        for row in rows:
            exits[row] = layer
        return self.cache.let_go(layer, self._gone())

    def _rotary(self, layer: int, full: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rotary angles of the live tokens at their original positions; gathered once a layout."""
        layout = self.cache.layouts[layer]
        if self.rotary[0] is not layout:
            rows = len(layout.index)
            self.rotary = (layout, *(take(x.expand(rows, -1, -1), layout.index, 1) for x in full))
        return self.rotary[1:]


def _lengths(ids: Tensor, ends: int | list[int] | None) -> list[int]:
    """How many tokens each row of (B, G) was given, its end token included."""
    if ends is None:
        return [ids.shape[1]] * len(ids)
    ended = torch.isin(ids, torch.tensor(ends))
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1]).tolist()


@contextmanager
def attach(model: Any, method: Method, calibration: Calibration | None = None) -> Iterator[Session]:
    """Let `method` act on every forward of `model` inside the `with`; afterwards the model is as it was.

    Args:
        model: of a family in `families.FAMILIES`. One session at a time.
        calibration: for methods that need one.

    Raises:
        ValueError: the method does not fit the model, or something is attached already.
    """
    parts = parts_of(model)
    decider = method.bind(parts, calibration)
    if getattr(model, "_decomoe_session", None) is not None:
        raise ValueError("A method is attached to this model already; leave its `with` first.")
    session = Session(parts, method, decider)
    handles = []
    experts = [module for module in parts.experts if module is not None] if decider.drops else []
    try:
        model._decomoe_session = session
        handles.append(parts.text_model.register_forward_pre_hook(session.begin, with_kwargs=True))
        for index, layer in enumerate(parts.layers):
            handles.append(layer.register_forward_pre_hook(partial(session.enter, index), with_kwargs=True))
        for index, router in enumerate(parts.routers):
            if router is not None:
                handles.append(router.register_forward_hook(partial(session.route, index)))
        handles.append(parts.text_model.norm.register_forward_pre_hook(session.end))
        for module in experts:
            module._is_expert_parallel = True  # transformers' own flag for "index E is no expert, skip it"
        yield session
    finally:
        for handle in handles:
            handle.remove()
        for module in experts:
            module._is_expert_parallel = False
        model._decomoe_session = None
