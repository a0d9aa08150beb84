"""What the tap inside the engine and those who read it agree on. Standard library only: both sides import it."""

from __future__ import annotations

REQUESTS = "tap-requests"
"""Directory in the report directory that the engine watches for questions."""

STORED_PREFIX = "extract-"
"""In store mode only requests whose id begins so are kept: nobody would ever collect the others."""

PREFILL, DECODE, VERIFY, DRAFT_EXTEND = 1, 2, 3, 4
"""Kinds of forward, in the rows of the probe."""
