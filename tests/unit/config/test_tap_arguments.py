"""The tap beside arguments with which its rows would be missing or another request's."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from eagle3_serve.config.schema import Config


def make(mode: str, extra_args: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "target": {"path": "/models/t"},
            "drafter": {"path": "/models/d"},
            "engine": {"extra_args": extra_args},
            "tap": {"mode": mode},
        }
    )


@pytest.mark.parametrize(
    "extra_args",
    [
        {"cuda-graph-backend-prefill": "full"},
        {"--cuda_graph_config": '{"prefill": {"backend": "full"}}'},
        {"enforce-piecewise-cuda-graph": True},
        {"enable_mixed_chunk": True},
        {"dp-size": 2},
        {"pp-size": 2},
    ],
)
def test_the_tap_refuses_what_would_mix_its_rows_and_only_the_tap(extra_args: dict[str, Any]) -> None:
    for mode in ("probe", "store"):
        with pytest.raises(ValidationError, match=f"tap.mode is {mode}"):
            make(mode, extra_args)
    assert make("off", extra_args).engine.extra_args


@pytest.mark.parametrize(
    "extra_args", [{"cuda-graph-backend-prefill": "disabled"}, {"enable-mixed-chunk": False}, {"pp-size": 1}]
)
def test_the_same_arguments_without_effect_are_no_fault(extra_args: dict[str, Any]) -> None:
    assert make("store", extra_args).tap.mode == "store"
