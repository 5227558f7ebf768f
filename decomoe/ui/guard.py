"""What stands between visitors and the page: how much they send, and that no address or file of theirs is opened."""

import base64
import binascii
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components.api_component import Api
from gradio.state_holder import SessionState
from gradio.utils import get_upload_folder
from PIL import Image
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..images import load_image
from .hosting import Host

MAX_UPLOAD = 20_000_000  # bytes of a picture
MAX_BODY = 30_000_000  # bytes of any request; a picture in base64 takes a third more than its file
MAX_TEXT = 1_000_000  # characters that the page itself sends in one value; Gradio keeps them for the session
MAX_STORED, MAX_FILES = 4_000_000_000, 2000  # all uploads together; they are deleted after an hour
MAX_SESSIONS = 500  # of which Gradio keeps half a megabyte each
MAX_QUESTION = 4000  # characters
MAX_TOKENS = 256  # of an answer: one person keeps the model no longer than this
ADD = "Add a picture first: upload one, paste one, or click an example."
UPLOADS_ONLY = "Pictures are read from uploads only: no address is fetched, and no other file is opened."


class GuardedBlocks(gr.Blocks):
    """Blocks whose handlers are given uploads alone; Gradio would fetch any address that a request names as a file."""

    async def preprocess_data(
        self, block_fn: Any, inputs: list[Any], state: SessionState | None, explicit_call: bool = False
    ) -> Any:
        called = all(isinstance(block, Api) for block in block_fn.inputs)
        try:
            check_values(inputs, MAX_BODY if called else MAX_TEXT)
        except ValueError as error:
            raise gr.Error(str(error), duration=None, print_exception=False) from None
        # without a state, so that pictures sent inline are not kept with it
        return await super().preprocess_data(block_fn, inputs, None if called else state, explicit_call)


def check_values(values: Any, longest: int) -> None:
    """Refuse in a request's values, however deep, any file that is not an upload, and text of over `longest`.

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
        elif isinstance(value, str) and len(value) > longest:
            raise ValueError(f"A text has {len(value)} characters; at most {longest} are read.")


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


class UploadQuota:
    """ASGI middleware: uploads wait while those of the last hour take too much of the disk."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload"):
            sizes = [file.stat().st_size for file in Path(get_upload_folder()).rglob("*") if file.is_file()]
            if len(sizes) > MAX_FILES or sum(sizes) > MAX_STORED:
                app = PlainTextResponse("Too many pictures have been uploaded; try again in an hour.", 503)
        await app(scope, receive, send)


def app_options(host: Host) -> dict[str, Any]:
    """For `launch(app_kwargs=...)`: the body limit, the health check, and what Gradio offers and this page does not."""

    def healthz(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok" if host.ready else "loading", "model": host.name})

    def refuse(request: Request) -> PlainTextResponse:
        return PlainTextResponse("This page does not offer that.", 403)

    refused = (
        "file=http{rest:path}",  # would fetch the address for whoever asks
        "deep_link",  # would keep a person's session on disk
        "process_recording",  # would run ffmpeg on an upload
    )
    routes = [Route(f"/gradio_api/{path}", refuse, methods=["GET", "POST"]) for path in refused]
    middleware = [Middleware(UploadQuota)]
    return {"max_body_size": MAX_BODY, "middleware": middleware, "routes": [Route("/healthz", healthz), *routes]}
