"""The mini model's architecture, tokenizer and processor: a Qwen3-VL-MoE of nine million parameters."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from ..families import Qwen3VLImageProcessor
from .draw import TOKEN, draw
from .draw.objects import NOUNS
from .photos import CLASSES

ASSETS = Path(__file__).parents[2] / "assets" / "mini"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen's layout without a system turn. Text goes in as it is: `decomoe.answer` keeps special tokens out of it.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(pictures: Iterable[int] = range(1500), vocab_size: int = 1280) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer trained on the questions and answers of `pictures`.

    Digits and letters of words in capitals stay single, so that what is read off a picture is spelled.
    """
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|(?<![a-z])[A-Z](?![a-z])"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["user\nassistant\n", "What is in the photo? What does the photo show? A photo of a"] * 20
    corpus += [f" {noun}" for noun in (*NOUNS, *CLASSES)] * 10
    corpus += [f"{q.text} {q.answer}" for seed in pictures for q in draw(seed).questions]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,  # type: ignore[arg-type]
        bos_token=None,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLImageProcessor:
    """The mini model's processor: 64 to 256 visual tokens a picture."""
    images = Qwen2VLImageProcessorPil(
        patch_size=TOKEN // 2,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 128 * 128, "longest_edge": 256 * 256},
    )
    return Qwen3VLImageProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)


def make_model(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen3VLMoeForConditionalGeneration:
    """The untrained mini model, in fp32."""
    width = 128
    token: Any = tokenizer.convert_tokens_to_ids
    config = Qwen3VLMoeConfig(
        text_config=dict(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=width,
            intermediate_size=4 * width,
            moe_intermediate_size=32,
            num_hidden_layers=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=32,
            num_experts_per_tok=4,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        ),
        vision_config=dict(
            depth=5,
            hidden_size=width,
            intermediate_size=4 * width,
            num_heads=4,
            patch_size=TOKEN // 2,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=width,
            num_position_embeddings=20 * 20,
            deepstack_visual_indexes=[1, 2, 3],
        ),
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen3VLMoeForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
