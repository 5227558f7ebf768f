"""The SAVB gate (paper, Sec. 2.1): forced exits -> labels -> one two-class MLP per candidate layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..gate import Gate


@dataclass(frozen=True)
class Training:
    """How the gate is trained.

    The paper gives width, loss (cross-entropy) and two epochs; optimizer (AdamW), rate and batch are our guess. A small
    model's few questions need more epochs.
    """

    width: int = 512
    bias: bool = True
    epochs: int = 30
    rate: float = 1e-3
    batch: int = 256
    seed: int = 0


def label(kept: Tensor, nll: Tensor) -> tuple[Tensor, float]:
    """(C, G) bool, whether an exit is fine: it keeps the answer, and the NLL of the dense first token is at most tau.

    tau is the 95th percentile of the NLL at each question's earliest exit that keeps it.

    Args:
        kept: (C, G) bool, whether the answer is correct (paper) or otherwise as it should be. nll: (C, G).

    Raises:
        ValueError: no question was answered correctly at any exit.
    """
    solved = kept.any(1)
    if not solved.any():
        raise ValueError("No question was answered correctly at any exit: this model can't be calibrated on this data.")
    earliest = kept.int().argmax(1, keepdim=True)
    tau = torch.quantile(nll.gather(1, earliest)[solved, 0], 0.95).item()
    return kept & (nll <= tau), tau


def train_gate(
    features: Tensor, labels: Tensor, candidates: Sequence[int], training: Training
) -> tuple[Gate, list[float]]:
    """Train every candidate's MLP on stored `features` (C, G, 2d) and `labels` (C, G); the backbone is never touched.

    Returns:
        the gate, and the mean loss of every epoch.
    """
    torch.manual_seed(training.seed)
    gate = Gate(list(candidates), features.shape[2] // 2, training.width, training.bias)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=training.rate, weight_decay=0.01)
    losses = []
    for _ in range(training.epochs):
        total = 0.0
        for rows in torch.randperm(len(features)).split(training.batch):
            loss = torch.stack(
                [
                    nn.functional.cross_entropy(gate.heads[str(layer)](features[rows, i]), labels[rows, i].long())
                    for i, layer in enumerate(candidates)
                ]
            ).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(features))
    return gate.requires_grad_(False).eval(), losses


def readings(gate: Gate, features: Tensor) -> Tensor:
    """(C, G): p_exit of every question at every candidate, from `features` (C, G, 2d)."""
    return torch.stack([gate(layer, features[:, i]) for i, layer in enumerate(gate.candidates)], 1)
