"""Which of a prompt's tokens live at a layer, row by row."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The live tokens of a padded batch at one layer, right aligned like the batch itself.

    Attributes:
        index: (B, N) int64, the original position in the prompt of the token in each slot, ascending in a row.
        valid: (B, N) bool, False where a slot is padding.
    """

    index: Tensor
    valid: Tensor

    @classmethod
    def full(cls, attention_mask: Tensor) -> "Layout":
        """The layout before anything left; `attention_mask` is (B, S), 0 at padding."""
        index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        return cls(index.expand(attention_mask.shape), attention_mask.bool())

    @cached_property
    def padded(self) -> bool:
        """Whether any slot is padding (on a GPU the first look waits for the device)."""
        return not bool(self.valid.all())

    def of_prompt(self, values: Tensor) -> Tensor:
        """Pick the live tokens out of per-prompt-token `values` of shape (B, S): the result is (B, N)."""
        return values.to(self.index.device).gather(1, self.index)

    def keep(self, alive: Tensor) -> tuple["Layout", Tensor]:
        """Drop the tokens that are not `alive` (B, N) bool.

        Returns:
            The layout of the rest, and (B, N') the slot of this layout that each slot of the new one takes.
        """
        alive = alive & self.valid
        length = int(alive.sum(1).max())
        order = alive.int().argsort(dim=1, stable=True)  # the dead first, both in order: the live end up right aligned
        slots = order[:, order.shape[1] - length :]
        return Layout(self.index.gather(1, slots), alive.gather(1, slots)), slots


def top(scores: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """The slots with the highest `scores` (B, N), so many a row as `count` (B,) says; the result is (B, N) bool.

    Only slots `among` (B, N) are chosen; of equal scores the first wins.
    """
    best = scores.to(among.device).masked_fill(~among, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return among & (best.argsort(1) < count.unsqueeze(1))


def take(values: Tensor, slots: Tensor, dim: int) -> Tensor:
    """Gather `values` along `dim`, each row (dimension 0) with its own `slots` (B, N')."""
    shape = [1] * values.ndim
    shape[0], shape[dim] = slots.shape
    return values.take_along_dim(slots.to(values.device).view(shape), dim)
