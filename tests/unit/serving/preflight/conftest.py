"""Shorthand of the preflight tests: edit a checkpoint on disk, read it, and look at what a check finds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.config.schema import Config
from eagle3_serve.serving import preflight
from eagle3_serve.serving.preflight import Checkpoints, Finding

RELEASES = ("0.5.9", "0.5.16", "0.5.23")


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in findings]


class Pair:
    """The checkpoints of a configuration, which can be edited in place."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def edit(self, which: str, **keys: Any) -> None:
        """Replace keys of a config.json; of the target's those of its text model."""
        path: Path = getattr(self.config, which).path / "config.json"
        content = json.loads(path.read_text())
        (content["text_config"] if which == "target" else content).update(keys)
        path.write_text(json.dumps(content))

    def without(self, key: str) -> None:
        """Remove a key of the drafter's config.json."""
        path = self.config.drafter.path / "config.json"
        content = json.loads(path.read_text())
        content.pop(key, None)
        path.write_text(json.dumps(content))

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace the drafter's tensors."""
        save_file(tensors, self.config.drafter.path / "model.safetensors")

    def read(self) -> Checkpoints:
        return preflight.read_checkpoints(self.config)[0]


@pytest.fixture
def pair(config: Config) -> Pair:
    return Pair(config)
