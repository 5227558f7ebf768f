"""The Explore tab: where answers break as the picture leaves earlier, and which experts a token goes to."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import pandas as pd
from PIL import Image, ImageColor

from analysis.data import Data
from analysis.figures import fig3a, fig6

from ..answer import Loaded, apart, encode, out_of_memory_is_told
from ..benchmarks import normalize
from ..collect import Swept, observe_routing, sweep
from ..collect.exits import exit_layers, gate_exits
from ..colors import MODALITIES
from .chart import chart
from .common import sentence
from .drawn import shown
from .guard import read_number, read_picture, read_question
from .hosting import LOADING, Host, on_gpu

CASES = Path(__file__).parents[2] / "analysis" / "results" / "cases.json"
INTRO = """**Where does it break?** Ask up to three questions about one picture. The picture leaves after every layer \
in turn, the last one first, and the answers show how early it may. Below: **which experts** a token goes to."""
CURVES = """How surprised the model is by the dense answer when the picture leaves early; 1 is not at all. The dot is \
the earliest exit that still gives the dense answer, which counts as right here."""
SIDE = 384  # pixels; small pictures are shown larger
HELD = 96  # tokens of an answer
FRAME = ImageColor.getrgb(MODALITIES["visual"])


@dataclass(frozen=True)
class Routes:
    """A question's routes as the page keeps them: per layer, the top-k experts (N, k) of every token, and weights."""

    picture: Image.Image
    grid: tuple[int, int] | None
    visual: list[bool]
    labels: list[str]
    experts: dict[int, np.ndarray]
    weights: dict[int, np.ndarray]
    count: int  # experts of a layer

    def alike(self, token: int, layer: int) -> np.ndarray:
        """(N,): the weight that every token gives to the experts of `token`."""
        own = np.isin(self.experts[layer], self.experts[layer][token])
        return np.where(own, self.weights[layer], 0).sum(1)


