"""The slow reference: one whole sequence, no cache, no gathering, masks and plain loops. No code of decomoe."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Seen:
    """What a reference decision may look at after a layer: all S tokens, those that left and decoded ones too."""

    number: int
    hidden: Tensor  # (S, d), the layer's output
    attention: Tensor  # (H, S, S), by transformers
    router: Tensor  # (S, E), after the softmax
    embeddings: Tensor  # (S, d)
    prompt: int  # tokens of the prompt
    visual: list[int]  # positions of the visual tokens that are left
    all_visual: list[int]


def moe(
    layer, states: Tensor, groups: list[list[int]], prefix_of, order: list[int], how: str, record: list, limit=None
) -> Tensor:
    """The expert layer, token by token. `groups`: the tokens of each limited invocation; others use all experts, or
    the routes that `limit(token, routes)` leaves."""
    router, experts = layer.mlp.gate, layer.mlp.experts
    total, top_k = experts.num_experts, router.top_k
    out = torch.zeros_like(states)
    logits = states @ router.weight.T
    normalize = getattr(router, "norm_topk_prob", True)

    def top(row: Tensor, allowed: list[int]) -> list[tuple[int, float]]:
        chances = torch.softmax(row[allowed].float(), 0)
        best = chances.argsort(descending=True)[:top_k]
        share = chances[best] / (chances[best].sum() if normalize else 1)
        return [(allowed[i], w) for i, w in zip(best.tolist(), share.tolist(), strict=True)]

    def run(token: int, routes: list[tuple[int, float]]) -> None:
        for expert, weight in routes:
            gate, up = (experts.gate_up_proj[expert] @ states[token]).chunk(2)
            out[token] += weight * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))

    everything = list(range(total))
    limited = [token for group in groups for token in group]
    for token in range(len(states)):
        if token not in limited:
            routes = top(logits[token], everything)
            run(token, limit(token, routes) if limit else routes)
    for group in groups:
        mass = [0.0] * total
        for token in group:
            routes = top(logits[token], everything)
            whole = sum(weight for _, weight in routes)
            for expert, weight in routes:
                mass[expert] += weight / whole
        kept = prefix_of([mass[expert] for expert in order])
        inside = sorted(order[:kept])
        record.append(kept)
        for token in group:
            if how == "reroute":
                run(token, top(logits[token], inside))
            else:
                run(token, [(e, w) for e, w in top(logits[token], everything) if e in inside])
    return out


def covering(share: float, top_k: int):
    """The paper's prefix rule, by counting up."""

    def prefix_of(mass: list[float]) -> int:
        if share >= 1:
            return len(mass)
        total, covered = sum(mass), 0.0
        for length, value in enumerate(mass, 1):
            covered += value
            if covered >= share * total - 1e-9:
                return max(top_k, length)
        return len(mass)

    return prefix_of


def embed(model: PreTrainedModel, inputs: dict[str, Tensor], ids: Tensor, visual: Tensor):
    """Embeddings (1, S, d) with the picture in its place, DeepStack's rows by layer, and positions."""
    core, length = model.model, ids.shape[1]
    embeds = core.language_model.embed_tokens(ids)
    features = core.get_image_features(
        inputs["pixel_values"],
        **({"image_grid_thw": inputs["image_grid_thw"]} if "image_grid_thw" in inputs else {}),
        return_dict=True,
    )
    deepstack = []
    if model.config.model_type == "qwen3_vl_moe":
        embeds[0, visual] = torch.cat(features.pooler_output)
        deepstack = [torch.cat(feature) for feature in features.deepstack_features]
        kinds = torch.zeros_like(ids).int()
        kinds[0, visual] = 1
        positions, _ = core.get_rope_index(ids, kinds, image_grid_thw=inputs["image_grid_thw"])
    else:
        embeds[0, visual] = features.pooler_output.flatten(0, 1)
        positions = torch.arange(length)[None]
    return embeds, deepstack, positions


@torch.no_grad()
def reference(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    answer: list[int],
    exit_after: int | None = None,
    purge: bool = False,
    stays: bool = False,
    prefix_of=None,
    orders: list[list[int]] | None = None,
    how: str = "reroute",
    after: Callable[[Seen], tuple[list[int], dict[int, Tensor]] | None] | None = None,
    limit: Callable[[int, bool, list], list] | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Logits (G, vocabulary) that produced each token of `answer`, for one unpadded question, and prefixes per layer.

    The prefixes of a layer: prefill first, then one per decoded token.

    Args:
        stays: the picture does not leave after `exit_after`; only the prefixes start there.
        after: after each layer, the visual positions that stay and {position: state} of merged ones; None: all stay.
        limit: of (layer, whether the token is visual, its routes [(expert, weight)], falling), the routes that stay.
    """
    text_model = model.model.language_model
    prompt = inputs["input_ids"].shape[1]
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
    length = ids.shape[1]
    visual = ids[0] == model.config.image_token_id
    visual[prompt:] = False  # a random model may well say the image token
    embeds, deepstack, positions = embed(model, inputs, ids, visual)
    rotary = text_model.rotary_emb(embeds, positions)
    generated = torch.arange(length) >= prompt
    hidden, prefixes = embeds, []
    left = all_visual = visual.nonzero().flatten().tolist()
    implementation = model.config.text_config._attn_implementation
    model.set_attn_implementation("eager")  # tells its attention
    for number, layer in enumerate(text_model.layers):
        past = exit_after is not None and number > exit_after
        allowed = torch.ones(length, length).tril().bool()
        for query in range(length):
            blind = past or (exit_after is not None and purge and bool(generated[query]))
            if blind and not visual[query] and not stays:
                allowed[query, visual] = False
        gone = sorted(set(all_visual) - set(left))
        allowed[:, gone] = False
        allowed[gone, gone] = True  # nobody reads them any more
        mask = torch.zeros(1, 1, length, length, dtype=hidden.dtype).masked_fill(~allowed, -torch.inf)
        attended, weights = layer.self_attn(
            layer.input_layernorm(hidden), position_embeddings=rotary, attention_mask=mask, cache=None
        )
        hidden = hidden + attended
        groups, record = [], []
        if past and prefix_of is not None:
            groups = [[t for t in range(prompt) if stays or not visual[t]], *[[t] for t in range(prompt, length)]]
        order = orders[number] if orders else list(range(layer.mlp.experts.num_experts))
        normed = layer.post_attention_layernorm(hidden)[0]
        limited = limit and (lambda token, routes, number=number: limit(number, bool(visual[token]), routes))
        hidden = hidden + moe(layer, normed, groups, prefix_of, order, how, record, limited)[None]
        prefixes.append(record)
        if number < len(deepstack):
            hidden = hidden.clone()
            hidden[0, visual] += deepstack[number]
        router = (normed @ layer.mlp.gate.weight.T).softmax(-1)
        seen = Seen(number, hidden[0], weights[0], router, embeds[0], prompt, left, all_visual)
        decision = after(seen) if after else None
        if decision is not None:
            left, merged = decision
            hidden = hidden.clone()
            for position, state in merged.items():
                hidden[0, position] = state
    model.set_attn_implementation(implementation)
    logits = model.lm_head(text_model.norm(hidden))[0]
    return logits[prompt - 1 :], prefixes
