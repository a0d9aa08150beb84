"""The launcher's own log: one line a request and what was unusual, in a file of bounded size."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from collections.abc import Iterator
from pathlib import Path

_LOGGER = "eagle3_serve"
_LARGEST_FILE = 16 * 1024 * 1024
_OLDER_FILES = 4


@contextlib.contextmanager
def logging_to(file: Path) -> Iterator[None]:
    """While the block runs, everything this package logs goes to `file`; older files are kept as FILE.1 to FILE.4."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        file, maxBytes=_LARGEST_FILE, backupCount=_OLDER_FILES, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
