"""Where the page runs: the model that environment variables choose, and the GPU of a ZeroGPU Space."""

import os
from collections.abc import Callable
from typing import Any

from ..ask import MINI, Loaded, load

ZERO_GPU = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "true")  # set by the platform


def load_chosen() -> Loaded:
    """The model of DECOMOE_MODEL, with DECOMOE_CALIBRATION, on DECOMOE_DEVICE; by default the mini model.

    Raises:
        ValueError, OSError: as for `load`.
    """
    model, calibration, device = (
        os.environ.get(f"DECOMOE_{name}") or None for name in ("MODEL", "CALIBRATION", "DEVICE")
    )
    return load(model or MINI, calibration, device)


def on_gpu(answers: int, tokens: int) -> Callable[[Any], Any]:
    """Run a generator function where a ZeroGPU Space has its GPU; elsewhere leave it as it is.

    The GPU is booked for the time that `answers` of `tokens` take a 30B model; asking for less queues sooner. The
    function runs in a forked process: what it is given and yields must be plain data.
    """
    if not ZERO_GPU:
        return lambda function: function
    import spaces  # noqa: PLC0415 (only there)

    return spaces.GPU(duration=10 + answers * (3 + tokens // 10))
