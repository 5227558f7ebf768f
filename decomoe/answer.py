"""Ask one question about one picture: text, streamed, and the trace of what happened."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, StoppingCriteria

from .calibration import META, Calibration
from .decode import CompiledDecode
from .experts import permute_experts
from .families import family_of, load_model, parts_of
from .gate import text_features
from .images import load_image
from .methods import Dense, Method
from .runtime import Session, Stopped, attach
from .trace import GateReading, Trace

MINI = Path(__file__).parents[1] / "assets" / "mini"
STOPPED = "Stopped before the first token."
WATCHING = 0.03  # the largest share of the time that a watcher may take; passing on what it saw takes some more
SLOWEST_S = 1.0  # but it looks as often as that
T = TypeVar("T")
_ALONE = threading.RLock()


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
        return name_of(self.model.name_or_path)


def name_of(source: str | Path) -> str:
    """The name of the model at `source`: that of its folder, or its Hub id."""
    path = Path(source)
    return path.name if path.is_absolute() else str(path)


@contextmanager
def _without_workers() -> Iterator[None]:
    """Compute in this thread alone, so that none of the workers that `apart` tells of stay with it.

    The number of threads is one for the process: one caller at a time changes it. (What computes for the first time
    in a thread meanwhile takes it over for good, which torch offers no way around.)
    """
    with _ALONE:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def apart(work: Callable[[], T]) -> T:
    """Do `work` in a thread that ends with it.

    OpenMP keeps workers for every thread that has computed. Once there are more than processors, none spins any more
    while it waits, and a TTFT on two processors more than doubles. A thread that ends takes its workers along.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@_without_workers()
def outline(
    source: str | Path = MINI, calibration: str | Path | None = None
) -> tuple[PretrainedConfig, Calibration | None]:
    """What is known of a model before its weights are read: its configuration and its calibration; see `load`."""
    if Path(source).is_absolute() and not Path(source).is_dir():
        raise FileNotFoundError(
            f"There is no model in '{source}'; the mini model comes with a clone of the repository."
        )
    config = AutoConfig.from_pretrained(source)
    family_of(config)
    folder = Path(calibration or Path(source) / "calibration")
    if calibration is None and not (folder / META).is_file():
        return config, None
    return config, Calibration.load(folder)


@_without_workers()
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
    _, artifact = outline(source, calibration)
    model, processor = load_model(source, device, dtype)
    parts = parts_of(model)
    parts.text_model.set_experts_implementation("decomoe")
    if artifact is not None:
        artifact.check(parts)
        permute_experts(parts, artifact.orders)
        if artifact.gate is not None:
            artifact.gate.to(parts.text_model.device)
    return Loaded(model, processor, artifact)


@dataclass(frozen=True)
class Answer:
    """The text of an answer and its trace."""

    text: str
    trace: Trace


@dataclass(frozen=True)
class Token:
    """One more token of an answer that is being made.

    What the hooks have noted so far is read only when asked for, so that whoever looks pays, not the run.

    Attributes:
        text: the whole text so far.
        time_s: seconds since the call of generate.
        number: tokens so far.
    """

    text: str
    time_s: float
    number: int
    session: Session

    def start(self) -> Trace:
        """What happened in the prefill."""
        return self.session.traces(1)[0]

    def prefix(self) -> list[int | None]:
        """Experts kept per layer by the forward that gave this token; None where all."""
        return self.session.record.kept(0, self.number - 1)

    def experts(self) -> list[list[int]]:
        """Places of the experts that this forward ran for its last token, per layer."""
        return self.session.record.ran(0, self.number - 1)


class _Watch(StoppingCriteria):
    """Sees every token as it comes: notes its time, passes it on, and stops when asked to."""

    def __init__(
        self,
        session: Session,
        decode: Callable[[Tensor], str],
        prompt: int,
        on_token: Callable[[Token], None],
        stop: threading.Event,
    ):
        self.session, self.decode, self.prompt, self.on_token, self.stop = session, decode, prompt, on_token, stop
        self.began = time.perf_counter()
        self.times: list[float] = []
        self.ends: list[int] = []
        self.text = ""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter() - self.began)
        self.text = self.decode(input_ids[0, self.prompt :])
        half = self.text.endswith("\ufffd")  # of a character
        self.ends.append(len(self.text) - half)
        if not half:
            self.on_token(Token(self.text, self.times[-1], len(self.times), self.session))
        return torch.full((len(input_ids),), self.stop.is_set(), device=input_ids.device)


def encode(loaded: Loaded, asked: Sequence[tuple[Image.Image, str]]) -> dict[str, Any]:
    """The model's inputs for pictures with a question each, left padded. Special tokens in questions are plain text.

    Raises:
        ValueError: a question is empty, too long for the model, or no text.
    """
    if not all(question.strip() for _, question in asked):
        raise ValueError("The question is empty; ask something about the picture.")
    if any("\ud800" <= character <= "\udfff" for _, question in asked for character in question):
        raise ValueError("The question is not valid Unicode; write it in UTF-8.")
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine, had no more memory to give."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


