"""The unchanged model."""

from dataclasses import dataclass

from .base import Method


@dataclass(frozen=True)
class Dense(Method):
    """All tokens and all experts, everywhere."""
