"""Configuration -> a launch that is decided and checked: nothing is started, and no file is left."""

from __future__ import annotations

import datetime
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3_serve.config.resolve import Resolved
from eagle3_serve.config.schema import Config
from eagle3_serve.core.contract import DrafterIds, Resolution, resolve
from eagle3_serve.core.errors import CheckpointError, ContractError, OverlayError
from eagle3_serve.core.process import free_port
from eagle3_serve.serving import preflight
from eagle3_serve.serving.machine import Machine, read_machine
from eagle3_serve.serving.overlay import debug
from eagle3_serve.serving.overlay.build import OverlayPlan, build_overlay
from eagle3_serve.serving.overlay.installed import installed_sglang
from eagle3_serve.serving.overlay.manifest import load_manifest, supported_versions
from eagle3_serve.serving.plan import LaunchPlan, OverlayChoice, make_plan
from eagle3_serve.serving.preflight import Checkpoints, Finding

_UNKNOWN_TARGET = "which layers the drafter needs cannot be said without the target's number of layers"


@dataclass(frozen=True)
class Prepared:
    """A plan, the overlay it needs (None where SGLang cannot be patched; a finding says why), and all findings."""

    plan: LaunchPlan
    overlay: OverlayPlan | None
    findings: Sequence[Finding]


def prepare(resolved: Resolved, machine: Machine | None = None) -> Prepared:
    """Run every cheap check and decide the launch. Faults become findings: `preflight.require` raises them."""
    config = resolved.config
    machine = machine or read_machine(config.engine.python, try_kernels=config.engine.device == "cuda")
    release = _release(config, machine)
    checkpoints, findings = preflight.read_checkpoints(config)
    contract, contract_findings = decide_contract(config, checkpoints)
    overlay, overlay_findings = _plan_overlay(config, machine)
    findings += [
        *(Finding("warning", "configuration", text) for text in resolved.warnings),
        *preflight.check_target(checkpoints),
        *preflight.check_drafter(checkpoints),
        *contract_findings,
        *preflight.check_layers_of_release(checkpoints, contract, release),
        *preflight.check_states(checkpoints, contract, release),
        *preflight.check_features(checkpoints, release),
        *preflight.check_tensors(checkpoints),
        *preflight.check_draft_vocabulary(checkpoints),
        *preflight.check_rope(checkpoints, release),
        *preflight.check_tokens(config, checkpoints),
        *preflight.check_arguments(config),
        *preflight.check_release(config, machine, supported_versions()),
        *overlay_findings,
        *debug.check_debug_layer(config),
        *preflight.check_devices(config, machine),
        *preflight.check_kernels(config, machine),
        *preflight.check_attention_backends(config, machine),
        *preflight.check_tap(config, machine),
        *preflight.check_exposure(config, resolved.secrets),
        *preflight.check_ports(config),
        *preflight.check_directories(config),
    ]
    plan = make_plan(
        config,
        contract=contract,
        overlay=_overlay_choice(config, overlay, machine),
        engine_port=config.engine.port or _free_engine_port(config.engine.host),
        run_dir=config.paths.run_dir / _run_name(),
        python=str(config.engine.python or sys.executable),
        cores=machine.cores,
        vocab_size=checkpoints.vocab_size,
        inherited_python_path=os.environ.get("PYTHONPATH", ""),
    )
    return Prepared(plan, overlay, tuple(findings))


