"""What every tab needs: warming up, saying what went wrong."""

import logging

from PIL import Image

from ..ask import Loaded, ask
from ..methods import Dense, from_toggles
from .hosting import ZERO_GPU


def warm_up(loaded: Loaded) -> None:
    """The first forward of a process is slow, and would be charged to the dense model, which always goes first."""
    if ZERO_GPU:  # there is no GPU before the first question
        return
    layers = loaded.model.config.get_text_config().num_hidden_layers
    blank = Image.new("RGB", (128, 128), "white")
    for method in (Dense(), from_toggles(layers, savb=False, rcep=False, exit_after=layers - 1)):
        ask(loaded, blank, "What is in the picture?", method, max_new_tokens=2)


def sentence(error: Exception) -> str:
    """What a person is told; what we did not expect goes to the log whole."""
    if isinstance(error, ValueError):
        return str(error)
    logging.getLogger(__name__).error("a question failed", exc_info=error)
    return "Something went wrong inside; the server's log says what. The page still works."
