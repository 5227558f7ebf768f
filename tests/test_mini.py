"""The generator, the packing that training relies on, and the shipped mini model."""

import json
import random

import pytest
import torch
from PIL import Image, ImageChops

from decomoe.ask import MINI, encode, load
from decomoe.calibrate.cases import normalize, run
from decomoe.methods import DecoMoE, Dense
from decomoe.mini import train
from decomoe.mini.cases import CALIBRATION_SEED, TEST_SEED, drawn_cases
from decomoe.mini.draw import COLORS, KINDS, PLACES, SIZES, THINGS, TOKEN, draw
from decomoe.mini.examples import FOLDER
from decomoe.mini.model import make_model, make_processor, make_tokenizer
from decomoe.mini.train import Stage, make_batch, run_stage


@pytest.fixture(scope="module")
def mini():
    return load()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(range(100))


def test_a_seed_always_draws_the_same():
    for seed in range(20):
        one, other = draw(seed), draw(seed)
        assert one.questions == other.questions
        assert ImageChops.difference(one.image, other.image).getbbox() is None
    assert draw(1).questions != draw(2).questions


@pytest.mark.parametrize("kind", KINDS)
def test_questions_have_answers_that_the_picture_bears_out(kind):
    """Answers against the picture's token labels, which are drawn, not written."""
    for seed in range(200):
        picture = draw(seed, kind=kind)
        columns = picture.image.width // TOKEN
        seen = [THINGS[thing] for thing in picture.things]
        assert len(picture.things) == columns * (picture.image.height // TOKEN)
        for question in picture.questions:
            assert question.text.strip() and question.answer.strip()
            if question.kind == "color":
                noun = question.text.removeprefix("What color is the ").rstrip("?")
                tints = {tint for thing, tint in zip(seen, picture.tints, strict=True) if thing == noun}
                assert tints == {1 + list(COLORS).index(question.answer)}
            if question.kind == "presence" and kind == "objects":
                noun = question.text.removeprefix("Is there a").split(" ", 1)[1].split(" in ")[0].rstrip("?")
                assert (noun in seen) == (question.answer == "yes")
            if question.kind == "locate":
                noun = question.text.removeprefix("Where is the ").rstrip("?")
                places = [(i // columns, i % columns) for i, thing in enumerate(seen) if thing == noun]
                row, column = (sum(axis) / len(places) + 0.5 for axis in zip(*places, strict=True))
                place = 3 * int(row * 3 * TOKEN / picture.image.height) + int(column * 3 * TOKEN / picture.image.width)
                assert PLACES[place] == question.answer


def test_yes_and_no_are_balanced():
    questions = [question for seed in range(1500) for question in draw(seed).questions]
    for kind in ("presence", "relation", "chart compare"):
        answers = [question.answer == "yes" for question in questions if question.kind == kind]
        assert 0.42 < sum(answers) / len(answers) < 0.58, kind


def test_patches_are_the_processors():
    processor = make_processor(make_tokenizer(range(50)))
    for size in SIZES:
        pictures = [draw(seed, size) for seed in range(2)]
        pixels, grids = train.patchify(pictures)
        expected = processor.image_processor([picture.image for picture in pictures], return_tensors="pt")
        torch.testing.assert_close(pixels, expected["pixel_values"], atol=1e-6, rtol=0)
        assert torch.equal(grids, expected["image_grid_thw"])


def test_packed_questions_are_exactly_single_ones(tokenizer):
    """Logits of the answer tokens in the packed sequence against one plain forward per question."""
    model, processor = make_model(tokenizer), make_processor(tokenizer)
    picture = draw(5, (128, 128), "objects")
    packed = train.pack_questions([picture], tokenizer)
    pixels, grids = train.patchify([picture])
    with torch.no_grad():
        hidden = train.read(model, packed, model.model.visual(pixels, grid_thw=grids)).last_hidden_state
        asked = packed.labels[0] != -100
        logits, labels = model.lm_head(hidden[0, asked]), packed.labels[0, asked]
        start = 0
        for question in picture.questions[: train.QUESTIONS_PER_PICTURE]:
            message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]}]
            text = processor.apply_chat_template(message, add_generation_prompt=True) + f" {question.answer}<|im_end|>"
            inputs = processor(images=[picture.image], text=[text], return_tensors="pt")
            count = len(tokenizer(f" {question.answer}<|im_end|>").input_ids)
            assert labels[start : start + count].tolist() == inputs["input_ids"][0, -count:].tolist()
            expected = model(**inputs).logits[0, -count - 1 : -1]
            torch.testing.assert_close(logits[start : start + count], expected, atol=1e-4, rtol=1e-4)
            start += count
        assert start == len(labels)


