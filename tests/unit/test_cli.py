"""The command line as a user meets it: a real process, its exit code, what it prints, and that no traceback appears."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from eagle3_serve.cli import app

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "eagle3_serve", *arguments],
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in result.stderr + result.stdout
    return result


def launch(tmp_path: Path, *sets: str, config: Path = CONFIGS / "tiny-cpu.yaml") -> subprocess.CompletedProcess[str]:
    """A launch that must fail before anything is spawned; it writes nowhere but under tmp_path."""
    paths = (f"paths.run_dir={tmp_path}/runs", f"paths.cache_dir={tmp_path}/cache")
    arguments = [part for each in (*paths, *sets) for part in ("--set", each)]
    return run("launch", "--config", str(config), *arguments)


def test_a_missing_checkpoint_has_its_exit_code_and_names_the_path(tmp_path: Path) -> None:
    result = launch(tmp_path, f"target.path={tmp_path}/nowhere", "gateway.port=0")
    assert result.returncode == 11
    assert f"{tmp_path}/nowhere" in result.stderr
    assert "what to do" in result.stderr


def test_an_unknown_key_names_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    text = (CONFIGS / "tiny-cpu.yaml").read_text().replace("chunked_prefill_size", "chunked_prefil_size")
    config = tmp_path / "typo.yaml"
    config.write_text(text)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "chunked_prefil_size" in each)
    result = launch(tmp_path, config=config)
    assert result.returncode == 10
    assert f"typo.yaml:{line}" in result.stderr
    assert "chunked_prefill_size" in result.stderr


def test_a_missing_configuration_file_is_a_configuration_error(tmp_path: Path) -> None:
    result = launch(tmp_path, config=tmp_path / "none.yaml")
    assert result.returncode == 10
    assert "none.yaml" in result.stderr


def test_another_sglang_release_than_the_configured_one_is_refused(tmp_path: Path) -> None:
    result = launch(tmp_path, "engine.release=0.5.16", "gateway.port=0")
    assert result.returncode == 13
    assert "0.5.16" in result.stderr
    assert "is installed" in result.stderr


def test_a_taken_port_is_named_with_its_process(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = launch(tmp_path, f"gateway.port={port}")
    assert result.returncode == 15
    assert str(port) in result.stderr
    assert f"process {os.getpid()}" in result.stderr


@pytest.mark.parametrize("host", ["10.99.99.99", "no-such-host.invalid"])
@pytest.mark.parametrize("section", ["engine", "gateway"])
def test_an_address_that_is_not_this_machines_is_refused(tmp_path: Path, section: str, host: str) -> None:
    result = launch(tmp_path, f"{section}.host={host}", "gateway.port=0")
    assert result.returncode == 13
    assert host in result.stderr
    assert f"{section}.host" in result.stderr


def test_ambiguous_layers_are_refused_with_the_ways_to_read_them(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    source = ROOT / "models" / "tiny-kimi" / "drafter"
    config = json.loads((source / "config.json").read_text())
    config.pop("eagle3_serve", None)
    config["eagle_config"].pop("eagle_aux_hidden_state_convention", None)
    (drafter / "config.json").write_text(json.dumps(config))
    (drafter / "model.safetensors").symlink_to(source / "model.safetensors")
    result = launch(
        tmp_path, f"drafter.path={drafter}", "aux_layers.layers=null", "aux_layers.convention=auto", "gateway.port=0"
    )
    assert result.returncode == 12
    assert "[2, 30, 58]" in result.stderr
    assert "[1, 29, 57]" in result.stderr


def test_the_plan_for_eight_gpus_is_shown_on_a_machine_without_any() -> None:
    result = run("launch", "--config", str(CONFIGS / "kimi.yaml"), "--dry-run", environment={"PATH": "/usr/bin:/bin"})
    assert result.returncode == 11  # the first error is about the checkpoints, which are not here either
    assert "--tp-size 8" in result.stdout
    assert "EAGLE3_SERVE_AUX_LAYERS=2,30,58" in result.stdout
    assert "error    devices" in result.stdout
    assert "checks failed" in result.stderr


def test_the_plan_needs_no_sglang(tmp_path: Path) -> None:
    """With a Python that has none for the engine, as on an operator's laptop."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    result = run(
        "launch",
        *("--config", str(CONFIGS / "kimi.yaml"), "--dry-run", "--json"),
        *("--set", f"engine.python={bare}/bin/python"),
    )
    assert result.returncode == 11
    plan = json.loads(result.stdout)
    assert plan["layers"] == [2, 30, 58]
    assert any("SGLang is not installed" in finding["message"] for finding in plan["findings"])


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        ((), 0),
        (("gateway.host=0.0.0.0",), 0),  # without a key: a warning
        (("aux_layers.layers=[2, 30, 77]",), 12),
        (("drafter.path=/nowhere", "aux_layers.layers=[2, 30, 77]"), 11),
        (("engine.device=cuda",), 13),
    ],
    ids=str,
)
def test_a_dry_run_exits_as_the_launch_would_and_shows_everything_first(
    tmp_path: Path, sets: tuple[str, ...], code: int
) -> None:
    set_all = [part for each in ("gateway.port=0", f"paths.run_dir={tmp_path}/runs", *sets) for part in ("--set", each)]
    dry = run("launch", "--dry-run", "--json", *set_all)
    assert dry.returncode == code
    plan = json.loads(dry.stdout)
    assert plan["engine"]
    errors = [finding["message"] for finding in plan["findings"] if finding["level"] == "error"]
    assert bool(errors) == bool(code)
    assert all(error in dry.stderr for error in errors)
    if code:
        real = launch(tmp_path, "gateway.port=0", *sets)
        assert (real.returncode, real.stderr) == (code, dry.stderr)


