"""The paper's figures from plain tables (`data.Data`); no model and no result file is read here.

Every function takes a table and returns a plotly figure, the same one for the page, for HTML and for print. Under it
stand its model, data, command and date; `layout.meta` has them for programs, with a summary for people who can't see.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from decomoe.colors import DENSE, GRID, MODALITIES, OURS, OUTLINE, PARTS, SHARE, dot, scale

from .data import Data, Row

DASHES = {"text": "solid", "visual": "dash"}
SYMBOLS = {"text": "circle", "visual": "diamond"}
CASE_DASHES = ("solid", "dash", "dot")
KEEP_STYLES = {"1/8": ("dot", "circle"), "1/4": ("dash", "square"), "1/2": ("solid", "diamond")}
PATTERNS = {"attention": "", "router": "x", "dispatch": "/", "expert MLP": ".", "method": "\\", "other": ""}
HATCH = {"fillmode": "overlay", "fgcolor": "#333333", "size": 5, "solidity": 0.25}
WIDTH, HEIGHT = 560, 400  # for print, in pixels: legible at half the width of a page


def fig1a(data: Data) -> go.Figure:
    """Where the decoder layers' time goes: milliseconds by layer and part, prefill and decode step (paper, Fig. 1a).

    Vision encoder, embeddings and LM head lie outside the layers and are left out. Measured with a stopwatch around
    every part, which itself costs time: read shares, not totals.
    """
    methods, phases = _unique(data.rows, "method"), _unique(data.rows, "phase")
    titles = [f"{method}, {phase}" for method in methods for phase in phases]
    figure = make_subplots(
        len(methods),
        len(phases),
        subplot_titles=titles,
        shared_xaxes=True,
        shared_yaxes="columns",
        vertical_spacing=0.14,
    )
    for part, pattern in PATTERNS.items():
        for i, method in enumerate(methods):
            for j, phase in enumerate(phases):
                rows = [r for r in data.rows if (r["part"], r["method"], r["phase"]) == (part, method, phase)]
                bars = go.Bar(
                    x=[row["layer"] for row in rows],
                    y=[row["ms"] for row in rows],
                    name=part,
                    meta=f"{method}, {phase}",
                    legendgroup=part,
                    showlegend=not (i or j),
                    marker={"color": PARTS[part], "line": OUTLINE, "pattern": {**HATCH, "shape": pattern}},
                    hovertemplate=f"layer %{{x}}: %{{y:.3g}} ms<extra>{part}</extra>",
                )
                figure.add_trace(bars, i + 1, j + 1)
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_xaxes(title_text="layer", row=len(methods))
    figure.update_yaxes(title_text="ms", rangemode="tozero", col=1)
    shares = {
        (method, phase): sum(r["ms"] for r in data.rows if _is(r, method, phase) and r["part"] == "attention")
        / sum(r["ms"] for r in data.rows if _is(r, method, phase))
        for method in methods
        for phase in phases
    }
    said = "; ".join(f"{share:.0%} in {method} {phase}" for (method, phase), share in shares.items())
    said = f"Of the decoder layers' time attention takes {said}."
    figure = _finished(figure, data, "Where the decoder layers' time goes", said, height=HEIGHT + 150)
    return figure.update_layout(margin={"t": 112})  # its legend takes two rows


def _is(row: Row, method: str, phase: str) -> bool:
    return (row["method"], row["phase"]) == (method, phase)


def fig3a(data: Data) -> go.Figure:
    """Perplexity of the dense model's answer if the picture leaves after a layer (paper, Fig. 3a).

    A line a case; its dot is the earliest exit with a right answer. Later exits can still be wrong.
    """
    figure, layers = go.Figure(), sorted({row["layer"] for row in data.rows if row["layer"] is not None})
    end = max(layers, default=0) + 2  # where "no exit" stands
    place = {**{layer: layer for layer in layers}, None: end}
    earliest, few_cases = [], len(_unique(data.rows, "case")) <= len(CASE_DASHES)  # then they have names
    for number, (case, group) in enumerate(groupby(data.rows, lambda row: row["case"])):
        rows = list(group)
        line = go.Scatter(
            x=[place[row["layer"]] for row in rows],
            y=[row["perplexity"] for row in rows],
            mode="lines",
            name=case,
            line={"color": DENSE, "width": 1.5, "dash": CASE_DASHES[number] if few_cases else "solid"},
            showlegend=few_cases,
            text=[_plain(f"{row['question']} {row['answer']}") for row in rows],
            hovertemplate="%{text}<br>after layer %{x}: %{y:.3g}<extra></extra>",
        )
        figure.add_trace(line)
        earliest += [row for row in rows if row["earliest"]]
    dots = go.Scatter(
        x=[place[row["layer"]] for row in earliest],
        y=[row["perplexity"] for row in earliest],
        mode="markers",
        name="earliest right answer",
        marker={"color": OURS, "size": 9, "symbol": "circle"},
        text=[_plain(f"{row['question']} {row['answer']}") for row in earliest],
        hovertemplate="%{text}<br>first right after layer %{x}<extra></extra>",
    )
    figure.add_trace(dots)
    ticks = _some(layers)
    figure.update_xaxes(title_text="exit after layer", tickvals=[*ticks, end], ticktext=[*map(str, ticks), "none"])
    figure.update_xaxes(range=[min(layers, default=0) - 0.5, end + 0.7])
    _perplexity_axis(figure, data.rows)
    cases = len({row["case"] for row in data.rows})
    where = sorted(row["layer"] for row in earliest)
    said = f"Of {cases} cases, {len(where)} are first answered rightly after layers "
    said += f"{where[0]} to {where[-1]}." if where else "none."
    return _finished(figure, data, "How early can the picture leave?", said)


def fig3b(data: Data) -> go.Figure:
    """Share of the routed mass that the most used fifth of the experts gets, by layer and modality (paper, Fig. 3b)."""
    figure = go.Figure([_line(data.rows, kind, "layer", "share") for kind in ("text", "visual")])
    top = data.meta["top"]
    figure.add_hline(y=top, line={"dash": "dot", "color": DENSE, "width": 1})
    figure.update_xaxes(title_text="layer")
    figure.update_yaxes(title_text=f"mass on the top {top:.0%} of experts", range=[0, 1], tickformat=".0%")
    means = {kind: _mean(r["share"] for r in data.rows if r["modality"] == kind) for kind in ("text", "visual")}
    said = f"The top {top:.0%} of experts get {means['text']:.0%} of text's mass and {means['visual']:.0%} of visual's"
    return _finished(figure, data, "How concentrated is routing?", f"{said}; even routing would give {top:.0%}.")


def fig3c(data: Data) -> go.Figure:
    """How many of a case's most used experts are those of another case too, at three keep ratios (paper, Fig. 3c).

    The thin horizontals are chance, dashed alike: what random sets of that size have in common.
    """
    kinds = _unique(data.rows, "modality")
    figure = make_subplots(1, 2, subplot_titles=[f"{kind} tokens" for kind in kinds], shared_yaxes=True)
    for column, kind in enumerate(kinds, 1):
        for keep, (dash, symbol) in KEEP_STYLES.items():
            rows = [row for row in data.rows if (row["modality"], row["keep"]) == (kind, keep)]
            line = go.Scatter(
                x=[row["layer"] for row in rows],
                y=[row["overlap"] for row in rows],
                mode="lines+markers",
                name=f"keep {keep}",
                meta=f"{kind} tokens",
                legendgroup=keep,
                showlegend=column == 1,
                line={"color": MODALITIES[kind], "dash": dash},
                marker={"symbol": symbol, "size": 6},
                hovertemplate="layer %{x}: %{y:.0%}<extra>keep " + keep + "</extra>",
            )
            figure.add_trace(line, 1, column)
            thin = {"dash": dash, "color": DENSE, "width": 1}
            chance = {"annotation_text": "chance", "annotation_position": "bottom right"}
            figure.add_hline(rows[0]["chance"], line=thin, row=1, col=column, **chance)
    figure.update_xaxes(title_text="layer")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    figure.update_yaxes(title_text="experts shared by two cases", col=1)
    said = []
    for kind in kinds:
        means = {
            keep: _mean(row["overlap"] for row in data.rows if (row["modality"], row["keep"]) == (kind, keep))
            for keep in KEEP_STYLES
        }
        shares = ", ".join(f"{share:.0%} at {keep}" for keep, share in means.items())
        said.append(f"{shares} of {kind}'s experts")
    return _finished(figure, data, "Do cases use the same experts?", f"Two cases share {'; '.join(said)}.")


def fig4(data: Data) -> go.Figure:
    """After which layer the gate lets the picture go, for each benchmark, and how often never (paper, Fig. 4)."""
    benchmarks, end = _unique(data.rows, "benchmark"), int(data.meta["layers"]) + 1  # where "never" stands
    layers = sorted({row["layer"] for row in data.rows if row["layer"] is not None})
    step = min((after - before for before, after in pairwise(layers)), default=1)
    figure = make_subplots(
        len(benchmarks), 1, shared_xaxes=True, subplot_titles=benchmarks, vertical_spacing=0.3 / len(benchmarks)
    )
    for i, benchmark in enumerate(benchmarks, 1):
        rows = [row for row in data.rows if row["benchmark"] == benchmark]
        bars = go.Bar(
            x=[end if row["layer"] is None else row["layer"] for row in rows],
            y=[row["share"] for row in rows],
            width=0.8 * step,
            name=benchmark,
            showlegend=False,
            marker={"color": [DENSE if row["layer"] is None else OURS for row in rows]},
            text=[f"{row['share']:.0%}" for row in rows],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y:.1%} of " + str(rows[0]["n"]) + " questions<extra></extra>",
        )
        figure.add_trace(bars, i, 1)
    most = 1.2 * max(row["share"] for row in data.rows)
    figure.update_yaxes(range=[0, most], showticklabels=False, showgrid=False)
    ticks = _some(layers)
    figure.update_xaxes(tickvals=[*ticks, end], ticktext=[*map(str, ticks), "never"])
    figure.update_xaxes(range=[min(layers, default=end) - step, end + step])
    figure.update_xaxes(title_text="exit after layer", row=len(benchmarks))
    never = {row["benchmark"]: row["share"] for row in data.rows if row["layer"] is None}
    said = ", ".join(f"{name} {never.get(name, 0):.0%}" for name in benchmarks)
    return _finished(
        figure, data, "When does the gate fire?", f"It never fires on {said}.", height=140 + 95 * len(benchmarks)
    )


def fig5a(data: Data) -> go.Figure:
    """Perplexity of the dense answer if the picture leaves layers before or after the gate's exit (paper, Fig. 5a)."""
    x = [row["offset"] for row in data.rows]
    text = [f"{row['n']} questions" for row in data.rows]
    figure = go.Figure()
    for name, column, color, dash in (("exit", "perplexity", OURS, "solid"), ("no exit", "dense", DENSE, "dash")):
        line = go.Scatter(
            x=x,
            y=[row[column] for row in data.rows],
            mode="lines+markers" if name == "exit" else "lines",
            name=name,
            line={"color": color, "dash": dash},
            text=text,
            hovertemplate="offset %{x}: %{y:.4f}, %{text}<extra>" + name + "</extra>",
        )
        figure.add_trace(line)
    figure.add_vline(0, line={"dash": "dot", "color": DENSE, "width": 1})
    figure.update_xaxes(title_text="layers from the gate's exit", dtick=2)
    _perplexity_axis(figure, data.rows)
    at = {row["offset"]: row for row in data.rows}
    said = f"At the gate's exit {at[0]['perplexity']:.3f}, without one {at[0]['dense']:.3f}" if 0 in at else ""
    if min(at) < 0:
        said += f"; {-min(at)} layers earlier {at[min(at)]['perplexity']:.3f}"
    return _finished(figure, data, "Is the gate's boundary the right one?", f"{said}.")


