"""Benchmarks: counts, known questions, disjoint splits, and what is said when data is missing."""

import io
import json
import re
import sys
import time

import easy_vqa
import pandas as pd
import pytest
from PIL import Image, ImageChops

from decomoe.benchmarks import BENCHMARKS, Case, exact, hallusionbench, mme, normalize
from decomoe.benchmarks import easy_vqa as ours
from decomoe.benchmarks.choices import chosen
from decomoe.mini.draw import UNSEEN, draw


def same(a: Image.Image, b: Image.Image) -> bool:
    return a.size == b.size and ImageChops.difference(a, b).getbbox() is None


def test_exact_match():
    case = Case("id", Image.Image, "What?", "A red cat")
    assert normalize("  A red\n cat. ") == "a red cat"
    assert exact(case, "a RED cat.")
    assert not exact(case, "red cat")


@pytest.mark.parametrize(("name", "unseen"), [("drawn", None), *((f"drawn-{unseen}", unseen) for unseen in UNSEEN)])
def test_drawn(name, unseen):
    began = time.perf_counter()
    test = BENCHMARKS[name].load("test", None)
    assert time.perf_counter() - began < 10
    assert len(test) == (500 if unseen else 2000)
    assert len({case.id for case in test}) == len(test)
    case = test[-1]
    _, seed, number = case.id.split("/")
    picture = draw(int(seed), unseen=unseen)
    assert same(case.picture(), picture.image)
    assert (case.question, case.answer) == (picture.questions[int(number)].text, picture.questions[int(number)].answer)
    calibration = BENCHMARKS[name].load("calibration", None)
    seeds = [[int(case.id.split("/")[1]) for case in cases] for cases in (test, calibration)]
    assert 0 <= min(seeds[0]) <= max(seeds[0]) < 500_000 <= min(seeds[1]) <= max(seeds[1]) < 1_000_000
    with pytest.raises(ValueError, match="no folder"):
        BENCHMARKS[name].load("test", "somewhere")


def test_drawn_pictures_has_all_questions_of_a_picture():
    cases = BENCHMARKS["drawn-pictures"].load("test", None)
    assert len(cases) == 200
    asked = [case.question for case in cases if case.group == "drawn/3"]
    assert asked == [question.text for question in draw(3).questions]
    assert {case.id for case in cases[:4]} <= {case.id for case in BENCHMARKS["drawn"].load("test", None)}


def test_easy_vqa_is_what_its_package_says():
    cases = BENCHMARKS["easy-vqa"].load("test", None)
    questions, answers, images = easy_vqa.get_test_questions()
    assert len(cases) == len(questions) == 9673
    paths = easy_vqa.get_test_image_paths()
    assert len(paths) == 1000
    for number in (0, 1, 4999, 9672):
        assert cases[number].id == f"easy-vqa/test/{number}"
        assert (cases[number].question, cases[number].answer) == (questions[number], answers[number])
        assert same(cases[number].picture(), Image.open(paths[images[number]]).convert("RGB"))
    assert cases[0].picture().size == (64, 64)
    kinds = {case.question: case.kind for case in cases}
    assert kinds["is there a triangle?"] == "presence"
    assert kinds["is there not a blue shape?"] == kinds["is no green shape present?"] == "absence"
    assert kinds["what color is the circle?"] == "color"
    assert kinds["what is the red shape?"] == "shape"


def test_easy_vqa_calibrates_on_its_train_set():
    cases = BENCHMARKS["easy-vqa"].load("calibration", None)
    questions, answers, _ = easy_vqa.get_train_questions()
    assert len({case.id for case in cases}) == 2000
    for case in cases[:20]:
        _, part, number = case.id.split("/")
        assert part == "train"
        assert (case.question, case.answer) == (questions[int(number)], answers[int(number)])


