"""Model families: where each keeps the parts that we hook, and how a model and its processor are loaded."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    InternVLProcessor,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3VLProcessor,
)
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.qwen3_moe.modeling_qwen3_moe import rotate_half
from transformers.processing_utils import ProcessorMixin
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file


class Qwen3VLImageProcessor(Qwen3VLProcessor):
    """Qwen3-VL's processor without the video slot, which needs torchvision. Pictures and text work the same."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


class InternVLImageProcessor(InternVLProcessor):
    """InternVL's processor without the video slot, for the same reason."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        """Without videos the tiles lie in the prompt's order already; InternVL's own sorting trips over a question that
        spells its image token, even where that is sanitised."""
        inputs = ProcessorMixin.__call__(self, images=images, text=text, **kwargs)
        inputs.pop("num_patches", None)
        return inputs


@dataclass(frozen=True)
class Family:
    """Names of one family's parts, as paths below the model."""

    name: str
    text_model: str  # the decoder, without the LM head
    attention: str  # below a decoder layer; has q_proj, q_norm, head_dim and scaling
    attention_norm: str  # below a decoder layer; what its input passes first
    router: str  # below a decoder layer; its output is (logits, scores, indices)
    experts: str  # below a decoder layer; parameters with the expert as dimension 0
    processor: type[ProcessorMixin]
    vision: tuple[str, ...]  # the vision encoder and what fits it to the decoder


_QWEN3_MOE = ("model.language_model", "self_attn", "input_layernorm", "mlp.gate", "mlp.experts")  # both build on it
FAMILIES = {
    "qwen3_vl_moe": Family("Qwen3-VL-MoE", *_QWEN3_MOE, Qwen3VLImageProcessor, ("model.visual",)),
    "internvl": Family(
        "InternVL", *_QWEN3_MOE, InternVLImageProcessor, ("model.vision_tower", "model.multi_modal_projector")
    ),
}


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model with this configuration.

    Raises:
        ValueError: it is not one of `FAMILIES`.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"Model type '{config.model_type}' is not supported; supported are: {', '.join(FAMILIES)}.")
    return FAMILIES[config.model_type]


def _child(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


@dataclass(frozen=True)
class Parts:
    """One model's parts, found once. `routers` and `experts` are None at layers without experts."""

    model: Any  # a PreTrainedModel that generates
    family: Family

    @cached_property
    def config(self) -> PretrainedConfig:
        """The text configuration."""
        return self.model.config.get_text_config()

    @cached_property
    def text_model(self) -> Any:
        return self.model.get_submodule(self.family.text_model)

    @cached_property
    def layers(self) -> list[Any]:
        return list(self.text_model.layers)

    @cached_property
    def routers(self) -> list[Any]:
        return [_child(layer, self.family.router) for layer in self.layers]

    @cached_property
    def experts(self) -> list[Any]:
        return [_child(layer, self.family.experts) for layer in self.layers]

    @property
    def vision(self) -> list[Any]:
        return [self.model.get_submodule(path) for path in self.family.vision]

    def queries(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The queries (B, H, R, D) of `layer` for some of its inputs `hidden` (B, R, d), at `rotary` (B, R, D) each."""
        attention = self.layers[layer].get_submodule(self.family.attention)
        normed = self.layers[layer].get_submodule(self.family.attention_norm)(hidden)
        heads = attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))
        queries = attention.q_norm(heads).transpose(1, 2)
        cos, sin = (angles.unsqueeze(1) for angles in rotary)
        return queries * cos + rotate_half(queries) * sin

    def attention_scaling(self, layer: int) -> float:
        """What `layer` multiplies the products of queries and keys by."""
        return self.layers[layer].get_submodule(self.family.attention).scaling

    @property
    def visual_token_ids(self) -> list[int]:
        ids = (getattr(self.model.config, name, None) for name in ("image_token_id", "video_token_id"))
        return [token for token in ids if token is not None]

    @cached_property
    def renormalizes(self) -> bool:
        """Whether top-k weights are renormalised: always in Qwen3-VL-MoE, a setting in Qwen3-MoE."""
        return getattr(self.config, "norm_topk_prob", True)

    @property
    def first_exit(self) -> int:
        """The first layer that sees the whole picture: DeepStack adds to it behind the layers before."""
        deepstack = getattr(getattr(self.model.config, "vision_config", None), "deepstack_visual_indexes", None)
        return max(1, len(deepstack or ()))


def parts_of(model: PreTrainedModel) -> Parts:
    """Find the parts of `model`.

    Raises:
        ValueError: the family is unknown, or this model of it has no experts.
    """
    family = family_of(model.config)
    parts = Parts(model, family)
    if all(router is None for router in parts.routers):
        raise ValueError(f"This {family.name} model has no expert routers: it is not a mixture of experts.")
    return parts


def default_device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> torch.dtype:
    """bf16 on a GPU and fp32 on a CPU."""
    return torch.float32 if device == "cpu" or not torch.cuda.is_available() else torch.bfloat16


def load_model(
    source: str | Path, device: str | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The model and processor at `source`, a folder or a Hub id.

    Args:
        device: by default a GPU if there is one; "auto" spreads the model over all there are.
        dtype: by default bf16 on a GPU and fp32 on a CPU.

    Raises:
        ValueError: the family is unknown, there is no such device, or the model does not fit.
        OSError: nothing that can be loaded is there.
    """
    config = AutoConfig.from_pretrained(source)
    family = family_of(config)
    device = device or default_device()
    dtype = dtype or default_dtype(device)
    if device != "auto":  # told before weights are loaded, or fetched
        what = f"'{source}' takes {{}} as {str(dtype).removeprefix('torch.')}"
        check_room(_weight_bytes(source, config, dtype), device, what)
    model = AutoModelForImageTextToText.from_pretrained(source, config=config, dtype=dtype, device_map=device)
    return model.eval(), family.processor.from_pretrained(source)


def check_room(needed: int, device: str, what: str) -> None:
    """Refuse what a device has no room for.

    Args:
        needed: bytes. what: says what needs them, with `{}` in place of the number.

    Raises:
        ValueError: so it is, or there is no such device.
    """
    free = _free_bytes(device)
    if needed > free:
        said = what.format(f"{needed / 1e9:.1f} GB")
        raise ValueError(
            f"{said}, and {device} has {free / 1e9:.1f} GB free. Take a smaller model, a larger device, or the device "
            "'auto', which is several."
        )


def _weight_bytes(source: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What the weights take as `dtype`, by their files or the Hub's index; 0 where there is no index."""
    if Path(source).is_dir():
        stored = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    else:
        index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        stored = json.loads(Path(index).read_text())["metadata"]["total_size"] if index else 0
    stored_as = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return stored * dtype.itemsize // stored_as.itemsize


def _free_bytes(device: str) -> int:
    """What this process may still take on a device."""
    try:
        if torch.device(device).type == "cuda":
            if "SPACES_ZERO_GPU" in os.environ:  # a GPU is lent to each question; none is here now
                return 96_000_000_000
            return torch.cuda.mem_get_info(device)[0]
    except (RuntimeError, AssertionError):
        known = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise ValueError(f"There is no device '{device}' here; there is {', '.join(known)}.") from None
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # a container may have less than its machine
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free
