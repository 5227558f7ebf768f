"""The Space: the page, on the model that environment variables choose."""

import os
import sys

if os.environ.get("SPACES_ZERO_GPU"):
    import spaces  # noqa: F401 (before anything touches CUDA)

from decomoe.ui.hosting import chosen
from decomoe.ui.page import serve

if __name__ == "__main__":
    try:
        serve(chosen())
    except (OSError, ValueError) as error:
        print(f"decomoe: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