def fig5b(data: Data) -> go.Figure:
    """Time to the first token against retention, a dot a method with its 95 % interval (paper, Fig. 5b).

    Retention is over the questions that all of these methods have answered; fewer of them were timed.
    """
    figure, times = go.Figure(), [row["ms"] for row in data.rows]
    margin = max(0.2 * (max(times) - min(times)), 0.02 * max(times))
    for row in data.rows:
        point = go.Scatter(
            x=[row["ms"]],
            y=[row["retention"]],
            mode="markers",
            name=row["method"].partition(":")[0],
            meta=row["method"],
            cliponaxis=False,
            showlegend=True,
            error_y={
                "array": [row["high"] - row["retention"]],
                "arrayminus": [row["retention"] - row["low"]],
                "thickness": 1,
            },
            marker=dot(row["method"]),
            hovertemplate="%{x:.1f} ms, %{y:.1%}<extra>" + row["method"] + "</extra>",
        )
        figure.add_trace(point)
    figure.update_xaxes(title_text="time to first token, ms", range=[min(times) - margin, max(times) + margin])
    figure.update_yaxes(title_text="retention", tickformat=".0%")
    said = "; ".join(f"{row['method']} {row['ms']:.0f} ms, {row['retention']:.1%}" for row in data.rows)
    return _finished(figure, data, "Time against retention", f"{said}.").update_layout(margin={"t": 84})  # two rows


