"""What every tab needs: warming up, reading a picture, saying what went wrong."""

import logging
from typing import Any

from PIL import Image

from ..ask import Loaded, ask
from ..images import load_image
from ..methods import Dense, from_toggles


def warm_up(loaded: Loaded) -> None:
    """The first forward of a process is slow, and would be charged to the dense model, which always goes first."""
    layers = loaded.model.config.get_text_config().num_hidden_layers
    blank = Image.new("RGB", (128, 128), "white")
    for method in (Dense(), from_toggles(layers, savb=False, rcep=False, exit_after=layers - 1)):
        ask(loaded, blank, "What is in the picture?", method, max_new_tokens=2)


def read_picture(image: Any) -> Image.Image:
    if not image:
        raise ValueError("Add a picture first: upload one, paste one, or click an example.")
    return load_image(image["path"])


def sentence(error: Exception) -> str:
    """What a person is told; what we did not expect goes to the log whole."""
    if isinstance(error, ValueError):
        return str(error)
    logging.getLogger(__name__).error("a question failed", exc_info=error)
    return "Something went wrong inside; the server's log says what. The page still works."
