"""Train the mini model: `python -m decomoe.mini.train`.

Two stages. First the vision tower alone, with a label per visual token (trained end to end from nothing, the model
stalls at guessing answer priors). Then the whole model on questions, several questions of a picture in one sequence:
each sees the picture and itself only, with positions restarting after the picture, which is exactly the same as asking
them one by one and five times cheaper. Training resumes from its last checkpoint after any interruption; what it writes
at the end, or when stopped by Ctrl-C in the second stage, is a moving average of the weights.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from ..families import load_model
from . import kernels
from .draw import COLORS, PLACES, THINGS, TINTS, TOKEN, Picture, Question, draw, pick_size
from .draw.base import CHARACTERS, choice
from .model import make_model, make_processor, make_tokenizer
from .photos import CLASSES, Photos, load_photos
from .pictograms import NAMES

TRAIN_SEEDS = 1_000_000  # training pictures have seeds from here up; smaller seeds are held out
SHEET_SEEDS = 1_000_000_000  # and those of `SHEETS` from here up
QUESTIONS_PER_PICTURE = 6
CHECKPOINT_SECONDS = 60
BALANCE = 0.001  # weight of the router's load-balancing loss, Qwen3's value
VISION = 0.3  # weight of the vision losses, of pictures with questions and of `SHEETS`, in the second stage
SHEETS = 1.5  # pictures of photos that only the vision tower sees, per picture with questions: photos need many epochs
MIX = {  # weights of the kinds of picture: more of what is learned slowest than the held-out sets have
    "objects": 40,
    "text": 18,
    "chart": 3,
    "table": 6,
    "shape": 13,
    "photo": 20,
}
SHORT = ("yes", "no", "A", "B", "C", "D")  # answers that judge: learned last, since their loss is small and flat
JUDGED = 3  # their weight
CHOICES = 0.3  # share of questions turned into multiple choice, which pictures have too few of to learn from
NAMED = 0.4  # share of these that name the answer and ask for its letter only: no picture is needed to learn that
POOLS = (tuple(COLORS), PLACES, CLASSES, NAMES)  # where options come from
OPEN = 0.6  # share of yes/no questions about relations turned into open ones, which say more about a mistake
OPPOSITES = (("to the left of", "to the right of"), ("above", "below"))
AVERAGE = 0.99  # a step's share of the moving average that stays


def patchify(pictures: list[Picture]) -> tuple[Tensor, Tensor]:
    """What the processor makes of equally large pictures: pixel values (B * patches, 1536/4) and grids (B, 3)."""
    pixels = torch.from_numpy(np.stack([np.asarray(picture.image) for picture in pictures])).float()
    half = TOKEN // 2
    batch, height, width, _ = pixels.shape
    pixels = (pixels / 255 - 0.5) / 0.5
    pixels = pixels.view(batch, height // TOKEN, 2, half, width // TOKEN, 2, half, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    pixels = pixels.unsqueeze(6).expand(*pixels.shape[:6], 2, half, half).reshape(-1, 3 * 2 * half * half)
    return pixels, torch.tensor([[1, height // half, width // half]]).repeat(batch, 1)


@dataclass
class Packed:
    """Several questions a picture in one sequence.

    Attributes:
        input_ids: (B, L). position_ids: (3, B, L).
        mask: (B, 1, L, L), True where a query may look.
        labels: (B, L), the token to predict at a position, -100 elsewhere.
        weights: (B, L), of a position's loss: 1/sqrt(length of the answer), or long descriptions would drown the rest;
            times `JUDGED` where the answer is in `SHORT`.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    labels: Tensor
    weights: Tensor


@dataclass
class Batch:
    """One training step's tensors; `things`, `tints`: (B * visual tokens).

    `packed`, and `sheets` if there are photos, in the question stage only.
    """

    pixels: Tensor
    grids: Tensor
    things: Tensor
    tints: Tensor
    packed: Packed | None = None
    sheets: "Batch | None" = None

    def to(self, device: str) -> "Batch":
        """The batch on another device."""
        packed = self.packed and Packed(*(value.to(device) for value in vars(self.packed).values()))
        pixels, grids, things, tints = (x.to(device) for x in (self.pixels, self.grids, self.things, self.tints))
        return Batch(pixels, grids, things, tints, packed, self.sheets and self.sheets.to(device))