def decide_contract(config: Config, checkpoints: Checkpoints) -> tuple[Resolution | None, list[Finding]]:
    """The layers by contract, or None with a finding; also None where nobody needs them."""
    if not config.drafter.enabled:
        return _contract_of_tap(config, checkpoints)
    num_layers = checkpoints.num_layers
    if num_layers is None and config.aux_layers.layers is None:
        return None, [Finding("error", "layers", _UNKNOWN_TARGET, "correct target.path", CheckpointError)]
    try:
        drafter = DrafterIds.from_config(checkpoints.drafter) if checkpoints.drafter else _unread_drafter(config)
        contract = resolve(
            layers=config.aux_layers.layers,
            convention=config.aux_layers.convention,
            drafter=drafter,
            # Without the target's config the range cannot be checked; `check_target` has that finding.
            num_layers=num_layers or sys.maxsize,
        )
    except ContractError as error:
        return None, [Finding("error", "layers", error.message, error.remedy, ContractError)]
    if checkpoints.drafter is None:
        said = contract.reason.partition(";")[0]
        contract = replace(contract, reason=f"{said}; the drafter's own config could not be read")
    return contract, [Finding("warning" if contract.contradicts_drafter else "ok", "layers", contract.reason)]


def _contract_of_tap(config: Config, checkpoints: Checkpoints) -> tuple[Resolution | None, list[Finding]]:
    """Without a drafter only the tap wants layers, and only the configuration can name them."""
    if config.tap.mode == "off" or config.tap.layers == "all":
        return None, []
    layers = config.aux_layers.layers
    if layers is None:
        message = f"tap.mode is {config.tap.mode}, no drafter is served, and aux_layers.layers names no layers"
        remedy = "set aux_layers.layers and aux_layers.convention, or tap.layers: all"
        return None, [Finding("error", "layers", message, remedy, ContractError)]
    try:
        contract = resolve(
            layers=layers,
            convention=config.aux_layers.convention,
            drafter=DrafterIds(states=len(layers)),
            num_layers=checkpoints.num_layers or sys.maxsize,
        )
    except ContractError as error:
        return None, [Finding("error", "layers", error.message, error.remedy, ContractError)]
    return contract, [Finding("ok", "layers", f"for the tap, without a drafter: {contract.layers}")]


def install_overlay(prepared: Prepared, config: Config) -> Path:
    """Build the overlay that the plan names, or find it already built. Raises OverlayError."""
    if prepared.overlay is None:
        raise OverlayError("there is no overlay for this launch")
    return build_overlay(prepared.overlay, config.paths.cache_dir)


def _unread_drafter(config: Config) -> DrafterIds:
    return DrafterIds(states=len(config.aux_layers.layers or (0, 0, 0)))


def _plan_overlay(config: Config, machine: Machine) -> tuple[OverlayPlan | None, list[Finding]]:
    if machine.sglang is None or machine.sglang not in supported_versions():
        return None, []  # check_release says it
    try:
        installed = installed_sglang(config.engine.python)
        overlay = debug.plan_for_launch(load_manifest(installed.version), installed.package, config.paths.cache_dir)
    except OverlayError as error:
        return None, [Finding("error", "overlay", error.message, error.remedy, OverlayError)]
    return overlay, [Finding("ok", "overlay", f"{overlay.id}: {len(overlay.files)} patched files")]


def _release(config: Config, machine: Machine) -> str:
    """Whose behaviour the checks are about: the installed release, or the intended one where none that we know is."""
    known = supported_versions()
    return next((each for each in (machine.sglang, config.engine.release) if each in known), known[-1])


def _overlay_choice(config: Config, overlay: OverlayPlan | None, machine: Machine) -> OverlayChoice:
    release = machine.sglang or config.engine.release or supported_versions()[-1]
    overlay_id = overlay.id if overlay else f"{release}-unknown"
    directory = (
        overlay.directory(config.paths.cache_dir) if overlay else config.paths.cache_dir / "overlays" / overlay_id
    )
    files = tuple((str(file.path), file.sha256) for file in overlay.files) if overlay else ()
    return OverlayChoice(overlay_id, release, directory, files)


def _free_engine_port(host: str) -> int:
    """0 where the host is none of this machine's: `check_ports` has that finding."""
    try:
        return free_port(host)
    except OSError:
        return 0


def _run_name() -> str:
    """Sorts by time; the tail keeps two launches in one second apart."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
