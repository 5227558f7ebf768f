"""The SAVB gate: from the text states after a layer, should the visual block leave now? (paper, SAVB)"""

import torch
from torch import Tensor, nn


def text_features(hidden: Tensor, text: Tensor) -> Tensor:
    """What the gate sees: [mean of all text states but the last; the last text state], fp32.

    Args:
        hidden: (B, N, d), the output of a layer.
        text: (B, N) bool, the slots that hold a text token of the prompt; on any device.

    Returns:
        (B, 2d).
    """
    text = text.to(hidden.device)
    count = text.sum(1, keepdim=True)
    last = text & (text.cumsum(1) == count)
    shares = torch.stack([(text & ~last) / (count - 1).clamp(min=1), last.float()], dim=1)
    return (shares @ hidden.float()).flatten(1)


class Gate(nn.Module):
    """One independent two-class MLP per candidate layer: 2d -> width -> 2.

    The paper gives the width (512) and the two classes; activation (GELU) and biases are our choice where it is silent.
    DyVTE's gate has no biases.
    """

    def __init__(self, candidates: list[int], hidden_size: int, width: int = 512, bias: bool = True) -> None:
        super().__init__()
        self.candidates, self.width = list(candidates), width
        self.sizes = {"candidates": list(candidates), "hidden_size": hidden_size, "width": width}
        self.heads = nn.ModuleDict(
            {
                str(layer): nn.Sequential(nn.Linear(2 * hidden_size, width, bias), nn.GELU(), nn.Linear(width, 2, bias))
                for layer in candidates
            }
        )

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> "Gate":
        """The gate with these weights, its `state_dict`; layers and sizes are read off them."""
        first = {int(name.split(".")[1]): weight for name, weight in weights.items() if name.endswith(".0.weight")}
        width, features = next(iter(first.values())).shape
        gate = cls(sorted(first), features // 2, width, bias=any(name.endswith("bias") for name in weights))
        gate.load_state_dict(weights)
        return gate.requires_grad_(False).eval()

    def forward(self, layer: int, features: Tensor) -> Tensor:
        """p_exit (B,) after `layer`, from `text_features` (B, 2d)."""
        head = self.heads[str(layer)]
        return head(features.to(next(head.parameters()))).softmax(-1)[:, 1]