def make_batch(step: int, size: int, photos: Photos | None, tokenizer: Qwen2Tokenizer | None = None) -> Batch:
    """The batch of `step`, always the same one, so that a resumed run sees what an uninterrupted one would.

    Its pictures are equally large; `size` of them if they have 64 visual tokens, fewer if they are larger. In the
    question stage `SHEETS` come with them.
    """
    shape = pick_size(random.Random(step))
    count = max(1, round(size * 64 * TOKEN * TOKEN / (shape[0] * shape[1])))
    pictures = [
        draw(TRAIN_SEEDS + step * size + index, shape, pick_kind(step, index, photos), photos=photos)
        for index in range(count)
    ]
    rng = random.Random(step)
    for picture in pictures:
        picture.questions = [with_options(rng, opened(rng, question)) for question in picture.questions]
    batch = labelled(pictures)
    if tokenizer is not None:
        batch.packed = pack_questions(pictures, tokenizer)
        if photos:
            first = SHEET_SEEDS + 1000 * step
            seeds = range(first, first + round(SHEETS * count))
            batch.sheets = labelled([draw(seed, shape, "photo", photos=photos) for seed in seeds])
    return batch


def labelled(pictures: list[Picture]) -> Batch:
    """Equally large pictures with the labels of their visual tokens."""
    things = torch.tensor([thing for picture in pictures for thing in picture.things])
    tints = torch.tensor([tint for picture in pictures for tint in picture.tints])
    return Batch(*patchify(pictures), things, tints)


def pick_kind(step: int, index: int, photos: Photos | None) -> str:
    """The kind of a training picture, by `MIX`; no photos if there are none."""
    kinds = [kind for kind in MIX if photos or kind != "photo"]
    return random.Random(f"{step} {index}").choices(kinds, [MIX[kind] for kind in kinds])[0]


def with_options(rng: random.Random, question: Question) -> Question:
    """`question`, or in `CHOICES` of cases and if one of `POOLS` holds its answer, the same as multiple choice."""
    pools = [pool for pool in POOLS if question.answer in pool]
    if not pools or rng.random() > CHOICES:
        return question
    if rng.random() < NAMED:
        question = replace(question, text=f"Which option is {question.answer}?")
    return choice(rng, question, pools[0])


def opened(rng: random.Random, question: Question) -> Question:
    """`question`, or in `OPEN` of cases, of a yes/no question about a relation, which of the two it is."""
    if question.kind != "relation" or rng.random() > OPEN:
        return question
    for pair in OPPOSITES:
        for word, other in (pair, pair[::-1]):
            if word in question.text:
                either = question.text.replace(word, " or ".join(pair))
                true = word if question.answer == "yes" else other
                return replace(question, text=either, answer=true.removeprefix("to the ").removesuffix(" of"))
    raise ValueError(f"No known relation: {question.text}")