def fig6(data: Data) -> go.Figure:
    """Which experts the tokens of one question go to, at one layer: visual tokens above, text below (paper, Fig. 6).

    The summary says how many experts both use, and the share of text's routed mass that goes to those.
    """
    kinds = ("visual", "text")
    tokens = {kind: _unique([row for row in data.rows if row["modality"] == kind], "token") for kind in kinds}
    total, most = sum(map(len, tokens.values())), max(row["weight"] for row in data.rows)
    heights = [max(0.25, len(tokens[kind]) / total) for kind in kinds]
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.06)
    for i, kind in enumerate(kinds):
        rows = [row for row in data.rows if row["modality"] == kind]
        table = [[0.0] * int(data.meta["experts"]) for _ in tokens[kind]]
        place = {token: y for y, token in enumerate(tokens[kind])}
        for row in rows:
            table[place[row["token"]]][row["expert"]] = row["weight"]
        names = {row["token"]: _plain(row["label"]) for row in rows}
        labels = [[names[token] or f"patch {y}"] * len(table[0]) for y, token in enumerate(tokens[kind])]
        heat = go.Heatmap(
            z=table,
            customdata=labels,
            name=kind,
            zmin=0,
            zmax=most,
            colorscale=scale(MODALITIES[kind]),
            colorbar={"title": {"text": kind}, "len": 0.45, "y": 0.77 - 0.54 * i, "thickness": 12, "dtick": 0.5},
            hovertemplate="%{customdata} to expert %{x}: %{z:.2f}<extra>" + kind + "</extra>",
        )
        figure.add_trace(heat, i + 1, 1)
        figure.update_yaxes(title_text=f"{kind} tokens", autorange="reversed", row=i + 1, showgrid=False)
    figure.update_xaxes(showgrid=False)
    figure.update_xaxes(title_text="expert, in the model's order", row=2)
    used = {kind: {row["expert"] for row in data.rows if row["modality"] == kind} for kind in kinds}
    said = f"At layer {data.meta['layer']}, {len(tokens['visual'])} visual tokens use {len(used['visual'])} of "
    said += f"{data.meta['experts']} experts, {len(tokens['text'])} text tokens use {len(used['text'])}. "
    shared, text = used["text"] & used["visual"], [row for row in data.rows if row["modality"] == "text"]
    mass = sum(row["weight"] for row in text if row["expert"] in shared) / sum(row["weight"] for row in text)
    said += f"Both use {len(shared)} experts; these get {mass:.0%} of text's mass."
    return _finished(figure, data, f"Where tokens go at layer {data.meta['layer']}", said, height=HEIGHT + 120)


