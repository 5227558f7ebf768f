"""What stands between visitors and the page: how much they send, and that no address or file of theirs is opened."""

import base64
import binascii
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from ..ask import Loaded
from ..images import load_image

MAX_UPLOAD = 20_000_000  # bytes of a picture
MAX_BODY = 30_000_000  # bytes of any request; a picture in base64 takes a third more than its file
MAX_QUESTION = 4000  # characters
MAX_TOKENS = 256  # of an answer: one person keeps the model no longer than this
ADD = "Add a picture first: upload one, paste one, or click an example."
UPLOADS_ONLY = "Pictures are read from uploads only: no address is fetched, and no other file is opened."


class GuardedBlocks(gr.Blocks):
    """Blocks whose handlers are given uploads alone; Gradio would fetch any address that a request names as a file."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **options: Any) -> Any:
        try:
            check_files(inputs)
        except ValueError as error:
            raise gr.Error(str(error), duration=None, print_exception=False) from None
        return await super().preprocess_data(block_fn, inputs, *args, **options)


def check_files(values: Any) -> None:
    """Refuse any file in a request's values, however deep, that is not an upload.

    Raises:
        ValueError: there is one.
    """
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if value.get("path") is not None:
                uploaded(value["path"])
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def uploaded(path: Any) -> Path:
    """The file of an upload, by its path or by its address on this server.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(path, str):
        path = path.partition("/gradio_api/file=")[2] or path
        try:
            file = Path(path).resolve()
            if file.is_relative_to(Path(get_upload_folder()).resolve()) and file.is_file():
                return file
        except (OSError, ValueError):  # a name that no file can have
            pass
    raise ValueError(UPLOADS_ONLY)


def read_picture(image: Any) -> Image.Image:
    """The picture of a request: an upload, as Gradio's file or its path, or `data:image/...;base64,...`.

    Raises:
        ValueError: in one sentence, what is wrong with it.
    """
    if isinstance(image, dict):
        image = image.get("path")
    if not image:
        raise ValueError(ADD)
    if isinstance(image, str) and image.startswith("data:"):
        try:
            data = base64.b64decode(image.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("The picture is no base64 after 'data:image/png;base64,'.") from None
        if len(data) > MAX_UPLOAD:
            raise ValueError(f"The picture has over {MAX_UPLOAD // 1_000_000} MB; make it smaller.")
        return load_image(data)
    return load_image(uploaded(image))


def read_question(question: Any) -> str:
    """The question of a request.

    Raises:
        ValueError: it is none, or too long.
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError("The question is empty; ask something about the picture.")
    if len(question) > MAX_QUESTION:
        raise ValueError(f"The question has {len(question)} characters; at most {MAX_QUESTION} are read. Ask shorter.")
    return question.encode(errors="replace").decode()  # JSON may carry halves of characters


def read_number(name: str, value: Any, low: float, high: float) -> Any:
    """A number of a request.

    Raises:
        ValueError: it is none, or outside [low, high].
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}.")
    return value


def app_options(loaded: Loaded) -> dict[str, Any]:
    """For `launch(app_kwargs=...)`: the body limit, the health check, and what Gradio offers and this page does not."""

    def healthz(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "model": loaded.name})

    def refuse(request: Request) -> PlainTextResponse:
        return PlainTextResponse("This page does not offer that.", 403)

    refused = (
        "file=http{rest:path}",  # would fetch the address for whoever asks
        "deep_link",  # would keep a person's session on disk
        "process_recording",  # would run ffmpeg on an upload
    )
    routes = [Route(f"/gradio_api/{path}", refuse, methods=["GET", "POST"]) for path in refused]
    return {"max_body_size": MAX_BODY, "routes": [Route("/healthz", healthz), *routes]}
