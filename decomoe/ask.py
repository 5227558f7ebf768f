"""Ask one question about one picture: text, streamed, and the trace of what happened."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import StoppingCriteria

from .calibration import META, Calibration
from .experts import permute_experts
from .families import load_model, parts_of
from .images import load_image
from .methods import Dense, Method
from .runtime import attach
from .trace import Trace

MINI = Path(__file__).parents[1] / "assets" / "mini"


@dataclass
class Loaded:
    """A model that is ready to be asked; `lock` keeps its questions one at a time."""

    model: Any  # a PreTrainedModel that generates
    processor: Any
    calibration: Calibration | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """The model's name: of its folder, or its Hub id."""
        path = Path(self.model.name_or_path)
        return path.name if path.is_absolute() else str(path)


def load(
    source: str | Path = MINI,
    calibration: str | Path | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Load a model with its calibration.

    Args:
        source: a folder or a Hub id, such as "Qwen/Qwen3-VL-30B-A3B-Instruct"; the mini model by default.
        calibration: a folder; by default `calibration` inside `source`, if there.
        device, dtype: see `families.load_model`.

    Raises:
        ValueError: the model's family is unknown or its calibration is for another model.
        OSError: there is no such model.
    """
    if Path(source).is_absolute() and not Path(source).is_dir():
        raise FileNotFoundError(
            f"There is no model in '{source}'; the mini model comes with a clone of the repository."
        )
    model, processor = load_model(source, device, dtype)
    parts = parts_of(model)
    parts.text_model.set_experts_implementation("decomoe")
    folder = Path(calibration or Path(source) / "calibration")
    if calibration is None and not (folder / META).is_file():
        return Loaded(model, processor)
    artifact = Calibration.load(folder)
    artifact.check(parts)
    permute_experts(parts, artifact.orders)
    return Loaded(model, processor, artifact)


@dataclass(frozen=True)
class Answer:
    """The text of an answer and its trace."""

    text: str
    trace: Trace


class _Watch(StoppingCriteria):
    """Sees every token as it comes: notes its time, passes the text on, and stops when asked to."""

    def __init__(
        self, decode: Callable[[Tensor], str], prompt: int, on_text: Callable[[str], None], stop: threading.Event
    ):
        self.decode, self.prompt, self.on_text, self.stop = decode, prompt, on_text, stop
        self.began = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter() - self.began)
        text = self.decode(input_ids[0, self.prompt :])
        if not text.endswith("\ufffd"):  # half of a character
            self.on_text(text)
        return torch.full((len(input_ids),), self.stop.is_set(), device=input_ids.device)


def encode(loaded: Loaded, asked: Sequence[tuple[Image.Image, str]]) -> dict[str, Any]:
    """The model's inputs for pictures with a question each, left padded. Special tokens in questions are plain text.

    Raises:
        ValueError: a question is empty or too long for the model.
    """
    if not all(question.strip() for _, question in asked):
        raise ValueError("The question is empty; ask something about the picture.")
    inputs = loaded.processor.apply_chat_template(
        [
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": image}, {"type": "text", "text": question.strip()}],
                }
            ]
            for image, question in asked
        ],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        sanitize_control_tokens=True,
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    length, limit = inputs["input_ids"].shape[1], loaded.model.config.get_text_config().max_position_embeddings
    if length >= limit:
        raise ValueError(f"Picture and question take {length} tokens; this model reads at most {limit}. Ask shorter.")
    return dict(inputs.to(loaded.model.device))


@contextmanager
def _out_of_memory_is_told() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ValueError("The model ran out of memory on this picture; try a smaller one.") from None


def ask(
    loaded: Loaded,
    image: str | Path | Image.Image,
    question: str,
    method: Method = Dense(),  # noqa: B008 (frozen)
    *,
    max_new_tokens: int = 64,
    on_text: Callable[[str], None] = lambda text: None,
    stop: threading.Event | None = None,
) -> Answer:
    """Ask `question` about `image`, greedily decoded.

    Args:
        on_text: called with the whole text so far, after every token.
        stop: when set, the answer ends after the token at hand.

    Raises:
        ValueError: picture, question or method don't fit; the message says what to do.
    """
    tokenizer = loaded.processor.tokenizer
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True).strip()  # noqa: E731
    with (
        _out_of_memory_is_told(),
        loaded.lock,
        attach(loaded.model, method, loaded.calibration) as session,
        torch.inference_mode(),
    ):
        inputs = encode(loaded, [(load_image(image), question)])
        prompt = inputs["input_ids"].shape[1]
        watch = _Watch(decode, prompt, on_text, stop or threading.Event())
        ids = session.generate(inputs, max_new_tokens=max_new_tokens, do_sample=False, stopping_criteria=[watch])
        trace = session.traces()[0]
    trace.question, trace.answer = question, decode(ids[0, prompt:])
    trace.token_times_s = watch.times
    trace.ttft_s = watch.times[0]
    if len(watch.times) > 1:
        trace.tpot_s = (watch.times[-1] - watch.times[0]) / (len(watch.times) - 1)
    return Answer(trace.answer, trace)


def stream(*args: Any, **options: Any) -> Iterator[str | Answer]:
    """`ask` as a generator: the text so far after every token, and the `Answer` at the end.

    Closing it stops the answer within a token. An error in `ask` is raised here.
    """
    events: queue.Queue[str | Answer | BaseException] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        try:
            events.put(ask(*args, on_text=events.put, stop=stop, **options))
        except BaseException as error:
            events.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Answer):
                return
    finally:
        stop.set()
        thread.join()
