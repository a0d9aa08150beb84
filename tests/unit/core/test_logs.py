from __future__ import annotations

import logging
from pathlib import Path

from eagle3_serve.core.logs import logging_to


def test_what_the_package_logs_goes_to_the_file_only_while_the_block_runs(tmp_path: Path) -> None:
    log = logging.getLogger("eagle3_serve.gateway")
    file = tmp_path / "run" / "gateway.log"
    with logging_to(file):
        log.info("POST /v1/chat/completions 200")
    log.info("after")
    assert "POST /v1/chat/completions 200" in file.read_text()
    assert "after" not in file.read_text()


def test_the_file_is_rotated(tmp_path: Path) -> None:
    file = tmp_path / "gateway.log"
    line = "x" * 1024 * 1024
    with logging_to(file):
        for _ in range(20):
            logging.getLogger("eagle3_serve").info(line)
    assert (tmp_path / "gateway.log.1").exists()
    assert all(each.stat().st_size < 18 * 1024 * 1024 for each in tmp_path.iterdir())