def fig7(data: Data) -> go.Figure:
    """The router's softmax of a question's text tokens at a deep layer, before and after the exit (paper, Fig. 7)."""
    sides = {"before": "picture there", "after": "picture gone"}
    figure = make_subplots(1, 2, shared_yaxes=True, subplot_titles=list(sides.values()), horizontal_spacing=0.05)
    most = max(max(row[side]) for row in data.rows for side in sides)
    for column, side in enumerate(sides, 1):
        heat = go.Heatmap(
            z=[row[side] for row in data.rows],
            customdata=[[_plain(row["label"])] * len(row[side]) for row in data.rows],
            name=sides[side],
            zmin=0,
            zmax=most,
            colorscale=scale(MODALITIES["text"]),
            showscale=column == 2,
            colorbar={"thickness": 12},
            hovertemplate="%{customdata}, expert %{x}: %{z:.3f}<extra></extra>",
        )
        figure.add_trace(heat, 1, column)
    figure.update_xaxes(title_text="expert", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_yaxes(title_text="text token", col=1)
    change = _mean(abs(b - a) for row in data.rows for b, a in zip(row["before"], row["after"], strict=True))
    said = f"The mean absolute change of a probability is {change:.4f}, of at most {most:.2f}."
    return _finished(figure, data, f"Text routing at layer {data.meta['layer']}", said)


def fig8a(data: Data) -> go.Figure:
    """Experts that hold half of the routers' probability mass, text against visual; a dot a case (paper, Fig. 8)."""
    most = 1.05 * max(row[kind] for row in data.rows for kind in ("text", "visual"))
    dots = go.Scatter(
        x=[row["visual"] for row in data.rows],
        y=[row["text"] for row in data.rows],
        mode="markers",
        name="cases",
        showlegend=False,
        marker={"color": OURS, "size": 7, "symbol": "circle-open"},  # where many lie, each can be seen
        text=[row["case"] for row in data.rows],
        hovertemplate="%{text}: text %{y:.1f}, visual %{x:.1f}<extra></extra>",
    )
    figure = go.Figure(dots)
    figure.add_shape(type="line", x0=0, y0=0, x1=most, y1=most, line={"dash": "dot", "color": DENSE, "width": 1})
    figure.update_xaxes(title_text="experts for half of visual mass", range=[0, most])
    figure.update_yaxes(title_text="experts for half of text mass", range=[0, most])
    below = sum(row["text"] < row["visual"] for row in data.rows)
    said = f"Text needs fewer experts than visual tokens in {below} of {len(data.rows)} cases."
    return _finished(figure, data, "Experts for half of the mass", said)


def fig8b(data: Data) -> go.Figure:
    """How much text routing changes when the picture leaves: cosine and mean absolute error by layer (paper, Fig. 8).

    The paper does not say whether tokens are compared one by one or in the mean; both are drawn.
    """
    figure = make_subplots(1, 2, horizontal_spacing=0.2)
    names = {"token": ("token by token", "solid", "circle"), "mean": ("in the mean of tokens", "dash", "diamond")}
    for column, value in enumerate(("cosine", "mae"), 1):
        for of, (name, dash, symbol) in names.items():
            rows = [row for row in data.rows if row["of"] == of]
            line = go.Scatter(
                x=[row["layer"] for row in rows],
                y=[row[value] for row in rows],
                mode="lines+markers",
                name=name,
                meta=value,
                legendgroup=of,
                showlegend=column == 1,
                line={"color": MODALITIES["text"], "dash": dash},
                marker={"symbol": symbol},
                hovertemplate="layer %{x}: %{y:.4g}<extra>" + name + "</extra>",
            )
            figure.add_trace(line, 1, column)
    figure.update_xaxes(title_text="layer", dtick=max(1, len({row["layer"] for row in data.rows}) // 3))
    figure.update_yaxes(title_text="cosine", col=1)
    figure.update_yaxes(title_text="mean absolute error", rangemode="tozero", col=2)
    said = " ".join(
        f"{name.capitalize()} the cosine is at least {min(row['cosine'] for row in data.rows if row['of'] == of):.4f} "
        f"and the error at most {max(row['mae'] for row in data.rows if row['of'] == of):.4f}."
        for of, (name, _, _) in names.items()
    )
    return _finished(figure, data, f"Text routing behind an exit after layer {data.meta['exit_after']}", said)


def text_share(data: Data) -> go.Figure:
    """Whose expert is it: text's share of routed mass, by layer and expert (after SMoES, CVPR 2026).

    Of mean masses of a token, so that many visual tokens don't count more than few text tokens.
    """
    layers, experts = _unique(data.rows, "layer"), int(data.meta["experts"])
    table = [[row["share"] for row in data.rows if row["layer"] == layer] for layer in layers]
    heat = go.Heatmap(
        z=table,
        y=layers,
        x=list(range(experts)),
        zmin=0,
        zmax=1,
        colorscale=SHARE,
        colorbar={"thickness": 12, "tickvals": [0, 0.5, 1], "ticktext": ["visual", "both", "text"]},
        hovertemplate="layer %{y}, expert %{x}: %{z:.0%} text<extra></extra>",
    )
    figure = go.Figure(heat)
    figure.update_xaxes(title_text="expert, in the model's order", showgrid=False)
    figure.update_yaxes(title_text="layer", autorange="reversed", showgrid=False)
    known = [row["share"] for row in data.rows if row["share"] is not None]
    own = {"text": sum(share > 0.8 for share in known), "visual": sum(share < 0.2 for share in known)}
    said = f"Of {len(known)} experts {own['text']} are text's (over 80 %) and {own['visual']} visual's."
    return _finished(figure, data, "Whose expert is it?", said)


FIGURES: dict[str, Callable[[Data], go.Figure]] = {
    function.__name__: function
    for function in (fig1a, fig3a, fig3b, fig3c, fig4, fig5a, fig5b, fig6, fig7, fig8a, fig8b, text_share)
}


# --- their parts -----------------------------------------------------------------------------------------------------


def _line(rows: Sequence[Row], kind: str, x: str, y: str) -> go.Scatter:
    """A line of one modality."""
    own = [row for row in rows if row["modality"] == kind]
    return go.Scatter(
        x=[row[x] for row in own],
        y=[row[y] for row in own],
        mode="lines+markers",
        name=kind,
        line={"color": MODALITIES[kind], "dash": DASHES[kind]},
        marker={"symbol": SYMBOLS[kind], "size": 7},
        hovertemplate=f"{x} %{{x}}: %{{y:.1%}}<extra>{kind}</extra>",
    )


def _some(layers: Sequence[int]) -> Sequence[int]:
    """The layers that get a tick: all, or every second, third, ... from the first on."""
    return layers[:: -(-len(layers) // 8) or 1]


def _perplexity_axis(figure: go.Figure, rows: Iterable[Row]) -> None:
    """Logarithmic, with ticks at 2 and 5 too where there is room."""
    few = max(row["perplexity"] for row in rows) < 50
    figure.update_yaxes(title_text="perplexity (log)", type="log", dtick="D2" if few else 1)


def _finished(figure: go.Figure, data: Data, title: str, summary: str, height: int = HEIGHT) -> go.Figure:
    """The look that all figures share: title, legend below it, and their origin at the bottom."""
    origin = [
        line
        for keys in (("model", "data"), ("command", "date"))
        for line in textwrap.wrap("; ".join(filter(None, map(data.meta.get, keys))), 95)
    ]
    height += 14 * max(0, len(origin) - 3)
    legend = len(figure.data) > 1 and any(
        trace.showlegend is not False for trace in figure.data if trace.type != "heatmap"
    )
    top = 38 + 24 * legend + 20 * bool(figure.layout.annotations)  # panels have titles
    figure.update_layout(
        template="none",
        title={"text": title, "font": {"size": 15}, "x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 10}},
        font={"size": 13, "color": "#333333"},
        margin={"l": 68, "r": 16, "t": top, "b": 64 + 14 * len(origin)},
        height=height,
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        legend={"orientation": "h", "xref": "container", "x": 0.99, "yref": "container", "y": 1 - 34 / height},
        meta={**data.meta, "summary": summary},
        uirevision="keep",
    )
    figure.update_layout(legend={"xanchor": "right", "yanchor": "top", "font": {"size": 11}})
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(gridcolor=GRID, zeroline=False, linecolor=GRID, title_standoff=6)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, linecolor=GRID, title_standoff=6)
    figure.add_annotation(
        text="<br>".join(map(_plain, origin)),
        xref="paper",
        yref="paper",
        x=0,
        y=0,
        yshift=-48,
        xanchor="left",
        yanchor="top",
        align="left",
        showarrow=False,
        font={"size": 10},
        opacity=0.75,
    )
    return figure


def _plain(text: str) -> str:
    """Text that plotly shows as it is; it would take tags for its own."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", "⏎")


def _unique(rows: Iterable[Row], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
