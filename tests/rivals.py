"""What the published methods decide, for the slow reference: plain loops over one question. No code of decomoe."""

import math

import torch
from reference import Seen
from torch import Tensor


def best(scores: dict[int, float], count: int) -> list[int]:
    """The positions with the highest scores, in their order."""
    return sorted(sorted(scores, key=lambda position: (-scores[position], position))[:count])


def of_last(seen: Seen) -> dict[int, float]:
    """Mean attention over heads that the prompt's last token pays to each visual token."""
    return {position: seen.attention[:, seen.prompt - 1, position].mean().item() for position in seen.visual}


def fastv(layer: int, prune: float):
    def after(seen: Seen):
        if seen.number == layer - 1:
            return best(of_last(seen), round((1 - prune) * len(seen.visual))), {}
        return None

    return after


def vtw(exit_after: int):
    return lambda seen: ([], {}) if seen.number == exit_after else None


def sparsevlm(layers, keep, recycle, per_cluster, seed=0):
    def rate(seen: Seen) -> list[int]:
        asks = range(seen.all_visual[-1] + 1, seen.prompt)
        relevance = [0.0] * len(asks)
        for position in seen.all_visual:
            likeness = torch.stack([seen.embeddings[position] @ seen.embeddings[t] for t in asks]).softmax(0)
            relevance = [
                old + new / len(seen.all_visual) for old, new in zip(relevance, likeness.tolist(), strict=True)
            ]
        mean = sum(relevance) / len(relevance)
        return [t for t, value in zip(asks, relevance, strict=True) if value > mean] or [seen.prompt - 1]

    def after(seen: Seen):
        if seen.number not in layers:
            return None
        raters = rate(seen)
        scores = {p: sum(seen.attention[:, t, p].mean().item() for t in raters) / len(raters) for p in seen.visual}
        stay = best(scores, round(keep[layers.index(seen.number)] * len(seen.all_visual)))
        gone = {position: score for position, score in scores.items() if position not in stay}
        if not gone or not recycle:
            return stay, {}
        chosen = best(gone, math.floor(recycle * len(gone)) + 1)
        clusters = density_peaks([seen.hidden[p] for p in chosen], len(chosen) // per_cluster + 1, seed)
        merged = {chosen[c[0]]: torch.stack([seen.hidden[chosen[i]] for i in c]).mean(0) for c in clusters}
        return sorted([*stay, *merged]), merged

    return after


def density_peaks(states: list[Tensor], count: int, seed: int) -> list[list[int]]:
    """Members of each cluster, ascending."""
    size, count = len(states), min(count, len(states))
    noise = torch.rand(size, generator=torch.Generator().manual_seed(seed)).tolist()
    apart = [[((a - b).square().sum() / len(a)).sqrt().item() for b in states] for a in states]
    density = [
        math.exp(-sum(d * d for d in sorted(row)[:count]) / count) + 1e-6 * noise[i] for i, row in enumerate(apart)
    ]
    farthest = max(map(max, apart))
    gap = [min([apart[i][j] for j in range(size) if density[j] > density[i]], default=farthest) for i in range(size)]
    centres = sorted(range(size), key=lambda i: -gap[i] * density[i])[:count]
    clusters = {centre: [centre] for centre in centres}
    for i in range(size):
        if i not in centres:
            clusters[min(centres, key=lambda centre: apart[i][centre])].append(i)
    return [sorted(members) for members in clusters.values()]


def fastmmoe(layers, keep, merge, window=3, alpha=0.5, mlerp=False):
    def after(seen: Seen):
        if seen.number not in layers:
            return None
        attention, visual = of_last(seen), seen.visual
        count = math.floor(keep * len(visual))
        windows = [visual[i : i + window] for i in range(0, len(visual) - window + 1, window)]
        alike, paid = [], []
        for members in windows:
            mean = torch.stack([seen.router[p] for p in members]).mean(0)
            alike.append(sum((seen.router[p] @ mean / seen.router[p].norm() / mean.norm()).item() for p in members))
            paid.append(sum(attention[p] for p in members))
        scores = {i: alpha * alike[i] / window - (1 - alpha) * paid[i] / max(paid) for i in range(len(windows))}
        chosen = [windows[i] for i in best(scores, math.floor(count * merge))]
        merged = {}
        for members in chosen:
            states = [seen.hidden[p] for p in members]
            mean = sum(states) / window
            if mlerp:
                mean = sum(state / state.norm() for state in states)
                mean = mean / mean.norm() * max(state.norm() for state in states)
            merged[members[0]] = mean
        others = {p: attention[p] for p in visual if all(p not in members for members in chosen)}
        return sorted([*best(others, count - len(chosen)), *merged]), merged

    return after


def fewer(start: int, count: int, renormalize: bool = True):
    """Visual tokens use `count` experts from a layer on."""

    def limit(layer: int, visual: bool, routes: list[tuple[int, float]]):
        if not visual or layer < start:
            return routes
        total = sum(weight for _, weight in routes[:count]) if renormalize else 1
        return [(expert, weight / total) for expert, weight in routes[:count]]

    return limit


def modes(text: float, visual: float, importance: list[list[float]]):
    """Skip where importance, of text and visual tokens [2][layers], times the renormalised weight is too low."""

    def limit(layer: int, is_visual: bool, routes: list[tuple[int, float]]):
        total, alpha = sum(weight for _, weight in routes), importance[is_visual][layer]
        return [(e, weight) for e, weight in routes if alpha * weight / total >= (visual if is_visual else text)]

    return limit


def dyvte(weights: dict[str, Tensor], layers, theta: float):
    def after(seen: Seen):
        if seen.number not in layers or not seen.visual:
            return None
        *others, last = [seen.hidden[t] for t in range(seen.all_visual[-1] + 1, seen.prompt)]
        features = torch.cat([torch.stack(others).mean(0), last])
        first, second = (weights[f"heads.{seen.number}.{i}.weight"] for i in (0, 2))
        scores = second @ torch.nn.functional.gelu(first @ features)
        return ([], {}) if scores.softmax(0)[1] > theta else None

    return after
