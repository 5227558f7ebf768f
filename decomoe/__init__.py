"""DecoMoE: see, and cut, the waste in multimodal mixture-of-experts models."""

from .ask import Answer, Loaded, Token, ask, load, stream
from .calibration import Calibration
from .decode import CompiledDecode
from .methods import METHODS, DecoMoE, Dense, Method
from .runtime import Session, attach
from .trace import Trace

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "Answer",
    "Calibration",
    "CompiledDecode",
    "DecoMoE",
    "Dense",
    "Loaded",
    "Method",
    "Session",
    "Token",
    "Trace",
    "ask",
    "attach",
    "load",
    "stream",
]
