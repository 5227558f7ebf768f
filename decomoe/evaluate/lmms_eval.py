"""The model "decomoe" of lmms-eval (a package of its own), whose tasks and official scoring then run with our methods.

    lmms-eval --model decomoe --model_args pretrained=MODEL,method=fastv,prune=0.5 --tasks ai2d

lmms-eval finds it by the entry point in pyproject.toml.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from accelerate import PartialState
from lmms_eval.api.model import lmms
from PIL import Image

from ..answer import MINI, load
from ..benchmarks import Case, run
from ..families import parts_of
from ..images import load_image
from .specs import parse_method

MAX_NEW_TOKENS = 128  # where a task does not say; as lmms-eval's own model of Qwen3-VL


def manifest() -> Any:
    """What lmms-eval's registry keeps of the model."""
    from lmms_eval.models.registry_v2 import ModelManifest  # noqa: PLC0415 (that package calls this while it loads)

    return ModelManifest(model_id="decomoe", simple_class_path=f"{__name__}.{LmmsEvalModel.__name__}")


class LmmsEvalModel(lmms):
    """Answers lmms-eval's requests: `generate_until`, greedily, for questions about one picture.

    Args:
        pretrained: a folder or a Hub id; the mini model by default.
        method, parameters: a method and its parameters, as in `decomoe evaluate`'s NAME:KEY=VALUE,KEY=VALUE.
        calibration: a folder; by default the model's own.
        batch_size: questions at once.

    Raises:
        ValueError: model, method or calibration don't fit.
    """

    def __init__(
        self,
        pretrained: str | Path = MINI,
        method: str = "decomoe",
        calibration: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        **parameters: Any,
    ) -> None:
        super().__init__()
        PartialState()  # before the model: under `accelerate launch` each process takes its own GPU
        self.loaded = load(pretrained, calibration, device)
        self.device = self.loaded.model.device
        parts = parts_of(self.loaded.model)
        pairs = ",".join(f"{name}={value}" for name, value in parameters.items())
        self.method = parse_method(f"{method}:{pairs}", len(parts.layers))
        self.method.bind(parts, self.loaded.calibration)  # refuses before any work is done
        self.batch_size = int(batch_size)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The answers, in order, each cut before the first of its task's stop words.

        Args:
            requests: their `args` are (question, generation settings, document -> pictures, its number, task, split);
                the documents are in `task_dict`, which lmms-eval fills.

        Raises:
            ValueError: a task samples, or asks about no or several pictures.
        """
        answers: list[str] = []
        for settings, alike in groupby(requests, lambda request: request.args[1]):
            limit, stops = _limit_and_stops(settings)
            outcomes = run(self.loaded, list(map(self._case, alike)), self.method, self.batch_size, limit)
            answers += [_before(outcome.answer, stops) for outcome in outcomes]
        return answers

    def _case(self, request: Any) -> Case:
        question, _, pictures, number, task, split = request.args
        picture = partial(self._picture, pictures, task, split, number)
        return Case(f"{task}/{split}/{number}", picture, question.replace("<image>", ""), answer="")

    def _picture(self, pictures: Any, task: str, split: str, number: int) -> Image.Image:
        found = pictures(self.task_dict[task][split][number]) or []
        if len(found) != 1:
            raise ValueError(f"Question {number} of {task} has {len(found)} pictures; take a task with one a question.")
        return load_image(found[0])

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        raise NotImplementedError("decomoe answers in words; take a task whose output_type is generate_until.")

    generate_until_multi_round = loglikelihood


def _limit_and_stops(settings: Mapping[str, Any]) -> tuple[int, Sequence[str]]:
    """The length of answers and the stop words of a task's generation settings."""
    if settings.get("num_beams", 1) > 1 or (settings.get("do_sample") and settings.get("temperature", 1) > 0):
        raise ValueError("decomoe decodes greedily; run the task with --gen_kwargs do_sample=False,num_beams=1.")
    stops = settings.get("until") or ()
    return settings.get("max_new_tokens", MAX_NEW_TOKENS), [stops] if isinstance(stops, str) else stops


def _before(answer: str, stops: Sequence[str]) -> str:
    for stop in filter(None, stops):
        answer = answer.partition(stop)[0]
    return answer
