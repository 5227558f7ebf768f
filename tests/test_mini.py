"""The generator, the packing that training relies on, and the shipped mini model."""

import io
import json

import pytest
import torch
from PIL import Image, ImageChops

from decomoe.answer import MINI, encode, load
from decomoe.benchmarks import exact, normalize, run
from decomoe.benchmarks.drawn import CALIBRATION_SEED, TEST_SEED, drawn_cases
from decomoe.methods import DecoMoE, Dense
from decomoe.mini import train
from decomoe.mini.draw import COLORS, KINDS, PLACES, SHAPES, SIZES, THINGS, TOKEN, UNSEEN, draw, objects, text
from decomoe.mini.draw.base import UNSEEN_PAIRS, a, plural
from decomoe.mini.examples import FOLDER
from decomoe.mini.glyphs import TRAIN_TYPEFACES, TYPEFACES, UNSEEN_TYPEFACES, line
from decomoe.mini.model import make_model, make_processor, make_tokenizer
from decomoe.mini.photos import CLASSES, Photos
from decomoe.mini.pictograms import NAMES, pictogram
from decomoe.mini.train import Stage, Trainer, make_batch, run_stage


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(range(100))


@pytest.fixture(scope="module")
def photos():
    """One plain colour a class."""
    encoded = []
    for label in range(len(CLASSES)):
        file = io.BytesIO()
        Image.new("RGB", (32, 32), (label, 100, 200)).save(file, "PNG")
        encoded.append(file.getvalue())
    return Photos(encoded, list(range(len(CLASSES))))


def same(one, other):
    return one.size == other.size and ImageChops.difference(one, other).getbbox() is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_always_draws_the_same(kind, photos):
    for seed in range(10):
        one, other = (draw(seed, kind=kind, photos=photos) for _ in range(2))
        assert one.questions == other.questions
        assert same(one.image, other.image)
    assert not same(draw(1, (128, 128), kind, photos=photos).image, draw(2, (128, 128), kind, photos=photos).image)


@pytest.mark.parametrize("kind", KINDS)
def test_questions_have_answers_that_the_picture_bears_out(kind, photos):
    """Answers against the picture's token labels, which come from what was drawn, not from what was written."""
    checked = 0
    for seed in range(300):
        picture = draw(seed, kind=kind, photos=photos)
        columns, rows = picture.image.width // TOKEN, picture.image.height // TOKEN
        seen = [THINGS[thing] for thing in picture.things]
        assert len(seen) == columns * rows
        assert len(picture.questions) >= 4
        for question in picture.questions:
            assert question.text.strip() and question.answer.strip()
            words = question.text.rstrip("?")
            if kind == "objects" and question.kind == "color":
                noun = words.split(" the ")[1]
                tints = {tint for thing, tint in zip(seen, picture.tints, strict=True) if thing == noun}
                assert tints <= {1 + list(COLORS).index(question.answer)}  # none if it is covered
                checked += 1
            if kind == "objects" and question.kind == "presence" and question.answer == "no":
                noun = words.removesuffix(" in the picture").split()[-1]
                color = next((index for index, name in enumerate(COLORS, 1) if f" {name} " in words), None)
                tints = {tint for thing, tint in zip(seen, picture.tints, strict=True) if thing == noun}
                assert color not in tints if color else not tints
                checked += 1
            if kind == "objects" and question.kind == "locate":
                noun = words.split(" the ")[1]
                spots = [divmod(i, columns) for i, thing in enumerate(seen) if thing == noun]
                if len(spots) >= 4:  # else mostly covered by its neighbour
                    row, column = (sum(axis) / len(spots) + 0.5 for axis in zip(*spots, strict=True))
                    place = 3 * min(2, int(3 * row / rows)) + min(2, int(3 * column / columns))
                    checked += PLACES[place] == question.answer
            if kind == "photo" and question.kind == "photo":
                assert f"photo of {question.answer}" in seen
                checked += 1
            if kind in ("text", "table") and question.kind.startswith(("read", "table")) and question.answer.isdigit():
                checked += set(question.answer) <= set(seen)
    assert checked > 100 or kind in ("chart", "shape")