def pack_questions(pictures: list[Picture], tokenizer: Qwen2Tokenizer) -> Packed:
    """Prefix, picture, then up to six independent questions with answers, for equally large pictures."""
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    columns, rows = (side // TOKEN for side in pictures[0].image.size)
    head = encode("<|im_start|>user\n<|vision_start|>")
    start = len(head)
    picture_ids = encode("<|image_pad|>") * (rows * columns)
    prefix = head + picture_ids + encode("<|vision_end|>")
    grid = torch.stack(
        [
            torch.full((rows * columns,), start),
            start + torch.arange(rows).repeat_interleave(columns),
            start + torch.arange(columns).repeat(rows),
        ]
    )
    after = start + max(rows, columns)  # position of <|vision_end|>
    samples = []
    for picture in pictures:
        ids, segments, labels = list(prefix), [0] * len(prefix), [-100] * len(prefix)
        weights = [0.0] * len(prefix)
        positions: list[int] = []
        for number, question in enumerate(picture.questions[:QUESTIONS_PER_PICTURE], 1):
            asked = encode(f"{question.text}<|im_end|>\n<|im_start|>assistant\n")
            answer = encode(f" {question.answer}<|im_end|>")
            ids += asked + answer
            segments += [number] * (len(asked) + len(answer))
            positions += range(after + 1, after + 1 + len(asked) + len(answer))
            labels += [-100] * (len(asked) - 1) + answer + [-100]
            weight = (JUDGED if question.answer in SHORT else 1) * len(answer) ** -0.5
            weights += [weight] * (len(asked) + len(answer))
        samples.append((ids, segments, positions, labels, weights))
    length = max(len(sample[0]) for sample in samples)
    count = len(samples)
    input_ids = torch.full((count, length), tokenizer.pad_token_id)
    targets = torch.full((count, length), -100)
    weighted = torch.zeros(count, length)
    position_ids = torch.zeros((3, count, length), dtype=torch.long)
    segment = torch.full((count, length), -1)
    common = torch.cat([torch.arange(start).expand(3, -1), grid, torch.full((3, 1), after)], dim=1)
    for row, (ids, segments, positions, labels, weights) in enumerate(samples):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.tensor(labels)
        weighted[row, : len(ids)] = torch.tensor(weights)
        segment[row, : len(ids)] = torch.tensor(segments)
        position_ids[:, row, : len(prefix)] = common
        position_ids[:, row, len(prefix) : len(ids)] = torch.tensor(positions)
    same = (segment[:, None, :] == 0) & (segment[:, :, None] >= 0) | (segment[:, None, :] == segment[:, :, None])
    mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    return Packed(input_ids, position_ids, mask, targets, weighted)


def label_weights() -> Tensor:
    """(THINGS,): little for the many tokens of ground and photos, more for letters, which are small and few."""
    weights = {"nothing": 0.2} | {f"photo of {name}": 0.3 for name in CLASSES} | dict.fromkeys(CHARACTERS, 2.0)
    return torch.tensor([weights.get(thing, 1.0) for thing in THINGS])


class VisionProbe(nn.Module):
    """Heads that read the thing and the colour under every visual token off the tower's outputs."""

    weights: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.thing = nn.Linear(width, len(THINGS))
        self.tint = nn.Linear(width, len(TINTS))
        self.register_buffer("weights", label_weights(), persistent=False)

    def loss(self, features: Tensor, batch: Batch) -> Tensor:
        features = features.float()
        tint = F.cross_entropy(self.tint(features), batch.tints)
        return F.cross_entropy(self.thing(features), batch.things, self.weights) + 0.5 * tint


def see(model: Any, batch: Batch) -> Any:
    """The vision tower's output; in bf16, which halves its time (the experts' small products gain nothing)."""
    with torch.autocast(batch.pixels.device.type, torch.bfloat16):
        return model.model.visual(batch.pixels, grid_thw=batch.grids)


def vision_loss(probe: VisionProbe, seen: Any, batch: Batch) -> tuple[Tensor, dict]:
    """Loss of what the tower has `seen`: over the merged tokens and, lighter, the DeepStack features; what to show."""
    loss = probe.loss(seen.pooler_output, batch)
    for features in seen.deepstack_features:
        loss = loss + 0.2 * probe.loss(features, batch)
    with torch.no_grad():
        known = batch.things > 0
        right = (probe.thing(seen.pooler_output.float()).argmax(-1) == batch.things)[known].float().mean()
    return loss, {"things": right.item()}


def read(model: Any, packed: Packed, seen: Any) -> Any:
    """The decoder's output on packed questions, with what the vision tower has `seen` in their pictures."""
    core = model.model.language_model
    visual = packed.input_ids == model.config.image_token_id
    embeds = core.embed_tokens(packed.input_ids)
    embeds = embeds.masked_scatter(visual[..., None], seen.pooler_output.to(embeds.dtype))
    return core(
        inputs_embeds=embeds,
        attention_mask=packed.mask,
        position_ids=packed.position_ids,
        visual_pos_masks=visual,
        deepstack_visual_embeds=seen.deepstack_features,
        use_cache=False,
        output_router_logits=True,
    )


def answer_loss(model: Any, probe: VisionProbe, batch: Batch) -> tuple[Tensor, dict]:
    """Next-token loss over the answers, load balancing, and some of the vision loss; and what to show."""
    packed = batch.packed
    assert packed is not None
    seen = see(model, batch)
    out = read(model, packed, seen)
    asked = packed.labels != -100
    logits, target = model.lm_head(out.last_hidden_state[asked]).float(), packed.labels[asked]
    text = model.config.text_config
    balance: Any = load_balancing_loss_func(
        out.router_logits, text.num_experts, text.num_experts_per_tok, packed.input_ids != text.pad_token_id
    )
    weights = packed.weights[asked]
    loss = (F.cross_entropy(logits, target, reduction="none") * weights).sum() / weights.sum()
    right = (logits.argmax(-1) == target).float().mean()
    vision, shown = vision_loss(probe, seen, batch)
    if batch.sheets:
        sheets, known = vision_loss(probe, see(model, batch.sheets), batch.sheets)
        vision, shown["photos"] = vision + sheets, known["things"]
    judged = weights > 1
    shown["judged"] = (logits.argmax(-1) == target)[judged].float().mean().item()  # half of it are end tokens
    shown |= {"loss": loss.item(), "token": right.item(), "balance": balance.item()}
    return loss + BALANCE * balance + VISION * vision, shown


@dataclass
class Stage:
    """One stage of training: its steps, batch size (pictures of 64 visual tokens) and peak learning rate."""

    name: str
    steps: int
    batch: int
    rate: float

    def learning_rate(self, step: int) -> float:
        """Warm-up over 100 steps, constant, then linearly down to 2 % over the last fifth.

        Constant in between, so that a run can be lengthened when it turns out that there is more time.
        """
        left = (self.steps - step) / (0.2 * self.steps)
        return self.rate * min(1, (step + 1) / 100, 0.02 + 0.98 * left)


class Trainer:
    """The state of one stage: modules, their moving average, optimizer, step; saved and resumed whole."""

    def __init__(self, stage: Stage, modules: nn.ModuleDict, folder: Path) -> None:
        self.stage, self.modules, self.path = stage, modules, folder / f"{stage.name}.pt"
        self.live = modules.state_dict()  # the very tensors that are trained
        self.average = {name: value.clone() for name, value in self.live.items()}
        self.weights = [p for p in modules.parameters() if p.requires_grad]
        decay = {"params": [p for p in self.weights if p.ndim >= 2], "weight_decay": 0.05}
        plain = {"params": [p for p in self.weights if p.ndim < 2], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([decay, plain], betas=(0.9, 0.98), fused=True)
        self.step, self.hours = 0, 0.0
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True, map_location=next(modules.parameters()).device)
            self.modules.load_state_dict(saved["modules"])
            self.average = saved["average"]
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.hours = saved["step"], saved["hours"]

    def save(self) -> None:
        """Write everything; an interrupted write leaves the last one."""
        state = {
            "modules": self.modules.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "hours": self.hours,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)

    def update(self, loss: Tensor) -> None:
        """One optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.stage.learning_rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.step += 1
        keep = min(AVERAGE, self.step / (self.step + 10))
        torch._foreach_lerp_(list(self.average.values()), list(self.live.values()), 1 - keep)


def run_stage(
    trainer: Trainer, batch_of: Callable[[int], Batch], loss_of: Callable[[Batch], tuple[Tensor, dict]]
) -> None:
    """Train to the stage's last step, with a checkpoint a minute and a line in log.jsonl every 20 steps."""
    stage, before, began = trainer.stage, trainer.hours, time.time()
    if trainer.step >= stage.steps:
        return
    saved_at = began
    bar = tqdm(
        range(trainer.step, stage.steps), initial=trainer.step, total=stage.steps, desc=stage.name, mininterval=5
    )
    with ThreadPoolExecutor(1) as drawing, open(trainer.path.with_name("log.jsonl"), "a") as log:
        ahead = drawing.submit(batch_of, trainer.step)
        for step in bar:
            batch = ahead.result()
            ahead = drawing.submit(batch_of, step + 1)
            loss, shown = loss_of(batch)
            trainer.update(loss)
            trainer.hours = before + (time.time() - began) / 3600
            if step % 20 == 0:
                bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()}, refresh=False)
                row = {"stage": stage.name, "step": step, "hours": round(trainer.hours, 4), **shown}
                log.write(json.dumps(row) + "\n")
                log.flush()
            if time.time() - saved_at > CHECKPOINT_SECONDS:
                trainer.save()
                saved_at = time.time()
    trainer.save()


