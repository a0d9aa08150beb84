"""What runs in the subprocess: the library's own training, with adaptations at its edges.

    python -m eagle3_serve.drafting.train.worker JOB.json

Adapted (here, in trainer.py and in hooks.py), and none of it touches what is computed:
  on a CPU   the trainer's device, the device that checkpoints are read to, and `torch.accelerator.synchronize`: the
             library takes an accelerator for granted
  anywhere   checkpoints are written whole or not at all, and in float32, so that a run that was resumed is the run that
             was not; without the target's embedding, which is gigabytes and not trained
             metrics go to a file; a loss that is no number ends the run; so does a sample that was left out
             SIGTERM and SIGINT end the run after the current step, with a checkpoint
             validation before training, and of the epoch whose checkpoint a killed process wrote and did not measure
             no git repository is searched for uncommitted changes to copy
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path

from eagle3_serve.drafting.train.hooks import SIGNALS, FailedError, StopRequestedError
from eagle3_serve.drafting.train.job import EXIT_FAILED, EXIT_STOPPED, Job, reason_of
from eagle3_serve.drafting.train.records import RecordWriter


def main(arguments: list[str]) -> int:
    job = Job.read(Path(arguments[0]))
    first = os.environ.get("RANK", "0") == "0"
    records = RecordWriter(Path(job.metrics))
    try:
        _train(job, records if first else None)
    except StopRequestedError:
        for number in SIGNALS:  # a second one must not change the exit code while Python takes its time to end
            signal.signal(number, signal.SIG_IGN)
        return EXIT_STOPPED
    except Exception as error:
        if first:
            _record_failure(records, error)
        if isinstance(error, FailedError):
            sys.stderr.write(f"{error}\n")
            return EXIT_FAILED
        raise
    if first:
        records.write("end")
    return 0


def _train(job: Job, records: RecordWriter | None) -> None:
    from speculators.train import cli, trainer, utils  # noqa: PLC0415 - ten seconds
    from speculators.train.config import TrainConfig  # noqa: PLC0415

    from eagle3_serve.drafting.train.trainer import AdaptedTrainer, CpuTrainer, StrictRecovery  # noqa: PLC0415

    if job.cpu:
        _use_cpu()
    trainer.BatchRecoveryCoordinator = StrictRecovery
    utils.find_repo_root = lambda _start: None
    cli.Trainer = functools.partial(CpuTrainer if job.cpu else AdaptedTrainer, job, records)
    cli.main(TrainConfig.resolve(job.arguments))


def _use_cpu() -> None:
    import torch  # noqa: PLC0415
    from speculators.train import checkpointer  # noqa: PLC0415

    torch.accelerator.synchronize = lambda *_: None
    checkpointer.get_current_device = lambda: "cpu"


def _record_failure(records: RecordWriter, error: Exception) -> None:
    text = str(error) if isinstance(error, FailedError) else f"{type(error).__name__}: {error}"
    reason = error.reason if isinstance(error, FailedError) else reason_of(text)
    try:
        records.write("failed", reason=reason, text=text[:2000])
    except OSError as full:
        sys.stderr.write(f"{full}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
