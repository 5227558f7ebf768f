"""What programs and agents call: `ask` and `compare`, by gradio_client, plain HTTP, or as MCP tools."""

import json
from collections.abc import Iterator
from typing import Any

import gradio as gr

from ..answer import Answer, stream
from .common import sentence
from .compare import ALL, Row, check_methods
from .compare import compare as run
from .guard import MAX_TOKENS, read_number, read_picture, read_question
from .hosting import Host, on_gpu


def add(host: Host) -> None:
    """Add the endpoints, inside the page's Blocks. What they say of themselves is what an agent reads."""

    @on_gpu(1, MAX_TOKENS)
    def ask(
        image: str, question: str, method: str = "decomoe", max_new_tokens: int = 64, with_trace: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Ask a question about a picture, and learn what the answer cost against the dense model.

        Args:
            image: the picture, as data:image/png;base64,... or as the path that an upload to /gradio_api/upload gave.
            question: what to ask about it; at most 4000 characters.
            method: which waste to cut: decomoe, dense, fastv, sparsevlm, dyvte, fastmmoe, vtw or modes, with parameters
                if you like, such as decomoe:p=0.5 or decomoe:exit_after=9,rcep=no or fastv:prune=0.75.
            max_new_tokens: the longest answer, from 1 to 256 tokens.
            with_trace: add everything that was measured, layer by layer; long.

        Returns:
            answer
            FLOPs against dense (executed and sparse)
            ttft_ms and tpot_ms
            exit_after: the layer, counted from 0, after which the visual tokens left
            means over layers of the visual tokens and the experts that remained, and the routes that were computed
        """
        try:
            picture, asked = read_picture(image), read_question(question)
            ((spec, chosen),) = check_methods(method, host.layers, most=1).items()
            tokens = int(read_number("max_new_tokens", max_new_tokens, 1, MAX_TOKENS))
            for event in stream(host.loaded, picture, asked, chosen, max_new_tokens=tokens):
                if isinstance(event, Answer):
                    trace = json.loads(event.trace.to_json()) | {"model": host.name}  # not where it lies on the disk
                    full = {"trace": trace} if with_trace is True else {}
                    yield Row.of(spec, event.trace, None).to_json() | full
                elif event is not None:
                    yield {"answer": event.text}
        except Exception as error:
            raise gr.Error(sentence(error), duration=None, print_exception=False) from error

    @on_gpu(2 * len(ALL.split()), MAX_TOKENS)
    def compare(
        image: str, question: str, methods: str = ALL, max_new_tokens: int = 48
    ) -> Iterator[list[dict[str, Any]]]:
        """Ask one question about a picture through several methods, one after the other, and compare answers and cost.

        Args:
            image: the picture, as data:image/png;base64,... or as the path that an upload to /gradio_api/upload gave.
            question: what to ask about it; at most 4000 characters.
            methods: their names, separated by blanks, with parameters as in ask; all of them by default.
            max_new_tokens: the longest answer, from 1 to 256 tokens.

        Returns:
            one object a method, as ask gives it
            as_dense: the share of words that its answer has in common with the dense model's
            problem: why the method could not run
        """
        try:
            asked = read_picture(image), read_question(question), check_methods(methods, host.layers)
            tokens = int(read_number("max_new_tokens", max_new_tokens, 1, MAX_TOKENS))
            for rows, _ in run(host.loaded, *asked, tokens):
                yield [row.to_json() for row in rows]
        except Exception as error:
            raise gr.Error(sentence(error), duration=None, print_exception=False) from error

    for function in (ask, compare):
        gr.api(function, concurrency_limit=1, concurrency_id="model")
