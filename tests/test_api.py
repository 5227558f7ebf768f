"""What programs and agents call: by gradio_client and as MCP tools."""

import asyncio
import base64
import json
import os
from pathlib import Path

import pytest
from conftest import slowed
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client
from visitor import Visitor, png

from decomoe.answer import ask
from decomoe.methods import METHODS, DecoMoE, Dense
from decomoe.mini.draw import draw

PICTURE = draw(4, kind="objects").image
QUESTION = "Describe the picture."


@pytest.fixture(scope="module")
def client(site) -> Client:
    return Client(site.url, verbose=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    path.write_bytes(png(PICTURE))
    return path


def test_ask_by_client_is_ask(site, client, file):
    method = DecoMoE(exit_after=9, prefix=8)
    alone = ask(site.loaded, PICTURE, QUESTION, method, max_new_tokens=6)
    with slowed(site.loaded.model, 0.3):  # so that there is something to stream
        job = client.submit(handle_file(file), QUESTION, "decomoe:exit_after=9,prefix=8", 6, True, api_name="/ask")
        answer = job.result()
    assert answer["answer"] == alone.text
    assert answer["exit_after"] == 9
    assert answer["trace"]["prefix"] == {"prefill": alone.trace.prefix.prefill, "decode": alone.trace.prefix.decode}
    assert answer["executed"] == pytest.approx(alone.trace.flops.executed / alone.trace.flops.executed_dense)
    texts = [output["answer"] for output in job.outputs()]
    assert len(set(texts)) > 2, "it did not stream"
    assert all(alone.text.startswith(text) for text in texts)


def test_ask_names_methods_alone_where_one_is_unknown(client, file):
    with pytest.raises(AppError, match="no method 'decomo'; there are dense") as caught:
        client.predict(handle_file(file), QUESTION, "decomo", api_name="/ask")
    assert "table1" not in str(caught.value)


def test_compare_by_client_has_a_row_a_method(site, client, file):
    rows = client.predict(handle_file(file), QUESTION, max_new_tokens=4, api_name="/compare")
    assert [row["method"] for row in rows] == list(METHODS)
    dense = ask(site.loaded, PICTURE, QUESTION, Dense(), max_new_tokens=4)
    assert rows[0]["answer"] == dense.text
    assert rows[0]["as_dense"] == rows[0]["executed"] == rows[0]["sparse"] == 1
    for row in rows:
        assert ("problem" in row) != ("answer" in row)
    two = client.predict(handle_file(file), QUESTION, "dense fastv:layer=4,prune=1", 4, api_name="/compare")
    assert [row["method"] for row in two] == ["dense", "fastv:layer=4,prune=1"]
    assert two[1]["visual_tokens"] == pytest.approx(two[1]["of_visual_tokens"] * 4 / 16)


def test_errors_reach_the_client_as_sentences(client, file):
    with pytest.raises(AppError, match="p must be above 0"):
        client.predict(handle_file(file), QUESTION, "decomoe:p=0", api_name="/ask")


def mcp(url: str, *calls: tuple[str, dict]) -> tuple[list, list]:
    """The tools of the page, and the results of calls."""

    async def talk():
        async with (
            streamablehttp_client(f"{url}gradio_api/mcp/") as (read, write, _),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            tools = (await session.list_tools()).tools
            return tools, [await session.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(talk())


def test_mcp_tools_say_what_they_take_and_answer(site):
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    uploaded = Visitor(site.url).upload(png(PICTURE))
    before = sorted(folder.rglob("*"))
    inline = "data:image/png;base64," + base64.b64encode(png(PICTURE)).decode()
    tools, results = mcp(
        site.url,
        ("ask", {"image": inline, "question": QUESTION, "method": "dense", "max_new_tokens": 4}),
        (
            "ask",
            {
                "image": f"{site.url}gradio_api/file={uploaded}",
                "question": QUESTION,
                "method": "dense",
                "max_new_tokens": 4,
            },
        ),
        ("compare", {"image": inline, "question": QUESTION, "methods": "dense vtw", "max_new_tokens": 2}),
        ("ask", {"image": "/etc/passwd", "question": QUESTION}),
        ("ask", {"image": "https://example.com/cat.png", "question": QUESTION}),
        ("ask", {"image": inline, "question": QUESTION, "max_new_tokens": -1}),
        ("nothing", {}),
    )
    assert {tool.name for tool in tools} == {"ask", "compare"}
    for tool in tools:
        assert tool.description.startswith("Ask ")
        assert tool.inputSchema["required"] == ["image", "question"]
        assert all(value["description"] for value in tool.inputSchema["properties"].values())
    alone = ask(site.loaded, PICTURE, QUESTION, Dense(), max_new_tokens=4).text
    texts = [result.content[0].text for result in results]
    assert [result.isError for result in results] == [False] * 3 + [True] * 4
    assert f"'answer': {alone!r}" in texts[0]
    assert f"'answer': {alone!r}" in texts[1]
    assert "'method': 'vtw'" in texts[2]
    assert "uploads only" in texts[3]
    assert "uploads only" in texts[4]
    assert "max_new_tokens must be" in texts[5]
    assert not any("Traceback" in text for text in texts)
    assert sorted(folder.rglob("*")) == before  # pictures sent inline are never written to disk


def test_health_says_which_model(site):
    answer = Visitor(site.url).get("healthz")
    assert answer.status_code == 200
    assert json.loads(answer.text) == {"status": "ok", "model": "mini"}
