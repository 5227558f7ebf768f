"""From traces to what the page shows: plotly figures as plain dicts, and a table."""

from typing import Any

from ..trace import Trace

OURS, DENSE, MUTED = "#2563eb", "#9ca3af", "#c7d2e0"
Figure = dict[str, Any]


def _layout(x: str, y: str, top: float, layers: int) -> dict[str, Any]:
    return {
        "margin": {"l": 45, "r": 10, "t": 30, "b": 40},
        "xaxis": {"title": {"text": x}, "range": [-0.6, layers - 0.4], "dtick": max(1, layers // 8)},
        "yaxis": {"title": {"text": y}, "range": [0, top]},
        "legend": {"orientation": "h", "y": 1.15},
        "bargap": 0.25,
        "uirevision": "keep",  # a person's zoom survives updates
    }


def gate_figure(trace: Trace) -> Figure:
    """p_exit per candidate layer against theta, the chosen exit in colour."""
    read = [reading for reading in trace.gate if reading.p_exit is not None]
    colors = [OURS if reading.layer == trace.exit_after else MUTED for reading in read]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": [reading.layer for reading in read],
            "y": [reading.p_exit for reading in read],
            "marker": {"color": colors},
            "hovertemplate": "after layer %{x}: p(exit) = %{y:.2f}<extra></extra>",
            "showlegend": False,
        }
    ]
    layout = _layout("layer", "p(exit)", 1.05, trace.layers)
    if trace.theta is not None:
        layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": trace.theta,
                "y1": trace.theta,
                "line": {"dash": "dash", "color": "#dc2626"},
            }
        ]
        layout["annotations"] = [
            {
                "xref": "paper",
                "x": 1,
                "y": trace.theta,
                "text": f"θ = {trace.theta:.2f}",
                "showarrow": False,
                "yshift": 9,
            }
        ]
    if trace.exit_after is None:
        summary = "The visual tokens stay in all layers."
    else:
        by = "the gate's choice" if read else "fixed"
        summary = f"The visual tokens leave after layer {trace.exit_after} of {trace.layers} ({by})."
    return {"data": data, "layout": layout, "summary": summary}


def prefix_figure(trace: Trace) -> Figure:
    """Experts kept per layer: bars for the prefill, dots for the decode step at hand; dense is all of them."""
    layers = list(range(trace.layers))
    some = [routes > 0 for routes in trace.routes.prefill]  # no bar at a layer without experts
    kept = [(m or trace.experts) * some[layer] for layer, m in enumerate(trace.prefix.prefill)]
    colors = [DENSE if m is None else OURS for m in trace.prefix.prefill]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "prefill",
            "x": layers,
            "y": kept,
            "marker": {"color": colors},
            "hovertemplate": "layer %{x}: %{y} experts<extra>prefill</extra>",
        }
    ]
    if trace.prefix.decode:
        last = [(m or trace.experts) if some[layer] else None for layer, m in enumerate(trace.prefix.decode[-1])]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "last token",
                "x": layers,
                "y": last,
                "marker": {"color": "#ea580c", "size": 8},
                "hovertemplate": "layer %{x}: %{y} experts<extra>last token</extra>",
            }
        )
    limited = [m for m in trace.prefix.prefill if m is not None]
    summary = f"All {trace.experts} experts in every layer."
    if limited:
        summary = (
            f"In {len(limited)} of {trace.layers} layers the prefill keeps {min(limited)} to {max(limited)} of "
            f"{trace.experts} experts; over the whole answer the mean is {trace.mean_prefix:.1f}."
        )
    return {
        "data": data,
        "layout": _layout("layer", "experts kept", trace.experts * 1.1, trace.layers),
        "summary": summary,
    }


def table(dense: Trace | None, ours: Trace | None) -> str:
    """TTFT, TPOT, FLOPs and KV cache of both, with the ratio, as Markdown; None for what has not run yet."""
    rows = [
        ("TTFT (time to first token)", _milliseconds, lambda t: t.ttft_s, None),
        ("TPOT (time per further token)", _milliseconds, lambda t: t.tpot_s, None),
        ("FLOPs, executed¹", _giga, lambda t: t.flops.executed, lambda t: t.flops.executed_dense),
        ("FLOPs, sparse²", _giga, lambda t: t.flops.sparse, lambda t: t.flops.sparse_dense),
        ("KV cache", _kilobytes, lambda t: t.kv_bytes, lambda t: t.kv_bytes_dense),
    ]
    lines = ["| | dense | DecoMoE | ratio³ |", "|---|---:|---:|---:|"]
    for name, show, get, get_dense in rows:
        left, right = (None if trace is None else get(trace) for trace in (dense, ours))
        base = get_dense(ours) if ours and get_dense else left
        ratio = "–" if base is None or right is None else f"{right / base:.2f}"
        lines.append(f"| {name} | {show(left)} | {show(right)} | {ratio} |")
    return "\n".join(lines) + (
        "\n\n¹ the paper's convention: every expert of the prefix for every token. ² what a sparse kernel computes:"
        " top-k only. Decoder layers and gates, whole answer. ³ FLOPs and cache at DecoMoE's answer length, so that a"
        " shorter answer is no saving. Times are of this machine, one question at a time."
    )


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.0f} ms"


def _giga(flops: float | None) -> str:
    return "–" if flops is None else f"{flops / 1e9:.2f} G"


def _kilobytes(size: float | None) -> str:
    return "–" if size is None else f"{size / 1024:.0f} kB"
