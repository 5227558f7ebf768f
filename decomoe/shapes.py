"""Models of a real one's widths with random weights: what a layer costs does not depend on what was learned."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.initialization import no_init_weights

from .calibrate import gate_candidates
from .calibrate.others import dyvte_training
from .calibration import Calibration, fingerprint
from .families import check_room, parts_of
from .gate import Gate
from .methods.decomoe import paper_fixed_exit

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-30b-a3b": dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    ),
    "tiny": dict(  # to try a command out
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    ),
}
_PATCH = 4  # of the stand-in for the vision encoder


def build(
    shape: str,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    skew: float = 0.0,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of this shape, Qwen3-VL-MoE's architecture, with random weights.

    The vision encoder is a stand-in of three narrow layers: it costs the same under every method. The vocabulary is cut
    in the same proportion as the layers, so that the LM head keeps its share.

    Args:
        layers: decoder layers, at least 4; all by default.
        skew: how unevenly routers choose. 0: almost uniformly, as random routers do, which is the worst case for an
            expert prefix. Otherwise the odds of expert e fall about as (1 + e) ** -skew, so that the native order is
            the calibrated one. Deeper layers are a little less skewed.

    Raises:
        ValueError: there is no such shape or device, too few layers, or no room for them.
    """
    if shape not in SHAPES:
        raise ValueError(f"There is no shape '{shape}'; there are {', '.join(SHAPES)}.")
    text = dict(SHAPES[shape])
    whole = text["num_hidden_layers"]
    layers = whole if layers is None else layers
    if layers < 4:
        raise ValueError(f"A shape needs at least 4 layers, the picture enters the first 3; not {layers}.")
    experts = layers * text["num_experts"] * 3 * text["hidden_size"] * text["moe_intermediate_size"]
    check_room(experts * dtype.itemsize, device, f"{layers} layers of {shape} take {{}}")
    vocabulary = max(64, text["vocab_size"] * layers // whole // 64 * 64)
    text |= dict(num_hidden_layers=layers, vocab_size=vocabulary, max_position_embeddings=32768, eos_token_id=None)
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config=dict(
            depth=3,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            patch_size=_PATCH,
            out_hidden_size=text["hidden_size"],
            num_position_embeddings=1024,
            deepstack_visual_indexes=[0, 1, 2],
        ),
        **{name: vocabulary - 1 - i for i, name in enumerate(_SPECIAL)},
    )
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with no_init_weights(), torch.device(device):
            model = Qwen3VLMoeForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(default)
    _fill(model, skew, seed)
    return model


_SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@torch.no_grad()
def _fill(model: Any, skew: float, seed: int) -> None:
    """Random weights that keep the size of states. All states share a large first number, by which `skew` acts."""
    generator = torch.Generator(model.device).manual_seed(seed)
    width = model.config.text_config.hidden_size
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            adds = name.endswith(("o_proj.weight", "down_proj"))
            weight.normal_(std=0.25 * width**-0.5 if adds else width**-0.5, generator=generator)
        else:
            weight.fill_(0 if name.endswith("bias") else 1)
    core = model.model
    core.language_model.embed_tokens.weight.normal_(generator=generator)
    core.language_model.embed_tokens.weight[:, 0] = width**0.5
    core.visual.merger.linear_fc2.weight.normal_(generator=generator)
    core.visual.merger.linear_fc2.bias[0] = width**0.5
    for layer in core.language_model.layers:
        odds = -skew * torch.arange(1, layer.mlp.gate.num_experts + 1, device=model.device).log()
        layer.mlp.gate.weight[:, 0] = odds / (width / 2) ** 0.5  # half of a state's square lies in its first number


@torch.no_grad()
def stand_in(model: Any) -> Calibration:
    """A calibration of a model from `build`, which costs what a trained one does: experts in their native order, and
    gates of SAVB and DyVTE at their usual widths, which fire from the candidate on that is nearest to the paper's
    fixed exit (28 of 48 layers).
    """
    parts = parts_of(model)
    width, training = parts.config.hidden_size, dyvte_training(parts.config.hidden_size)
    candidates = gate_candidates(parts)
    exit_after = min(candidates, key=lambda layer: abs(layer - paper_fixed_exit(len(parts.layers))))
    savb = Gate(list(candidates), width)
    dyvte = Gate(list(range(parts.first_exit, len(parts.layers) - 1)), width, training.width, training.bias)
    for layer, head in (*savb.heads.items(), *dyvte.heads.items()):
        for weight in head.parameters():
            weight.zero_()
        first, last = (weight for weight in head.parameters() if weight.ndim == 2)
        first[:, 0] = 1  # looks at the first number, which all states share
        last[int(int(layer) >= exit_after)] = 1
    orders = torch.arange(parts.config.num_experts).repeat(len(parts.layers), 1)
    savb.to(model.device).eval()
    return Calibration(fingerprint(parts), orders, savb, others={"dyvte": dyvte.state_dict()})


def prompt(model: Any, visual: int, text: int, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of a model from `build`: one random picture of `visual` tokens a row, amid `text` random tokens.

    Raises:
        ValueError: there must be at least 1 visual and 2 text tokens.
    """
    if visual < 1 or text < 2:
        raise ValueError(f"A prompt has at least 1 visual and 2 text tokens, not {visual} and {text}.")
    config, generator = model.config, torch.Generator().manual_seed(seed)
    height = next(side for side in range(int(visual**0.5), 0, -1) if visual % side == 0)
    ids = torch.randint(config.text_config.vocab_size - len(_SPECIAL), (rows, visual + text), generator=generator)
    ids[:, 1 : 1 + visual] = config.image_token_id
    patches = torch.randn(rows * visual * 4, 3 * 2 * _PATCH**2, generator=generator)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": patches.to(model.dtype),
        "image_grid_thw": torch.tensor([[1, 2 * height, 2 * visual // height]] * rows),
    }
    return {name: values.to(model.device) for name, values in inputs.items()}
