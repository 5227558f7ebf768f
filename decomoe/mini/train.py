"""Train the mini model: `python -m decomoe.mini.train`.

Two stages. First the vision tower alone, with a label per visual token (trained end to end from nothing, the model
stalls at guessing answer priors). Then the whole model on questions, several questions of a picture in one sequence:
each sees the picture and itself only, with positions restarting after the picture, which is exactly the same as asking
them one by one and five times cheaper. Training resumes from its last checkpoint after any interruption.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AttentionInterface, Qwen2Tokenizer
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from .draw import SIZES, THINGS, TINTS, TOKEN, Picture, draw
from .model import make_model, make_processor, make_tokenizer

TRAIN_SEEDS = 1_000_000  # training pictures have seeds from here up; smaller seeds are held out
QUESTIONS_PER_PICTURE = 6
CHECKPOINT_SECONDS = 60
BALANCE = 0.001  # weight of the router's load-balancing loss, Qwen3's value


def equal_grids_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """Vision attention of a batch of equal grids as one call; transformers' own loop goes picture by picture.

    query, key, value: (1, heads, pictures * patches, head_dim). Its name starts with "flash" because only then does
    the vision tower hand over the whole batch together with `cu_seq_lens_q`.
    """
    pictures = len(kwargs["cu_seq_lens_q"]) - 1
    heads, total, width = query.shape[1:]
    q, k, v = (x.view(heads, pictures, total // pictures, width).transpose(0, 1) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, scale=kwargs["scaling"])
    return out.transpose(1, 2).reshape(1, total, heads, width), None


AttentionInterface.register("flash_equal_grids", equal_grids_attention)


def patchify(pictures: list[Picture]) -> tuple[Tensor, Tensor]:
    """What the processor makes of equally large pictures: pixel values (B * patches, 1536/4) and grids (B, 3)."""
    pixels = torch.from_numpy(np.stack([np.asarray(picture.image) for picture in pictures])).float()
    half = TOKEN // 2
    batch, height, width, _ = pixels.shape
    pixels = (pixels / 255 - 0.5) / 0.5
    pixels = pixels.view(batch, height // TOKEN, 2, half, width // TOKEN, 2, half, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    pixels = pixels.unsqueeze(6).expand(*pixels.shape[:6], 2, half, half).reshape(-1, 3 * 2 * half * half)
    return pixels, torch.tensor([[1, height // half, width // half]]).expand(batch, 3)


@dataclass
class Packed:
    """Several questions a picture in one sequence.

    Attributes:
        input_ids: (B, L). position_ids: (3, B, L).
        mask: (B, 1, L, L), True where a query may look.
        labels: (B, L), the token to predict at a position, -100 elsewhere.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    labels: Tensor


@dataclass
class Batch:
    """One training step's tensors; `things`, `tints`: (B * visual tokens); `packed` in the question stage only."""

    pixels: Tensor
    grids: Tensor
    things: Tensor
    tints: Tensor
    packed: Packed | None = None


def make_batch(step: int, size: int, tokenizer: Qwen2Tokenizer | None = None) -> Batch:
    """The batch of `step`, always the same one, so that a resumed run sees what an uninterrupted one would."""
    shape = random.Random(step).choice(SIZES)
    pictures = [draw(TRAIN_SEEDS + step * size + index, shape) for index in range(size)]
    pixels, grids = patchify(pictures)
    things = torch.tensor([thing for picture in pictures for thing in picture.things])
    tints = torch.tensor([tint for picture in pictures for tint in picture.tints])
    batch = Batch(pixels, grids, things, tints)
    if tokenizer is not None:
        batch.packed = pack_questions(pictures, tokenizer)
    return batch


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
        positions: list[int] = []
        for number, question in enumerate(picture.questions[:QUESTIONS_PER_PICTURE], 1):
            asked = encode(f"{question.text}<|im_end|>\n<|im_start|>assistant\n")
            answer = encode(f" {question.answer}<|im_end|>")
            ids += asked + answer
            segments += [number] * (len(asked) + len(answer))
            positions += range(after + 1, after + 1 + len(asked) + len(answer))
            labels += [-100] * (len(asked) - 1) + answer + [-100]
        samples.append((ids, segments, positions, labels))
    length = max(len(sample[0]) for sample in samples)
    count = len(samples)
    input_ids = torch.full((count, length), tokenizer.pad_token_id)
    targets = torch.full((count, length), -100)
    position_ids = torch.zeros((3, count, length), dtype=torch.long)
    segment = torch.full((count, length), -1)
    common = torch.cat([torch.arange(start).expand(3, -1), grid, torch.full((3, 1), after)], dim=1)
    for row, (ids, segments, positions, labels) in enumerate(samples):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.tensor(labels)
        segment[row, : len(ids)] = torch.tensor(segments)
        position_ids[:, row, : len(prefix)] = common
        position_ids[:, row, len(prefix) : len(ids)] = torch.tensor(positions)
    same = (segment[:, None, :] == 0) & (segment[:, :, None] >= 0) | (segment[:, None, :] == segment[:, :, None])
    mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    return Packed(input_ids, position_ids, mask, targets)


