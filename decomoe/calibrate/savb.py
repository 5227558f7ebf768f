"""The SAVB gate (paper, Sec. 2.1): forced exits -> labels -> one two-class MLP per candidate layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..ask import Loaded
from ..calibration import Calibration
from ..families import Parts
from ..gate import Gate, text_features
from ..methods import DecoMoE
from ..methods.base import Boundary, Decider, Method
from .cases import Case, Outcome, normalize, run

THETAS = tuple(round(0.05 * step, 2) for step in range(1, 20))


@dataclass(frozen=True)
class _Features(Method):
    """The dense model, with the gate's features of every question collected on the way."""

    layers: tuple[int, ...]
    into: list[Tensor] = field(default_factory=list, hash=False)  # one (B, candidates, 2d) per batch

    def settings(self) -> dict[str, Any]:
        return {"layers": self.layers}  # without what is collected

    def bind(self, parts: Parts, calibration: Calibration | None) -> Decider:
        return _Collector(self)


class _Collector(Decider):
    def __init__(self, method: _Features) -> None:
        self.method = method
        self.batch: list[Tensor] = []

    def leaves(self, state: Boundary) -> None:
        if state.layer in self.method.layers:
            self.batch.append(text_features(state.hidden, state.text).cpu())
            if state.layer == self.method.layers[-1]:
                self.method.into.append(torch.stack(self.batch, 1))
                self.batch = []


@dataclass
class Observed:
    """What forced exits showed, per case and candidate.

    Attributes:
        features: (C, G, 2d) fp32. correct: (C, G) bool. nll: (C, G), of the dense answer's first token.
        dense_correct: (C,) bool.
    """

    candidates: list[int]
    features: Tensor
    correct: Tensor
    nll: Tensor
    dense_correct: Tensor


def observe(loaded: Loaded, cases: Sequence[Case], candidates: Sequence[int]) -> Observed:
    """Run every case dense and with a forced exit after every candidate, all experts on."""
    if not candidates:
        raise ValueError("There is no layer to calibrate the gate at; take candidates closer together.")
    collector = _Features(layers=tuple(candidates))
    first, dense_correct = [], []
    for case, outcome in zip(cases, run(loaded, cases, collector, label="dense"), strict=True):
        first.append(outcome.first_logits.argmax())
        dense_correct.append(_right(outcome, case))
    correct, nll = [], []
    for layer in candidates:
        outcomes = run(loaded, cases, DecoMoE(exit_after=layer, rcep=False), label=f"exit after {layer}")
        seen = [
            (_right(outcome, case), nn.functional.cross_entropy(outcome.first_logits, token))
            for case, outcome, token in zip(cases, outcomes, first, strict=True)
        ]
        correct.append(torch.tensor([right for right, _ in seen]))
        nll.append(torch.stack([loss for _, loss in seen]))
    return Observed(
        list(candidates),
        torch.cat(collector.into),
        torch.stack(correct, 1),
        torch.stack(nll, 1),
        torch.tensor(dense_correct),
    )


def _right(outcome: Outcome, case: Case) -> bool:
    return normalize(outcome.answer) == normalize(case.answer)


def label(seen: Observed, cases: Sequence[int]) -> tuple[Tensor, float]:
    """(C, G) bool, whether an exit is fine: correct, and the reference token's NLL at most tau.

    tau is the 95th percentile, over `cases`, of the NLL at each case's earliest correct exit.

    Raises:
        ValueError: no case was answered correctly at any exit.
    """
    rows = torch.tensor(list(cases))
    correct, nll = seen.correct[rows], seen.nll[rows]
    solved = correct.any(1)
    if not solved.any():
        raise ValueError("No question was answered correctly at any exit: this model can't be calibrated on this data.")
    earliest = correct.int().argmax(1, keepdim=True)
    tau = torch.quantile(nll.gather(1, earliest)[solved, 0], 0.95).item()
    return seen.correct & (seen.nll <= tau), tau


def train_gate(
    features: Tensor,
    labels: Tensor,
    candidates: Sequence[int],
    width: int = 512,
    epochs: int = 30,
    rate: float = 1e-3,
    batch: int = 256,
    seed: int = 0,
) -> tuple[Gate, list[float]]:
    """Train every candidate's MLP with cross-entropy on stored features; the backbone is never touched.

    Optimizer, rate and batch are our guess (the paper names the loss and two epochs). A small model's few questions
    need more epochs: 30.

    Returns:
        the gate, and the mean loss of every epoch.
    """
    torch.manual_seed(seed)
    gate = Gate(list(candidates), features.shape[2] // 2, width)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=rate, weight_decay=0.01)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(features)).split(batch):
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


def tune_theta(gate: Gate, seen: Observed, cases: Sequence[int], retain: float) -> tuple[float, dict[str, Any]]:
    """The threshold of lowest mean exit that keeps `retain` of dense accuracy on `cases`, replayed from forced exits.

    Returns:
        theta, and what it gave. If no threshold keeps it, the strictest one, 0.99.
    """
    rows = torch.tensor(list(cases))
    features, correct, dense = seen.features[rows], seen.correct[rows], seen.dense_correct[rows]
    p_exit = torch.stack([gate(layer, features[:, i]) for i, layer in enumerate(gate.candidates)], 1)
    outcomes = torch.cat([correct, dense[:, None]], 1)  # the last column: never exits
    depth = torch.tensor([*gate.candidates, gate.candidates[-1] + 1]).float()
    results = []
    for theta in (*THETAS, 0.99):
        fires = torch.cat([p_exit >= theta, torch.ones(len(rows), 1, dtype=torch.bool)], 1)
        exits = fires.int().argmax(1)
        accuracy = outcomes.gather(1, exits[:, None]).float().mean().item()
        results.append((depth[exits].mean().item(), theta, accuracy))
    wanted = retain * dense.float().mean().item()
    mean_exit, theta, accuracy = min((r for r in results if r[2] >= wanted), default=results[-1])
    report = {"dense_accuracy": dense.float().mean().item(), "accuracy": accuracy, "mean_exit": mean_exit}
    return theta, report
