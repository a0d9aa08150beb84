"""A launch as data: everything that will be run, decided before anything runs.

`make_plan` is pure; `render` and `as_dict` show a plan with secrets redacted, which is what `--dry-run` prints.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_serve.config.schema import Config
from eagle3_serve.core.contract import Resolution
from eagle3_serve.core.secrets import redact_argv, redact_environment
from eagle3_serve.serving.engine import command
from eagle3_serve.serving.engine.cpu import settings as cpu_settings


@dataclass(frozen=True)
class EnginePlan:
    """One SGLang server. `environment` is added to the launcher's own; times in seconds."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    url: str
    health_url: str
    log_file: Path
    report_dir: Path
    tp_size: int
    start_timeout_s: float
    stop_grace_s: float


@dataclass(frozen=True)
class OverlayChoice:
    """The overlay that the engine imports SGLang from; `directory` goes in front of PYTHONPATH.

    `files`: path in the package and hex SHA-256 of each patched file.
    """

    id: str
    release: str
    directory: Path
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """A whole launch: which layers, which overlay, which engine, which gateway."""

    run_dir: Path
    contract: Resolution | None
    overlay: OverlayChoice
    engine: EnginePlan
    gateway_address: tuple[str, int]
    served_name: str
    vocab_size: int | None
    readiness: str

    def gateway_url(self, port: int) -> str:
        """Base URL of the gateway once it listens on `port`."""
        return f"http://{_for_url(self.gateway_address[0])}:{port}"

    @property
    def gateway_log(self) -> Path:
        """One line a request, rotated."""
        return self.run_dir / "gateway.log"


def make_plan(
    config: Config,
    *,
    contract: Resolution | None,
    overlay: OverlayChoice,
    engine_port: int,
    run_dir: Path,
    python: str,
    cores: int,
    vocab_size: int | None = None,
    inherited_python_path: str = "",
) -> LaunchPlan:
    """Decide the launch. `contract` is None where no drafter is served; `engine_port` 0: none could be found."""
    engine = config.engine
    report_dir = run_dir / "engine"
    python_path = [overlay.directory]
    if engine.device == "cpu":
        python_path.append(cpu_settings.site_directory())
    url = f"http://{_for_url(engine.host)}:{engine_port}"
    engine_plan = EnginePlan(
        argv=command.engine_command(config, python=python, port=engine_port, release=overlay.release),
        environment=command.engine_environment(
            config,
            contract=contract,
            overlay_id=overlay.id,
            python_path=python_path,
            report_dir=report_dir,
            inherited_python_path=inherited_python_path,
            cores=cores,
        ),
        host=engine.host,
        url=url,
        health_url=f"{url}/health",
        log_file=run_dir / "engine.log",
        report_dir=report_dir,
        tp_size=engine.tp_size,
        start_timeout_s=engine.start_timeout_s,
        stop_grace_s=engine.stop_grace_s,
    )
    return LaunchPlan(
        run_dir=run_dir,
        contract=contract,
        overlay=overlay,
        engine=engine_plan,
        gateway_address=(config.gateway.host, config.gateway.port),
        served_name=config.target.served_name,
        vocab_size=vocab_size,
        readiness=f"GET {engine_plan.health_url} answers 200 within {engine.start_timeout_s:g} s, engine alive",
    )


def as_dict(plan: LaunchPlan) -> dict[str, Any]:
    """The plan for `--json`, secrets redacted."""
    host, port = plan.gateway_address
    return {
        "run_dir": str(plan.run_dir),
        "layers": list(plan.contract.layers.outputs) if plan.contract else None,
        "layers_reason": plan.contract.reason if plan.contract else "no drafter",
        "overlay": {
            "id": plan.overlay.id,
            "directory": str(plan.overlay.directory),
            "patched_files": dict(plan.overlay.files),
        },
        "engine": {
            "argv": redact_argv(plan.engine.argv),
            "environment": redact_environment(plan.engine.environment),
            "url": plan.engine.url,
            "log_file": str(plan.engine.log_file),
            "report_dir": str(plan.engine.report_dir),
            "start_timeout_s": plan.engine.start_timeout_s,
            "stop_grace_s": plan.engine.stop_grace_s,
        },
        "gateway": {"host": host, "port": port, "model": plan.served_name, "log_file": str(plan.gateway_log)},
        "readiness": plan.readiness,
    }


def render(plan: LaunchPlan) -> str:
    """The plan as a shell script with comments, secrets redacted."""
    shown = as_dict(plan)
    environment = shown["engine"]["environment"]
    lines = [
        f"# layers     {shown['layers']}: {shown['layers_reason']}",
        f"# overlay    {plan.overlay.id}  ({plan.overlay.directory})",
        f"# run dir    {plan.run_dir}",
        f"# engine log {plan.engine.log_file}",
        f"# access log {plan.gateway_log}",
        f"# ready when {plan.readiness}",
        f"# gateway    {plan.gateway_url(plan.gateway_address[1])}/v1  model {plan.served_name}",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        _command_lines(shown["engine"]["argv"]),
    ]
    return "\n".join(lines)


def _command_lines(argv: list[str]) -> str:
    """One option a line, so that two plans can be compared by eye and by diff."""
    lines: list[str] = []
    for part in argv:
        if part.startswith("--") or not lines:
            lines.append(shlex.quote(part))
        else:
            lines[-1] += f" {shlex.quote(part)}"
    return " \\\n  ".join(lines)


def _for_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