class VisionProbe(nn.Module):
    """Heads that read the thing and the colour under every visual token off the tower's outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.thing = nn.Linear(width, len(THINGS))
        self.tint = nn.Linear(width, len(TINTS))

    def loss(self, features: Tensor, batch: Batch) -> Tensor:
        features = features.float()
        tint = F.cross_entropy(self.tint(features), batch.tints)
        return F.cross_entropy(self.thing(features), batch.things) + 0.5 * tint


def see(model: Any, batch: Batch) -> Any:
    """The vision tower's output; in bf16, which halves its time (the experts' small products gain nothing)."""
    with torch.autocast(batch.pixels.device.type, torch.bfloat16):
        return model.model.visual(batch.pixels, grid_thw=batch.grids)


def vision_loss(model: Any, probe: VisionProbe, batch: Batch) -> tuple[Tensor, dict]:
    """Loss over the merged tokens and, lighter, over the DeepStack features; and what to show."""
    out = see(model, batch)
    loss = probe.loss(out.pooler_output, batch)
    for features in out.deepstack_features:
        loss = loss + 0.2 * probe.loss(features, batch)
    with torch.no_grad():
        seen = batch.things > 0
        right = (probe.thing(out.pooler_output.float()).argmax(-1) == batch.things)[seen].float().mean()
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


def answer_loss(model: Any, batch: Batch) -> tuple[Tensor, dict]:
    """Next-token loss over the answers plus load balancing; and what to show."""
    packed = batch.packed
    assert packed is not None
    out = read(model, packed, see(model, batch))
    asked = packed.labels != -100
    logits, target = model.lm_head(out.last_hidden_state[asked]).float(), packed.labels[asked]
    text = model.config.text_config
    balance: Any = load_balancing_loss_func(
        out.router_logits, text.num_experts, text.num_experts_per_tok, packed.input_ids != text.pad_token_id
    )
    loss = F.cross_entropy(logits, target)
    right = (logits.argmax(-1) == target).float().mean()
    return loss + BALANCE * balance, {"loss": loss.item(), "token": right.item(), "balance": balance.item()}


@dataclass
class Stage:
    """One stage of training: its steps, batch size and peak learning rate."""

    name: str
    steps: int
    batch: int
    rate: float

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over 3 % of the steps, then cosine down to 2 % of the peak."""
        warm = max(1, round(self.steps * 0.03))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))))


def run_stage(
    stage: Stage,
    modules: nn.ModuleDict,
    loss_of: Callable[[Batch], tuple[Tensor, dict]],
    state: Path,
    tokenizer: Qwen2Tokenizer | None,
) -> None:
    """Train `modules` for `stage`, resuming from and checkpointing to `state`."""
    decay = [p for p in modules.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [p for p in modules.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    path, start, hours = state / f"{stage.name}.pt", 0, 0.0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        modules.load_state_dict(saved["modules"])
        optimizer.load_state_dict(saved["optimizer"])
        start, hours = saved["step"], saved["hours"]
    if start >= stage.steps:
        return

    def save(step: int) -> None:
        temporary = path.with_suffix(".tmp")
        torch.save(
            {
                "modules": modules.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "hours": hours + (time.time() - began) / 3600,
            },
            temporary,
        )
        os.replace(temporary, path)

    began = saved_at = time.time()
    bar = tqdm(range(start, stage.steps), initial=start, total=stage.steps, desc=stage.name, mininterval=5)
    with ThreadPoolExecutor(1) as drawing, open(state / "log.jsonl", "a") as log:
        ahead = drawing.submit(make_batch, start, stage.batch, tokenizer)
        for step in bar:
            batch = ahead.result()
            ahead = drawing.submit(make_batch, step + 1, stage.batch, tokenizer)
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate(step)
            loss, shown = loss_of(batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_([*decay, *plain], 1.0)
            optimizer.step()
            if step % 20 == 0:
                bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()}, refresh=False)
                log.write(json.dumps({"stage": stage.name, "step": step, "time": time.time(), **shown}) + "\n")
                log.flush()
            if time.time() - saved_at > CHECKPOINT_SECONDS:
                save(step + 1)
                saved_at = time.time()
    save(stage.steps)


def compile_layers(model: Any) -> None:
    """Fuse the element-wise work of both towers with `torch.compile` (on two cores: 1.3 times as fast)."""
    visual = model.model.visual
    modules = [*visual.blocks, visual.merger, *visual.deepstack_merger_list]
    for layer in model.model.language_model.layers:
        modules += [layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm]
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=True)


def export(model: Any, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Write model and processor to `out` in bf16, in files that need no large-file storage (under 10 MB)."""
    model.set_attn_implementation("sdpa")
    copy: Any = make_model(tokenizer)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(out, max_shard_size="9MB")
    make_processor(tokenizer).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("work/mini"), help="checkpoints and logs (resumed from)")
    parser.add_argument("--out", type=Path, default=Path("work/mini/model"), help="where the trained model goes")
    parser.add_argument("--vision-steps", type=int, default=880)
    parser.add_argument("--answer-steps", type=int, default=2050)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the layers: minutes to start, then faster"
    )
    arguments = parser.parse_args()
    arguments.state.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer)
    model.model.visual.config._attn_implementation = "flash_equal_grids"
    if arguments.compile:
        compile_layers(model)
    probe = VisionProbe(model.config.text_config.hidden_size)
    vision = nn.ModuleDict({"visual": model.model.visual, "probe": probe})
    run_stage(
        Stage("vision", arguments.vision_steps, 64, 1.5e-3),
        vision,
        lambda batch: vision_loss(model, probe, batch),
        arguments.state,
        None,
    )
    run_stage(
        Stage("answers", arguments.answer_steps, 24, 1.2e-3),
        nn.ModuleDict({"model": model}),
        lambda batch: answer_loss(model, batch),
        arguments.state,
        tokenizer,
    )
    export(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