def test_what_is_nowhere_is_not_in_the_picture():
    asked = 0
    for seed in range(100):
        picture = draw(seed, kind="objects")
        nouns = {THINGS[thing] for thing in picture.things}
        for question in picture.questions:
            if question.answer == "nowhere":
                asked += 1
                assert question.text.lower().rstrip("?").removeprefix("where is the ") not in nouns
    assert asked > 20


def test_where_things_are_is_where_they_are_labelled():
    """Single objects: the place that is told holds the middle of what was drawn."""
    for seed in range(400):
        picture = draw(seed, kind="objects")
        located = [q for q in picture.questions if q.kind == "locate" and q.answer != "nowhere"]
        if len(set(picture.things)) != 2 or not located:  # one object and nothing else
            continue
        columns, rows = picture.image.width // TOKEN, picture.image.height // TOKEN
        spots = [divmod(i, columns) for i, thing in enumerate(picture.things) if thing]
        row, column = (sum(axis) / len(spots) + 0.5 for axis in zip(*spots, strict=True))
        center_row, center_column = divmod(PLACES.index(located[0].answer), 3)
        assert abs(3 * row / rows - center_row - 0.5) < 1
        assert abs(3 * column / columns - center_column - 0.5) < 1


def test_yes_and_no_are_balanced(photos):
    questions = [question for seed in range(3000) for question in draw(seed, photos=photos).questions]
    for kind in ("presence", "absence", "relation", "compare"):
        answers = [q.answer for q in questions if q.kind == kind and q.answer in ("yes", "no")]
        assert len(answers) > 150
        assert 0.44 < answers.count("yes") / len(answers) < 0.56, kind


def test_options_of_multiple_choice(photos):
    letters = []
    for seed in range(1500):
        for question in draw(seed, photos=photos).questions:
            if question.kind == "choice":
                _, *options = question.text.split("\n")
                assert [option[:3] for option in options] == ["A. ", "B. ", "C. ", "D. "]
                assert len({option[3:] for option in options}) == 4
                letters.append(question.answer)
    for letter in "ABCD":
        assert 0.2 < letters.count(letter) / len(letters) < 0.3


