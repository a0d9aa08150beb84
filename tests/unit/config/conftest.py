from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from eagle3_serve.config.resolve import Resolved, load_config
from eagle3_serve.core.errors import ConfigError

MINIMAL = "target:\n  path: target\ndrafter:\n  path: drafter\n"

Load = Callable[..., Resolved]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load YAML text from a file in an empty directory, with nothing inherited from this process."""

    def load(text: str = MINIMAL, *sets: str, environ: Mapping[str, str] | None = None) -> Resolved:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return load_config(file, sets=sets, environ=environ or {})

    return load


@pytest.fixture
def failure(load: Load) -> Callable[..., str]:
    """The whole message with which loading fails."""

    def failure(text: str = MINIMAL, *sets: str, environ: Mapping[str, str] | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *sets, environ=environ)
        return str(caught.value)

    return failure
