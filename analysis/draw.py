"""From a folder of results to files: every figure as table, HTML and picture, and the paper's tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from decomoe.evaluate import store

from . import data, tables
from .figures import FIGURES, WIDTH

SCRIPT = "plotly.min.js"
PICTURES = ("svg", "png")
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>body {{font-family: system-ui, sans-serif; max-width: 50rem; margin: 1rem auto; padding: 0 1rem}}</style>
</head><body>{figure}<p>{summary}</p></body></html>
"""
FOLLOW = """const box = document.getElementById('{plot_id}');
Plotly.relayout(box, {'font.color': getComputedStyle(document.body).color});"""  # light or dark as the reader has it


def draw(results: Path, out: Path, only: Sequence[str] | None, formats: Sequence[str]) -> Iterator[Path]:
    """Write the figures that `results` can give with a list of them, and the paper's tables if it has been evaluated.

    Args:
        only: names of figures; then there is neither list nor table.
        formats: of "html", "svg", "png"; the last two need a Chromium.

    Returns:
        the files, as they are written: the table that a figure is drawn from as NAME.json, and the figure beside it.

    Raises:
        ValueError: there is nothing to draw, no such figure, or no browser.
    """
    unknown = set(only or ()) - FIGURES.keys()
    if unknown:
        raise ValueError(f"There is no figure '{min(unknown)}'; there are {', '.join(FIGURES)}.")
    found = {name: table for name, table in data.read(results).items() if not only or name in only}
    figures = {name: FIGURES[name](table) for name, table in found.items()}
    if "html" in formats:
        store.write(out / SCRIPT, get_plotlyjs())
        yield out / SCRIPT
    for name, figure in figures.items():
        store.write(out / f"{name}.json", found[name].to_json())
        yield out / f"{name}.json"
        if "html" in formats:
            store.write(out / f"{name}.html", page(figure))
            yield out / f"{name}.html"
    for kind in (kind for kind in PICTURES if kind in formats and figures):
        paths = [out / f"{name}.{kind}" for name in figures]
        _pictures(list(figures.values()), paths)
        yield from paths
    if only is not None:
        return
    store.write(out / "index.md", "\n".join(told(name, figure, formats) for name, figure in figures.items()))
    yield out / "index.md"
    if store.read_meta(results).get("methods"):
        for table in tables.tables(tables.Results.read(results)):
            yield from tables.write(table, out)


def told(name: str, figure: go.Figure, formats: Sequence[str]) -> str:
    """One figure in a list of them: it or a link to it, what it shows in a sentence, and where it comes from."""
    meta = figure.layout.meta
    kind = next((kind for kind in (*PICTURES, "html") if kind in formats), "json")
    link = f"{'!' if kind in PICTURES else ''}[{name}]({name}.{kind})"
    origin = "; ".join(filter(None, (meta[key] for key in ("model", "data", "command", "date"))))
    return f"## {name}: {figure.layout.title.text}\n{link}\n\n{meta['summary']}\n\n{origin}\n"


def page(figure: go.Figure) -> str:
    """One figure as a page of its own, beside `SCRIPT`."""
    meta = figure.layout.meta
    drawn = figure.to_html(full_html=False, include_plotlyjs=SCRIPT, post_script=FOLLOW, config={"responsive": True})
    return PAGE.format(title=figure.layout.title.text, figure=drawn, summary=meta["summary"])


def _pictures(figures: Sequence[go.Figure], paths: Sequence[Path]) -> None:
    """Pictures on white, for print; one browser for all."""
    white = [go.Figure(figure).update_layout(paper_bgcolor="white") for figure in figures]
    heights = [figure.layout.height for figure in figures]
    try:
        plotly.io.write_images(white, [str(path) for path in paths], scale=2, width=WIDTH, height=heights)
    except (ValueError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"Pictures need kaleido and a Chromium ({reason}); install them or leave them out: --formats html"
        ) from error
