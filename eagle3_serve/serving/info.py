"""What a running server really serves with: for the gateway's `/internal/info`."""

from __future__ import annotations

import json
from typing import Any

from eagle3_serve import __version__
from eagle3_serve.serving.plan import LaunchPlan


class ServerInfo:
    """The plan beside what the engine's own processes reported when they loaded the model.

    `target_digest`: of the checkpoint, for those who collect its hidden states from elsewhere.
    """

    def __init__(self, plan: LaunchPlan, target_digest: str | None = None) -> None:
        self._plan = plan
        self._target_digest = target_digest

    def read(self) -> dict[str, Any]:
        """Fresh from the report directory each time.

        `engine`: one entry a rank and model as written by `runtime/`, so the layers are those that the model
        captures, not those that were asked for. `consistent`: every rank reported, with the planned layers.
        """
        plan = self._plan
        planned = list(plan.contract.layers.outputs) if plan.contract else None
        reports = self._reports()
        captured = [report.get("layers") for name, report in reports.items() if name.startswith("capture-")]
        return {
            "eagle3_serve": __version__,
            "model": plan.served_name,
            "run_dir": str(plan.run_dir),
            "overlay": plan.overlay.id,
            "target_digest": self._target_digest,
            "sglang": plan.overlay.release,
            "layers": planned,
            "convention": str(plan.contract.convention) if plan.contract else None,
            "layers_reason": plan.contract.reason if plan.contract else "no drafter",
            "engine": reports,
            "consistent": planned is None
            or (len(captured) == plan.engine.tp_size and all(layers == planned for layers in captured)),
        }

    def _reports(self) -> dict[str, dict[str, Any]]:
        directory = self._plan.engine.report_dir
        files = sorted(directory.glob("*.json")) if directory.is_dir() else []
        return {file.stem: json.loads(file.read_text()) for file in files}