def test_kinds_and_sizes_that_were_promised(photos):
    pictures = [draw(seed, photos=photos) for seed in range(2000)]
    kinds = {question.kind for picture in pictures for question in picture.questions}
    assert kinds >= {"name", "count", "locate", "compare", "presence", "relation", "color", "choice", "describe"}
    assert kinds >= {"read word", "read number", "letter", "text color", "chart", "table", "photo"}
    tokens = {len(picture.things) for picture in pictures}
    assert min(tokens) <= 70 and max(tokens) == 256
    assert all(64 <= size[0] * size[1] // TOKEN**2 <= 256 for size in SIZES)
    assert len(NAMES) == len(set(NAMES)) >= 200
    counts = {q.answer for p in pictures for q in p.questions if q.text == "How many objects are there?"}
    assert counts == set("123456789")


def test_pictograms_differ():
    small = {name: pictogram(name).resize((8, 8)).tobytes() for name in NAMES}
    assert len(set(small.values())) == len(NAMES)
    assert all(pictogram(name).getbbox() for name in NAMES)


def test_articles_and_plurals():
    assert [a(noun) for noun in ("cat", "owl", "hourglass")] == ["a cat", "an owl", "an hourglass"]
    known = {
        "cat": "cats",
        "fish": "fish",
        "leaf": "leaves",
        "butterfly": "butterflies",
        "key": "keys",
        "cross": "crosses",
    }
    assert {noun: plural(noun) for noun in known} == known


def test_a_line_of_text_tells_where_its_characters_are():
    """Painting over a character's span leaves no ink of it; spans go from left to right."""
    for typeface in TYPEFACES:
        mask, spans = line("Ab 12", typeface, 32)
        assert mask.height == 32
        assert [left for left, _ in spans] == sorted(left for left, _ in spans)
        ink = mask.crop((round(spans[0][0]), 0, round(spans[1][1]), 32))
        assert ink.getbbox() is not None
    with pytest.raises(ValueError, match="ß"):
        line("ß", TYPEFACES[0], 32)


def test_what_is_unseen_in_training(monkeypatch):
    """Training's pictures have none of it, the sets named after it have it."""
    assert set(UNSEEN) == {"combinations", "typefaces", "style"}
    assert set(TRAIN_TYPEFACES) | set(UNSEEN_TYPEFACES) == set(TYPEFACES)
    assert not set(TRAIN_TYPEFACES) & set(UNSEEN_TYPEFACES)
    assert objects.UNSEEN_STYLE not in objects.STYLES
    shapes, colors = {THINGS.index(shape): shape for shape in SHAPES}, list(COLORS)

    def pairs(kind, unseen):
        return {
            (shapes[thing], colors[tint - 1])
            for seed in range(600)
            for picture in [draw(seed, kind=kind, unseen=unseen)]
            for thing, tint in zip(picture.things, picture.tints, strict=True)
            if thing in shapes
        }

    assert len(pairs("objects", None)) > 80
    assert not pairs("objects", None) & UNSEEN_PAIRS
    assert not pairs("shape", None) & UNSEEN_PAIRS
    assert pairs("objects", "combinations") == UNSEEN_PAIRS
    used = []
    monkeypatch.setattr(
        text, "line", lambda said, typeface, height: used.append(typeface) or line(said, typeface, height)
    )
    for seed in range(100):
        draw(seed, kind="text", unseen="typefaces")
    assert set(used) == set(UNSEEN_TYPEFACES)
    used.clear()
    for seed in range(300):
        draw(seed)
    assert set(used) == set(TRAIN_TYPEFACES)


def test_photos_need_photos():
    with pytest.raises(ValueError, match="photos"):
        draw(0, kind="photo")
    assert all(not THINGS[thing].startswith("photo") for seed in range(200) for thing in draw(seed).things)


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
    pixels, grids = train.patchify([draw(seed, (144, 128)) for seed in range(3)])
    with torch.no_grad():
        expected = model.model.visual(pixels, grid_thw=grids)
        model.model.visual.config._attn_implementation = "flash_equal_grids"
        ours = model.model.visual(pixels, grid_thw=grids)
    torch.testing.assert_close(ours.pooler_output, expected.pooler_output, atol=1e-5, rtol=1e-5)


def test_training_resumes_where_it_was_killed(tmp_path, monkeypatch):
    """Three steps in one go, and three steps with a kill after the second: the same weights and the same average."""
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", 0)
    dies = iter([False, False, True])

    def trainer(folder):
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        return Trainer(Stage("test", 3, 2, 0.01), torch.nn.ModuleDict({"probe": train.VisionProbe(4)}), folder)

    def go(trainer, deaths=iter([False] * 6)):  # noqa: B008
        def loss_of(batch):
            if next(deaths):
                raise KeyboardInterrupt
            return trainer.modules["probe"].loss(torch.ones(len(batch.things), 4), batch), {"things": 0.0}

        run_stage(trainer, lambda step: make_batch(step, 2, None), loss_of)
        return trainer

    whole = go(trainer(tmp_path / "a"))
    with pytest.raises(KeyboardInterrupt):
        go(trainer(tmp_path / "b"), dies)
    resumed = trainer(tmp_path / "b")
    assert resumed.step == 2
    go(resumed)
    for name, value in whole.average.items():
        assert torch.equal(resumed.average[name], value)
        assert torch.equal(resumed.live[name], whole.live[name])
    lines = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["stage"] == "test" and lines[0]["step"] == 0


def test_the_average_is_of_all_steps(tmp_path):
    """Against the sum written out."""
    torch.manual_seed(0)
    trainer = Trainer(Stage("test", 4, 2, 0.01), torch.nn.ModuleDict({"probe": train.VisionProbe(4)}), tmp_path)
    expected = {name: value.clone() for name, value in trainer.live.items()}
    for step in range(4):
        batch = make_batch(step, 2, None)
        trainer.update(trainer.modules["probe"].loss(torch.ones(len(batch.things), 4), batch))
        keep = min(train.AVERAGE, (step + 1) / (step + 11))
        for name, value in trainer.live.items():
            expected[name] = keep * expected[name] + (1 - keep) * value
    for name, value in expected.items():
        torch.testing.assert_close(trainer.average[name], value)


def test_a_later_model_starts_from_an_earlier_one(tmp_path):
    """Same layers, embeddings by the text of the token; new tokens keep their own."""
    old_words, new_words = make_tokenizer(range(3), 600), make_tokenizer(range(40), 900)
    earlier, later = make_model(old_words, seed=1), make_model(new_words, seed=2)
    fresh = later.state_dict()["model.language_model.embed_tokens.weight"].clone()
    train.export(earlier.state_dict(), old_words, tmp_path)
    train.start_from(later, new_words, tmp_path)
    old, new = earlier.state_dict(), later.state_dict()
    gate = "model.language_model.layers.3.mlp.gate.weight"
    torch.testing.assert_close(new[gate], old[gate].bfloat16().float())
    embeddings = "model.language_model.embed_tokens.weight"
    shared = set(old_words.get_vocab()) & set(new_words.get_vocab())
    assert len(shared) > 300
    for token, index in new_words.get_vocab().items():
        expected = old[embeddings][old_words.get_vocab()[token]].bfloat16().float() if token in shared else fresh[index]
        torch.testing.assert_close(new[embeddings][index], expected)
    assert torch.equal(new["lm_head.weight"], new[embeddings])


def test_batches_depend_on_the_step_only(tokenizer, photos):
    one, other = (make_batch(7, 4, photos, tokenizer) for _ in range(2))
    assert torch.equal(one.pixels, other.pixels)
    assert torch.equal(one.packed.input_ids, other.packed.input_ids)
    assert torch.equal(one.sheets.pixels, other.sheets.to("cpu").pixels)
    assert len(one.sheets.grids) == 6  # half as many again
    assert make_batch(7, 4, None, tokenizer).sheets is None
    later = make_batch(8, 4, photos, tokenizer)
    assert not torch.equal(one.pixels[:64], later.pixels[:64])
    assert not torch.equal(one.sheets.pixels[:64], later.sheets.pixels[:64])


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
            drawn = [draw(row["seed"], image.size, kind) for kind in KINDS if kind != "photo"]
            [picture] = [p for p in drawn if same(image.convert("RGB"), p.image)]
        assert (row["question"], row["answer"]) in {(q.text, q.answer) for q in picture.questions}


def test_shipped_files_need_no_large_file_storage():
    files = [path for path in MINI.rglob("*") if path.is_file()]
    assert files
    assert max(path.stat().st_size for path in files) < 10_000_000


def test_shipped_model_answers_held_out_questions(mini):
    """At least half exactly right; the model card has the full figures."""
    cases = drawn_cases(TEST_SEED, 200)
    outcomes = list(run(mini, cases, Dense()))
    right = [exact(c, o.answer) for o, c in zip(outcomes, cases, strict=True)]
    assert sum(right) / len(right) >= 0.5


def test_shipped_calibration_saves_and_mostly_agrees(mini):
    """DecoMoE as shipped against dense on held-out questions: cheaper, and mostly the same answer."""
    cases = drawn_cases(TEST_SEED + 10_000, 120)
    dense = list(run(mini, cases, Dense()))
    ours = list(run(mini, cases, DecoMoE()))
    agree = [normalize(a.answer) == normalize(b.answer) for a, b in zip(dense, ours, strict=True)]
    assert sum(agree) / len(agree) >= 0.8
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