def kept_tokenizer(state: Path) -> Qwen2Tokenizer:
    """The tokenizer that this training began with: made anew, it would change with the generator."""
    folder = state / "tokenizer"
    if not folder.exists():
        make_tokenizer().save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def start_from(model: Any, tokenizer: Qwen2Tokenizer, source: Path) -> None:
    """Take over the weights of an earlier mini model; embeddings go by the text of their tokens."""
    earlier, state = load_model(source)[0].state_dict(), model.state_dict()
    old = AutoTokenizer.from_pretrained(source).get_vocab()
    name = "model.language_model.embed_tokens.weight"
    for token, index in tokenizer.get_vocab().items():
        if token in old:
            state[name][index] = earlier[name][old[token]]
    same = {key: value for key, value in earlier.items() if key != name and value.shape == state[key].shape}
    model.load_state_dict({**state, **same, name: state[name], "lm_head.weight": state[name]})


def export(weights: dict[str, Tensor], tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Write model and processor to `out` in bf16, in files that need no large-file storage (under 10 MB)."""
    model: Any = make_model(tokenizer)
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(out, max_shard_size="9MB")
    make_processor(tokenizer).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("work/mini"), help="checkpoints and logs (resumed from)")
    parser.add_argument("--out", type=Path, default=Path("work/mini/model"), help="where the best model so far goes")
    parser.add_argument("--photos", help="a folder with the photos; by default the published dataset")
    parser.add_argument("--start-from", type=Path, help="an earlier mini model whose weights to take over")
    parser.add_argument("--vision-steps", type=int, default=2000)
    parser.add_argument("--answer-steps", type=int, default=12000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers: slow to start, then faster")
    train(parser.parse_args())


def train(options: argparse.Namespace) -> None:
    """Both stages, then the model to `options.out`."""
    options.state.mkdir(parents=True, exist_ok=True)
    tokenizer, photos = kept_tokenizer(options.state), load_photos(options.photos)
    model: Any = make_model(tokenizer)
    if options.start_from:
        start_from(model, tokenizer, options.start_from)
    model.to(options.device)
    model.model.visual.config._attn_implementation = "flash_equal_grids"
    probe = VisionProbe(model.config.text_config.hidden_size).to(options.device)
    vision = nn.ModuleDict({"visual": model.model.visual, "probe": probe})
    first = Trainer(Stage("vision", options.vision_steps, 64, 1.5e-3), vision, options.state)
    if options.compile:
        kernels.compile_layers(model)
    run_stage(
        first,
        lambda step: make_batch(step, 64, photos).to(options.device),
        lambda batch: vision_loss(probe, see(model, batch), batch),
    )
    vision.load_state_dict(first.average)
    both = nn.ModuleDict({"model": model, "probe": probe})
    second = Trainer(Stage("answers", options.answer_steps, 24, 1.2e-3), both, options.state)
    try:
        run_stage(
            second,
            lambda step: make_batch(step, 24, photos, tokenizer).to(options.device),
            lambda batch: answer_loss(model, probe, batch),
        )
    finally:
        weights = {name[6:]: value for name, value in second.average.items() if name.startswith("model.")}
        export(weights, tokenizer, options.out)


if __name__ == "__main__":
    main()
