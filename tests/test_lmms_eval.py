"""The adapter to lmms-eval, without lmms-eval: what that package (0.7) asks of a model, and what it gets.

`lmms_eval_run.py` runs the real one.
"""

import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from decomoe.answer import ask, load
from decomoe.methods import DecoMoE, FastV, SparseVLM
from decomoe.mini.draw import draw

ROOT = Path(__file__).parents[1]
GREEDY = {"max_new_tokens": 8, "temperature": 0, "do_sample": False, "until": ["\n\n"]}


class Lmms:
    """The base class of lmms-eval's models, as far as a model uses it."""

    def __init__(self) -> None:
        self.task_dict: dict = {}


@pytest.fixture
def adapter(monkeypatch):
    """The module of the adapter, with stand-ins for what it imports of lmms-eval."""
    registry = SimpleNamespace(ModelManifest=SimpleNamespace)
    for name, content in {"": {}, ".api": {}, ".api.model": {"lmms": Lmms}, ".models": {}}.items():
        module = ModuleType(f"lmms_eval{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "lmms_eval.models.registry_v2", registry)
    monkeypatch.delitem(sys.modules, "decomoe.evaluate.lmms_eval", raising=False)
    yield importlib.import_module("decomoe.evaluate.lmms_eval")
    monkeypatch.delitem(sys.modules, "decomoe.evaluate.lmms_eval")


@pytest.fixture
def loaded(adapter, monkeypatch):
    """The mini model, loaded once for the model and for the comparison."""
    mini = load()
    monkeypatch.setattr(adapter, "load", lambda *_: mini)
    return mini


def request(number: int, question: str, **settings) -> SimpleNamespace:
    """A `generate_until` request as lmms-eval's tasks make it."""
    return SimpleNamespace(args=(question, GREEDY | settings, lambda doc: doc["pictures"], number, "task", "test"))


def test_the_entry_point_names_the_model(adapter):
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."lmms_eval\.models"\]\ndecomoe = "(.+)"', text)
    manifest = pkgutil.resolve_name(found[1])()
    assert manifest.model_id == "decomoe"
    model = pkgutil.resolve_name(manifest.simple_class_path)
    assert issubclass(model, Lmms)
    assert {"generate_until", "loglikelihood", "generate_until_multi_round"} <= vars(model).keys()


@pytest.mark.parametrize("batch_size", ["1", 3])
def test_answers_are_those_of_ask(adapter, loaded, batch_size):
    pictures = [draw(seed) for seed in (3, 4, 5)]
    model = adapter.LmmsEvalModel(method="decomoe", p=0.5, savb="no", batch_size=batch_size)
    model.task_dict["task"] = {"test": [{"pictures": [picture.image]} for picture in pictures]}
    limits = (8, 8, 2)
    asked = [picture.questions[0].text for picture in pictures]
    answers = model.generate_until(
        [request(i, f"<image>{asked[i]}", max_new_tokens=limit) for i, limit in enumerate(limits)]
    )
    method = DecoMoE(exit_after=9, p=0.5)  # 28 of 48, at 16 layers
    assert answers == [
        ask(loaded, picture.image, question, method, max_new_tokens=limit).text
        for picture, question, limit in zip(pictures, asked, limits, strict=True)
    ]


def test_parameters_are_those_of_the_method(adapter, loaded):
    assert adapter.LmmsEvalModel(method="fastv", layer=3, prune=0.75).method == FastV(3, 0.75)
    assert adapter.LmmsEvalModel(method="sparsevlm", keep="0.5/0.25/0.2").method == SparseVLM(keep=(0.5, 0.25, 0.2))
    with pytest.raises(ValueError, match="no method 'fastest'"):
        adapter.LmmsEvalModel(method="fastest")
    with pytest.raises(ValueError, match="no parameter 'layers'"):
        adapter.LmmsEvalModel(method="fastv", layers=3)
    with pytest.raises(ValueError, match="99"):
        adapter.LmmsEvalModel(method="vtw", exit_after=99)


def test_settings_of_tasks(adapter):
    limit_and_stops, before = adapter._limit_and_stops, adapter._before
    assert limit_and_stops({}) == (128, ())
    assert limit_and_stops({"until": "\n", "max_new_tokens": 5}) == (5, ["\n"])
    assert limit_and_stops({"until": None, "do_sample": True, "temperature": 0}) == (128, ())
    assert before("A cat. It sits.\n\nB", ["\n\n", ".", ""]) == "A cat"
    for settings in ({"do_sample": True}, {"do_sample": True, "temperature": 0.7}, {"num_beams": 4}):
        with pytest.raises(ValueError, match="greedily"):
            limit_and_stops(settings)


def test_what_is_not_answered(adapter, loaded):
    model, picture = adapter.LmmsEvalModel(method="dense"), draw(3).image
    for found, count in ((None, 0), ([], 0), ([picture] * 2, 2)):
        model.task_dict["task"] = {"test": [{"pictures": found}]}
        with pytest.raises(ValueError, match=f"Question 0 of task has {count} pictures"):
            model.generate_until([request(0, "What is it?")])
    for kind in ("loglikelihood", "generate_until_multi_round"):
        with pytest.raises(NotImplementedError, match="generate_until"):
            getattr(model, kind)([])
