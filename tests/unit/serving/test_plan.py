from __future__ import annotations

import json
from pathlib import Path

from eagle3_serve.config.schema import Config
from eagle3_serve.core.contract import DrafterIds, Resolution, resolve
from eagle3_serve.serving import plan as plans
from eagle3_serve.serving.plan import LaunchPlan, OverlayChoice, make_plan
from tests.unit.serving.conftest import changed


def contract() -> Resolution:
    return resolve(layers=[2, 30, 58], convention="contract", drafter=DrafterIds((2, 30, 58)), num_layers=61)


def plan_for(config: Config, tmp_path: Path) -> LaunchPlan:
    return make_plan(
        config,
        contract=contract() if config.drafter.enabled else None,
        overlay=OverlayChoice("0.5.23-abc", "0.5.23", tmp_path / "overlay"),
        engine_port=31000,
        run_dir=tmp_path / "run",
        python="/usr/bin/python3",
        cores=2,
        inherited_python_path="/inherited",
    )


def test_a_plan_is_equal_for_equal_input(config: Config, tmp_path: Path) -> None:
    assert plan_for(config, tmp_path) == plan_for(config, tmp_path)


def test_the_overlay_comes_first_on_the_path_and_the_operators_own_last(config: Config, tmp_path: Path) -> None:
    paths = plan_for(config, tmp_path).engine.environment["PYTHONPATH"].split(":")
    assert paths[0] == str(tmp_path / "overlay")
    assert paths[1].endswith("engine/cpu/site")
    assert paths[-1] == "/inherited"


def test_a_gpu_engine_gets_no_stand_in_kernels(config: Config, tmp_path: Path) -> None:
    on_gpu = plan_for(changed(config, engine={"device": "cuda"}), tmp_path)
    assert "cpu/site" not in on_gpu.engine.environment["PYTHONPATH"]
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu.engine.environment


def test_the_contract_reaches_the_engine_by_environment(config: Config, tmp_path: Path) -> None:
    environment = plan_for(config, tmp_path).engine.environment
    assert environment["EAGLE3_SERVE_AUX_LAYERS"] == "2,30,58"
    alone = plan_for(changed(config, drafter={"enabled": False}), tmp_path)
    assert "EAGLE3_SERVE_AUX_LAYERS" not in alone.engine.environment


def test_secrets_appear_neither_in_the_script_nor_in_json(config: Config, tmp_path: Path) -> None:
    secret = "hunter2-very-secret"
    with_secrets = changed(
        config,
        engine={
            "environment": {"HF_TOKEN": secret, "NCCL_PROTO": "LL"},
            "extra_args": {"ssl-keyfile-password": secret},
        },
        gateway={"api_key": secret, "admin_key": secret},
    )
    plan = plan_for(with_secrets, tmp_path)
    assert secret in plan.engine.environment.values()  # it does reach the engine
    for shown in (plans.render(plan), json.dumps(plans.as_dict(plan)), repr(with_secrets.gateway)):
        assert secret not in shown
    assert "export NCCL_PROTO=LL" in plans.render(plan)


def test_the_script_is_what_would_run(config: Config, tmp_path: Path) -> None:
    script = plans.render(plan_for(config, tmp_path))
    assert "-m sglang.launch_server" in script
    assert "--speculative-num-draft-tokens 4" in script
    assert "# layers     [2, 30, 58]" in script


def test_an_ipv6_address_is_bracketed(config: Config, tmp_path: Path) -> None:
    plan = plan_for(changed(config, engine={"host": "::1"}, gateway={"host": "::1"}), tmp_path)
    assert plan.engine.url == "http://[::1]:31000"
    assert plan.gateway_url(80) == "http://[::1]:80"
