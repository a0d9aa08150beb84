from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import typer
from safetensors import SafetensorError
from typer.testing import CliRunner

from eagle3_serve.core.errors import CheckpointError, ConfigError, DiskFullError, StoreError, TrainingError
from eagle3_serve.core.reporter import make_reporter
from eagle3_serve.drafting.train import run
from eagle3_serve.drafting.train.options_file import load_options
from eagle3_serve.drafting.train.plan import make_plan
from eagle3_serve.train_cli import train
from tests.support.synthetic_store import TARGET
from tests.unit.drafting.train.conftest import write_sound_store

app = typer.Typer()
app.command()(train)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound_store(tmp_path_factory.mktemp("cli") / "store", samples=4, tokens=20)


def arguments(store: Path, out: Path, *more: str) -> list[str]:
    common = ["--store", str(store), "--target", str(TARGET), "--out", str(out), "--device", "cpu"]
    return [*common, "--set", "validation_share=0.25", *more]


def test_a_dry_run_shows_options_and_the_exact_command_and_writes_nothing(store: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(store, tmp_path / "out", "--set", "lr=3e-3", "--dry-run"))
    assert done.exit_code == 0, done.output
    assert "3 are trained on (60 tokens, 48 in the loss) and 1 measured" in done.output
    assert "option       lr = 0.003" in done.output
    assert "--target-layer-ids 3 31 59" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json_has_the_same_for_scripts(store: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(store, tmp_path / "out", "--dry-run", "--json"))
    (line,) = done.stdout.splitlines()
    facts = json.loads(line)
    assert facts["layers"] == [2, 30, 58]
    assert facts["split"]["train"] == 3
    assert facts["command"][-1].endswith("job.json")


def test_a_damaged_store_is_refused_before_anything_is_written(store: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(store, tmp_path / "damaged")
    (damaged / "dataset_info.json").unlink()
    for more in ([], ["--dry-run"]):
        done = CliRunner().invoke(app, arguments(damaged, tmp_path / "out", *more))
        assert isinstance(done.exception, StoreError)
        assert "store inspect" in done.exception.remedy
    assert not (tmp_path / "out").exists()


def test_what_is_no_store_is_an_error_of_its_own_exit_code(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(tmp_path, tmp_path / "out"))
    assert isinstance(done.exception, StoreError)
    assert "is no store" in done.exception.message
    assert not (tmp_path / "out").exists()


def test_an_out_that_holds_something_else_is_left_alone(store: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = CliRunner().invoke(app, arguments(store, tmp_path))
    assert isinstance(done.exception, ConfigError)
    assert "is not empty (thesis.tex)" in done.exception.message
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def begun(store: Path, out: Path, *sets: str) -> None:
    """A run that was killed right after its first record."""
    out.mkdir()
    run._begin(_plan(store, out, *sets), resume=False)
    (out / "metrics.jsonl").write_text("")


def _plan(store: Path, out: Path, *sets: str) -> run.Plan:
    return make_plan(store, TARGET, out, load_options(None, ["validation_share=0.25", *sets]), "cpu")


def test_a_run_is_not_begun_twice_without_resume(store: Path, tmp_path: Path) -> None:
    begun(store, tmp_path / "out")
    done = CliRunner().invoke(app, arguments(store, tmp_path / "out"))
    assert isinstance(done.exception, ConfigError)
    assert "--resume" in done.exception.remedy


def test_a_run_that_failed_before_it_began_is_begun_anew(store: Path, tmp_path: Path) -> None:
    begun(store, tmp_path / "out", "lr=0.5")
    (tmp_path / "out" / "metrics.jsonl").unlink()
    plan = _plan(store, tmp_path / "out", "lr=0.25")
    assert not run._begin(plan, resume=False)
    assert json.loads((plan.out / run.RUN_FILE).read_text())["options"]["lr"] == 0.25


def test_a_run_is_not_resumed_with_other_options(store: Path, tmp_path: Path) -> None:
    begun(store, tmp_path / "out", "lr=0.5", "seed=1")
    done = CliRunner().invoke(app, arguments(store, tmp_path / "out", "--resume"))
    assert isinstance(done.exception, ConfigError)
    assert "lr: 0.5 there, 0.001 now; seed: 1 there, 42 now" in done.exception.message


def test_the_options_written_beside_a_run_begin_the_same_run(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun(store, out, "lr=0.5", "draft_vocab_size=64")
    options = load_options(out / run.OPTIONS_FILE)
    again = make_plan(store, TARGET, out, options, "cpu")
    assert run._begin(again, resume=True)


def test_two_trainings_do_not_write_into_one_directory(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_ORPHAN_ENDS_S", 0.2)
    plan = _plan(store, tmp_path / "out")
    with (
        run._claimed(plan.out),
        pytest.raises(ConfigError, match="another training writes into"),
        make_reporter(as_json=True) as reporter,
    ):
        run.train(plan, reporter, resume=False)


def test_a_record_of_a_run_that_is_none_is_one_clear_error(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun(store, out)
    (out / run.RUN_FILE).write_text("[]")
    done = CliRunner().invoke(app, arguments(store, out, "--resume"))
    assert isinstance(done.exception, ConfigError)
    assert "run.json cannot be read" in done.exception.message


@pytest.mark.parametrize(
    "refusal",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        CheckpointError("out/drafter could not be written: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_is_told_from_other_refusals(tmp_path: Path, refusal: Exception) -> None:
    with pytest.raises(DiskFullError, match="no space is left"), run._disk(tmp_path):
        raise refusal
    with pytest.raises(TrainingError, match="Read-only file system"), run._disk(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(BrokenPipeError), run._disk(tmp_path):  # `| head` is no fault of the disk
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_the_help_has_an_example() -> None:
    assert "Example: " in CliRunner().invoke(app, ["--help"]).output
