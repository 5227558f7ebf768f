"""Attaches a method to a model. The only file that registers hooks; they live inside a `with`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .cache import LayoutCache
from .calibration import Calibration
from .experts import expert_order
from .families import Parts, parts_of
from .flops import Dimensions, count, head_width
from .layout import take
from .methods import Method
from .methods.base import Boundary, Decider, Routing
from .prefix import drop, reroute, routed_mass
from .trace import GateReading, PerLayer, Tokens, Trace

CHANNELS = ("prefix", "coverage", "routes")  # what is recorded of one limited router invocation, per row


class Session:
    """One method at work on one model, one batch of questions at a time. Made by `attach`."""

    cache: Any = None  # the LayoutCache of the batch at hand
    lengths: list[int]

    def __init__(self, parts: Parts, method: Method, decider: Decider) -> None:
        self.parts, self.method, self.decider = parts, method, decider
        self.layers = len(parts.layers)

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
        self._reset(LayoutCache(self.parts.config, visual, attention_mask))
        return self.cache

    def generate(self, inputs: dict[str, Any], **options: Any) -> Any:
        """`model.generate` on a processor's output, with the method at work. Same result: (B, S + G) token ids, or
        what `return_dict_in_generate` asks for.

        Raises:
            ValueError: an option that the method can't follow (beam search, another cache).
        """
        if options.get("num_beams", 1) != 1 or "cache" in options or "past_key_values" in options:
            raise ValueError("A method runs one beam on its own cache; leave out num_beams and cache.")
        cache = self.new_cache(inputs["input_ids"], inputs.get("attention_mask"))
        out = self.parts.model.generate(**inputs, cache=cache, **options)
        ids = out if isinstance(out, Tensor) else out.sequences
        self.lengths = self._lengths(ids[:, cache.prompt :].cpu(), options.get("eos_token_id"))
        return out

    def traces(self) -> list[Trace]:
        """What happened to each row of the last batch, up to its end token."""
        steps = [{layer: values.tolist() for layer, values in step.items()} for step in self.steps]
        lengths = self.lengths or [len(steps)] * len(self.exits)
        return [self._trace(row, length, steps) for row, length in enumerate(lengths)]

    def _lengths(self, ids: Tensor, ends: int | list[int] | None) -> list[int]:
        """How many tokens each row of (B, G) was given, its end token included."""
        if ends is None:
            ends = self.parts.model.generation_config.eos_token_id
        if ends is None:
            return [ids.shape[1]] * len(ids)
        ended = torch.isin(ids, torch.tensor(ends))
        return torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1]).tolist()

    # --- hooks -----------------------------------------------------------------------------------------------------

    def _reset(self, cache: LayoutCache) -> None:
        rows = len(cache.visual)
        self.cache, self.decoding = cache, False
        self.lengths = []  # tokens given to each row, once `generate` is through
        self.exits: list[int | None] = [None] * rows
        self.readings: list[dict[int, float]] = [{} for _ in range(rows)]
        self.steps: list[dict[int, Tensor]] = []  # per forward: {limited layer: (channels, B)}
        self.mass: list[dict[int, dict[str, Tensor]]] = []  # per forward: {layer: {modality: (B, E)}}
        self.rotary: tuple[Any, ...] = (None,)

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
        if len(kwargs["inputs_embeds"]) != len(self.exits):
            raise ValueError("A method can't follow beams or several sequences a row; ask for one.")
        self.steps.append({})
        self.mass.append({})
        cache.new_step()

    def enter(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Pre-hook of a decoder layer: let tokens go, then give the layer what belongs to those that are left."""
        hidden = args[0]
        if not self.decoding and layer > 0:
            slots = self._let_go(layer - 1, hidden)
            if slots is not None:
                hidden = take(hidden, slots, 1)
        if not any(exit_after is not None for exit_after in self.exits):
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
        _cache, experts = self.cache, logits.shape[-1]
        rows = len(self.exits)
        each = routed_mass(scores, indices, experts).view(rows, -1, experts)
        mass = self._record_mass(layer, each)
        prefix = self.decider.prefix(Routing(layer, self.decoding, mass, self.exits))
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
        self.steps[-1][layer] = torch.stack([prefix.length.double(), coverage, routes.sum((1, 2)).double()])
        return logits, scores, indices

    def end(self, module: nn.Module, args: tuple) -> None:
        """Pre-hook of the final norm: after prefill, earlier layers lose what has left."""
        if self.decoding:
            return
        self._let_go(self.layers - 1, args[0])
        last = max((exit_after for exit_after in self.exits if exit_after is not None), default=-1)
        if self.decider.purge and last >= 0:
            self.cache.purge(range(last + 1), self._gone())

    # --- their parts -----------------------------------------------------------------------------------------------

    def _gone(self) -> Tensor:
        """(B, S) bool: the prompt tokens that have left."""
        exited = torch.tensor([exit_after is not None for exit_after in self.exits], device=self.cache.visual.device)
        return self.cache.visual & exited.unsqueeze(1)

    def _let_go(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Ask the method after `layer`. If rows exit: set the layout of the layers to come, return slots (B, N')."""
        if all(exit_after is not None for exit_after in self.exits):
            return None
        leaves = self.decider.leaves(Boundary(layer, hidden, self.cache, self.readings))
        if leaves is None:
            return None
        leaving = [left and old is None for left, old in zip(leaves.tolist(), self.exits, strict=True)]
        if not any(leaving):
            return None
        self.exits = [layer if left else old for left, old in zip(leaving, self.exits, strict=True)]
        return self.cache.let_go(layer, self._gone())

    def _rotary(self, layer: int, full: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rotary angles of the live tokens at their original positions; gathered once a layout."""
        layout = self.cache.layouts[layer]
        if self.rotary[0] is not layout:
            rows = len(layout.index)
            self.rotary = (layout, *(take(x.expand(rows, -1, -1), layout.index, 1) for x in full))
        return self.rotary[1:]

    def _record_mass(self, layer: int, each: Tensor) -> Tensor:
        """Record (B, N, E) routed mass by modality; the result is (B, E), over all tokens that are not padding."""
        layout = self.cache.layouts[layer]
        if self.decoding:
            kinds = {"generated": each.sum(1)}
        else:
            kinds = {}
            for name, tokens in (("visual", self.cache.visual), ("text", self.cache.text)):
                slots = (layout.of_prompt(tokens) & layout.valid).to(each.device)
                kinds[name] = torch.where(slots.unsqueeze(-1), each, 0).sum(1)
        self.mass[-1][layer] = kinds
        return torch.stack(list(kinds.values())).sum(0)

    # --- from record to trace ----------------------------------------------------------------------------------------

    def _mass(self, row: int, generated: int) -> dict[str, list[list[float] | None]]:
        """Routed mass of a row by modality, [layer][native expert]; None at layers without experts."""
        order = expert_order(self.parts)
        total: dict[str, list[list[float] | None]] = {}
        for name in ("visual", "text", "generated"):
            total[name] = [None] * self.layers
            for layer in self.mass[0]:
                steps = [step[layer][name][row] for step in self.mass[:generated] if name in step[layer]]
                places = torch.stack(steps).sum(0).cpu() if steps else torch.zeros(order.shape[1])
                total[name][layer] = places[order[layer].argsort()].tolist()
        return total

    def _trace(self, row: int, generated: int, recorded: list[dict[int, list]]) -> Trace:
        parts, cache, decider, exit_after = self.parts, self.cache, self.decider, self.exits[row]
        visual, text = int(cache.visual[row].sum()), int(cache.text[row].sum())
        stays = [exit_after is None or layer <= exit_after for layer in range(self.layers)]
        keeps = [here and (exit_after is None or not decider.purge) for here in stays]
        live = [text + visual * here for here in stays]
        cached = [text + visual * here for here in keeps]
        experts, top_k = parts.config.num_experts, parts.config.num_experts_per_tok
        has_experts = [router is not None for router in parts.routers]

        def per_layer(name: str, whole: Callable[[int, int], Any]) -> PerLayer:
            """One channel as the trace has it; `whole(step, layer)` where all experts stayed."""
            channel, table = CHANNELS.index(name), []
            for number, step in enumerate(recorded[:generated]):
                limited = [layer in step and step[layer][0][row] < experts for layer in range(self.layers)]
                values = [
                    step[layer][channel][row] if limited[layer] else whole(number, layer)
                    for layer in range(self.layers)
                ]
                table.append([int(x) if name != "coverage" and x is not None else x for x in values])
            return PerLayer(table[0], table[1:])

        readings = self.readings[row]
        trace = Trace(
            method=self.method.name,
            settings=self.method.settings(),
            model=parts.model.name_or_path or parts.family.name,
            question="",
            layers=self.layers,
            experts=experts,
            top_k=top_k,
            tokens=Tokens(visual, text, generated),
            exit_after=exit_after,
            theta=decider.theta,
            gate=[
                GateReading(layer, readings.get(layer) if exit_after is None or layer <= exit_after else None)
                for layer in decider.candidates
            ],
            prefix=per_layer("prefix", lambda step, layer: None),
            coverage=per_layer("coverage", lambda step, layer: None),
            routes=per_layer("routes", lambda step, layer: top_k * (1 if step else live[layer]) * has_experts[layer]),
            live=live,
            cached=cached,
            mass=self._mass(row, generated),
        )
        entry = 2 * parts.config.num_key_value_heads * head_width(parts.config) * cache.element_size()
        steps = max(0, generated - 1)
        trace.kv_bytes = entry * sum(count + steps for count in cached)
        trace.kv_bytes_dense = entry * self.layers * (visual + text + steps)
        size = Dimensions.of(parts.config, has_experts)
        trace.flops = count(trace, size, decider.gate_width)
        return trace


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
