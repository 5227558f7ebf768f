"""The page: a shell of tabs, each in its own file; and how it is served."""

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import gradio as gr

from ..colors import DENSE, OURS
from . import api, ask, chart, compare, explore, panes, results
from .guard import MAX_SESSIONS, MAX_UPLOAD, GuardedBlocks, app_options
from .hosting import BEAT_S, LOADING, ZERO_GPU, Host

TABS = {"Ask": ask.tab, "Compare": compare.tab, "Explore": explore.tab, "Results": results.tab}
INTRO = """# DecoMoE
A multimodal mixture-of-experts model wastes work in two ways. **SAVB**: after some layer the question no longer needs \
the picture, so all its tokens leave. **RCEP**: after that, most of the experts are not needed either. \
Ask something and see what leaves, layer by layer."""
CSS = (
    f":root {{--ours: {OURS}; --dense: {DENSE}}}"
    + """
.gradio-container {--body-text-color-subdued: #596273; --block-info-text-color: #596273;
  --input-placeholder-color: #596273; --border-color-primary: #dfe4ec}
.dark .gradio-container, .gradio-container.dark {--body-text-color-subdued: #b3bbc8; --block-info-text-color: #b3bbc8;
  --input-placeholder-color: #b3bbc8; --border-color-primary: #3b4252}
.gradio-container {max-width: min(1240px, 100vw) !important; margin: 0 auto !important}
.gradio-container .app {max-width: 100% !important; min-width: 0 !important; box-sizing: border-box}
.dark [role=tab].selected {color: #93c5fd !important}
.intro {max-width: 46rem} .intro h1 {margin-bottom: 0.25rem}
#answers, #numbers {padding: 0 !important}
#line {height: 1.25rem; margin: -0.5rem 0; padding: 0 !important}
#line .wrap, #line .progress-text {position: static !important; transform: none; padding: 0; display: block}
.quiet, .quiet p {font-size: 0.875rem; color: var(--body-text-color-subdued)}
.gradio-container .wrap .or, .gradio-container .upload-container .wrap, .gradio-container span.info,
.gradio-container .info {color: var(--body-text-color-subdued)}
.gradio-container .numbers, .gradio-container .numbers :is(tr, td, th) {border: 0 !important;
  background: none !important}
.gradio-container .numbers {width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 0.9375rem}
.gradio-container .numbers :is(th, td) {padding: 0.3125rem 0.5rem;
  border-bottom: 1px solid var(--border-color-primary) !important}
.numbers td, .numbers thead th {text-align: right; white-space: nowrap}
.numbers tbody th {text-align: left; font-weight: 500; position: relative}
.numbers thead th {font-weight: 600}
.help {text-decoration: underline dotted; text-underline-offset: 3px; cursor: help}
.tip {position: absolute; left: 0; top: 100%; z-index: 10; width: min(20rem, 70vw); padding: 0.5rem 0.75rem;
  border-radius: 6px; font-weight: 400; font-size: 0.8125rem; background: var(--body-text-color);
  color: var(--background-fill-primary); visibility: hidden}
.help:hover + .tip, .help:focus + .tip {visibility: visible}
.example {justify-content: flex-start !important; text-align: left; font-weight: 400 !important; gap: 0.625rem;
  white-space: normal}
.example img {width: 44px !important; height: 44px !important; object-fit: cover; border-radius: 5px; margin: 0}
.quiet h2 {font-size: 1rem}
#loading {padding: 0.5rem 0.75rem; border-left: 3px solid var(--ours); background: var(--block-background-fill)}
.md.prose:has(> table) {overflow-x: auto}
.gradio-container .md.prose table {width: 100%; font-size: 0.875rem; font-variant-numeric: tabular-nums}
.gradio-container .md.prose :is(th, td) {padding: 0.375rem 0.5rem !important;
  border-color: var(--border-color-primary) !important}
.gradio-container .md.prose td {white-space: nowrap}
.gradio-container .md.prose th {overflow-wrap: normal; word-break: normal}
.gradio-container #compare-table td:nth-child(2) {white-space: normal; min-width: 12rem}
#compare-status:not(:has(p)) {display: none}
@media (max-width: 520px) {.gradio-container .app {padding: 0.75rem !important}
  .gradio-container .numbers {font-size: 0.8125rem}
  .gradio-container .numbers :is(th, td) {padding: 0.3125rem 0.25rem}}
footer {display: none !important}
"""
    + chart.CSS
    + panes.CSS
)
SCROLLABLE = """<script>  // wide tables can be scrolled with the keyboard too
new MutationObserver(() => document.querySelectorAll('.md.prose:has(> table)').forEach(node => { node.tabIndex = 0; }))
  .observe(document, {subtree: true, childList: true});
</script>"""
THEME = gr.themes.Soft(primary_hue="blue", secondary_hue="blue", font=["system-ui", "sans-serif"]).set(
    color_accent="*primary_600",  # the theme's own blue is too pale to read
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    button_secondary_background_fill_hover_dark="*neutral_700",
    block_label_text_color="*primary_700",
    block_title_text_color="*primary_700",
)


