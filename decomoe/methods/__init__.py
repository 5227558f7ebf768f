"""One published method a file, all behind `Method`. `METHODS` is the table that command line and page read."""

from .base import Method
from .decomoe import DecoMoE, from_toggles
from .dense import Dense
from .dyvte import DyVTE
from .fastmmoe import FastMMoE
from .fastv import FastV
from .modes import MoDES
from .sparsevlm import SparseVLM
from .vtw import VTW

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Dense, DecoMoE, FastV, SparseVLM, DyVTE, FastMMoE, VTW, MoDES)
}

__all__ = [
    "METHODS",
    "VTW",
    "DecoMoE",
    "Dense",
    "DyVTE",
    "FastMMoE",
    "FastV",
    "Method",
    "MoDES",
    "SparseVLM",
    "from_toggles",
]
