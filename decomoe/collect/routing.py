"""Where a question's tokens are routed, layer by layer, before and after its visual tokens have left."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..answer import Loaded, encode
from ..calibration import Calibration
from ..evaluate.run import Batch
from ..families import Parts, parts_of
from ..methods import Method
from ..methods.base import Boundary, Cut, Decider, Prefix, Routing
from ..prefix import shares
from ..runtime import attach

MAPPED = 1  # questions of a benchmark, the first, whose lines keep a map token by token


@dataclass(frozen=True)
class Routed:
    """The routers' softmax for one question, experts by their place in the model (RCEP's order if calibrated).

    Attributes:
        before: {layer: (N, E)} fp32 of the N prompt tokens, nothing left.
        after: {layer: (T, E)} of the text tokens, in the layers behind the exit.
        visual: (N,) bool.
        ids: (N,) token ids.
        grid: rows and columns of the visual tokens; None where they are not one grid.
        top_k: routes a token.
    """

    before: dict[int, Tensor]
    after: dict[int, Tensor]
    visual: Tensor
    ids: Tensor
    grid: tuple[int, int] | None
    top_k: int

    def mass(self, layer: int) -> Tensor:
        """(N, E) float64: routed mass, each token's top-k weights renormalised to one."""
        scores, indices = self.before[layer].topk(self.top_k, dim=1)
        return torch.zeros_like(self.before[layer], dtype=torch.double).scatter_(1, indices, shares(scores))


@dataclass(frozen=True)
class _Observer(Method):
    """Lets the visual tokens go after `exit_after`, if it is given, and keeps what the routers say."""

    exit_after: int | None

    def bind(self, parts: Parts, calibration: Calibration | None) -> "_ObserverDecider":
        return _ObserverDecider(self.exit_after)


class _ObserverDecider(Decider):
    def __init__(self, exit_after: int | None) -> None:
        self.exit_after, self.seen = exit_after, dict[int, Tensor]()

    def cut(self, state: Boundary) -> Cut | None:
        return state.without_visual(state.cache.visual.any(1)) if state.layer == self.exit_after else None

    def prefix(self, state: Routing) -> Prefix | None:
        self.seen[state.layer] = state.logits[0].softmax(-1, dtype=torch.float).cpu()
        return None


@torch.inference_mode()
def observe_routing(loaded: Loaded, inputs: dict[str, Any], exit_after: int) -> Routed:
    """Two prefills of one question, not padded: without an exit, and with one after `exit_after`."""
    parts, seen = parts_of(loaded.model), []
    for layer in (None, exit_after):
        with loaded.lock, attach(loaded.model, _Observer(layer)) as session:
            session.generate(inputs, max_new_tokens=1, do_sample=False)
            observer: Any = session.decider
            seen.append(observer.seen)
            visual = session.cache.visual[0].cpu()
    before, after = seen
    after = {layer: values for layer, values in after.items() if layer > exit_after}
    ids = inputs["input_ids"][0].cpu()
    return Routed(before, after, visual, ids, _grid(parts, inputs), parts.config.num_experts_per_tok)


def _grid(parts: Parts, inputs: dict[str, Any]) -> tuple[int, int] | None:
    """How a picture's visual tokens lie; InternVL's lie in tiles."""
    if "image_grid_thw" not in inputs:
        return None
    _, height, width = inputs["image_grid_thw"][0].tolist()
    merged = parts.model.config.vision_config.spatial_merge_size
    return height // merged, width // merged


def experts_for(probabilities: Tensor, share: float = 0.5) -> int:
    """The fewest experts that hold `share` of the probability mass of all tokens (N, E) (paper, Fig. 8)."""
    mass = probabilities.double().sum(0).sort(descending=True).values.cumsum(0)
    return int((mass < share * mass[-1]).sum()) + 1


def likeness(before: Tensor, after: Tensor) -> dict[str, float]:
    """How alike text routing (T, E) is before and after eviction (paper, Fig. 8).

    The paper does not say whether tokens are compared one by one or in the mean, so both are here: cosine and mean
    absolute error per token, averaged over tokens; and the same of the distributions averaged over tokens.
    """
    found = {}
    for name, (one, other) in {
        "token": (before, after),
        "mean": (before.mean(0, keepdim=True), after.mean(0, keepdim=True)),
    }.items():
        found[f"{name}_cosine"] = nn.functional.cosine_similarity(one.double(), other.double()).mean().item()
        found[f"{name}_mae"] = (one.double() - other.double()).abs().mean().item()
    return found


def route_all(loaded: Loaded, exit_after: int, part: Batch) -> list[dict[str, Any]]:
    """What a line keeps of each question of a batch."""
    found = []
    for number, case in enumerate(part.cases, part.first):
        routed = observe_routing(loaded, encode(loaded, [(case.picture(), case.question)]), exit_after)
        line = reduced(routed)
        if number < MAPPED:
            behind = sorted(routed.after)
            line["map"] = mapped(loaded, routed, behind[len(behind) // 2])
        found.append(line)
    return found


def reduced(routed: Routed) -> dict[str, Any]:
    """A question's routing in numbers: "layers" with experts, and lists that go along with them.

    "text" and "visual" have, for each layer and expert, the mean routed mass of a token; "half" the experts that hold
    half of the modality's probability mass; "evicted" has `likeness` by layer behind the exit.
    """
    kinds = {"text": ~routed.visual, "visual": routed.visual}
    layers = sorted(routed.before)
    mass = {layer: routed.mass(layer) for layer in layers}
    return {
        "tokens": {kind: int(tokens.sum()) for kind, tokens in kinds.items()},
        "layers": layers,
        **{kind: [_short(mass[layer][tokens].mean(0)) for layer in layers] for kind, tokens in kinds.items()},
        "half": {
            kind: [experts_for(routed.before[layer][tokens]) for layer in layers] for kind, tokens in kinds.items()
        },
        "evicted": {
            layer: {
                name: round(value, 6) for name, value in likeness(routed.before[layer][~routed.visual], after).items()
            }
            for layer, after in routed.after.items()
        },
    }


def mapped(loaded: Loaded, routed: Routed, layer: int) -> dict[str, Any]:
    """Token by token at one `layer` behind the exit: routes, and text probabilities before and after eviction."""
    tokenizer = loaded.processor.tokenizer
    routes = routed.mass(layer).topk(routed.top_k, dim=1)
    return {
        "layer": layer,
        "visual": routed.visual.int().tolist(),
        "tokens": [tokenizer.decode([token]) for token in routed.ids[~routed.visual].tolist()],
        "experts": routes.indices.tolist(),
        "weights": [_short(row) for row in routes.values],
        "before": [_short(row) for row in routed.before[layer][~routed.visual]],
        "after": [_short(row) for row in routed.after[layer]],
    }


def _short(values: Tensor) -> list[float]:
    """Four digits are enough, and a third of the size."""
    return [float(f"{value:.4g}") for value in values.tolist()]