USUAL_PORT = 7860  # Gradio's
QUEUE_S = 0.02  # how often Gradio looks for questions; by default every millisecond, which takes 6 % of a processor


def build(host: Host) -> gr.Blocks:
    """The page for one model; nothing is launched."""
    chart.allow_plotly()
    with GuardedBlocks(title="DecoMoE", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        api.add(host)  # first, so that its names are free
        gr.Markdown(INTRO, elem_classes="intro")
        line = gr.Markdown(LOADING, visible=False, elem_id="loading")
        with gr.Tabs():
            for name, tab in TABS.items():
                with gr.Tab(name):
                    tab(host)
        page.load(
            partial(_loading, host),
            None,
            line,
            concurrency_limit=None,
            show_progress="hidden",
            api_visibility="private",
        )
    page.queue(max_size=32, api_open=False)
    page._queue.sleep_when_free = QUEUE_S
    return page


async def _loading(host: Host) -> AsyncIterator[dict[str, Any]]:
    """Shows the line above the tabs until the model is there."""
    while not host.ready:
        yield gr.update(visible=True)
        await asyncio.sleep(BEAT_S)
    yield gr.update(visible=False)


def serve(host: Host, port: int | None = None) -> None:
    """Serve the page until interrupted; the model is loaded meanwhile.

    Args:
        port: by default that of GRADIO_SERVER_PORT, or the first free one from `USUAL_PORT` on.

    Raises:
        ValueError, OSError: the model can't be loaded, or a named port is taken.
    """
    if ZERO_GPU:  # takes hold of what is loaded as the page starts
        host.load()
    page, port = build(host), port or _port_of_environment()
    try:
        page.launch(**launch_options(host, port), prevent_thread_lock=True)
    except OSError as error:
        raise OSError(f"Port {port} is taken; name another with --port or GRADIO_SERVER_PORT.") from error
    if port is None and page.server_port != USUAL_PORT:
        print(f"Port {USUAL_PORT} is taken; the page is on {page.server_port}.", flush=True)
    if not ZERO_GPU:
        host.load()
    page.block_thread()


def _port_of_environment() -> int | None:
    given = os.environ.get("GRADIO_SERVER_PORT") or None
    if given and not given.isdigit():
        raise ValueError(f"GRADIO_SERVER_PORT is a number, not '{given}'.")
    return int(given) if given else None


def launch_options(host: Host, port: int | None = None) -> dict[str, Any]:
    """What the page needs at launch."""
    return {
        "server_port": port,
        "head": chart.HEAD + SCROLLABLE,
        "css": CSS,
        "theme": THEME,
        "max_file_size": MAX_UPLOAD,
        "state_session_capacity": MAX_SESSIONS,
        "show_error": False,
        "app_kwargs": app_options(host),
        "mcp_server": True,
        "ssr_mode": False,
        "run_history": False,
        "enable_monitoring": False,
    }
