"""FLOPs of one question, in closed form (paper, Eq. 18-19). Decoder layers and gates; MAC = 2.

Left out, as in the paper: vision encoder, LM head, norms, embeddings; and the little that methods without a gate
compute to decide. One decode step is the forward that follows a generated token: G tokens mean G - 1 steps, and step j
attends to the cached prompt and j generated tokens.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from .trace import Flops, Trace


def head_width(config: PretrainedConfig) -> int:
    """The width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class Dimensions:
    """The sizes that the formulas need: d, q and k_v widths, E, k, expert width m, per-layer dense width or None."""

    hidden: int
    query: int
    key_value: int
    experts: int
    top_k: int
    expert_width: int
    dense_widths: tuple[int | None, ...]  # one per layer; None where the layer has experts

    @classmethod
    def of(cls, config: PretrainedConfig, has_experts: list[bool]) -> "Dimensions":
        """Read the sizes off a text configuration; `has_experts` says it per layer."""
        head = head_width(config)
        return cls(
            config.hidden_size,
            config.num_attention_heads * head,
            config.num_key_value_heads * head,
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            tuple(None if sparse else config.intermediate_size for sparse in has_experts),
        )

    def projections(self) -> int:
        """Attention's four projections, per token."""
        return 2 * (2 * self.hidden * self.query + 2 * self.hidden * self.key_value)

    def router(self) -> int:
        """The router, per token."""
        return 2 * self.hidden * self.experts

    def expert(self) -> int:
        """One gated expert, per token."""
        return 6 * self.hidden * self.expert_width

    def mlp(self, layer: int, tokens: int, computed: float) -> float:
        """The feed-forward half of `layer`; `computed`: experts times tokens that run."""
        width = self.dense_widths[layer]
        if width is not None:
            return tokens * 6 * self.hidden * width
        return tokens * self.router() + computed * self.expert()

    def causal_attention(self, tokens: int) -> float:
        """QK and AV of a causal prefill over `tokens`."""
        return 2 * self.query * tokens * (tokens + 1)

    def attention(self, entries: int) -> float:
        """QK and AV of one query over `entries` keys."""
        return 4 * self.query * entries

    def gate(self, width: int) -> int:
        """One reading of a gate of hidden size `width`."""
        return 2 * (2 * self.hidden) * width + 2 * width * 2


def count(trace: Trace, size: Dimensions, gate_width: int = 512) -> Flops:
    """FLOPs of the question in `trace`, counted as if it had been alone in its batch."""
    flops = Flops()
    prompt = trace.tokens.visual + trace.tokens.text
    steps = max(0, trace.tokens.generated - 1)
    for layer in range(trace.layers):
        tokens = trace.live[layer]
        common = tokens * size.projections() + size.causal_attention(tokens)
        kept = trace.prefix.prefill[layer] or size.experts
        flops.executed += common + size.mlp(layer, tokens, tokens * kept)
        flops.sparse += common + size.mlp(layer, tokens, trace.routes.prefill[layer])
        dense = prompt * size.projections() + size.causal_attention(prompt)
        flops.executed_dense += dense + size.mlp(layer, prompt, prompt * size.experts)
        flops.sparse_dense += dense + size.mlp(layer, prompt, prompt * size.top_k)
        for step in range(steps):
            common = size.projections() + size.attention(trace.cached[layer] + step + 1)
            kept = trace.prefix.decode[step][layer] or size.experts
            flops.executed += common + size.mlp(layer, 1, kept)
            flops.sparse += common + size.mlp(layer, 1, trace.routes.decode[step][layer])
            dense = size.projections() + size.attention(prompt + step + 1)
            flops.executed_dense += dense + size.mlp(layer, 1, size.experts)
            flops.sparse_dense += dense + size.mlp(layer, 1, size.top_k)
    readings = size.gate(gate_width) * sum(reading.p_exit is not None for reading in trace.gate)
    flops.executed += readings
    flops.sparse += readings
    return flops
