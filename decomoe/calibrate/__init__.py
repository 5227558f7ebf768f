"""Calibration of one model: expert orders (RCEP) and the exit gate (SAVB), as the paper does it.

The paper calibrates on halves of POPE and MME. `calibrate` takes any questions with short answers.
"""

from collections.abc import Sequence

from ..ask import Loaded
from ..calibration import Calibration, fingerprint
from ..families import parts_of
from .cases import Case
from .orders import expert_orders
from .savb import label, observe, train_gate, tune_theta

__all__ = ["Case", "calibrate"]


def calibrate(loaded: Loaded, cases: Sequence[Case], candidates: Sequence[int], retain: float = 0.98) -> Calibration:
    """Orders from the first half of `cases`, gate from the same half, theta from the other half.

    Args:
        candidates: the layers after which the gate is asked (paper: every fourth of 48).
        retain: theta is the one of lowest mean exit that keeps this share of dense accuracy on the second half.
    """
    parts = parts_of(loaded.model)
    half = len(cases) // 2
    orders = expert_orders(loaded, cases[:half])
    seen = observe(loaded, cases, candidates)
    labels, tau = label(seen, range(half))
    gate, losses = train_gate(seen.features[:half], labels[:half], candidates)
    theta, report = tune_theta(gate, seen, range(half, len(cases)), retain)
    provenance = {
        "cases": len(cases),
        "ids": [case.id for case in cases],
        "tau": tau,
        "labels_positive": {str(c): labels[:half, i].float().mean().item() for i, c in enumerate(candidates)},
        "gate_loss": losses,
        "retain": retain,
        "theta_report": report,
        "note": "first half: orders and gate; second half: theta",
    }
    return Calibration(fingerprint(parts), orders, gate, theta, provenance=provenance)
