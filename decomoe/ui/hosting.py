"""Where the page runs: its model, which may still be loading, and the GPU of a ZeroGPU Space."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..answer import MINI, Loaded, apart, ask, load, name_of, outline
from ..methods import Dense, from_toggles

ZERO_GPU = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "true")  # set by the platform
BEAT_S = 0.2  # how often a waiting run looks up
# An answer is as fast as its slowest worker: on a CPU, one processor is left to the page and to a browser beside it.
THREADS = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else max(1, torch.get_num_threads() - 1)
LOADING = "The model is still loading. Recorded examples and results are here already; questions wait for it."


class Host:
    """The model behind the page: what its files say at once, and the model itself once it is loaded.

    Attributes:
        name: of the model's folder, or its Hub id. is_mini: whether it is the mini model.
        layers: of its decoder.
        calibration: its calibration, if there is one. gated: whether that has a gate.
        orders: (L, E), the native experts of each layer in prefix order.
    """

    def __init__(
        self, source: str | Path = MINI, calibration: str | Path | None = None, device: str | None = None
    ) -> None:
        """Read the model's configuration and calibration.

        Raises:
            ValueError, OSError: as for `answer.load`.
        """
        config, self.calibration = outline(source, calibration)
        sizes = config.get_text_config()
        self.name, self.is_mini, self.layers = name_of(source), Path(source) == MINI, sizes.num_hidden_layers
        self.gated = self.calibration is not None and self.calibration.gate is not None
        native = torch.arange(sizes.num_experts).expand(self.layers, -1)
        self.orders: list[list[int]] = (self.calibration.orders if self.calibration else native).tolist()
        self._where = source, calibration, device
        self._loaded: Future[Loaded] = Future()

    def load(self) -> Loaded:
        """Load the model and warm it up; who waits for it goes on.

        Raises:
            ValueError, OSError: as for `answer.load`.
        """
        torch.set_num_threads(THREADS)
        loaded = load(*self._where)
        warm_up(loaded)
        self._loaded.set_result(loaded)
        return loaded

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._loaded.done()

    @property
    def loaded(self) -> Loaded:
        """The model, waited for if need be."""
        return self._loaded.result()

    def waiting(self) -> Iterator[None]:
        """None again and again until the model is loaded; a generator that waits so can be closed meanwhile."""
        while not self.ready:
            yield None
            wait([self._loaded], BEAT_S)


def chosen() -> Host:
    """The model of DECOMOE_MODEL, with DECOMOE_CALIBRATION, on DECOMOE_DEVICE; by default the mini model.

    Raises:
        ValueError, OSError: as for `answer.load`.
    """
    model, calibration, device = (
        os.environ.get(f"DECOMOE_{name}") or None for name in ("MODEL", "CALIBRATION", "DEVICE")
    )
    return Host(model or MINI, calibration, device)


def warm_up(loaded: Loaded) -> None:
    """The first forward of a process is slow, and would be charged to the dense model, which always goes first."""
    if ZERO_GPU:  # there is no GPU before the first question
        return
    layers = loaded.model.config.get_text_config().num_hidden_layers
    blank = Image.new("RGB", (128, 128), "white")
    for method in (Dense(), from_toggles(layers, savb=False, rcep=False, exit_after=layers - 1)):
        apart(partial(ask, loaded, blank, "What is in the picture?", method, max_new_tokens=2))


def on_gpu(answers: int, tokens: int) -> Callable[[Any], Any]:
    """Run a function where a ZeroGPU Space has its GPU; elsewhere leave it as it is.

    The GPU is booked for the time that `answers` of `tokens` take a 30B model; asking for less queues sooner. The
    function runs in a forked process: what it is given and yields must be plain data.
    """
    if not ZERO_GPU:
        return lambda function: function
    import spaces  # noqa: PLC0415 (only there)

    return spaces.GPU(duration=10 + answers * (3 + tokens // 10))
