"""The Space: the page, on the model that environment variables choose."""

import os
import sys

if os.environ.get("SPACES_ZERO_GPU"):
    import spaces  # noqa: F401 (before anything touches CUDA)


def main() -> int:
    """Serve the page until interrupted; the exit status."""
    print("Starting; torch and Gradio take some seconds to load.", flush=True)
    try:
        from decomoe.ui.hosting import chosen  # noqa: PLC0415 (Ctrl-C meanwhile ends quietly)
        from decomoe.ui.page import serve  # noqa: PLC0415

        serve(chosen())
    except (OSError, ValueError) as error:
        print(f"decomoe: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
