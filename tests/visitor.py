"""A person or program that uses the page by HTTP. It never forgives a traceback."""

import json
from io import BytesIO
from typing import Any

import httpx
from PIL import Image

JSON = {"content-type": "application/json"}
ONCE = httpx.Limits(max_keepalive_connections=0)  # the server breaks off after what it cannot take
PATIENCE = 300.0  # seconds; a shared machine may be slow


def no_traceback(text: str) -> None:
    assert "Traceback" not in text, text
    assert 'File "' not in text, text


def png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Visitor:
    """One visitor."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE, limits=ONCE)

    def get(self, path: str) -> httpx.Response:
        response = self.http.get(path)
        no_traceback(response.text)
        return response

    def post(self, path: str, **body: Any) -> httpx.Response:
        response = self.http.post(path, **body)
        no_traceback(response.text)
        return response

    def upload(self, content: bytes, name: str = "picture.png") -> str:
        """The path that the upload got."""
        response = self.post("gradio_api/upload", files={"files": (name, content)})
        assert response.status_code == 200, response.text
        return response.json()[0]

    def call(self, name: str, **arguments: Any) -> tuple[bool, Any]:
        """Call an endpoint: whether it went well, and its last output, or what it says went wrong."""
        # not httpx's json=: it refuses NaN and halves of characters, which an attacker sends
        joined = self.post(f"gradio_api/call/v2/{name}", content=json.dumps(arguments), headers=JSON)
        if joined.status_code != 200:
            return False, joined.text
        event, data = "", None
        with self.http.stream("GET", f"gradio_api/call/{name}/{joined.json()['event_id']}") as response:
            for line in response.iter_lines():
                no_traceback(line)
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: ") and event in ("complete", "error"):
                    data = json.loads(line.removeprefix("data: "))
                    break
        return (True, data[0]) if event == "complete" else (False, (data or {}).get("error"))
