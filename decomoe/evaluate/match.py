"""Methods at equal cost: how strong another method has to be to cost what a given one does.

Found on calibration questions, from their FLOPs alone: no answer is scored.
"""

from collections.abc import Mapping, Sequence

import torch
from tqdm import tqdm

from ..answer import Loaded
from ..benchmarks import Case, run
from ..families import parts_of
from ..methods import Method, SparseVLM
from .specs import parse_method

STEPS, TOLERANCE = 10, 0.005
Cost = Mapping[str, float]  # decoder FLOPs against dense, by convention: "executed" and "sparse"


def cost_of(loaded: Loaded, cases: Sequence[Case], method: Method, batch: int = 32, max_new_tokens: int = 64) -> Cost:
    """What `cases` cost with a method, as a ratio of sums, at the same answer lengths."""
    flops = [outcome.trace.flops for outcome in run(loaded, cases, method, batch, max_new_tokens)]
    return {
        "executed": sum(one.executed for one in flops) / sum(one.executed_dense for one in flops),
        "sparse": sum(one.sparse for one in flops) / sum(one.sparse_dense for one in flops),
    }


def matched(
    loaded: Loaded, cases: Sequence[Case], spec: str, target: Cost, batch: int = 32, max_new_tokens: int = 64
) -> tuple[str, Cost]:
    """The spec with the strength at which it costs most nearly `target`, and what it costs; by bisection.

    Executed FLOPs are matched; sparse ones for methods that skip routes, MoDES and FastMMoE: it saves these alone.

    Raises:
        ValueError: as for `at_strength`.
    """
    layers = len(parts_of(loaded.model).layers)
    convention = _convention(spec)
    costs: dict[str, Cost] = {}
    low, high = 0.0, 1.0

    def gap(candidate: str) -> float:
        return costs[candidate][convention] - target[convention]

    for _ in tqdm(range(STEPS), spec, leave=False, disable=None):  # at most so many
        strength = (low + high) / 2
        candidate = at_strength(spec, strength, loaded)
        if candidate not in costs:
            costs[candidate] = cost_of(loaded, cases, parse_method(candidate, layers), batch, max_new_tokens)
        if abs(gap(candidate)) < TOLERANCE:
            break
        low, high = (strength, high) if gap(candidate) > 0 else (low, strength)
    best = min(costs, key=lambda candidate: abs(gap(candidate)))
    return best, costs[best]


def missed(spec: str, cost: Cost, target: Cost) -> bool:
    """Whether a spec costs something else than the target: there was no strength nearer to it."""
    return abs(cost[_convention(spec)] - target[_convention(spec)]) >= TOLERANCE


def _convention(spec: str) -> str:
    """The FLOPs by which a method is matched."""
    return "sparse" if spec.partition(":")[0] in ("modes", "fastmmoe") else "executed"


def at_strength(spec: str, strength: float, loaded: Loaded) -> str:
    """The spec with the parameters of a strength: 0 saves nothing, 1 all that it can.

    Raises:
        ValueError: there is no one strength to match by, it is given already, or the method does not fit the model.
    """
    parts = parts_of(loaded.model)
    stronger = f"{spec}{',' if ':' in spec else ':'}{_parameters(strength, spec, loaded)}"
    parse_method(stronger, len(parts.layers)).bind(parts, loaded.calibration)
    return stronger


def _parameters(strength: float, spec: str, loaded: Loaded) -> str:
    weakness, parts = 1 - strength, parts_of(loaded.model)
    match spec.partition(":")[0]:
        case "fastv":
            return f"prune={strength:.4g}"
        case "sparsevlm":  # its shares keep their proportions, up to 1
            scale = weakness / min(SparseVLM.keep)
            return "keep=" + "/".join(f"{min(1, scale * share):.4g}" for share in SparseVLM.keep)
        case "dyvte":
            return f"theta={weakness:.4g}"
        case "fastmmoe":
            return f"keep={weakness:.4g}"
        case "vtw":
            return f"exit_after={round(weakness * (len(parts.layers) - 1))}"
        case "modes":  # its calibrated thresholds keep their proportion, and lie orders of magnitude below the largest
            found = loaded.calibration.of("modes", parts) if loaded.calibration else {}
            tau = found["tau"] / found["tau"].max() if found else torch.ones(2)
            most = found["importance"].max().item() if found else 1 / len(parts.layers)  # no route weighs more
            return "tau_text={:.4g},tau_visual={:.4g}".format(*(strength**4 * most * tau).tolist())
        case name:
            raise ValueError(f"'{name}' has no strength to match; fastv, sparsevlm, dyvte, fastmmoe, vtw, modes have.")
