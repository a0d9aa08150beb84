"""The served drafter against the store that it was trained on: are the states the same?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sizes import Sizes, write_json
from steps import Steps

from eagle3_serve.core.reporter import make_reporter

RING_ROWS = 16384  # eight whole samples of the store, and their answers


def verify_wiring(sizes: Sizes, out: Path) -> dict[str, Any]:
    """OUT/results/wiring.json. Raises StepError where the wiring is wrong."""
    with make_reporter(as_json=False) as reporter:
        steps = Steps(out / "logs", reporter)
        given = ("--config", out / "served.yaml", "--store", out / "store", "--limit", "8")
        found = json.loads(steps.run("wiring", "verify", "wiring", *given, "--set", f"tap.rows={RING_ROWS}", "--json"))
    result = {"headline": "the drafter gets the states it was trained on", "steps": steps.as_dict(), "report": found}
    write_json(out / "results" / "wiring.json", result)
    return result