def test_easy_vqa_from_a_folder(tmp_path, monkeypatch):
    (tmp_path / "test" / "images").mkdir(parents=True)
    Image.new("RGB", (64, 64), "teal").save(tmp_path / "test" / "images" / "7.png")
    (tmp_path / "test" / "questions.json").write_text(json.dumps([["what color is the shape?", "teal", 7]]))
    (case,) = BENCHMARKS["easy-vqa"].load("test", str(tmp_path))
    assert case.picture().getpixel((0, 0)) == (0, 128, 128)
    with pytest.raises(ValueError, match=r"train/questions\.json"):
        BENCHMARKS["easy-vqa"].load("calibration", str(tmp_path))
    monkeypatch.setattr(ours, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install easy-vqa"):
        BENCHMARKS["easy-vqa"].load("test", None)


def encoded(color: int) -> dict[str, object]:
    """A one-coloured photo as datasets on the Hub have it."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (color, 0, 0)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def photos(tmp_path):
    """A folder in the schema of uoft-cs/cifar10: 12 test photos, 2010 train photos."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for split, count in (("test", 12), ("train", 2010)):
        colors = [encoded(index % 250) for index in range(250)]
        rows = {"img": [colors[i % 250] for i in range(count)], "label": [i % 10 for i in range(count)]}
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    return str(folder)


def test_photos(photos):
    cases = BENCHMARKS["photos"].load("test", photos)
    names = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert [case.answer for case in cases] == [*names, "airplane", "car"]
    assert {case.question for case in cases} == {"What is in the photo?"}
    assert [case.picture().getpixel((64, 64)) for case in cases] == [(i, 0, 0) for i in range(12)]
    assert cases[0].picture().size == (128, 128)


def test_photos_calibrate_on_the_end_of_the_train_split(photos):
    cases = BENCHMARKS["photos"].load("calibration", photos)
    assert len({case.id for case in cases}) == 2000
    numbers = [int(case.id.split("/")[-1]) for case in cases]
    assert numbers != sorted(numbers)
    for case, number in zip(cases[:50], numbers, strict=False):
        assert case.picture().getpixel((0, 0)) == ((number + 10) % 250, 0, 0)  # the first ten are for training


@pytest.mark.parametrize(
    ("answer", "right"),
    [("car", True), ("Automobile.", True), ("A photo of a car.", True), ("cat", False), ("a car or a truck", False)],
)
def test_photos_score(answer, right):
    assert BENCHMARKS["photos"].right(Case("id", Image.Image, "What is in the photo?", "car"), answer) == right


def test_photos_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="photos=FOLDER"):
        BENCHMARKS["photos"].load("test", str(tmp_path / "nothing"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        BENCHMARKS["photos"].load("test", None)


# --- published sets, on files of the same schema ------------------------------------------------------

LETTER = "Answer with the option's letter from the given choices directly."
DIGEST = "[0-9a-f]{16}"
MMBENCH = {
    **{"index": 7, "question": "What is it?", "hint": "nan", "answer": "B", "category": "ocr", "source": "web"},
    **{"A": "a cat", "B": "a dog", "C": "nan", "D": None, "L2-category": "perception", "comment": "nan"},
    **{"split": "dev", "image": encoded(7)},
}
SCIENCEQA = {
    **{"image": encoded(7), "question": "Which is it?", "choices": ["a solid", "a gas"], "answer": 1, "hint": "Look."},
    **{"task": "closed choice", "grade": "grade3", "subject": "natural science", "topic": "physics"},
    **{"category": "Materials", "skill": "Identify", "lecture": "", "solution": ""},
}
AI2D = {"question": "What does A eat?", "options": ["b", "grass", "a"], "answer": "1", "image": encoded(7)}
A_OKVQA = {
    **{"image": encoded(7), "question_id": "22MexN", "question": "What next?", "choices": ["run", "sit", "eat", "fly"]},
    **{"correct_choice_idx": 3, "direct_answers": "['fly']", "difficult_direct_answer": False, "rationales": ["."]},
}
MMMU = {
    **{"id": "validation_Art_Theory_1", "question": "<image 1> Who made it?", "options": "['Dali', 'Miro']"},
    **{"explanation": "", "image_1": encoded(7), **{f"image_{number}": None for number in range(2, 8)}},
    **{"img_type": "['Paintings']", "answer": "B", "topic_difficulty": "Easy", "question_type": "multiple-choice"},
    **{"subfield": "Modern Art"},
}
HALLUSIONBENCH = {
    **{"category": "VD", "subcategory": "illusion", "visual_input": "1", "set_id": "0", "figure_id": "2"},
    **{"sample_note": "circle", "question_id": "1", "question": "Are they equal?", "gt_answer": "1"},
    **{"gt_answer_details": "They are.", "filename": "./VD/illusion/0_2.png", "image": encoded(7)},
}
POPE = {
    **{"id": "0", "question_id": "1", "question": "Is there a cat in the image?", "answer": "no"},
    **{"image_source": "COCO_val2014_01", "image": encoded(7), "category": "random"},
}
MME = {
    **{"question_id": "count/01.png", "image": encoded(7), "question": "One cat? Please answer yes or no."},
    **{"answer": "Yes", "category": "count"},
}


@pytest.fixture
def publish(tmp_path):
    """Write rows as a split in a folder; gives the folder, as a source."""

    def write(split: str, *rows: dict, folder: str = "data") -> str:
        file = tmp_path / "set" / folder / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(file)
        return str(tmp_path / "set")

    return write


@pytest.mark.parametrize(
    ("name", "split", "row", "id", "question", "answer", "kind"),
    [
        ("mmbench", "dev", MMBENCH, "mmbench/7", f"What is it?\nA. a cat\nB. a dog\n{LETTER}", "B", "ocr"),
        (
            *("scienceqa", "test", SCIENCEQA, f"scienceqa/{DIGEST}/{DIGEST}"),
            *(f"Context: Look.\nWhich is it?\nA. a solid\nB. a gas\n{LETTER}", "B", "natural science"),
        ),
        ("ai2d", "test", AI2D, f"ai2d/{DIGEST}/{DIGEST}", f"What does A eat?\nA. b\nB. grass\nC. a\n{LETTER}", "B", ""),
        (
            *("a-okvqa", "validation", A_OKVQA, "a-okvqa/22MexN"),
            *(f"What next?\nA. run\nB. sit\nC. eat\nD. fly\n{LETTER}", "D", ""),
        ),
        (
            *("mmmu", "validation", MMMU, "mmmu/validation_Art_Theory_1"),
            *(f"<image 1> Who made it?\nA. Dali\nB. Miro\n{LETTER}", "B", "Art_Theory"),
        ),
        (
            *("hallusionbench", "image", HALLUSIONBENCH, "hallusionbench/VD/illusion/0/2/1"),
            *("Are they equal?\nPlease answer yes or no.", "yes", "VD/illusion"),
        ),
        (
            *("pope", "test", POPE, "pope/random/1"),
            *("Is there a cat in the image?\nAnswer the question using a single word or phrase.", "no", "presence"),
        ),
        (
            *("mme", "test", MME, f"mme/count/count/01.png/{DIGEST}"),
            *("One cat? Please answer yes or no.", "yes", "count"),
        ),
    ],
)
def test_published(publish, name, split, row, id, question, answer, kind):
    (case,) = BENCHMARKS[name].load("test", publish(split, row))
    assert re.fullmatch(id, case.id)
    assert (case.question, case.answer, case.kind) == (question, answer, kind)
    assert case.picture().getpixel((0, 0)) == (7, 0, 0)
    assert BENCHMARKS[name].right(case, answer)
    assert BENCHMARKS[name].right(case, f"{answer.capitalize()}.")
    assert not BENCHMARKS[name].right(case, {"yes": "No", "no": "Yes"}.get(answer, "A"))


@pytest.mark.parametrize(
    ("name", "split", "row", "other"),
    [
        ("scienceqa", "test", SCIENCEQA, {"choices": ["a gas", "a solid"], "answer": 0}),
        ("ai2d", "test", AI2D, {"question": "What does b eat?"}),
        ("pope", "test", POPE, {"category": "popular"}),
        ("mme", "test", MME, {"question": "Two cats? Please answer yes or no.", "answer": "No"}),
    ],
)
def test_ids_do_not_depend_on_the_order_of_rows(publish, name, split, row, other):
    rows = [row, row | other, row | {"image": encoded(9), "question_id": "9", "question": "Else?"}, row]
    sides = [BENCHMARKS[name].load("test", publish(split, *some)) for some in (rows, rows[::-1])]
    ids = [{case.id: (case.question, case.answer, case.group) for case in cases} for cases in sides]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 4  # also where the data holds a question twice


def test_what_is_left_out(publish):
    rows = [MMBENCH, MMBENCH | {"index": 1_000_007, "answer": "A"}, MMBENCH | {"index": 8, "image": None}]
    assert [case.id for case in BENCHMARKS["mmbench"].load("test", publish("dev", *rows))] == ["mmbench/7"]
    several = {"id": "validation_Art_2", "question": "Which?", "options": "['<image 1>', '<image 2>']"}
    explained = {"id": "validation_Art_3", "image_2": encoded(9)}  # a picture that the question doesn't show
    cases = BENCHMARKS["mmmu"].load("test", publish("validation", MMMU, MMMU | several, MMMU | explained))
    assert [case.id for case in cases] == ["mmmu/validation_Art_Theory_1", "mmmu/validation_Art_3"]


def test_questions_about_a_picture_are_a_group(publish):
    rows = [AI2D, AI2D | {"question": "Else?"}, AI2D | {"image": encoded(9)}]
    groups = [case.group for case in BENCHMARKS["ai2d"].load("test", publish("test", *rows))]
    assert groups[0] == groups[1] != groups[2]


def test_where_files_are(publish, tmp_path):
    source = publish("dev", MMBENCH, folder="en")
    publish("dev", MMBENCH | {"index": 8}, folder="cn")
    publish("development", MMBENCH | {"index": 9}, folder="en")
    ids = [case.id for case in BENCHMARKS["mmbench"].load("test", source)]
    assert ids == ["mmbench/7"]
    (file,) = (tmp_path / "set" / "cn").iterdir()
    assert [case.id for case in BENCHMARKS["mmbench"].load("test", str(file))] == ["mmbench/8"]


def test_the_hub_is_asked_for_every_subject(monkeypatch):
    import datasets  # noqa: PLC0415 (slow)

    asked = []

    def load_dataset(hub, config, split):
        asked.append((hub, config, split))
        rows = datasets.Dataset.from_list([MMMU | {"id": f"validation_{config}_1"}])
        return rows.cast_column("image_1", datasets.Image())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    cases = BENCHMARKS["mmmu"].load("test", None)
    assert len(asked) == len({case.kind for case in cases}) == 30
    assert cases[29].picture().getpixel((0, 0)) == (7, 0, 0)
    assert asked[3:5] == [("MMMU/MMMU", "Art", "validation"), ("MMMU/MMMU", "Art_Theory", "validation")]


def test_calibration_on_another_split(publish):
    source = publish("train", *(A_OKVQA | {"question_id": str(number)} for number in range(20)))
    ids = [case.id for case in BENCHMARKS["a-okvqa"].load("calibration", source)]
    assert sorted(ids) == sorted(f"a-okvqa/{number}" for number in range(20)) != ids
    for name in ("mmbench", "ai2d", "hallusionbench"):
        with pytest.raises(ValueError, match="calibrate on another benchmark"):
            BENCHMARKS[name].load("calibration", None)


def test_calibration_on_half_of_the_pictures(publish):
    rows = [POPE | {"image_source": f"picture {number // 2}", "question_id": str(number)} for number in range(40)]
    source = publish("test", *rows)
    test, calibration = (BENCHMARKS["pope"].load(split, source) for split in ("test", "calibration"))
    assert len({case.id for case in calibration}) == 20
    assert {case.id for case in calibration} < {case.id for case in test}
    groups = {case.group for case in calibration}
    assert len(groups) == 10
    assert groups.isdisjoint(case.group for case in test if case.id not in {seen.id for seen in calibration})
    assert [case.id for case in calibration] == [case.id for case in BENCHMARKS["pope"].load("calibration", source)]


def test_published_sets_that_cannot_be_read(publish, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"Can't read mme .* \(it has no test\*\.parquet\)\. .* mme=FOLDER\.$"):
        BENCHMARKS["mme"].load("test", str(tmp_path))
    for row, reason in (
        ({"question": "?"}, "column category, question_id, answer, image_source, image"),
        (POPE | {"image": None}, "picture"),
    ):
        with pytest.raises(ValueError, match=f"Can't read pope from .* \\(it has no .*{reason}"):
            BENCHMARKS["pope"].load("test", publish("test", row))
    (tmp_path / "test.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"Can't read mme .* \(Parquet"):
        BENCHMARKS["mme"].load("test", str(tmp_path / "test.parquet"))
    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ValueError, match=r"Can't read mme from 'lmms-lab-encoder/MME' \(Couldn't reach it\)"):
        BENCHMARKS["mme"].load("test", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="mme needs a package: pip install datasets"):
        BENCHMARKS["mme"].load("test", None)


def offline(*_, **__):
    raise ConnectionError("Couldn't reach it")


# --- what counts as right ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B. a dog", "B"),
        ("B. It is lying on the sofa, which cats do too.", "B"),
        ("The answer is B", "B"),
        ("The answer is B, because A can be ruled out here", "B"),
        ("Answer: B", "B"),
        ("a red cat", "A"),
        ("A red dog.", "C"),  # not option A
        ("A red car.", None),
        ("A man is riding a horse", None),
        ("A. A red cat", "A"),
        ("A) red", "A"),
        ("A", "A"),
        ("It must be A", "A"),
        ("The answer is A because of its fur", "A"),
        ("Option A is right.", "A"),
        ("The answer is a red car", None),
        ("It looks like a dog to me", "B"),
        ("A or B", None),
        ("E", None),
        ("I can't tell", None),
        ("", None),
    ],
)
def test_option_chosen(answer, letter):
    assert chosen(answer, ("a red cat", "a dog", "a red dog")) == letter


