"""Tiny random models of both families, built in seconds, and questions for them. Nothing is downloaded."""

import os
import signal
import subprocess
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import PATIENCE, chromium, opened, watched
from PIL import Image
from torch import Tensor
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from decomoe.mini.draw import draw

ROOT = Path(__file__).parents[1]
torch.set_num_threads(1)  # tiny models: threads only cost
LAYERS, EXPERTS, TOP_K, WIDTH, VOCABULARY, IMAGE = 6, 8, 2, 32, 64, 60
TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    max_position_embeddings=512,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)


def qwen(**text) -> Qwen3VLMoeForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    config = Qwen3VLMoeConfig(
        text_config={**TEXT, "rope_parameters": rope, **text},
        vision_config=dict(
            depth=3,
            hidden_size=16,
            intermediate_size=32,
            num_heads=2,
            patch_size=4,
            out_hidden_size=WIDTH,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1, 2],
            initializer_range=0.3,
        ),
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    torch.manual_seed(0)
    return Qwen3VLMoeForConditionalGeneration(config).eval()


def internvl(**text) -> InternVLForConditionalGeneration:
    config = InternVLConfig(
        text_config={
            "model_type": "qwen3_moe",
            **TEXT,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **text,
        },
        vision_config=dict(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=[16, 16],
            patch_size=[4, 4],
            initializer_range=0.3,
        ),
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    return InternVLForConditionalGeneration(config).eval()


BUILDERS = {"qwen3_vl_moe": qwen, "internvl": internvl}


@pytest.fixture(params=BUILDERS)
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return BUILDERS[family]()


@dataclass
class Prompt:
    """Tokens before the picture, and after it; one picture of 4 visual tokens, or several times as many."""

    before: list[int]
    after: list[int]
    seed: int
    size: int = 1


PROMPTS = (
    Prompt([5, 6], [7, 8, 9, 10, 11], 1),
    Prompt([12], [13, 14, 15], 2),
    Prompt([16, 17, 18], [19, 20, 21, 22, 23, 24, 25, 26], 3),
)


def inputs_for(model: PreTrainedModel, *prompts: Prompt) -> dict[str, Tensor]:
    """A left-padded batch in the form of the family's processor."""
    rows = [[*prompt.before, *[IMAGE] * 4 * prompt.size, *prompt.after] for prompt in prompts]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    pictures = []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(prompt.seed)
        patches, tiles = (16 * prompt.size, 3 * 2 * 16), (prompt.size, 3, 16, 16)
        shape = patches if model.config.model_type == "qwen3_vl_moe" else tiles
        pictures.append(torch.randn(shape, generator=generator))
    inputs["pixel_values"] = torch.cat(pictures).to(model.dtype)
    if model.config.model_type == "qwen3_vl_moe":
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4 * prompt.size] for prompt in prompts])
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


@pytest.fixture(scope="module")
def mini() -> Any:
    """The shipped mini model."""
    from decomoe.answer import load  # noqa: PLC0415 (slow; most tests need none)

    return load()


def killed_midway(arguments: Sequence[Any], written: Path, lines: int) -> str:
    """Run `python -m decomoe` on `arguments`, kill it once `written` has so many lines, and tear its last line.

    Returns:
        The whole lines that it had written there.
    """
    command = [sys.executable, "-m", "decomoe", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (written.exists() and written.read_text().count("\n") >= lines):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = written.read_text()
    written.write_text(kept + kept[:30])  # as if killed while writing
    return kept


@dataclass
class Site:
    """The page, served on loopback."""

    url: str
    loaded: Any
    page: Any


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Iterator[Site]:
    """The page on the mini model; what visitors upload lies in a folder of its own."""
    from decomoe.ui.hosting import Host  # noqa: PLC0415 (slow; most tests need no page)
    from decomoe.ui.page import build, launch_options  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        host = Host()
        page = build(host)
        options = launch_options(host) | {"server_name": "127.0.0.1", "prevent_thread_lock": True, "quiet": True}
        _, url, _ = page.launch(**options)
        yield Site(url, host.load(), page)
        page.close()


@contextmanager
def slowed(model: Any, seconds: float) -> Iterator[None]:
    """Every token takes its time, and whoever watches may take as much: there is something to see on any machine."""
    handle = model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decomoe.answer.WATCHING", 1)
        yield
    handle.remove()


@pytest.fixture(scope="session")
def loaded(site) -> Any:
    """The model behind the page."""
    return site.loaded


@pytest.fixture(scope="session")
def address(site) -> str:
    return site.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # closed after each module: its event loop runs in the main thread
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    yield context
    context.close()


@pytest.fixture(scope="module")
def shared(context) -> Any:
    """One page for all tests; what it fetches stays cached."""
    return watched(context.new_page())


@pytest.fixture
def page(shared, address) -> Iterator[Any]:
    """The page as somebody finds it who has just come."""
    opened(shared, address)
    shared.problems.clear()
    yield shared
    assert shared.problems == []


@pytest.fixture(scope="session")
def image() -> Image.Image:
    return draw(3, kind="objects").image


@pytest.fixture
def picture(image, tmp_path) -> Path:
    """The file of `image`."""
    image.save(tmp_path / "picture.png")
    return tmp_path / "picture.png"
