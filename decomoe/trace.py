"""What happened to one question, and its JSON form: the single source of every number, plot and table."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1


@dataclass
class Tokens:
    """Token counts: prompt tokens by modality (padding never counts), and generated tokens."""

    visual: int
    text: int
    generated: int = 0


@dataclass
class GateReading:
    """p_exit at one candidate layer; None where the question had already left or no gate was asked."""

    layer: int
    p_exit: float | None


@dataclass
class PerLayer:
    """One figure per layer for the prefill, and the same per decode step. None where a layer used all experts."""

    prefill: list[Any] = field(default_factory=list)
    decode: list[list[Any]] = field(default_factory=list)


@dataclass
class Flops:
    """Decoder FLOPs of the whole answer (MAC = 2), under two conventions, with the dense model's beside them.

    `executed` counts all experts of the prefix for every token (the paper's, its A.3): it sees tokens that leave, not
    single routes that are skipped. `sparse` counts the routes only (what a grouped GEMM computes).
    """

    executed: float = 0.0
    executed_dense: float = 0.0
    sparse: float = 0.0
    sparse_dense: float = 0.0


@dataclass
class Trace:
    """What happened to one question.

    Attributes:
        settings: the method's parameters.
        layers, experts, top_k: the model's sizes; `top_k` is also the shortest possible prefix.
        exit_after: the last layer that saw the visual block (zero-based), None if it stayed.
        gate: one reading per candidate layer, with the threshold `theta`.
        prefix: experts kept per layer (0-based), `coverage`: the share of routed mass that they, or the routes that
            were not skipped, hold.
        routes: routes computed per layer (tokens x top-k, less where some are skipped; 0 at layers without experts).
        live: prompt tokens that went through each layer.
        cached: prompt entries left in the KV cache per layer after prefill.
        mass: routed mass before any cut, [layer][native expert], by modality: visual and text prompt tokens, and
            generated tokens. None at layers without experts. A token adds 1 a layer.
        kv_bytes: size of the KV cache at the end; `kv_bytes_dense`: what it would be with nothing removed.
        ttft_s: seconds from the call of generate to the first token (vision encoder included).
        tpot_s: mean seconds per further token, None if there was only one.
        token_times_s: when each token came, in seconds like `ttft_s`; token_ends: how many characters the answer had
            then.
    """

    method: str
    settings: dict[str, Any]
    model: str
    question: str
    layers: int
    experts: int
    top_k: int
    tokens: Tokens
    answer: str = ""
    exit_after: int | None = None
    theta: float | None = None
    gate: list[GateReading] = field(default_factory=list)
    prefix: PerLayer = field(default_factory=PerLayer)
    coverage: PerLayer = field(default_factory=PerLayer)
    routes: PerLayer = field(default_factory=PerLayer)
    live: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    mass: dict[str, list[list[float] | None]] = field(default_factory=dict)
    kv_bytes: int = 0
    kv_bytes_dense: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    token_ends: list[int] = field(default_factory=list)
    flops: Flops = field(default_factory=Flops)
    schema: int = SCHEMA

    @property
    def expert_layers(self) -> list[int]:
        """The layers that have experts."""
        return [layer for layer, mass in enumerate(self.mass["text"]) if mass is not None]

    @property
    def mean_prefix(self) -> float:
        """Mean number of experts kept over every invocation of a layer with experts; all where nothing was cut."""
        layers = self.expert_layers
        kept = [step[layer] for step in (self.prefix.prefill, *self.prefix.decode) for layer in layers]
        return sum(self.experts if m is None else m for m in kept) / max(1, len(kept))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Trace":
        """Read `to_json`'s line back.

        Raises:
            ValueError: not a trace, or one of another schema version.
        """
        values = json.loads(line)
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            raise ValueError(f"This is not a trace of schema {SCHEMA}; make it again with this version of decomoe.")
        values["tokens"] = Tokens(**values["tokens"])
        values["gate"] = [GateReading(**reading) for reading in values["gate"]]
        values["flops"] = Flops(**values["flops"])
        for name in ("prefix", "coverage", "routes"):
            values[name] = PerLayer(**values[name])
        return cls(**values)
