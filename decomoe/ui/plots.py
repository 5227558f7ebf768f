"""From traces to what the page shows: plotly figures as plain dicts, and a table."""

from collections.abc import Callable, Sequence
from typing import Any

from analysis.data import Data
from analysis.figures import HATCH, fig1a

from ..colors import DENSE, MODALITIES, MUTED, OURS, OUTLINE, SHARE, scale
from ..latency import Breakdown
from ..trace import Trace
from .drawn import shown
from .panes import exit_sentence

STEP, THETA = "#D55E00", "#dc2626"
SIDES = (DENSE, "/"), (OURS, "")  # colour and pattern of a pair of bars, so that they differ in grey too
ENOUGH = 5  # tokens, for times per token to be compared
PREDICTED = "Predicted from the dense run: "
Figure = dict[str, Any]
LATEST: Figure = {
    "type": "scatter",
    "mode": "markers",
    "name": "latest token",
    "marker": {"color": STEP, "size": 8, "line": {"color": "white", "width": 1}},
}


def _layout(x: str, y: str, top: float, layers: int) -> dict[str, Any]:
    return {
        "margin": {"l": 45, "r": 10, "t": 10, "b": 40},
        "xaxis": {"title": {"text": x}, "range": [-0.6, layers - 0.4], "dtick": max(1, layers // 8)},
        "yaxis": {"title": {"text": y}, "range": [0, top]},
        "legend": {"orientation": "h", "y": 1.12},
        "bargap": 0.25,
        "uirevision": "keep",  # a person's zoom survives updates
    }


def _line(**ends: Any) -> dict[str, Any]:
    return {"type": "line", "line": {"dash": "dash", "color": THETA, "width": 1.5}, **ends}


def gate_figure(trace: Trace, predicted: bool = False) -> Figure:
    """p_exit per candidate layer against theta, the chosen exit in colour."""
    read = [(reading.layer, reading.p_exit) for reading in trace.gate if reading.p_exit is not None]
    theta = trace.theta
    words = []
    for layer, p_exit in read:
        verdict = "" if theta is None else f"; below θ = {theta:.2f}, so it stays"
        if theta is not None and p_exit >= theta:
            verdict = f"; at least θ = {theta:.2f}, so it " + ("leaves here" if layer == trace.exit_after else "may go")
        words.append(f"After layer {layer} the gate is {p_exit:.0%} sure<br>that the picture may go{verdict}.")
    layout = _layout("after layer", "p(exit)", 1.05, trace.layers)
    layout["showlegend"] = False
    if theta is not None:
        layout["shapes"] = [_line(xref="paper", x0=0, x1=1, y0=theta, y1=theta)]
        label = {"xref": "paper", "x": 1, "y": theta, "text": f"θ = {theta:.2f}", "showarrow": False, "yshift": 9}
        layout["annotations"] = [label]
    bars = {
        "type": "bar",
        "name": "p(exit)",
        "x": [layer for layer, _ in read],
        "y": [round(p_exit, 4) for _, p_exit in read],
        "marker": {
            "color": [OURS if layer == trace.exit_after else MUTED for layer, _ in read],
            "line": OUTLINE | {"width": 1},
        },
        "text": words,
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }
    summary = (PREDICTED if predicted else "") + exit_sentence(trace)
    return {"name": "exit", "data": [bars], "layout": layout, "summary": summary}


def prefix_figure(trace: Trace, predicted: bool = False) -> Figure:
    """Experts kept per layer: bars for the prefill, dots for the decode step at hand; dense is all of them."""
    layers = list(range(trace.layers))
    some = [layer in trace.expert_layers for layer in layers]  # no bar at a layer without experts
    kept = [(m or trace.experts) * some[layer] for layer, m in enumerate(trace.prefix.prefill)]
    words = [
        f"In layer {layer} the prefill {'would use' if predicted else 'used'} {m} of {trace.experts} experts<br>"
        f"for {trace.live[layer]} tokens of picture and question."
        for layer, m in enumerate(kept)
    ]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "prefill",
            "x": layers,
            "y": kept,
            "marker": {"color": [DENSE if m is None else OURS for m in trace.prefix.prefill]},
            "text": words,
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]
    if trace.prefix.decode:
        data += latest_prefix(trace, trace.prefix.decode[-1])
    limited = [m for m in trace.prefix.prefill if m is not None]
    summary = f"All {trace.experts} experts in every layer."
    if limited:
        summary = f"In {len(limited)} of {trace.layers} layers the prefill keeps {min(limited)} to {max(limited)} of "
        summary += f"{trace.experts} experts"
        summary += ", approximately." if predicted else f"; over the whole answer the mean is {trace.mean_prefix:.1f}."
    layout = _layout("layer", "experts kept", trace.experts * 1.1, trace.layers) | {"showlegend": True}
    return {
        "name": "prefix",
        "data": data,
        "layout": layout,
        "summary": (PREDICTED if predicted else "") + summary,
    }


def latest_prefix(trace: Trace, kept: Sequence[int | None]) -> list[Figure]:
    """Dots over `prefix_figure`: what the latest token's forward kept."""
    some = [layer in trace.expert_layers for layer in range(trace.layers)]
    dots = {
        "x": list(range(trace.layers)),
        "y": [(m or trace.experts) if some[layer] else None for layer, m in enumerate(kept)],
        "hovertemplate": "For the latest token layer %{x}<br>used a prefix of %{y} experts.<extra></extra>",
    }
    return [LATEST | dots]


def latest_experts(ran: Sequence[Sequence[int]]) -> list[Figure]:
    """Dots over `routing_figure`: the experts that the latest token ran through, per layer by rank."""
    pairs = [(expert, layer) for layer, experts in enumerate(ran) for expert in experts]
    dots = {
        "x": [expert for expert, _ in pairs],
        "y": [layer for _, layer in pairs],
        "hovertemplate": "The latest token runs through the expert<br>at rank %{x} of layer %{y}.<extra></extra>",
    }
    return [LATEST | dots]


def routing_figure(trace: Trace, orders: Sequence[Sequence[int]], predicted: bool = False) -> Figure:
    """Share of each layer's routed mass on each expert, in prefix order, with the prefix boundary.

    Args:
        orders: (L, E), the native experts of each layer in prefix order.
    """
    shares = {name: _shares(trace.mass[name], orders) for name in ("text", "visual")}
    pairs = zip(shares["text"], shares["visual"], strict=True)
    gap = [[None if a is None or b is None else round(a - b, 2) for a, b in zip(*rows, strict=True)] for rows in pairs]
    boundary: dict[str, list[Any]] = {"x": [], "y": []}
    for layer, length in enumerate(trace.prefix.prefill):
        if length is not None:
            boundary["x"] += [length - 0.5] * 2
            boundary["y"] += [layer - 0.5, layer + 0.5]
    edge = {
        "type": "scatter",
        "mode": "lines",
        "name": "prefix boundary",
        **boundary,
        "line": {"color": OURS, "width": 2},
        "hovertemplate": "The prefill uses no expert<br>right of this line in layer %{y:.0f}.<extra></extra>",
    }
    top = max((share for rows in shares.values() for row in rows for share in row if share is not None), default=1)
    views = {}
    answer = {"answer": _shares(trace.mass["generated"], orders)} if trace.tokens.generated > 1 else {}
    for name, values in (*shares.items(), ("difference", gap), *answer.items()):
        what = {
            "difference": "text tokens more than visual ones (less, if negative)",
            "answer": "the answer's tokens",
        }.get(name, f"{name} tokens")
        heat: dict[str, Any] = {
            "type": "heatmap",
            "name": name,
            "z": values,
            "hovertemplate": "Of layer %{y}'s routed mass the expert at rank %{x}<br>gets %{z:.1f} % from "
            + f"{what}.<extra></extra>",
            "colorbar": {"thickness": 10, "ticksuffix": " %", "len": 1},
        }
        if name == "difference":
            heat |= {"zmid": 0, "colorscale": SHARE}
        else:
            modality = "generated" if name == "answer" else name
            heat |= {"zmin": 0, "zmax": top, "colorscale": scale(MODALITIES[modality])}
        views[name] = {"data": [heat, edge]}
    layout = _layout("expert, in prefix order", "layer", trace.layers - 0.5, trace.experts)
    layout["yaxis"] |= {"range": [-0.5, trace.layers - 0.5], "dtick": max(1, trace.layers // 8)}
    layout["xaxis"]["dtick"] = max(1, trace.experts // 8)
    layout["showlegend"] = False
    if trace.exit_after is not None:
        layout["shapes"] = [_line(xref="paper", x0=0, x1=1, y0=trace.exit_after + 0.5, y1=trace.exit_after + 0.5)]
    summary = (
        "Where tokens go: each row is a layer, each column an expert, those that text uses most on the left. The "
        "dashed line is the exit, the solid one the prefix boundary: the prefill does not use experts right of it."
    )
    return {
        "name": "routing",
        "height": 320,
        "data": views["text"]["data"],
        "views": views,
        "layout": layout,
        "summary": (PREDICTED if predicted else "") + summary,
    }


def _shares(mass: list[list[float] | None], orders: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """Percent of each layer's mass, experts in order; None where a layer has no experts or saw no such token."""
    rows: list[list[float | None]] = []
    for layer, order in zip(mass, orders, strict=True):
        whole = sum(layer or ())
        rows.append([round(100 * layer[expert] / whole, 2) if layer and whole else None for expert in order])
    return rows


Get = Callable[[Trace], float | None]
NUMBERS: tuple[tuple[str, str, Callable[[float], str], Get, Get | None], ...] = (
    (
        "TTFT",
        "Time to first token: from the start of the vision encoder to the first token of the answer.",
        lambda s: f"{s * 1000:.0f} ms",
        lambda t: t.ttft_s,
        None,
    ),
    (
        "TPOT",
        "Time per output token: the mean time that every further token takes. Of fewer than five tokens the ratio is "
        "chance, and not shown.",
        lambda s: f"{s * 1000:.0f} ms",
        lambda t: t.tpot_s,
        None,
    ),
    (
        "FLOPs, executed",
        "Operations of the decoder and the gates if every expert of a prefix runs for every token, which is how the "
        "paper counts.",
        lambda n: f"{n / 1e9:.2f} G",
        lambda t: t.flops.executed,
        lambda t: t.flops.executed_dense,
    ),
    (
        "FLOPs, sparse",
        "The same if only the top-k experts of each token run, which is what sparse kernels do.",
        lambda n: f"{n / 1e9:.2f} G",
        lambda t: t.flops.sparse,
        lambda t: t.flops.sparse_dense,
    ),
    (
        "KV cache",
        "Memory for the keys and values of all layers at the end of the answer.",
        lambda n: f"{n / 1024:.0f} kB",
        lambda t: t.kv_bytes,
        lambda t: t.kv_bytes_dense,
    ),
)


def _rows(dense: Trace | None, ours: Trace | None) -> list[tuple[str, str, str, str, float | None]]:
    """Name, meaning, both values and their ratio; costs are compared at DecoMoE's answer length."""
    rows: list[tuple[str, str, str, str, float | None]] = []
    for name, meaning, show, get, get_dense in NUMBERS:
        left, right = (None if trace is None else get(trace) for trace in (dense, ours))
        base = left
        if dense and ours and get_dense:  # a baseline that is not dense is made as long, too
            base = (left or 0) * (get_dense(ours) or 0) / (get_dense(dense) or 1)
        ratio = right / base if base and right is not None else None
        if name == "TPOT" and any(trace and trace.tokens.generated < ENOUGH for trace in (dense, ours)):
            ratio = None
        left_text, right_text = ("–" if value is None else show(value) for value in (left, right))
        rows.append((name, meaning, left_text, right_text, ratio))
    return rows


def numbers(dense: Trace | None, ours: Trace | None, first: str = "Dense") -> str:
    """TTFT, TPOT, FLOPs and KV cache of both, with the ratio, as HTML; None for what has not run yet."""
    body = ""
    for at, (name, meaning, left, right, ratio) in enumerate(_rows(dense, ours)):
        body += (
            f'<tr><th scope="row"><span class="help" tabindex="0" aria-describedby="help-{at}">{name}</span>'
            f'<span class="tip" role="tooltip" id="help-{at}">{meaning}</span></th>'
            f"<td>{left}</td><td>{right}</td><td>{'–' if ratio is None else f'{ratio:.2f}'}</td></tr>"
        )
    return (
        f'<table class="numbers"><thead><tr><td></td><th scope="col">{first}</th><th scope="col">DecoMoE</th>'
        f'<th scope="col">Ratio</th></tr></thead><tbody>{body}</tbody></table>'
        '<p class="quiet">The ratio of FLOPs and cache is at DecoMoE\'s answer length, so that a shorter answer '
        "is no saving. Times are of this machine.</p>"
    )


def _side(side: int) -> dict[str, Any]:
    """The look of the baseline's bars (0) and of DecoMoE's (1)."""
    color, pattern = SIDES[side]
    return {"color": color, "pattern": {**HATCH, "shape": pattern}}


def cost_figure(dense: Trace, ours: Trace, first: str = "Dense") -> Figure:
    """What DecoMoE costs, as a share of the baseline, whose name is `first`."""
    rows = [row for row in _rows(dense, ours) if row[4] is not None][::-1]
    names = [row[0] for row in rows]
    bars = [
        (first, [1.0] * len(rows), [f"{row[0]}: {row[2]} in the baseline's run." for row in rows]),
        (
            "DecoMoE",
            [round(row[4] or 0, 4) for row in rows],
            [f"{row[0]}: {row[3]}.<br>{row[1]}" for row in rows],
        ),
    ]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": values,
            "y": names,
            "marker": _side(side),
            "text": words,
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
        for side, (name, values, words) in enumerate(bars)
    ]
    said = ", ".join(f"{row[0]} {row[4]:.2f}" for row in rows[::-1])
    layout = {
        "margin": {"l": 110, "r": 10, "t": 45, "b": 40},
        "xaxis": {"title": {"text": f"share of {first}"}, "rangemode": "tozero"},
        "legend": {
            "orientation": "h",
            "xref": "container",
            "x": 0,
            "yref": "container",
            "yanchor": "top",
            "y": 1,
            "traceorder": "reversed",
        },
        "bargap": 0.3,
        "barmode": "group",
    }
    return {"name": "costs", "data": data, "layout": layout, "summary": f"DecoMoE against {first}: {said}."}


def latency_figure(found: dict[str, Breakdown]) -> Figure:
    """Where the time went: parts of prefill and decode step of each method, and by layer as in Figure 1a."""
    views: dict[str, Figure] = {}
    phases: dict[str, Any] = {"prefill": lambda one: one.prefill, "decode step": lambda one: one.decode}
    rows = []
    for view, phase in phases.items():
        data = [_time_bars(name, phase(one).parts, side, view) for side, (name, one) in enumerate(found.items())]
        views[view] = {"data": data, "layout": _time_layout(), "summary": _time_summary(view, data)}
        rows += [
            {"method": name, "phase": view, "layer": layer, "part": part, "ms": round(seconds * 1000, 3)}
            for name, one in found.items()
            for layer, parts in enumerate(phase(one).layers)
            for part, seconds in parts.items()
        ]
    views["by layer"] = shown(fig1a(Data(rows, {})), "latency")
    traces = [event for name, one in found.items() for event in one.chrome_trace(name)]
    first = views["prefill"]
    return {**first, "name": "latency", "height": 300, "views": views, "downloads": {"Trace": {"traceEvents": traces}}}


def _time_bars(name: str, spent: dict[str, float], side: int, view: str) -> Figure:
    whole = sum(spent.values())
    return {
        "type": "bar",
        "name": name,
        "x": list(spent),
        "y": [round(seconds * 1000, 3) for seconds in spent.values()],
        "marker": _side(side),
        "text": [
            f"{part.capitalize()} took {seconds * 1000:.1f} ms,<br>{seconds / whole:.0%} of the {view} of {name}."
            for part, seconds in spent.items()
        ],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }


def _time_layout() -> dict[str, Any]:
    return {
        "margin": {"l": 50, "r": 10, "t": 10, "b": 40},
        "xaxis": {"automargin": True},
        "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.15},
        "barmode": "group",
        "bargap": 0.25,
    }


def _time_summary(view: str, data: list[Figure]) -> str:
    parts = []
    for bars in data:
        part, longest = max(zip(bars["x"], bars["y"], strict=True), key=lambda pair: pair[1])
        parts.append(f"{bars['name']}: {sum(bars['y']):.0f} ms, most of it {part} ({longest:.0f} ms)")
    note = "Watching slows the work: believe the shares here, and TTFT and TPOT for times."
    return f"One {view}. {'; '.join(parts)}. {note}"