def test_the_plan_as_json_has_no_secret(tmp_path: Path) -> None:
    secret = "hunter2-very-secret"
    for form in ([], ["--json"]):
        result = run(
            "launch",
            *("--dry-run", "--set", "gateway.port=0", "--set", f"engine.environment.HF_TOKEN={secret}", *form),
            environment={"EAGLE3_SERVE__GATEWAY__API_KEY": secret, "EAGLE3_SERVE__GATEWAY__ADMIN_KEY": secret},
        )
        assert result.returncode == 0
        assert secret not in result.stdout + result.stderr
        assert "HF_TOKEN" in result.stdout


def every_command(group: typer.core.TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from every_command(command, (*above, name))
        else:
            yield (*above, name)


COMMANDS = list(every_command(typer.main.get_command(app)))


def test_all_commands_are_there():
    names = {" ".join(command) for command in COMMANDS}
    assert {"launch", "config show", "patch verify", "patch debug on", "patch strip"} <= names
    assert {"verify wiring", "verify lossless", "verify acceptance"} <= names


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert re.search(r"Example:.*eagle3-serve\s+" + r"\s+".join(command), result.stdout, re.DOTALL)


def every_function(group: typer.Typer, above: str = "") -> Iterator[tuple[str, Callable[..., object]]]:
    """Name and function of each command and callback, as they were written."""
    for info in (*group.registered_commands, *([group.registered_callback] if group.registered_callback else [])):
        assert info.callback is not None
        yield f"{above}{info.name or info.callback.__name__}", info.callback
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from every_function(below.typer_instance, f"{above}{below.name} ")


def unnamed_options(function: Callable[..., object]) -> list[str]:
    """Parameters that are neither arguments nor options with a name of their own."""
    hints = typing.get_type_hints(function, include_extras=True)
    infos = {name: getattr(hints.get(name), "__metadata__", ()) for name in inspect.signature(function).parameters}
    return [name for name, info in infos.items() if not any(_is_named(each) for each in info)]


def _is_named(info: object) -> bool:
    if isinstance(info, typer.models.OptionInfo):
        # within Annotated the first name is where typer's signature has a default
        return any(str(name).startswith("--") for name in (info.default, *(info.param_decls or ())))
    return isinstance(info, typer.models.ArgumentInfo)


FUNCTIONS = dict(every_function(app))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_is_declared_with_its_name(name: str) -> None:
    """Releases of typer differ in what they call one that is not: 0.27 took its metavar."""
    assert unnamed_options(FUNCTIONS[name]) == []


def test_all_commands_are_looked_at_and_an_option_without_a_name_is_found() -> None:
    assert {" ".join(command) for command in COMMANDS} <= set(FUNCTIONS)

    def command(
        argument: Annotated[str, typer.Argument()],
        bare: int = 0,
        layers: Annotated[str, typer.Option(metavar="LAYERS")] = "",
        named: Annotated[str, typer.Option("--named", "-n")] = "",
    ) -> None: ...

    assert unnamed_options(command) == ["bare", "layers"]


def test_a_wrong_command_line_is_exit_code_2() -> None:
    assert run("launch", "--no-such-option").returncode == 2
    assert run("no-such-command").returncode == 2


def test_a_reader_that_goes_away_is_no_error() -> None:
    result = subprocess.run(
        f"{shlex.quote(sys.executable)} -m eagle3_serve config schema | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
