"""What every tab needs: saying what went wrong."""

import logging


def sentence(error: Exception) -> str:
    """What a person is told; what we did not expect goes to the log whole."""
    if isinstance(error, ValueError):
        return str(error)
    logging.getLogger(__name__).error("a question failed", exc_info=error)
    return "Something went wrong inside; the server's log says what. The page still works."
