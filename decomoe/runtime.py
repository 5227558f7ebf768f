"""Attaches a method to a model. The only file that registers hooks; they live inside a `with`."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .cache import LayoutCache, blocks
from .calibration import Calibration
from .decode import CompiledDecode, complete
from .experts import WHOLE_PREFIX
from .families import Parts, parts_of
from .layout import take
from .methods import Method
from .methods.base import Boundary, Decider, Watched
from .prefix import drop, reroute, skip
from .record import Limit, Record
from .trace import Trace


@dataclass(frozen=True)
class Prefill:
    """A batch's prefill in which nothing has left, for `Session.resume` to go on from.

    Attributes:
        input_ids: (B, S), left padded.
        cache: keys and values of every layer.
        states: {layer: (B, S, d)}, the outputs of the layers that were kept; -1 stands for the embeddings.
        rotary: cosine and sine of all tokens, as the layers take them.
        deepstack: what is added to the visual tokens after the first layers, as the model has it.
        mass: {layer: {modality: (B, E)}}, as in `Record`.
        rope_deltas: (B, 1), where M-RoPE counts on after the picture (Qwen3-VL keeps it on the model); None elsewhere.
    """

    input_ids: Tensor
    cache: LayoutCache
    states: dict[int, Tensor]
    rotary: tuple[Tensor, Tensor]
    deepstack: list[Tensor]
    mass: dict[int, dict[str, Tensor]]
    rope_deltas: Tensor | None


class Stopped(Exception):
    """The session's `stop` event was set."""


