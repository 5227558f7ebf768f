"""One published method a file, all behind `Method`. `METHODS` is the table that command line and page read."""

from .base import Method
from .decomoe import DecoMoE, from_toggles
from .dense import Dense

METHODS: dict[str, type[Method]] = {method.name: method for method in (Dense, DecoMoE)}

__all__ = ["METHODS", "DecoMoE", "Dense", "Method", "from_toggles"]
