"""Twenty people at once on one process."""

import asyncio
import gc
import json
import threading
from dataclasses import dataclass

import httpx
import psutil
import pytest
from PIL import Image
from visitor import PATIENCE, no_traceback, png

from decomoe.answer import ask
from decomoe.methods import METHODS
from decomoe.mini.draw import draw

PEOPLE, TOKENS, ROUNDS, GROWTH = 20, 6, 3, 64 * 2**20
QUESTIONS = ("Describe the picture.", "How many objects are there?", "What is at the top?", "What is at the bottom?")


@dataclass
class Person:
    """Who asks what; `answer` is what he must be told."""

    picture: Image.Image
    question: str
    method: str
    answer: str


@pytest.fixture(scope="module")
def people(site) -> list[Person]:
    """Everybody has a picture of his own; the true answers are those of `ask` with nobody else there."""
    found = []
    for number in range(PEOPLE):
        picture = draw(500 + number, kind="objects").image
        question, method = QUESTIONS[number % 4], ("dense", "decomoe", "fastv", "vtw")[number // 4 % 4]
        alone = ask(site.loaded, picture, question, METHODS[method](), max_new_tokens=TOKENS)
        found.append(Person(picture, question, method, alone.text))
    assert len({person.answer for person in found}) >= PEOPLE // 2, "answers are too alike to be told apart"
    return found


async def visit(http: httpx.AsyncClient, person: Person) -> str:
    """Upload, ask, and read the answer to its end."""
    sent = await http.post("gradio_api/upload", files={"files": ("picture.png", png(person.picture))})
    asked = {"image": sent.json()[0], "question": person.question, "method": person.method, "max_new_tokens": TOKENS}
    joined = await http.post("gradio_api/call/v2/ask", json=asked)
    assert joined.status_code == 200, joined.text
    last = ""
    async with http.stream("GET", f"gradio_api/call/ask/{joined.json()['event_id']}") as response:
        async for line in response.aiter_lines():
            no_traceback(line)
            assert line != "event: error"
            if line.startswith("data: ") and line != "data: null":
                last = line.removeprefix("data: ")
    return json.loads(last)[0]["answer"]


async def everybody(url: str, people: list[Person]) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as http:
        return await asyncio.gather(*(visit(http, person) for person in people))


def test_twenty_people_get_their_own_answers_and_leave_nothing_behind(site, people):
    process, memory = psutil.Process(), []
    for number in range(1 + ROUNDS):
        assert asyncio.run(everybody(site.url, people)) == [person.answer for person in people]
        gc.collect()
        if number in (0, ROUNDS):
            memory.append(process.memory_info().rss)
    assert not site.loaded.lock.locked()
    assert memory[1] - memory[0] < GROWTH
    print(f"memory after one round {memory[0] / 2**20:.0f} MB, after {ROUNDS} more {memory[1] / 2**20:.0f} MB")


def test_a_person_who_leaves_frees_the_model(site, people, monkeypatch):
    """His answer would have had 256 tokens; the next person is served long before."""
    monkeypatch.setattr(site.loaded.model.generation_config, "eos_token_id", None)
    steps, gone = 0, threading.Event()

    def count(*args):
        nonlocal steps
        steps += 1
        if steps == 8:  # wait for him to leave, so that a fast machine doesn't finish first
            gone.wait(PATIENCE)

    hook = site.loaded.model.model.language_model.register_forward_pre_hook(count)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=site.url, timeout=PATIENCE) as http:
            sent = await http.post("gradio_api/upload", files={"files": ("picture.png", png(people[0].picture))})
            asked = {"image": sent.json()[0], "question": "Describe the picture.", "max_new_tokens": 256}
            joined = await http.post("gradio_api/call/v2/ask", json=asked)
            async with http.stream("GET", f"gradio_api/call/ask/{joined.json()['event_id']}") as response:
                async for line in response.aiter_lines():
                    if line == "event: generating":
                        return

    try:
        asyncio.run(leave())
        gone.set()
        monkeypatch.undo()
        assert asyncio.run(everybody(site.url, people[:2])) == [person.answer for person in people[:2]]
    finally:
        hook.remove()
    assert steps < 256
