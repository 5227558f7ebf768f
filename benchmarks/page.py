"""What watching costs: TPOT of a question on the page, all plots live, against the same question with nobody watching.

    python benchmarks/page.py [--rounds 20] [--tokens 64]

The page and the model run in this process as they do when served, the visitor in another one. Both ways take turns, the
first round is thrown away, and ratios are taken inside a round: median, with the quartiles in brackets.
"""

import argparse
import json
import statistics
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from decomoe.answer import Answer, Loaded, stream
from decomoe.images import load_image
from decomoe.methods import DecoMoE, Dense, Method
from decomoe.ui.ask import _run
from decomoe.ui.hosting import Host
from decomoe.ui.page import build, launch_options

PICTURE = Path(__file__).parents[1] / "assets" / "examples" / "objects.png"
QUESTION = "Describe the picture."
METHODS = ("dense", "decomoe")


def visit(url: str, handler: int, data: list[Any], number: int) -> list[list[float]]:
    """Ask on the page as a browser does, and read all that it sends; the times of the tokens of both answers."""
    with httpx.Client(base_url=url, timeout=None) as http:
        path = http.post("gradio_api/upload", files={"files": ("picture.png", PICTURE.read_bytes())}).json()[0]
        session = {"fn_index": handler, "session_hash": f"visitor{number}"}
        http.post("gradio_api/queue/join", json={"data": [{"path": path}, QUESTION, *data[2:]], **session})
        with http.stream("GET", "gradio_api/queue/data", params=session) as response:
            for line in response.iter_lines():
                if "process_completed" in line:
                    answers = json.loads(line.removeprefix("data: "))["output"]["data"][0]
                    return [pane["times"] for pane in answers["panes"]]
    raise RuntimeError("the page gave no answer")


def unwatched(loaded: Loaded, picture: Image.Image, method: Method, tokens: int) -> list[float]:
    """The times of the tokens of an answer that is made in a thread as on the page, while nobody looks."""
    *_, answer = stream(loaded, picture, QUESTION, method, max_new_tokens=tokens, pace_s=3600)
    assert isinstance(answer, Answer)
    return answer.trace.token_times_s


def main() -> None:
    """Measure, and print a line a method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    host = Host()
    page = build(host)
    page_options = launch_options(host) | {"server_name": "127.0.0.1", "prevent_thread_lock": True, "quiet": True}
    _, url, _ = page.launch(**page_options)
    loaded = host.load()
    loaded.model.generation_config.eos_token_id = None  # answers of one length
    handler = next(f for f in page.fns.values() if getattr(f.fn, "func", None) is _run)
    data = [getattr(block, "value", None) for block in handler.inputs]
    data[[getattr(block, "label", "") for block in handler.inputs].index("Length")] = options.tokens
    picture, found = load_image(PICTURE), []
    with get_context("spawn").Pool(1) as visitor:
        for number in range(options.rounds + 1):
            began = time.process_time()
            watched = visitor.apply(visit, (url, handler._id, data, number))
            middle = time.process_time()
            alone = [unwatched(loaded, picture, method, options.tokens) for method in (Dense(), DecoMoE())]
            spent = (middle - began) / (time.process_time() - middle)
            if number:
                found.append([*map(tpot, watched), *map(tpot, alone), spent])
    for place, name in enumerate(METHODS):
        off = statistics.median(row[2 + place] for row in found)
        print(
            f"{name}: TPOT {1e3 * off:.2f} ms alone; watched {spread([r[place] / r[2 + place] for r in found])} of it"
        )
    print(f"CPU seconds of the whole question, watched: {spread([row[4] for row in found])} of alone")
    page.close()


def tpot(times: list[float]) -> float:
    """Seconds a further token."""
    return (times[-1] - times[0]) / (len(times) - 1)


def spread(ratios: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
