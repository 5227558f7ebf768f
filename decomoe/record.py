"""What the hooks note down while one batch of questions runs, and the trace of each row that comes of it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .cache import LayoutCache
from .experts import expert_order
from .families import Parts
from .flops import Dimensions, count, head_width
from .layout import Layout
from .methods.base import Limits, Prefix, Routes, Routing
from .prefix import routed_mass, shares
from .trace import GateReading, PerLayer, Tokens, Trace

MODALITIES = ("visual", "text", "generated")


@dataclass(eq=False)
class Limit:
    """How one invocation of a router was limited: to a prefix, or to some routes."""

    state: Routing
    prefix: Prefix | None
    routes: Routes | None

    @cached_property
    def inside(self) -> Tensor:
        """(B, E) bool, the experts of the prefix, by place."""
        assert self.prefix is not None
        return self.prefix.rank < self.prefix.length.unsqueeze(1)

    def summary(self, chosen: Tensor) -> Tensor:
        """(3, B) float64: experts kept, share of mass they cover, and routes computed, of those `chosen` (B * N, k)."""
        state, experts, live = self.state, self.state.logits.shape[2], self.state.live
        if self.prefix is not None:
            length, kept = self.prefix.length, state.mass.masked_fill(~self.inside, 0).sum(1)
        elif self.routes is not None:
            stay = self.routes.stay & live.unsqueeze(-1)
            kept = shares(state.scores).where(stay, 0).sum((1, 2))
            length = kept.new_full((len(kept),), experts)
        computed = ((chosen < experts).view(state.indices.shape) & live.unsqueeze(-1)).sum((1, 2))
        covered = kept / live.sum(1)  # a token puts a mass of 1
        return torch.stack([length.to(covered), covered, computed.to(covered)])


class Record:
    """Tensors stay on the device until somebody looks; what a forward comes to is then fetched once for all rows.

    Attributes:
        live: (L, B), prompt tokens that went through each layer, once the prefill is over.
        exits: per row, the layer after which its visual block left, None if it has not.
        readings: per row, {candidate layer: p_exit}.
        lengths: tokens given to each row; empty until known, then every forward counts.
        limits: per forward, {layer: Limit} until `limited_in` reduces them.
        chosen: per forward, {layer: (tokens, k)}, the experts that were run, index E for none.
        routed: per forward, {layer: Routing} until `mass_in` reduces it, so that a forward pays nothing for it.
        idle: per forward, {layer: output of a router} that nothing limits in decode, until `_settle` makes both of it.
    """

    def __init__(self, parts: Parts, cache: LayoutCache) -> None:
        rows = len(cache.visual)
        self.parts, self.cache = parts, cache
        self.live: Any = None
        self.exits: list[int | None] = [None] * rows
        self.readings: list[dict[int, float]] = [{} for _ in range(rows)]
        self.lengths: list[int] = []
        self.limits: list[dict[int, Limit]] = []
        self._limited: list[dict[int, Tensor]] = []
        self.chosen: list[dict[int, Tensor]] = []
        self.routed: list[dict[int, Routing]] = []
        self.idle: list[dict[int, tuple[Tensor, Tensor, Tensor]]] = []
        self._reduced: list[dict[int, dict[str, Tensor]]] = []
        self._lock = threading.Lock()  # the page looks from another thread

    def new_step(self) -> None:
        """A forward starts."""
        self.limits.append({})
        self._limited.append({})
        self.chosen.append({})
        self.routed.append({})
        self.idle.append({})
        self._reduced.append({})

    def add_step(self, routed: Sequence[Tensor], limits: Limits | None) -> None:
        """A compiled decode step ran, which no hook has seen.

        Args:
            routed: as from `CompiledDecode.step`. limits: under which it ran.
        """
        self.new_step()
        layers = [layer for layer, router in enumerate(self.parts.routers) if router is not None]
        steps = zip(*(values.unbind() for values in routed), strict=True)
        for layer, (logits, scores, indices, chosen, length) in zip(layers, steps, strict=True):
            state = self.routing(layer, (logits, scores, indices))
            self.routed[-1][layer], self.chosen[-1][layer] = state, chosen
            if limits is not None and layer in limits.layers:
                prefix = Prefix(length, limits.rank[layer], limits.reroute)
                self.limits[-1][layer] = Limit(state, prefix, None)

    def routing(self, layer: int, output: tuple[Tensor, Tensor, Tensor], layout: Layout | None = None) -> Routing:
        """A router's output with the tokens that it is of: those of `layout` in prefill, None in a decode step."""
        return Routing(layer, layout is None, self.exits, output, partial(self.cache.slots, layout, output[0].device))

    def _settle(self, forward: int) -> None:
        """Note of a finished forward's idle routers what is noted of others; call it with the lock."""
        idle = self.idle[forward]
        for layer, output in idle.items():
            self.routed[forward][layer], self.chosen[forward][layer] = self.routing(layer, output), output[2]
        idle.clear()

    def end_prefill(self) -> None:
        """The prefill is over; the cache may still be purged."""
        self.live = self._counts()

    def _counts(self) -> Tensor:
        """(L, B): prompt tokens that the cache holds in each layer."""
        return torch.stack([layout.valid.sum(1) for layout in self.cache.layouts])

    @property
    def mass(self) -> list[dict[int, dict[str, Tensor]]]:
        """Per forward, {layer: {modality: (B, E)}}: routed mass by place in the model."""
        return [self.mass_in(forward) for forward in range(len(self.routed))]

    def limited_in(self, forward: int) -> dict[int, Tensor]:
        """{layer: (3, B)} of one finished forward: experts kept, share of mass they cover, routes computed.

        The run may go on meanwhile.
        """
        with self._lock:
            limits, reduced = self.limits[forward], self._limited[forward]
            for layer, limit in limits.items():
                reduced[layer] = limit.summary(self.chosen[forward][layer]).cpu()
            limits.clear()
            return reduced

    def chosen_in(self, forward: int) -> dict[int, Tensor]:
        """`chosen` of one finished forward; the run may go on meanwhile."""
        with self._lock:
            self._settle(forward)
            return self.chosen[forward]

    def mass_in(self, forward: int) -> dict[int, dict[str, Tensor]]:
        """`mass` of one finished forward; the run may go on meanwhile."""
        with self._lock:
            self._settle(forward)
            routed, reduced = self.routed[forward], self._reduced[forward]
            for layer, state in routed.items():
                kinds = {"visual": state.visual, "text": state.live & ~state.visual}
                if state.decoding:
                    kinds = {"generated": state.live}
                reduced[layer] = {
                    name: routed_mass(state.scores, state.indices, state.logits.shape[2], tokens).cpu()
                    for name, tokens in kinds.items()
                }
            routed.clear()
            return reduced

    def used_experts(self) -> list[list[int]]:
        """Per forward and layer, how many experts had at least one route; 0 at layers without experts."""
        experts, layers = self.parts.config.num_experts, range(len(self.parts.layers))
        used = []
        for forward in range(len(self.chosen)):
            found = {layer: indices.unique() for layer, indices in self.chosen_in(forward).items()}
            used.append([int((found[layer] < experts).sum()) if layer in found else 0 for layer in layers])
        return used

    def trace(self, row: int, generated: int | None = None) -> Trace:
        """What happened to one row, up to its end token, or to so many `generated` tokens.

        Method, gate and question are the caller's to fill in; FLOPs wait for the gate.
        """
        config, cache = self.parts.config, self.cache
        if generated is None:
            generated = self.lengths[row] if self.lengths else len(self.chosen)
        visual, text = int(cache.visual[row].sum()), int(cache.text[row].sum())
        live, cached = self.live[:, row].tolist(), self._counts()[:, row].tolist()
        steps = max(0, generated - 1)
        entry = 2 * config.num_key_value_heads * head_width(config) * cache.element_size()
        prefix, coverage, routes = self._tables(row, generated, live)
        return Trace(
            method="",
            settings={},
            model=self.parts.model.name_or_path or self.parts.family.name,
            question="",
            layers=len(live),
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            tokens=Tokens(visual, text, generated),
            exit_after=self.exits[row],
            prefix=prefix,
            coverage=coverage,
            routes=routes,
            live=live,
            cached=cached,
            mass=self._mass(row, generated),
            kv_bytes=entry * sum(held + steps for held in cached),
            kv_bytes_dense=entry * len(live) * (visual + text + steps),
        )

    def gate(self, row: int, candidates: Sequence[int]) -> list[GateReading]:
        """What the gate said of one row; nothing counts once the row has left."""
        last = self.exits[row]
        return [
            GateReading(layer, self.readings[row].get(layer) if last is None or layer <= last else None)
            for layer in candidates
        ]

    def kept(self, row: int, step: int) -> list[int | None]:
        """Experts that one finished forward kept, per layer; None where all."""
        limited, experts = self.limited_in(step), self.parts.config.num_experts
        lengths = [int(limited[layer][0, row]) if layer in limited else experts for layer in range(len(self.live))]
        return [length if length < experts else None for length in lengths]

    def ran(self, row: int, step: int) -> list[list[int]]:
        """Places of the experts that one finished forward ran for a row's last token, per layer."""
        experts, chosen = self.parts.config.num_experts, self.chosen_in(step)
        last = [
            chosen[layer].unflatten(0, (len(self.exits), -1))[row, -1].tolist() if layer in chosen else []
            for layer in range(len(self.live))
        ]
        return [[expert for expert in places if expert < experts] for places in last]

    def add_flops(self, trace: Trace, gate_width: int) -> None:
        """Count the FLOPs of a finished trace."""
        has_experts = [router is not None for router in self.parts.routers]
        trace.flops = count(trace, Dimensions.of(self.parts.config, has_experts), gate_width)

    def _tables(self, row: int, generated: int, live: list[int]) -> tuple[PerLayer, PerLayer, PerLayer]:
        """Experts kept, mass covered and routes computed; None (or all routes) where nothing was cut."""
        top_k, experts = self.parts.config.num_experts_per_tok, self.parts.config.num_experts
        tables: tuple[list[list[Any]], ...] = ([], [], [])
        for number in range(generated):
            step = self.limited_in(number)
            for table in tables:
                table.append([])
            for layer, tokens in enumerate(live):
                whole = 0 if self.parts.routers[layer] is None else top_k * (1 if number else tokens)
                kept, covered, routes = step[layer][:, row].tolist() if layer in step else (experts, 1.0, whole)
                values: tuple[Any, ...] = (
                    int(kept) if kept < experts else None,
                    covered if kept < experts or routes < whole else None,
                    int(routes),
                )
                for table, value in zip(tables, values, strict=True):
                    table[-1].append(value)
        prefix, coverage, routes = (PerLayer(table[0], table[1:]) for table in tables)
        return prefix, coverage, routes

    def _mass(self, row: int, generated: int) -> dict[str, list[list[float] | None]]:
        """Routed mass of a row by modality, [layer][native expert]; None at layers without experts."""
        order = expert_order(self.parts)
        total: dict[str, list[list[float] | None]] = {name: [None] * len(order) for name in MODALITIES}
        masses = [self.mass_in(number) for number in range(generated)]
        for name in MODALITIES:
            for layer in masses[0]:
                steps = [step[layer][name][row] for step in masses if name in step[layer]]
                places = torch.stack(steps).sum(0) if steps else torch.zeros(order.shape[1])
                total[name][layer] = places[order[layer].argsort()].tolist()
        return total
