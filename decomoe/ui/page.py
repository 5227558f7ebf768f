"""The page: a shell of tabs, each in its own file; and how it is served."""

from typing import Any

import gradio as gr

from ..ask import Loaded
from . import api, ask, compare, explore, results
from .chart import HEAD, allow_plotly
from .common import warm_up
from .guard import MAX_SESSIONS, MAX_UPLOAD, GuardedBlocks, app_options

TABS = {"Ask": ask.tab, "Compare": compare.tab, "Explore": explore.tab, "Results": results.tab}
INTRO = """# DecoMoE
A multimodal mixture-of-experts model wastes work in two ways. **SAVB**: after some layer the question no longer needs \
the picture, so all its tokens leave. **RCEP**: after that, most of the experts are not needed either. \
Ask something and see what leaves, layer by layer."""
CSS = ".chart-note {font-size: 0.9rem; margin: 0.2rem 0.5rem} footer {display: none !important}"


def build(loaded: Loaded) -> gr.Blocks:
    """The page for one loaded model; nothing is launched."""
    allow_plotly()
    warm_up(loaded)
    with GuardedBlocks(title="DecoMoE", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        api.add(loaded)  # first, so that its names are free
        gr.Markdown(INTRO)
        with gr.Tabs():
            for name, tab in TABS.items():
                with gr.Tab(name):
                    tab(loaded)
    return page.queue(max_size=32, api_open=False)


def serve(loaded: Loaded, port: int | None = None) -> None:
    """Build the page and serve it until interrupted."""
    build(loaded).launch(**launch_options(loaded, port))


def launch_options(loaded: Loaded, port: int | None = None) -> dict[str, Any]:
    """What the page needs at launch."""
    return {
        "server_port": port,
        "head": HEAD,
        "css": CSS,
        "theme": gr.themes.Soft(font=["system-ui", "sans-serif"]),
        "max_file_size": MAX_UPLOAD,
        "state_session_capacity": MAX_SESSIONS,
        "show_error": False,
        "app_kwargs": app_options(loaded),
        "mcp_server": True,
        "ssr_mode": False,
        "run_history": False,
        "enable_monitoring": False,
    }
