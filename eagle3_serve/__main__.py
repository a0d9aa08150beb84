"""The entry point, of `eagle3-serve` and of `python -m eagle3_serve`: Ctrl-C is answered from here on."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line and run it."""
    # Started in the background, a process ignores SIGINT, and is to.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from eagle3_serve import cli  # noqa: PLC0415 - takes up to a second

    cli.main()


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt, for `cli.py` to report; but the end at once within an import, where libraries swallow it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"error: SIGINT: stopped\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
