"""DecoMoE: see, and cut, the waste in multimodal mixture-of-experts models.

Names and submodules load when they are first used, so that `decomoe --help` need not wait for torch.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answer import Answer as Answer
    from .answer import Loaded as Loaded
    from .answer import Token as Token
    from .answer import ask as ask
    from .answer import load as load
    from .answer import stream as stream
    from .calibration import Calibration as Calibration
    from .decode import CompiledDecode as CompiledDecode
    from .methods import METHODS as METHODS
    from .methods import DecoMoE as DecoMoE
    from .methods import Dense as Dense
    from .methods import Method as Method
    from .runtime import Session as Session
    from .runtime import attach as attach
    from .trace import Trace as Trace

__version__ = "0.1.0"
_HOMES = {
    "answer": ("Answer", "Loaded", "Token", "ask", "load", "stream"),
    "calibration": ("Calibration",),
    "decode": ("CompiledDecode",),
    "methods": ("METHODS", "DecoMoE", "Dense", "Method"),
    "runtime": ("Session", "attach"),
    "trace": ("Trace",),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    if name in _submodules():
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module 'decomoe' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_submodules()})


def _submodules() -> list[str]:
    return [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
