"""What a dense run says about DecoMoE without another run: the exit exactly, prefix lengths approximately."""

from dataclasses import replace

import torch

from ..answer import Loaded
from ..experts import expert_order
from ..families import parts_of
from ..methods import DecoMoE
from ..methods.base import Routing
from ..trace import PerLayer, Trace


def predict(loaded: Loaded, dense: Trace, method: DecoMoE) -> Trace:
    """The trace that `method` would leave, from a dense one with gate readings; its answer, costs and times stay out.

    Nothing differs before the exit, so the exit is exact. After it text states shift a little, and with them the
    routed mass that prefixes are cut from.

    Raises:
        ValueError: the method does not fit the model.
    """
    parts = parts_of(loaded.model)
    decider = method.bind(parts, loaded.calibration)
    exit_after = method.exit_after if isinstance(method.exit_after, int) else None
    if method.exit_after == "gate":
        said = (reading.layer for reading in dense.gate if (reading.p_exit or 0) >= decider.theta)
        exit_after = next(said, None)
    order, lengths, one = expert_order(parts), [], torch.ones(1, 1, dtype=torch.bool)
    everywhere = torch.arange(dense.experts).unsqueeze(0)
    for layer, native in enumerate(dense.mass["text"]):
        found = None
        if native is not None:
            mass = torch.tensor(native, dtype=torch.float64)[order[layer]].unsqueeze(0)
            routed = mass, mass, everywhere  # one token that is routed as all of them together
            found = decider.prefix(Routing(layer, False, [exit_after], routed, lambda: (one, ~one)))
        length = dense.experts if found is None else int(found.length)
        lengths.append(length if length < dense.experts else None)
    text = dense.tokens.text
    live = [n if exit_after is None or layer <= exit_after else text for layer, n in enumerate(dense.live)]
    return replace(
        dense,
        method=method.name,
        settings=method.settings(),
        exit_after=exit_after,
        theta=decider.theta,
        gate=dense.gate if decider.candidates else [],
        prefix=PerLayer(lengths, []),
        live=live,
        answer="",
    )
