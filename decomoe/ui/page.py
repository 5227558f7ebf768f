"""The page: a shell of tabs, each in its own file; and how it is served."""

from typing import Any

import gradio as gr

from ..ask import Loaded
from . import ask, explore, results
from .chart import HEAD, allow_plotly
from .common import warm_up

TABS = {"Ask": ask.tab, "Explore": explore.tab, "Results": results.tab}
INTRO = """# DecoMoE
A multimodal mixture-of-experts model wastes work in two ways. **SAVB**: after some layer the question no longer needs \
the picture, so all its tokens leave. **RCEP**: after that, most of the experts are not needed either. \
Ask something and see what leaves, layer by layer."""
CSS = ".chart-note {font-size: 0.9rem; margin: 0.2rem 0.5rem} footer {display: none !important}"


def build(loaded: Loaded) -> gr.Blocks:
    """The page for one loaded model; nothing is launched."""
    allow_plotly()
    warm_up(loaded)
    with gr.Blocks(title="DecoMoE", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(INTRO)
        with gr.Tabs():
            for name, tab in TABS.items():
                with gr.Tab(name):
                    tab(loaded)
    return page.queue(max_size=32)


def serve(loaded: Loaded, port: int | None = None) -> None:
    """Build the page and serve it until interrupted."""
    build(loaded).launch(**launch_options(port))


def launch_options(port: int | None = None) -> dict[str, Any]:
    """What the page needs at launch."""
    return {
        "server_port": port,
        "head": HEAD,
        "css": CSS,
        "theme": gr.themes.Soft(font=["system-ui", "sans-serif"]),
        "max_file_size": "20mb",
        "show_error": True,
        "ssr_mode": False,
        "run_history": False,
        "enable_monitoring": False,
    }
