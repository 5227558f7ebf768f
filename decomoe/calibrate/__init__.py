"""Calibration of one model: expert orders (RCEP), the exit gate (SAVB), and when it should fire.

The paper calibrates on halves of POPE and MME. `calibrate` takes the calibration questions of any benchmark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from torch import Tensor

from ..answer import Loaded
from ..calibration import Calibration, fingerprint
from ..families import Parts, parts_of
from ..gate import Gate
from .data import Question, load_parts, load_questions
from .guarantee import THETAS, learn_then_test, needed, replay
from .observe import Observed, Plan
from .others import OTHERS, OtherSettings, calibrate_other
from .savb import Training, label, readings, train_gate
from .store import observe_all

__all__ = [
    "OTHERS",
    "OtherSettings",
    "Question",
    "Settings",
    "Training",
    "calibrate",
    "calibrate_other",
    "gate_candidates",
    "load_parts",
    "load_questions",
]

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
ASSUMPTION = (
    "future questions are drawn like the held-out ones, one a picture, independently (exchangeable), asked with this "
    "theta and p and the method's other settings as they are, and the calibration is not repeated until it passes"
)


@dataclass(frozen=True)
class Settings:
    """How to calibrate.

    Attributes:
        candidates: the layers after which the gate is asked (paper: every fourth of 48).
        label: which answers the gate learns to keep: the right ones (paper), so that it stays where the dense model is
            wrong; or "same", all that are the dense model's, which lets those questions go too.
        p: RCEP's share of routed mass (paper: 0.7); chosen among `shares` under a guarantee.
        keep: theta is the cheapest one that keeps this share of dense accuracy. Our rule where the paper is silent.
        retain: instead, guarantee that this share of answers stays the dense model's, with this `confidence`.
        max_new_tokens: answers are cut there. batch: questions at a time, and in a file of observations.
    """

    candidates: tuple[int, ...]
    label: Literal["right", "same"] = "right"
    p: float = 0.7
    keep: float = 0.98
    retain: float | None = None
    confidence: float = 0.95
    shares: tuple[float, ...] = SHARES
    max_new_tokens: int = 64
    batch: int = 8
    training: Training = field(default_factory=Training)


def gate_candidates(parts: Parts, every: int | None = None) -> tuple[int, ...]:
    """The layers to ask a gate after: every fourth of a deep model (paper: 3, 7, ... 47), every second of others.

    Raises:
        ValueError: there is no such layer.
    """
    every = every or (4 if len(parts.layers) >= 32 else 2)
    layers = tuple(layer for layer in range(every - 1, len(parts.layers), every) if layer >= parts.first_exit)
    if not layers:
        raise ValueError(f"A gate every {every} layers has no layer of {len(parts.layers)} to stand at.")
    return layers


def calibrate(
    loaded: Loaded, parts: Mapping[str, Sequence[Question]], settings: Settings, work: Path
) -> Calibration | None:
    """Calibrate a model on three parts of questions (see `load_parts`).

    "fit" makes expert orders and gate. On "tune" and "hold" every exit and share is replayed, and then every threshold
    from the tables: "tune" chooses one, or the path of them that the guarantee tests on "hold".

    Args:
        work: where observations are kept; a second run goes on from them.

    Returns:
        the artifact; under `accelerate launch`, None in all processes but the main one.

    Raises:
        ValueError: there are too few questions.
    """
    _check_sizes(parts, settings)
    model = fingerprint(parts_of(loaded.model))
    plan = Plan(settings.candidates, settings.max_new_tokens)
    fit = observe_all(loaded, parts["fit"], plan, settings.batch, work, "fit")
    mass = fit.mass.mean(0)
    orders = mass.argsort(dim=1, descending=True, stable=True)
    shares = (settings.p,) if settings.retain is None else settings.shares
    plan = Plan(settings.candidates, settings.max_new_tokens, shares, Calibration(model, orders))
    seen = {
        name: observe_all(loaded, part, plan, settings.batch, work, name)
        for name, part in parts.items()
        if name != "fit"
    }
    if not PartialState().is_main_process:
        return None
    kept = fit.right if settings.label == "right" else fit.same
    labels, tau = label(kept[:, :-1, 0], fit.nll[:, :-1, 0])
    gate, losses = train_gate(fit.features, labels, settings.candidates, settings.training)
    means = {name: _replayed(part, gate) for name, part in seen.items()}
    if settings.retain is None:
        chosen, guarantee = _keeping_accuracy(means["tune"], settings.keep), None
    else:
        chosen, guarantee = _guaranteed(means["tune"], means["hold"], settings, len(parts["hold"]))
    provenance = {
        "settings": asdict(settings),
        "tau": tau,
        "labels_positive": dict(zip(map(str, settings.candidates), labels.double().mean(0).tolist(), strict=True)),
        "gate_loss": losses,
        "measured": {
            name: {of: values[chosen].item() for of, values in part.items()}
            | {
                "dense_accuracy": part["accuracy"][-1].item(),
                "hindsight": hindsight(seen[name], settings.label, chosen % len(shares)),
            }
            for name, part in means.items()
        },
        "guarantee": guarantee,
        "ids": {name: [question.case.id for question in part] for name, part in parts.items()},
    }
    return Calibration(model, orders, gate, *_configuration(chosen, shares), provenance=provenance, mass=mass)


def _check_sizes(parts: Mapping[str, Sequence[Question]], settings: Settings) -> None:
    sizes = ", ".join(f"{len(part)} to {name}" for name, part in parts.items())
    if min(map(len, parts.values())) < 5:
        raise ValueError(f"There are too few questions to calibrate on ({sizes}); give more data.")
    if settings.retain is not None:
        fewest = needed(settings.retain, settings.confidence)
        if len(parts["hold"]) < fewest:
            raise ValueError(
                f"A guarantee of {settings.retain} with confidence {settings.confidence} takes at least {fewest} "
                f"held-out pictures; there are {len(parts['hold'])} ({sizes}). Give more data or ask for less."
            )


def _replayed(seen: Observed, gate: Gate) -> dict[str, Tensor]:
    """Mean cost, agreement with dense, and accuracy (K,) of every configuration; the last never exits."""
    p_exit = readings(gate, seen.features)
    tables = {"cost": seen.cost, "agreement": seen.same, "accuracy": seen.right}
    return {name: replay(table, p_exit).double().mean(1) for name, table in tables.items()}


def hindsight(seen: Observed, label: str, share: int) -> float:
    """Mean cost if every question left at its cheapest exit that keeps the answer, and not at all where none does: the
    labels followed without a mistake, but for their limit on the NLL. `share` is the place of p among those observed.
    """
    kept = (seen.right if label == "right" else seen.same)[..., share].clone()
    kept[:, -1] = True
    return seen.cost[..., share].where(kept, torch.inf).amin(1).mean().item()


def _configuration(index: int, shares: Sequence[float]) -> tuple[float, float]:
    """theta and p of a row of `replay`."""
    return THETAS[index // len(shares)], shares[index % len(shares)]


def _keeping_accuracy(tune: dict[str, Tensor], keep: float) -> int:
    """The cheapest configuration that keeps a share of dense accuracy."""
    keeps = tune["accuracy"] >= keep * tune["accuracy"][-1]
    return int(tune["cost"].where(keeps, float("inf")).argmin())


def _guaranteed(
    tune: dict[str, Tensor], hold: dict[str, Tensor], settings: Settings, trials: int
) -> tuple[int, dict[str, Any]]:
    """The cheapest configuration that passes its test, and what was tested."""
    assert settings.retain is not None
    wrong = [round(trials * (1 - agreement)) for agreement in hold["agreement"].tolist()]
    path, passed = learn_then_test(
        tune["cost"].tolist(), tune["agreement"].tolist(), wrong, trials, settings.retain, settings.confidence
    )
    tested = [
        dict(zip(("theta", "p"), _configuration(i, settings.shares), strict=True))
        | {"cost": tune["cost"][i].item(), "differences": wrong[i]}
        for i in path
    ]
    report = {
        "retain": settings.retain,
        "confidence": settings.confidence,
        "questions": trials,
        "assumption": ASSUMPTION,
        "passed": passed,
        "path": tested,
    }
    return path[max(passed, 1) - 1], report  # the path begins with the dense model
