from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_serve.config.schema import Config
from eagle3_serve.core.files import write_json_atomic
from eagle3_serve.serving.info import ServerInfo
from tests.unit.serving.conftest import changed
from tests.unit.serving.test_plan import plan_for


def test_before_the_model_has_reported_nothing_is_claimed(config: Config, tmp_path: Path) -> None:
    info = ServerInfo(plan_for(config, tmp_path)).read()
    assert info["layers"] == [2, 30, 58]
    assert info["engine"] == {}
    assert info["consistent"] is False


@pytest.mark.parametrize(("captured", "consistent"), [([2, 30, 58], True), ([1, 29, 57], False)])
def test_what_the_model_reported_is_compared_with_the_plan(
    config: Config, tmp_path: Path, captured: list[int], consistent: bool
) -> None:
    plan = plan_for(config, tmp_path)
    write_json_atomic(plan.engine.report_dir / "capture-rank0.json", {"layers": captured})
    info = ServerInfo(plan).read()
    assert info["engine"]["capture-rank0"]["layers"] == captured
    assert info["consistent"] is consistent


def test_every_rank_must_have_reported(config: Config, tmp_path: Path) -> None:
    plan = plan_for(changed(config, engine={"tp_size": 2}), tmp_path)
    write_json_atomic(plan.engine.report_dir / "capture-rank0.json", {"layers": [2, 30, 58]})
    assert ServerInfo(plan).read()["consistent"] is False
    write_json_atomic(plan.engine.report_dir / "capture-rank1.json", {"layers": [2, 30, 58]})
    assert ServerInfo(plan).read()["consistent"] is True


def test_without_a_drafter_there_is_nothing_to_contradict(config: Config, tmp_path: Path) -> None:
    alone = changed(config, drafter={"enabled": False})
    info = ServerInfo(plan_for(alone, tmp_path)).read()
    assert info["layers"] is None
    assert info["consistent"] is True


def test_whose_hidden_states_can_be_collected_is_said_where_somebody_may_ask(config: Config, tmp_path: Path) -> None:
    plan = plan_for(config, tmp_path)
    assert ServerInfo(plan, "sha256:abc").read()["target_digest"] == "sha256:abc"
    assert ServerInfo(plan).read()["target_digest"] is None
