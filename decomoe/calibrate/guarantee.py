"""A threshold and a prefix share with a guarantee: Learn-then-Test by fixed-sequence testing.

Angelopoulos et al., "Learn then Test", arXiv:2110.01052. The promise: with the wanted confidence over the draw of the
held-out questions, at least a share `retain` of all answers stay the dense model's. It assumes that held-out and future
questions are drawn independently from one distribution (exchangeable); about other questions it says nothing. What is
tested may depend on anything but the held-out questions: gate, orders and path come from others.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NEVER = 1.01  # a threshold that no probability reaches: the dense model
THETAS = (*(round(0.05 * step, 2) for step in range(1, 20)), 0.97, 0.98, 0.99, 0.995, 0.997, 0.999, NEVER)


def replay(table: Tensor, p_exit: Tensor, thetas: Sequence[float] = THETAS) -> Tensor:
    """What each configuration gives on each question, from a table of what every exit gives.

    Args:
        table: (C, G + 1, P), by candidate exit and prefix share; the last candidate is "never".
        p_exit: (C, G), the gate's readings.

    Returns:
        (T * P, C), configurations with the threshold as the slow index.
    """
    rows, always = torch.arange(len(table)), torch.ones(len(table), 1, dtype=torch.bool)
    exits = [torch.cat([p_exit >= theta, always], 1).int().argmax(1) for theta in thetas]
    return torch.stack([table[rows, first] for first in exits]).transpose(1, 2).flatten(0, 1)


def build_path(cost: Sequence[float], agreement: Sequence[float]) -> list[int]:
    """Configurations in the order of testing: falling cost, and agreement that never rises.

    Those with equal agreement are all kept: a small step on the safe side costs nothing and is more likely to pass.
    """
    path: list[int] = []
    for index in sorted(range(len(cost)), key=lambda i: (cost[i], -agreement[i])):
        if not path or agreement[index] >= agreement[path[-1]]:
            path.append(index)
    return path[::-1]


def binomial_cdf(successes: int, trials: int, chance: float) -> float:
    """P(X <= successes) for X ~ Bin(trials, chance), 0 < chance < 1."""
    ways = math.lgamma(trials + 1)
    return min(
        1.0,
        math.fsum(
            math.exp(
                ways
                - math.lgamma(k + 1)
                - math.lgamma(trials - k + 1)
                + k * math.log(chance)
                + (trials - k) * math.log1p(-chance)
            )
            for k in range(successes + 1)
        ),
    )


def passing(wrong: Sequence[int], trials: int, retain: float, confidence: float) -> int:
    """How many leading configurations pass, one after the other, until the first that does not.

    The hypothesis "it differs from dense on more than 1 - retain" is rejected where so few as `wrong` differences in
    `trials` would have at most the chance 1 - confidence (exact binomial test). Testing in a fixed order and stopping
    at the first failure needs no correction for the number of tests.
    """
    for count, differences in enumerate(wrong):
        if binomial_cdf(differences, trials, 1 - retain) > 1 - confidence:
            return count
    return len(wrong)


def learn_then_test(
    cost: Sequence[float],
    agreement: Sequence[float],
    wrong: Sequence[int],
    trials: int,
    retain: float,
    confidence: float,
) -> tuple[list[int], int]:
    """The path of configurations, and how many of them pass; the last that passes is the one to use.

    Args:
        cost, agreement: of every configuration, on the tuning questions.
        wrong: how often each differs from dense on the `trials` held-out questions.
    """
    path = build_path(cost, agreement)
    return path, passing([wrong[index] for index in path], trials, retain, confidence)


def needed(retain: float, confidence: float) -> int:
    """The fewest held-out questions on which anything can pass: retain^n <= 1 - confidence."""
    return math.ceil(math.log(1 - confidence) / math.log(retain))