@contextmanager
def out_of_memory_is_told() -> Iterator[None]:
    """Out of memory becomes a ValueError whose message says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError("The model ran out of memory on this picture; try a smaller one.") from None


def ask(
    loaded: Loaded,
    image: str | Path | Image.Image,
    question: str,
    method: Method = Dense(),  # noqa: B008 (frozen)
    *,
    max_new_tokens: int = 64,
    on_token: Callable[[Token], None] = lambda token: None,
    stop: threading.Event | None = None,
    read_gate: bool = False,
    decode: CompiledDecode | None = None,
) -> Answer:
    """Ask `question` about `image`, greedily decoded.

    Args:
        on_token: called after every token.
        stop: when set, the answer ends with the layer at hand.
        read_gate: after the answer, note what the gate reads after every candidate; for `Dense`, where nothing leaves.
        decode: compiled decode steps, made for this model and kept from question to question.

    Raises:
        ValueError: picture, question or method don't fit, and the message says what to do; or the answer was stopped
            before its first token.
    """
    tokenizer, stop = loaded.processor.tokenizer, stop or threading.Event()
    to_text = lambda ids: tokenizer.decode(ids, skip_special_tokens=True).strip()  # noqa: E731
    with (
        out_of_memory_is_told(),
        _held(loaded.lock, stop),
        attach(loaded.model, method, loaded.calibration, decode) as session,
        torch.inference_mode(),
    ):
        inputs = encode(loaded, [(load_image(image), question)])
        prompt = inputs["input_ids"].shape[1]
        session.stop = stop
        if read_gate and loaded.calibration and loaded.calibration.gate:
            session.keep = loaded.calibration.gate.candidates
        watch = _Watch(session, to_text, prompt, on_token, stop)
        try:
            session.generate(inputs, max_new_tokens=max_new_tokens, do_sample=False, stopping_criteria=[watch])
        except Stopped:
            if not watch.times:
                raise ValueError(STOPPED) from None
            session.record.lengths = [len(watch.times)]
        trace = session.traces()[0]
        if session.keep and loaded.calibration:
            trace.gate = _readings(session, loaded.calibration)
    trace.question, trace.answer = question, watch.text
    trace.token_times_s, trace.token_ends = watch.times, watch.ends
    trace.ttft_s = watch.times[0]
    if len(watch.times) > 1:
        trace.tpot_s = (watch.times[-1] - watch.times[0]) / (len(watch.times) - 1)
    return Answer(trace.answer, trace)


@contextmanager
def _held(lock: threading.Lock, stop: threading.Event) -> Iterator[None]:
    """Hold `lock`; who is stopped does not wait for it any longer.

    Raises:
        ValueError: so it was.
    """
    while not lock.acquire(timeout=0.1):
        if stop.is_set():
            raise ValueError(STOPPED)
    try:
        yield
    finally:
        lock.release()


def _readings(session: Session, calibration: Calibration) -> list[GateReading]:
    """What the gate reads in the kept states of a prefill in which nothing left."""
    gate, cache = calibration.gate, session.cache
    assert gate is not None
    text = cache.text_after_image if calibration.gate_text == "after image" else cache.text
    return [
        GateReading(layer, gate(layer, text_features(session.states[layer], text)).item()) for layer in gate.candidates
    ]


def stream(
    *args: Any, pace_s: float = 0.2, stop: threading.Event | None = None, **options: Any
) -> Iterator[Token | Answer | None]:
    """`ask` as a generator: every `pace_s` seconds the latest `Token`, None if there is no new one; last, the `Answer`.

    Whoever looks in between takes the interpreter from the run; so the pace slackens, to `SLOWEST_S` at most, until
    what is done with the tokens takes no more than `WATCHING` of the time. Setting `stop` stops the answer within a
    layer, and so does closing the generator; but that can't be closed between two looks. An error in `ask` is raised
    here. The run has a thread of its own, which ends with it: see `apart`.
    """
    latest: Token | None = None
    shown, pause = latest, pace_s
    result: list[Answer | BaseException] = []
    stop = stop or threading.Event()

    def on_token(token: Token) -> None:
        nonlocal latest
        latest = token

    def work() -> None:
        try:
            result.append(ask(*args, on_token=on_token, stop=stop, **options))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            thread.join(pause)
            if result:
                break
            token, began = latest, time.monotonic()
            yield None if token is shown else token
            shown, pause = token, max(pace_s, min(SLOWEST_S, (time.monotonic() - began) / WATCHING))
    finally:
        if not result:
            stop.set()
        thread.join()
        latest = token = shown = None  # they hold the session and its KV cache
    if isinstance(result[0], BaseException):
        raise result[0]
    yield result[0]
