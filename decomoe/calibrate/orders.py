"""RCEP's expert orders (paper, Sec. 2.2): experts of each layer by the routed mass of text tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ask import Loaded
from ..families import parts_of
from ..methods import DecoMoE
from .cases import Case, run


def expert_orders(loaded: Loaded, cases: Sequence[Case]) -> Tensor:
    """(L, E) int64: native experts by falling mean routed mass of the prompt's text tokens.

    As in the paper the visual tokens leave after the middle layer (24 of 48) and no expert is cut. Mass is averaged
    inside a question first, then over questions.
    """
    layers, experts = len(parts_of(loaded.model).layers), parts_of(loaded.model).config.num_experts
    method = DecoMoE(exit_after=layers // 2, rcep=False)
    total = torch.zeros(layers, experts, dtype=torch.float64)
    for outcome in run(loaded, cases, method, max_new_tokens=1, label="expert orders"):
        trace = outcome.trace
        for layer, mass in enumerate(trace.mass["text"]):
            if mass is not None:
                total[layer] += torch.tensor(mass, dtype=torch.float64) / trace.tokens.text
    return total.argsort(dim=1, descending=True, stable=True)