def test_an_option_that_names_a_letter():
    assert chosen("Vitamin B", ("Vitamin B", "Vitamin A", "iron")) == "A"


@pytest.mark.parametrize(
    "answer", ["B", "b", " b ", "B.", "B. a cat", "B.a cat", "A. B or C", "D.", "E", "a cat", "A cat", "It is", ""]
)
def test_letters_as_lmms_eval_reads_them(answer):
    """By its rule for ScienceQA: the letter alone, or a capital and a full stop first; anything else is wrong there."""
    text = answer.strip()
    theirs = text[0] if text[1:2] == "." and text[0].isupper() else text.upper() if len(text) == 1 else None
    assert chosen(answer, ("one", "two", "three", "four")) == (theirs if theirs in list("ABCD") else None)


@pytest.mark.parametrize(
    ("name", "answer", "taken"),
    [
        *((name, "Yes, there is", "yes") for name in ("pope", "mme", "hallusionbench")),
        *((name, "no", "no") for name in ("pope", "mme", "hallusionbench")),
        *((name, "No.", "no") for name in ("pope", "mme", "hallusionbench")),
        ("pope", "There is not. Yes.", "no"),
        ("pope", "A cat", "yes"),  # as POPE has it: whatever doesn't deny
        ("mme", "y", "yes"),
        ("mme", "The answer is yes", None),
        ("mme", "A cat", None),
        ("hallusionbench", "The answer is yes", "yes"),
        ("hallusionbench", "Yes and no", None),
        ("hallusionbench", "I know it", None),
    ],
)
def test_yes_or_no(name, answer, taken):
    for truth in ("yes", "no"):
        assert BENCHMARKS[name].right(Case("id", Image.Image, "?", truth), answer) == (truth == taken)