def tab(host: Host) -> None:
    """The tab's contents; call it inside its `gr.Tab`."""

    gr.Markdown(INTRO)
    with gr.Row():
        with gr.Column(scale=2):
            picture = gr.Image(type="filepath", label="Picture", sources=["upload", "clipboard"], height=260)
            boxes = [
                gr.Textbox(
                    label=label, max_lines=1, placeholder="Ask and press Enter" if not number else "May be empty"
                )
                for number, label in enumerate(("First question", "Second question", "Third question"))
            ]
            with gr.Row():
                go = gr.Button("Explore", variant="primary")
                stop = gr.Button("Stop")
            if host.is_mini and CASES.is_file():
                gr.Markdown("## Examples", elem_classes="quiet")
                for case in json.loads(CASES.read_text()):
                    filled = [str(CASES.parent / case["picture"]), *(case["questions"] + ["", ""])[:3]]
                    button = gr.Button(case["title"], icon=filled[0], size="sm", elem_classes="example")
                    button.click(partial(list, filled), None, [picture, *boxes], queue=False, api_visibility="private")
        with gr.Column(scale=3):
            note = gr.Markdown(elem_id="breaks")
            table = gr.Dataframe(
                headers=["exit after", "answer 1"],
                label="Answers by exit",
                interactive=False,
                max_height=640,
                elem_id="sweep",
            )
    sweep_chart = chart("Perplexity of the dense answer, by exit")
    with gr.Row():
        token = gr.Dropdown([], label="Token of the first question", filterable=True, min_width=240, elem_id="token")
        layer = gr.Slider(0, host.layers - 1, value=host.layers // 2, step=1, label="Layer", min_width=240)
    with gr.Row():
        patches = gr.Image(
            label="Patches that go to its experts",
            alt_text="The picture, bright where patches go to the token's experts; a click chooses a patch",
            interactive=False,
            elem_id="patches",
        )
        experts = gr.Dataframe(
            headers=["expert", "share of the token"], label="Its experts", interactive=False, elem_id="experts"
        )
    map_chart = chart("All tokens and their experts at this layer")
    routes = gr.State()
    outputs = [note, table, sweep_chart, map_chart, routes, token]
    run = gr.on(
        [*(box.submit for box in boxes), go.click],
        on_gpu(host.layers, 0)(partial(_explore, host)),  # short answers that share a prefill
        [picture, layer, *boxes],
        outputs,
        preprocess=False,  # as on the Ask tab
        concurrency_limit=1,
        concurrency_id="model",
        trigger_mode="once",
        api_visibility="private",
    )
    stop.click(None, cancels=[run], api_visibility="private")
    for changed, show, target in (
        ([token.change, layer.change], token_view, [patches, experts]),
        ([layer.change], lambda seen, _, at: shown_map(seen, at), [map_chart]),
    ):
        quiet: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last", "api_visibility": "private"}
        gr.on(changed, show, [routes, token, layer], target, **quiet)
    patches.select(clicked, [routes], [token], show_progress="hidden", api_visibility="private")


def _explore(host: Host, image: Any, at: Any, *questions: Any) -> Iterator[tuple[Any, ...]]:
    """The exit sweep, row by row, then the routes of the first question."""
    try:
        picture = read_picture(image)
        asked = [read_question(text) for text in questions if str(text or "").strip()] or [read_question("")]
        shown_layer = int(read_number("Layer", at, 0, host.layers - 1))
        for _ in host.waiting():
            yield LOADING, None, None, None, gr.skip(), gr.skip()
        loaded, found = host.loaded, list[Swept]()
        with out_of_memory_is_told():
            inputs = apart(partial(encode, loaded, [(picture, question) for question in asked]))
            gated = apart(partial(gate_exits, loaded, inputs)) if host.gated else []
            fires, exits = [exit_after for exit_after, _ in gated], sweep(loaded, inputs, HELD)
            while swept := apart(partial(next, exits, None)):
                found.append(swept)
                yield told(asked, found, fires), answers(asked, found), None, None, gr.skip(), gr.skip()
            curves = shown(fig3a(swept_data(host.name, asked, found)), "perplexity") | {"summary": CURVES}
            routes = apart(partial(routes_of, loaded, picture, asked[0]))
        tokens = gr.update(choices=choices(routes), value=first_asked(routes))
        drawn = (curves, shown_map(routes, shown_layer))
        yield told(asked, found, fires), answers(asked, found), *drawn, routes, tokens
    except Exception as error:
        raise gr.Error(sentence(error), duration=None, print_exception=False) from error


# --- where it breaks -------------------------------------------------------------------------------------------------


def same(found: list[Swept], number: int) -> list[bool]:
    """Whether each answer to a question is the dense one; `found` starts with the dense model."""
    dense = normalize(found[0].answers[number])
    return [normalize(swept.answers[number]) == dense for swept in found]


def told(asked: list[str], found: list[Swept], fires: list[int | None]) -> str:
    """How early the picture may leave, so far; questions by number, because their text could be anything."""
    lines = []
    for number in range(len(asked)):
        kept = same(found, number)
        breaks = kept.index(False) if False in kept else None
        text = f"**Question {number + 1}**: "
        if breaks is None:
            text += f"the dense answer holds down to an exit after layer {found[-1].layer}." if found[1:] else "asking…"
        elif breaks == 1:
            text += f"an exit after layer {found[1].layer}, the last possible, changes the answer already."
        else:
            text += (
                f"the answer holds down to an exit after layer {found[breaks - 1].layer} and "
                f"breaks after layer {found[breaks].layer}."
            )
        if fires:
            fired = fires[number]
            text += " The gate never lets it go." if fired is None else f" The gate lets it go after layer {fired}."
        lines.append(text)
    return "\n\n".join(lines)


def answers(asked: list[str], found: list[Swept]) -> pd.DataFrame:
    """A row an exit; answers that are not the dense one are marked."""
    columns = {"exit after": ["none" if swept.layer is None else str(swept.layer) for swept in found]}
    for number in range(len(asked)):
        kept = same(found, number)
        columns[f"answer {number + 1}"] = [
            swept.answers[number] if own else f"✗ {swept.answers[number]}"
            for swept, own in zip(found, kept, strict=True)
        ]
    return pd.DataFrame(columns)


def swept_data(model: str, asked: list[str], found: list[Swept]) -> Data:
    """The sweep as the table of Figure 3a, where the dense answer counts as right."""
    rows: list[dict[str, Any]] = []
    for number, question in enumerate(asked):
        kept = same(found, number)
        earliest = max(place for place, own in enumerate(kept) if own)
        for place, swept in reversed(list(enumerate(found))):
            rows.append(
                {
                    "case": f"question {number + 1}",
                    "question": question,
                    "answer": swept.answers[number],
                    "layer": swept.layer,
                    "perplexity": float(np.exp(swept.nll[number])),
                    "right": kept[place],
                    "earliest": place == earliest and swept.layer is not None,
                }
            )
    origin = {"data": f"{len(asked)} questions of yours", "command": "", "date": ""}
    return Data(rows, {"model": model, **origin})


# --- which experts ---------------------------------------------------------------------------------------------------


def routes_of(loaded: Loaded, picture: Image.Image, question: str) -> Routes:
    """Observe one question."""
    inputs = encode(loaded, [(picture, question)])
    routed = observe_routing(loaded, inputs, exit_layers(loaded)[-1])
    tops = {layer: routed.mass(layer).float().topk(routed.top_k, dim=1) for layer in routed.before}
    labels, patch = [], 0
    for place, (token, visual) in enumerate(zip(routed.ids.tolist(), routed.visual.tolist(), strict=True)):
        if visual:
            columns = routed.grid[1] if routed.grid else 1
            labels.append(
                f"patch {patch // columns + 1}, {patch % columns + 1}" if routed.grid else f"patch {patch + 1}"
            )
            patch += 1
        else:
            labels.append(f"“{loaded.processor.tokenizer.decode([token])}”, token {place}")  # words come twice
    return Routes(
        picture,
        routed.grid,
        routed.visual.tolist(),
        labels,
        {layer: top.indices.numpy().astype(np.int16) for layer, top in tops.items()},
        {layer: top.values.numpy() for layer, top in tops.items()},
        next(iter(routed.before.values())).shape[1],
    )


def choices(routes: Routes) -> list[tuple[str, int]]:
    """Tokens to choose from, the text first."""
    order = sorted(range(len(routes.labels)), key=lambda token: routes.visual[token])
    return [(routes.labels[token], token) for token in order]


def first_asked(routes: Routes) -> int:
    """The first text token behind the picture."""
    last = max((token for token, visual in enumerate(routes.visual) if visual), default=-1)
    return min(last + 2, len(routes.visual) - 1)


def token_view(routes: Routes | None, token: int | None, layer: int) -> tuple[Image.Image | None, pd.DataFrame | None]:
    """The picture with the patches that go to a token's experts, and these experts."""
    if routes is None or token is None or layer not in routes.experts:
        return None, None
    pairs = zip(routes.experts[layer][token], routes.weights[layer][token], strict=True)
    table = pd.DataFrame([{"expert": int(expert), "share of the token": f"{weight:.0%}"} for expert, weight in pairs])
    return highlighted(routes, token, layer), table


def highlighted(routes: Routes, token: int, layer: int) -> Image.Image | None:
    """Bright where patches go to the same experts as the token, dark elsewhere; the token's own patch is framed."""
    if routes.grid is None:
        return None
    rows, columns = routes.grid
    visual = np.array(routes.visual)
    alike = routes.alike(token, layer)[visual].reshape(rows, columns)
    scale = max(1, SIDE // max(routes.picture.size))
    size = (routes.picture.width * scale, routes.picture.height * scale)
    bright = np.array(routes.picture.resize(size, Image.Resampling.NEAREST), dtype=float)
    light = Image.fromarray(np.uint8(alike * 255)).resize(size, Image.Resampling.NEAREST)
    seen = 0.2 + 0.8 * np.array(light, dtype=float)[..., None] / 255
    shaded = np.uint8(bright * seen)
    if routes.visual[token]:
        row, column = divmod(int(visual[:token].sum()), columns)
        top, bottom = row * size[1] // rows, (row + 1) * size[1] // rows - 1
        left, right = column * size[0] // columns, (column + 1) * size[0] // columns - 1
        shaded[[top, bottom], left : right + 1] = shaded[top : bottom + 1, [left, right]] = FRAME
    return Image.fromarray(shaded)


def clicked(routes: Routes | None, event: gr.SelectData) -> Any:
    """The token of the patch that was clicked."""
    if routes is None or routes.grid is None:
        return gr.skip()
    scale = max(1, SIDE // max(routes.picture.size))
    x, y = event.index
    rows, columns = routes.grid
    row, column = y * rows // (routes.picture.height * scale), x * columns // (routes.picture.width * scale)
    return [token for token, visual in enumerate(routes.visual) if visual][row * columns + column]


def shown_map(routes: Routes | None, layer: int) -> dict[str, Any] | None:
    """Figure 6 of this question at a layer."""
    if routes is None or layer not in routes.experts:
        return None
    rows = [
        {
            "token": token,
            "modality": "visual" if routes.visual[token] else "text",
            "label": label,
            "expert": int(expert),
            "weight": float(weight),
        }
        for token, label in enumerate(routes.labels)
        for expert, weight in zip(routes.experts[layer][token], routes.weights[layer][token], strict=True)
    ]
    origin = {"model": "", "data": "your question", "command": "", "date": ""}
    return shown(fig6(Data(rows, {**origin, "layer": layer, "experts": routes.count})), f"tokens-layer-{layer}")