class Session:
    """One method at work on one model, one batch of questions at a time. Made by `attach`."""

    def __init__(self, parts: Parts, method: Method, decider: Decider, decode: CompiledDecode | None = None) -> None:
        self.parts, self.method, self.decider, self.decode = parts, method, decider, decode
        if decode is not None:
            decode.check(parts)
            decider.limits([None])  # refuses what a graph can't follow
        self.cache: Any = None  # the LayoutCache of the batch at hand
        self.record: Any = None  # its Record
        self.deepstack: list[Tensor] = []  # what the batch's visual tokens get after the first layers
        self.keep: Collection[int] = ()  # layers whose output in prefill goes to `states`
        self.stop: threading.Event | None = None  # once set, the next layer, or decode step, raises `Stopped`
        self.hooks: dict[int, RemovableHandle] = {}  # layers that `enter` watches

    # --- what callers use ------------------------------------------------------------------------------------------

    def new_cache(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> LayoutCache:
        """A cache for this prompt (B, S), left padded; pass it to `generate` or to the model as `cache`.

        Raises:
            ValueError: several rows without a mask that tells their padding, or padding on the right.
        """
        if attention_mask is None:
            if len(input_ids) > 1:
                raise ValueError("Several rows need an attention_mask that tells padding from text.")
            attention_mask = torch.ones_like(input_ids)
        if bool((attention_mask.diff(dim=1) < 0).any()):
            raise ValueError("Rows must be padded on the left; give the processor padding_side='left'.")
        visual = torch.isin(input_ids, torch.tensor(self.parts.visual_token_ids, device=input_ids.device))
        return self._start(LayoutCache(self.parts.config, visual, attention_mask))

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
        if self.decode is not None:
            if options.get("streamer") is not None:
                raise ValueError("Compiled decode has no streamer; watch it with stopping_criteria.")
            options["custom_generate"] = self._generate_compiled
        out = self.parts.model.generate(**inputs, cache=cache, **options)
        ids = out if isinstance(out, Tensor) else out.sequences
        settings = options.get("generation_config") or self.parts.model.generation_config
        ends = options.get("eos_token_id", settings.eos_token_id)
        self.record.lengths = _lengths(ids[:, cache.prompt :].cpu(), ends)
        return out

    def prefill(self, inputs: dict[str, Any]) -> Prefill:
        """The prefill of the last batch, `generate(inputs)` with `keep` set, for sessions to `resume` from.

        Raises:
            ValueError: tokens have left, so that it is not the dense model's; or compiled decode has taken its cache.
        """
        if self.decode is not None:
            raise ValueError("Compiled decode takes the cache of a prefill; attach without it to resume.")
        if any(layout is not self.cache.full for layout in self.cache.layouts):
            raise ValueError("Tokens left in this prefill; resume from one of the dense model.")
        deltas = getattr(self.parts.model.model, "rope_deltas", None)
        mass = self.record.mass[0]
        return Prefill(inputs["input_ids"], self.cache, self.states, self.full_rotary, self.deepstack, mass, deltas)

    def resume(self, prefill: Prefill, layer: int, max_new_tokens: int, copies: int = 1) -> tuple[Tensor, Tensor]:
        """Answer greedily from the state after `layer`, which must have been kept: what this session's method gives if
        it lets nothing go before. Neither the vision tower nor the layers up to `layer` run again.

        Args:
            copies: how often every row is answered, one block after the other, for methods that tell rows apart.

        Returns:
            (B, G) token ids of the answers, and (B, vocabulary) the logits that chose the first; B with copies.

        Raises:
            ValueError: the method watches layers that don't run again.
        """
        if any(watched <= layer for watched in self.decider.watches):
            raise ValueError(
                f"{self.method.name} looks into layers up to {layer}, which don't run again; resume earlier."
            )
        parts = self.parts
        prompt, hidden, *rotary = (
            blocks(values.expand(len(prefill.input_ids), *values.shape[1:]), copies)
            for values in (prefill.input_ids, prefill.states[layer], *prefill.rotary)
        )
        cache = self._start(prefill.cache.fork(parts.config, layer, copies))
        self.record.new_step()
        self.deepstack = [blocks(rows, copies) for rows in prefill.deepstack]
        for below in (index for index in prefill.mass if index <= layer):
            kinds = prefill.mass[below]
            self.record.mass[0][below] = {name: blocks(mass, copies) for name, mass in kinds.items()}
        for index in range(layer + 1, len(parts.layers)):
            mask = cache.mask(parts.config, hidden, index, decoding=False)
            hidden = parts.layers[index](hidden, attention_mask=mask, cache=cache, position_embeddings=tuple(rotary))
        logits = parts.model.get_output_embeddings()(parts.text_model.norm(hidden)[:, -1])
        ids = logits.argmax(-1, keepdim=True).to(prompt.device)
        if max_new_tokens > 1:
            if prefill.rope_deltas is not None:
                parts.model.model.rope_deltas = blocks(prefill.rope_deltas, copies)
            ids = parts.model.generate(
                input_ids=torch.cat([prompt, ids], 1),
                attention_mask=nn.functional.pad((cache.visual | cache.text).long(), (0, 1), value=1),
                cache=cache,
                max_new_tokens=max_new_tokens - 1,
                do_sample=False,
            )[:, cache.prompt :]
        self.record.lengths = _lengths(ids.cpu(), parts.model.generation_config.eos_token_id)
        return ids, logits

    def traces(self, generated: int | None = None) -> list[Trace]:
        """What happened to each row of the last batch, up to its end token, or to so many `generated` tokens.

        Raises:
            ValueError: nothing was asked yet.
        """
        if self.record is None:
            raise ValueError("Nothing was asked in this session yet; generate first.")
        traces = []
        for row in range(len(self.record.exits)):
            trace = self.record.trace(row, generated)
            trace.method, trace.settings = self.method.name, self.method.settings()
            trace.theta, trace.gate = self.decider.theta, self.record.gate(row, self.decider.candidates)
            self.record.add_flops(trace, self.decider.gate_width)
            traces.append(trace)
        return traces

    # --- hooks -----------------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Pre-hook of the text model: a forward starts. DeepStack is taken over: the model would add to all tokens."""
        cache: Any = kwargs.get("cache")
        length = kwargs["inputs_embeds"].shape[1]
        if not isinstance(cache, LayoutCache) or cache is not self.cache:
            raise ValueError(
                "With a method attached, run the model on session.new_cache(...) or session.generate(...)."
            )
        self._check_stop()
        self.decoding = cache.get_seq_length() > 0
        if length != (1 if self.decoding else cache.prompt):
            raise ValueError("A method needs the whole prompt in one prefill, and then one token at a time.")
        if len(kwargs["inputs_embeds"]) != len(self.record.exits):
            raise ValueError("A method can't follow beams or several sequences a row; ask for one.")
        self.record.new_step()
        cache.new_step()
        if not self.decoding:
            self.deepstack = kwargs.get("deepstack_visual_embeds") or []
        return args, {**kwargs, "deepstack_visual_embeds": None} if self.deepstack else kwargs

    def enter(self, layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Pre-hook of a decoder layer: let tokens go, then give the layer what belongs to those that are left."""
        self._check_stop()
        hidden = args[0]
        if not self.decoding:
            self.full_rotary = kwargs["position_embeddings"]
            hidden = self._between(layer - 1, hidden)
        if self.cache.layouts[layer] is not self.cache.full:  # else the layer's own arguments, bit for bit
            kwargs = {
                **kwargs,
                "attention_mask": self.cache.mask(self.parts.config, hidden, layer, self.decoding),
                "position_ids": None,  # flash attention would take the gaps for packed sequences
            }
            if not self.decoding:
                kwargs["position_embeddings"] = self._rotary(layer, self.full_rotary)
        if not self.decoding and layer in self.decider.watches:
            rows = len(hidden)
            cos, sin = (angles.expand(rows, -1, -1) for angles in kwargs["position_embeddings"])
            self.watched[layer] = Watched(hidden, (cos, sin))
        return (hidden, *args[1:]), kwargs

    def route(self, layer: int, module: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> tuple | None:
        """Hook of a router: record its mass, then limit it to the prefix or the routes that the method leaves."""
        if self.idle:
            self.record.idle[-1][layer] = output
            return None
        logits, scores, indices = output
        state = self.record.routing(layer, output, None if self.decoding else self.cache.layouts[layer])
        if layer in self.watched:
            self.watched[layer].logits = state.logits
        self.record.routed[-1][layer], self.record.chosen[-1][layer] = state, indices
        prefix, routes = self.decider.prefix(state), self.decider.routes(state)
        if prefix is None and routes is None:
            return None
        limit = Limit(state, prefix, routes)
        if prefix is not None:
            inside, tokens = limit.inside, len(logits) // len(state.exits)
            per_token = inside if tokens == 1 else inside.repeat_interleave(tokens, dim=0)
            if prefix.reroute:
                scores, indices = reroute(logits, per_token, indices.shape[1], self.parts.renormalizes, scores.dtype)
            else:
                scores, indices = drop(scores, indices, per_token)
            setattr(indices, WHOLE_PREFIX, True)
        elif routes is not None:
            stay, normalize = routes.stay.view_as(indices), routes.renormalize and self.parts.renormalizes
            scores, indices = skip(scores, indices, stay, logits.shape[-1], normalize)
        self.record.limits[-1][layer], self.record.chosen[-1][layer] = limit, indices
        return logits, scores, indices

    def end(self, module: nn.Module, args: tuple) -> tuple | None:
        """Pre-hook of the final norm: after prefill, earlier layers lose what has left."""
        if self.decoding:
            return None
        hidden = self._between(len(self.parts.layers) - 1, args[0])
        self.record.end_prefill()
        self.watched.clear()
        exits = self.record.exits
        self.idle = self.decider.is_idle(exits)
        last = max((exit_after for exit_after in exits if exit_after is not None), default=-1)
        if self.decider.purge and last >= 0:
            exited = torch.tensor([exit_after is not None for exit_after in exits], device=self.cache.visual.device)
            self.cache.purge(range(last + 1), self.cache.visual & exited.unsqueeze(1))
        self.hook_layers([layer for layer, layout in enumerate(self.cache.layouts) if layout is not self.cache.full])
        return (hidden,)

    # --- their parts -----------------------------------------------------------------------------------------------

    def _start(self, cache: LayoutCache) -> LayoutCache:
        """A batch of questions starts on `cache`."""
        self.cache, self.record, self.deepstack = cache, Record(self.parts, cache), []
        self.decoding = self.idle = False
        self.states: dict[int, Tensor] = {}
        self.watched: dict[int, Watched] = {}
        self.rotary: tuple[Any, ...] = (None,)
        self.hook_layers(range(len(self.parts.layers)))
        return cache

    def _check_stop(self) -> None:
        if self.stop is not None and self.stop.is_set():
            raise Stopped

    def hook_layers(self, layers: Collection[int]) -> None:
        """Have `enter` called before these layers only: a hook costs a decode step more than what it does."""
        for layer in self.hooks.keys() - set(layers):
            self.hooks.pop(layer).remove()
        for layer in set(layers) - self.hooks.keys():
            hook = partial(self.enter, layer)
            self.hooks[layer] = self.parts.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)

    def _between(self, layer: int, hidden: Tensor) -> Tensor:
        """What goes on from the output `hidden` of `layer` in prefill: DeepStack's share added, then cut."""
        if layer in self.keep:
            self.states[layer] = hidden
        if 0 <= layer < len(self.deepstack):
            hidden = self._add_deepstack(layer, hidden)
        if layer < 0 or all(exit_after is not None for exit_after in self.record.exits):
            return hidden
        state = Boundary(layer, hidden, self.cache, self.parts, self.record.readings, self.watched)
        cut = self.decider.cut(state)
        if cut is None:
            return hidden
        hidden = hidden if cut.hidden is None else cut.hidden
        slots = self.cache.let_go(layer, cut.keep)
        if slots is None:
            return hidden
        left = (self.cache.visual.any(1) & ~(state.visual & cut.keep).any(1)).tolist()
        exits = self.record.exits
        exits[:] = [layer if gone and before is None else before for gone, before in zip(left, exits, strict=True)]
        return take(hidden, slots, 1)

    def _add_deepstack(self, layer: int, hidden: Tensor) -> Tensor:
        """Add the rows of the visual tokens that are left, as the model does with all of them."""
        layout, visual = self.cache.layouts[layer], self.cache.visual
        live = layout.of_prompt(visual) & layout.valid
        number = layout.of_prompt((visual.flatten().cumsum(0) - 1).view_as(visual))[live]
        hidden, live = hidden.clone(), live.to(hidden.device)
        hidden[live] += self.deepstack[layer].to(hidden)[number.to(hidden.device)]
        return hidden

    def _rotary(self, layer: int, full: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rotary angles of the live tokens at their original positions; gathered once a layout."""
        layout = self.cache.layouts[layer]
        if self.rotary[0] is not layout:
            rows = len(layout.index)
            self.rotary = (layout, *(take(x.expand(rows, -1, -1), layout.index, 1) for x in full))
        return self.rotary[1:]

    # --- decode without hooks --------------------------------------------------------------------------------------

    def _generate_compiled(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Any:
        """What `generate` runs with compiled decode: the prefill as ever, then graphs."""
        decode, length = self.decode, input_ids.shape[1]
        assert decode is not None
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=length, is_first_iteration=True, **inputs
        )
        logits = model(**inputs, return_dict=True).logits[:, -1]
        limits = self.decider.limits(self.record.exits)
        limits = limits and limits.to(input_ids.device)
        room = generation_config.max_length - length - 1
        if room:
            position = inputs["position_ids"][..., -1:] + 1  # as `generate` goes on
            decode.start(self.cache, position[-3:] if position.ndim == 3 else position, room, limits)

        def step(chosen: Tensor) -> Tensor:
            self._check_stop()
            logits, routed = decode.step(chosen)
            self.record.add_step(routed, limits)
            return logits

        return complete(input_ids, logits, step, logits_processor, stopping_criteria, generation_config)


def _lengths(ids: Tensor, ends: int | list[int] | None) -> list[int]:
    """How many tokens each row of (B, G) was given, its end token included."""
    if ends is None:
        return [ids.shape[1]] * len(ids)
    ended = torch.isin(ids, torch.tensor(ends))
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1]).tolist()


@contextmanager
def attach(
    model: Any, method: Method, calibration: Calibration | None = None, decode: CompiledDecode | None = None
) -> Iterator[Session]:
    """Let `method` act on every forward of `model` inside the `with`; afterwards the model is as it was.

    Args:
        model: of a family in `families.FAMILIES`. One session at a time.
        calibration: for methods that need one.
        decode: compiled decode steps for `Session.generate`, made for this model and kept from session to session.

    Raises:
        ValueError: the method does not fit the model or compiled decode, or something is attached already.
    """
    parts = parts_of(model)
    decider = method.bind(parts, calibration)
    if getattr(model, "_decomoe_session", None) is not None:
        raise ValueError("A method is attached to this model already; leave its `with` first.")
    session = Session(parts, method, decider, decode)
    handles = []
    experts = [module for module in parts.experts if module is not None] if decider.drops else []
    try:
        model._decomoe_session = session
        handles.append(parts.text_model.register_forward_pre_hook(session.begin, with_kwargs=True))
        for index, router in enumerate(parts.routers):
            if router is not None:
                handles.append(router.register_forward_hook(partial(session.route, index)))
        handles.append(parts.text_model.norm.register_forward_pre_hook(session.end))
        for module in experts:
            module._is_expert_parallel = True  # transformers' own flag for "index E is no expert, skip it"
        yield session
    finally:
        for handle in (*handles, *session.hooks.values()):
            handle.remove()
        for module in experts:
            module._is_expert_parallel = False
        model._decomoe_session = None
