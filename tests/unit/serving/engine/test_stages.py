from __future__ import annotations

from pathlib import Path

from eagle3_serve.serving.engine.stages import StageReader, last_lines


def test_the_stage_follows_the_log_as_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    reader = StageReader(log)
    assert reader.current() == "starting Python"  # no log yet
    log.write_text("[time] server_args=ServerArgs(model_path=...)\n")
    assert reader.current() == "resolving arguments"
    with log.open("a") as file:
        file.write("[time TP0] Load weight begin. avail mem=1 GB\n[time TP0] Load wei")
    assert reader.current() == "loading weights"
    with log.open("a") as file:
        file.write("ght end. elapsed=1 s\n")
    assert reader.current() == "weights loaded"  # a line that was cut when it was read the first time


def test_bytes_that_are_no_utf8_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"\xff\xfe\n[x] Load weight begin\n")
    assert StageReader(log).current() == "loading weights"
    assert "Load weight begin" in last_lines(log, 3)


def test_the_tail_is_short_even_where_one_line_holds_a_whole_configuration(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("a\n\nserver_args=" + "x" * 10_000 + "\nValueError: bad\n")
    tail = last_lines(log, 2)
    assert tail.splitlines()[-1] == "ValueError: bad"
    assert len(tail) < 500
    assert last_lines(tmp_path / "none.log", 3) == ""