def test_batched_vision_is_the_models_own(tokenizer):
    model = make_model(tokenizer)
    pixels, grids = train.patchify([draw(seed, (144, 112)) for seed in range(3)])
    with torch.no_grad():
        expected = model.model.visual(pixels, grid_thw=grids)
        model.model.visual.config._attn_implementation = "flash_equal_grids"
        ours = model.model.visual(pixels, grid_thw=grids)
    torch.testing.assert_close(ours.pooler_output, expected.pooler_output, atol=1e-5, rtol=1e-5)


def test_training_resumes_where_it_was_killed(tmp_path, monkeypatch):
    """Three steps in one go, and three steps with a kill after the second: the same weights."""
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", 0)

    def make():
        torch.manual_seed(0)
        return torch.nn.ModuleDict({"probe": train.VisionProbe(4)})

    def loss_of(modules):
        return lambda batch: (modules["probe"].loss(torch.ones(len(batch.things), 4), batch), {"things": 0.0})

    whole, killed = make(), make()
    stage = Stage("test", 3, 2, 0.01)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run_stage(stage, whole, loss_of(whole), tmp_path / "a", None)
    steps = iter(range(3))

    def dies(batch):
        if next(steps) == 2:
            raise KeyboardInterrupt
        return loss_of(killed)(batch)

    with pytest.raises(KeyboardInterrupt):
        run_stage(stage, killed, dies, tmp_path / "b", None)
    resumed = make()
    run_stage(stage, resumed, loss_of(resumed), tmp_path / "b", None)
    for ours, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_batches_depend_on_the_step_only(tokenizer):
    one, other = make_batch(7, 2, tokenizer), make_batch(7, 2, tokenizer)
    assert torch.equal(one.pixels, other.pixels)
    assert torch.equal(one.packed.input_ids, other.packed.input_ids)
    assert random.Random(7).choice(SIZES) == tuple(int(x) * TOKEN // 2 for x in one.grids[0, [2, 1]])


def test_seeds_do_not_meet():
    assert TEST_SEED < CALIBRATION_SEED < train.TRAIN_SEEDS
    ids = {case.id for case in drawn_cases(TEST_SEED, 200)} & {case.id for case in drawn_cases(CALIBRATION_SEED, 200)}
    assert not ids


def test_examples_are_the_held_out_pictures_they_say():
    rows = json.loads((FOLDER / "examples.json").read_text())
    assert len(rows) >= 5
    for row in rows:
        assert row["seed"] < CALIBRATION_SEED
        with Image.open(FOLDER / row["image"]) as image:
            drawn = [draw(row["seed"], image.size, kind) for kind in KINDS]
            same = [p for p in drawn if ImageChops.difference(image.convert("RGB"), p.image).getbbox() is None]
        assert (row["question"], row["answer"]) in {(q.text, q.answer) for q in same[0].questions}


def test_shipped_files_need_no_large_file_storage():
    files = [path for path in MINI.rglob("*") if path.is_file()]
    assert files
    assert max(path.stat().st_size for path in files) < 10_000_000


def test_shipped_model_answers_held_out_questions(mini):
    """At least half exactly right; the model card has the full figures."""
    cases = drawn_cases(TEST_SEED, 200)
    outcomes = list(run(mini, cases, Dense()))
    right = [normalize(o.answer) == normalize(c.answer) for o, c in zip(outcomes, cases, strict=True)]
    assert sum(right) / len(right) >= 0.5


def test_shipped_calibration_saves_and_mostly_agrees(mini):
    """DecoMoE as shipped against dense on held-out questions: cheaper, and mostly the same answer."""
    cases = drawn_cases(TEST_SEED + 10_000, 120)
    dense = list(run(mini, cases, Dense()))
    ours = list(run(mini, cases, DecoMoE()))
    same = [normalize(a.answer) == normalize(b.answer) for a, b in zip(dense, ours, strict=True)]
    assert sum(same) / len(same) >= 0.8
    spent = sum(o.trace.flops.executed for o in ours) / sum(o.trace.flops.executed_dense for o in ours)
    assert spent < 0.95
    assert any(o.trace.exit_after is not None for o in ours)


def test_batched_run_equals_asking_alone(mini):
    cases = drawn_cases(TEST_SEED, 6)
    batched = list(run(mini, cases, DecoMoE(), batch=6))
    alone = list(run(mini, cases, DecoMoE(), batch=1))
    for one, other in zip(batched, alone, strict=True):
        assert one.answer == other.answer
        assert one.trace.exit_after == other.trace.exit_after
        assert one.trace.prefix == other.trace.prefix


def test_encode_pads_on_the_left(mini):
    pictures = [draw(seed).image for seed in (1, 2)]
    inputs = encode(mini, [(pictures[0], "What is this?"), (pictures[1], "How many objects are there in the picture?")])
    assert inputs["attention_mask"][:, -1].tolist() == [1, 1]


def test_a_clear_error_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no model"):
        load(tmp_path / "gone")
