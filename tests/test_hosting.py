"""Where the page runs: the model that environment variables choose, whether it fits, and ZeroGPU's worker."""

import base64
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from types import SimpleNamespace

import gradio as gr
import pytest
import torch
from transformers import AutoConfig
from visitor import png

from decomoe import families
from decomoe.answer import MINI, _without_workers, load
from decomoe.mini.draw import draw
from decomoe.ui import api, hosting
from decomoe.ui.hosting import Host
from decomoe.ui.page import QUEUE_S, build, serve


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DECOMOE_MODEL", "/nowhere", "no model in '/nowhere'"),
        ("DECOMOE_DEVICE", "gpu", "no device 'gpu' here"),
        ("DECOMOE_DEVICE", "cuda:77", "no device 'cuda:77' here"),
        ("DECOMOE_CALIBRATION", "/nowhere", "/nowhere"),
    ],
)
def test_variables_that_name_nothing_are_told(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises((OSError, ValueError), match=message):
        hosting.chosen().load()


def test_variables_choose_model_and_calibration(monkeypatch, tmp_path):
    for name in ("DECOMOE_MODEL", "DECOMOE_CALIBRATION", "DECOMOE_DEVICE"):
        monkeypatch.setenv(name, "")
    assert hosting.chosen().load().name == "mini"
    shutil.copytree(MINI, tmp_path / "mine")
    shutil.move(tmp_path / "mine" / "calibration", tmp_path / "elsewhere")
    monkeypatch.setenv("DECOMOE_MODEL", str(tmp_path / "mine"))
    monkeypatch.setenv("DECOMOE_DEVICE", "cpu")
    loaded = hosting.chosen().load()
    assert (loaded.name, loaded.calibration) == ("mine", None)
    monkeypatch.setenv("DECOMOE_CALIBRATION", str(tmp_path / "elsewhere"))
    assert hosting.chosen().load().calibration is not None


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path):
    for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINI / name, tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(2_000_000_000_000)  # sparse: takes no room on the disk
    with pytest.raises(ValueError, match=r"takes 4000\.0 GB as float32, and cpu has .* free"):  # bf16 there, fp32 here
        load(tmp_path)


def test_a_model_of_the_hub_is_sized_by_its_index(monkeypatch, tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"metadata": {"total_size": 62_000}, "weight_map": {}}))
    monkeypatch.setattr(families, "cached_file", lambda *args, **options: tmp_path / "index.json")
    config = AutoConfig.from_pretrained(MINI)
    assert config.dtype == torch.bfloat16
    assert families._weight_bytes("some/model", config, torch.bfloat16) == 62_000
    assert families._weight_bytes("some/model", config, torch.float32) == 124_000


def test_on_zero_gpu_questions_run_in_a_worker_that_gets_and_gives_plain_data(monkeypatch):
    booked = []

    def gpu(duration):
        def decorate(function):
            @wraps(function)
            def forked(*args, **options):
                args, options = pickle.loads(pickle.dumps((args, options)))
                for output in function(*args, **options):
                    yield pickle.loads(pickle.dumps(output))

            booked.append(duration)
            return forked

        return decorate

    monkeypatch.setitem(sys.modules, "spaces", SimpleNamespace(GPU=gpu))
    monkeypatch.setattr(hosting, "ZERO_GPU", True)
    with gr.Blocks() as page:
        host = Host()
        api.add(host)
    host.load()
    assert len(booked) == 2
    assert all(0 < seconds <= 600 for seconds in booked)
    assert booked[0] <= 60  # no longer than the platform's default for one question
    image = "data:image/png;base64," + base64.b64encode(png(draw(4).image)).decode()
    endpoints = {function.api_name: function.fn for function in page.fns.values()}
    *_, answer = endpoints["ask"](image, "What is this?", max_new_tokens=2)
    *_, rows = endpoints["compare"](image, "What is this?", "dense vtw", 2)
    assert answer["answer"] is not None
    assert [row["method"] for row in rows] == ["dense", "vtw"]
    json.dumps([answer, rows])


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_named_port_that_is_taken_is_refused(monkeypatch, taken):
    with pytest.raises(OSError, match=f"Port {taken} is taken"):
        serve(Host(), taken)
    monkeypatch.setenv("GRADIO_SERVER_PORT", str(taken))
    with pytest.raises(OSError, match=f"Port {taken} is taken"):
        serve(Host())
    monkeypatch.setenv("GRADIO_SERVER_PORT", "many")
    with pytest.raises(ValueError, match="is a number, not 'many'"):
        serve(Host())


def test_an_idle_page_does_not_look_for_questions_all_the_time():
    assert hasattr(gr.Blocks().queue()._queue, "sleep_when_free")  # Gradio knows the setting
    assert build(Host())._queue.sleep_when_free == QUEUE_S


def test_elsewhere_functions_stay_as_they_are():
    assert hosting.on_gpu(1, 64)(print) is print


VISIT = """
import sys, time, psutil, torch
from decomoe.methods import Dense
from decomoe.ui import ask, compare, explore, hosting
from decomoe.ui.guard import read_picture

hosting.THREADS = 4
host, picture, knobs = hosting.Host(), sys.argv[1], (True, True, 0.7, 0.5, 0, 0, "calibrated", "drop")
host.load()
list(ask._run(host, picture, "What is this?", {}, "dense", 2, *knobs))
ask._profile(host, picture, "What is this?", "dense", *knobs)
list(compare.compare(host.loaded, read_picture(picture), "What is this?", {"dense": Dense()}, 2))
list(explore._explore(host, picture, 1, "What is this?"))
time.sleep(0.5)
before = psutil.Process().num_threads()
torch.rand(1 << 22).exp()
print(psutil.Process().num_threads() - before)
"""


def test_whoever_called_has_no_idle_workers():
    """They would slow every later answer down. A thread that has none yet gets all its three at its first work."""
    picture = f"data:image/png;base64,{base64.b64encode(png(draw(7).image)).decode()}"
    assert subprocess.check_output([sys.executable, "-c", VISIT, picture], text=True).split()[-1] == "3"


def test_two_loads_at_once_leave_the_number_of_threads_as_it_was():
    """The first ends while the second is on, which then must not take the one thread of the first for the usual."""
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    inside, ended = threading.Event(), threading.Event()

    def first():
        with _without_workers():
            inside.set()
            time.sleep(0.1)
        ended.set()

    def second():
        inside.wait()
        with _without_workers():
            ended.wait()

    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda work: work(), (first, second)))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(usual)


LOADED = """
import torch
before = torch.get_num_threads()
from decomoe.ui import hosting
hosting.load = hosting.warm_up = lambda *_: None
hosting.Host().load()
print(before, torch.get_num_threads())
"""


@pytest.mark.parametrize("wanted", [None, "2"])
def test_a_processor_is_left_to_the_page_unless_somebody_says_how_many(wanted):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": wanted} if wanted else {}
    said = subprocess.check_output([sys.executable, "-c", LOADED], text=True, env=environment)
    before, after = map(int, said.split())
    assert after == (before if wanted else max(1, before - 1))