@pytest.mark.parametrize(
    ("truth", "options", "answer", "right"),
    [
        ("B", ("a cat", "a dog"), "(A) no, rather (B)", True),
        ("B", ("a cat", "a dog"), "B. a dog", True),
        ("B", ("a cat", "a dog"), "What I see there is a dog", True),
        ("B", ("a cat", "a dog"), "a dog", False),  # too short for a text to count
        ("B", ("a cat", "a dog"), "nothing", False),
        ("3,000.5", (), "So the sum is 3000.50.", True),
        ("3", (), "x = 13", False),
        ("0.33", (), "First it was 1.\nThe result = 0.333", True),
        ("Tampa", (), "in tampa bay", True),
        ("['$MgS$', 'MgS']", (), "The formula is MgS", True),
        ("x", (), "six", False),
        ("x", (), "x", True),
    ],
)
def test_mmmu_score(truth, options, answer, right):
    assert BENCHMARKS["mmmu"].right(Case("id", Image.Image, "?", truth, options=options), answer) == right


def test_scores_of_mme():
    answers = {("count", 1): (1, 1), ("count", 2): (1, 0), ("code_reasoning", 1): (0, 0), ("code_reasoning", 2): (1,)}
    records = [
        {"kind": kind, "group": f"{kind}/{picture}", "right": bool(right)}
        for (kind, picture), pair in answers.items()
        for right in pair
    ]
    assert mme.scores(records) == {"count": 75 + 50, "code_reasoning": 0, "perception": 125, "cognition": 0}


def test_scores_of_hallusionbench():
    answers = {"VD/map/0/0/0": 1, "VD/map/0/0/1": 1, "VD/map/0/1/0": 1, "VD/map/0/1/1": 0, "VS/map/0/1/1": 1}
    records = [{"id": f"hallusionbench/{id}", "right": bool(right)} for id, right in answers.items()]
    scores = hallusionbench.scores(records)
    assert scores == pytest.approx({"aAcc": 80, "fAcc": 100 * 2 / 3, "qAcc": 100 * 2 / 3})
