"""What other methods need to know of a model: VTW's exit layer, DyVTE's gates, MoDES's importances and thresholds."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from ..answer import Loaded
from ..calibration import Calibration
from ..families import parts_of
from ..methods import VTW
from ..runtime import attach
from .data import Question
from .modes import modes
from .observe import Plan, divergence, prefills
from .savb import Training, train_gate
from .store import observe_all

Found = tuple[dict[str, Tensor], dict[str, Any]]  # for the calibration, and for its provenance


ROUNDING = 1e-4  # a certain answer has no loss, and no share of it is more; ours


@dataclass(frozen=True)
class OtherSettings:
    """How to calibrate the other methods.

    Attributes:
        eta: VTW: the mean KL divergence that a withdrawal may cause. We recall the paper's 0.003; unchecked.
        skip: MoDES: the share of routes to skip in prefill; the authors report up to 0.88.
        grid: MoDES: thresholds to try for each modality (paper: 100).
        loss_ratio: DyVTE: how much the loss may grow by an exit (its code: 1.03).
        training: DyVTE: by default `dyvte_training`.
        max_new_tokens: answers are cut there. batch: questions at a time.
    """

    eta: float = 0.003
    skip: float = 0.5
    grid: int = 100
    loss_ratio: float = 1.03
    training: Training | None = None
    max_new_tokens: int = 64
    batch: int = 8


def dyvte_training(hidden_size: int, width: int = 2048) -> Training:
    """The authors' gates: no biases, and 2048 wide, but never wider than the states that they read.

    The authors' model, of width 4096, and any from 2048 on have their width; beside a small model such gates would be
    larger than the model. The rest is as for SAVB, so that the two gates differ by design alone (theirs: one epoch at a
    rate of 6e-5 with a cosine schedule on 6600 questions).
    """
    return Training(width=min(width, hidden_size), bias=False)


def calibrate_other(
    method: str, loaded: Loaded, questions: Sequence[Question], settings: OtherSettings, work: Path
) -> Calibration | None:
    """The model's calibration with what `method` needs added.

    Args:
        work: where DyVTE's observations are kept; a second run goes on from them.

    Returns:
        the artifact; under `accelerate launch`, None in all processes but the main one. Only DyVTE's work is shared.

    Raises:
        ValueError: there is no calibration to add to, or nothing that does what `settings` ask for.
    """
    old = loaded.calibration
    if old is None:
        raise ValueError("There is no calibration to add to; make one first, of decomoe.")
    if method != "dyvte" and not PartialState().is_main_process:
        return None
    values, report = OTHERS[method](loaded, questions, settings, work)
    if not PartialState().is_main_process:
        return None
    ids = {**old.provenance.get("ids", {}), method: [question.case.id for question in questions]}
    provenance = {**old.provenance, "ids": ids, method: {"settings": asdict(settings), **report}}
    return replace(old, others={**old.others, method: values}, provenance=provenance)


@torch.inference_mode()
def _vtw(loaded: Loaded, questions: Sequence[Question], settings: OtherSettings, work: Path) -> Found:
    """The first layer after which the visual tokens may leave: the first token's distribution hardly changes."""
    layers = _layers(loaded)
    total = torch.zeros(len(layers), dtype=torch.float64)
    for prefill, dense in prefills(loaded, questions, settings.batch, layers):
        for i, layer in enumerate(layers):
            with attach(loaded.model, VTW(layer)) as session:
                total[i] += divergence(session.resume(prefill, layer, 1)[1], dense)
    mean = dict(zip(layers, (total / len(questions)).tolist(), strict=True))
    fine = [layer for layer in layers if mean[layer] < settings.eta]
    if not fine:
        least = min(mean.values())
        raise ValueError(f"No withdrawal keeps the mean KL divergence below {settings.eta}; the least is {least:.3g}.")
    return {"exit_after": torch.tensor(fine[0])}, {"exit_after": fine[0], "divergence": mean}


def _dyvte(loaded: Loaded, questions: Sequence[Question], settings: OtherSettings, work: Path) -> Found:
    """Gates that say where an exit changes neither the answer nor, by more than a little, its loss.

    Where we differ from the authors: the answer is the model's own, whole, where they compare the likeliest token at
    each place of the true answer, and its loss is that of its first token.
    """
    layers = _layers(loaded)
    plan = Plan(layers, settings.max_new_tokens, after_image=True)
    seen = observe_all(loaded, questions, plan, settings.batch, work, "dyvte")
    same, nll = seen.same[:, :, 0], seen.nll[:, :, 0]
    labels = same[:, :-1] & (nll[:, :-1] <= settings.loss_ratio * nll[:, -1:] + ROUNDING)
    training = settings.training or dyvte_training(parts_of(loaded.model).config.hidden_size)
    gate, losses = train_gate(seen.features, labels, layers, training)
    positive = dict(zip(layers, labels.double().mean(0).tolist(), strict=True))
    return gate.state_dict(), {"training": asdict(training), "labels_positive": positive, "gate_loss": losses}


OTHERS: dict[str, Callable[[Loaded, Sequence[Question], OtherSettings, Path], Found]] = {
    "vtw": _vtw,
    "dyvte": _dyvte,
    "modes": lambda loaded, questions, settings, work: modes(
        loaded, questions, settings.batch, settings.skip, settings.grid
    ),
}


def _layers(loaded: Loaded) -> tuple[int, ...]:
    """After these an exit is tried: the whole picture has been seen, and there is something left to save."""
    parts = parts_of(loaded.model)
    return tuple(range(parts.first_exit, len(parts.layers) - 1))
