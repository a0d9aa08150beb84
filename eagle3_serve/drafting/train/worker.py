"""What runs in the subprocess: the library's own training, with adaptations at its edges.

    python -m eagle3_serve.drafting.train.worker JOB.json

Adapted (here, in trainer.py and in hooks.py), and none of it touches what is computed:
  on a CPU   the trainer's device, the device that checkpoints are read to, what is asked of `torch.accelerator`, and
             that processes of several meet without one: the library takes an accelerator for granted
  anywhere   checkpoints are written whole or not at all, and in float32, so that a run that was resumed is the run that
             was not; without the target's embedding, which is gigabytes and not trained
             metrics go to a file; a loss that is no number ends the run; so does a sample that was left out
             SIGTERM and SIGINT end the run after the current step, with a checkpoint
             validation before training, and of the epoch whose checkpoint a killed process wrote and did not measure
             no git repository is searched for uncommitted changes to copy
             processes of several meet at the socket that `ranks.py` opened, and stop after the same step
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from eagle3_serve.drafting.train.hooks import SIGNALS, FailedError, StopRequestedError
from eagle3_serve.drafting.train.job import EXIT_FAILED, EXIT_STOPPED, Job, reason_of
from eagle3_serve.drafting.train.ranks import LISTENER
from eagle3_serve.drafting.train.records import RecordWriter


def main(arguments: list[str]) -> int:
    job = Job.read(Path(arguments[0]))
    if several := LISTENER in os.environ:
        rank = int(os.environ["RANK"])
    else:
        rank = 0
        os.environ.pop("LOCAL_RANK", None)  # of another program that this one runs in: the library would wait for more
    records = RecordWriter(Path(job.metrics))
    try:
        _train(job, records if rank == 0 else None, several=several)
    except StopRequestedError:
        for number in SIGNALS:  # a second one must not change the exit code while Python takes its time to end
            signal.signal(number, signal.SIG_IGN)
        return EXIT_STOPPED
    except Exception as error:
        _record_failure(records, error)  # of several processes each: the first record is the cause, others follow it
        if not isinstance(error, FailedError):
            traceback.print_exc()
            return 1
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    if rank == 0:
        records.write("end")
    return 0


def _train(job: Job, records: RecordWriter | None, *, several: bool) -> None:
    from speculators.train import cli, trainer, utils  # noqa: PLC0415 - ten seconds
    from speculators.train.config import TrainConfig  # noqa: PLC0415

    from eagle3_serve.drafting.train.trainer import AdaptedTrainer, CpuTrainer, StrictRecovery  # noqa: PLC0415

    if job.cpu:
        _use_cpu()
    if several:
        _meet(cpu=job.cpu)
    trainer.BatchRecoveryCoordinator = StrictRecovery
    utils.find_repo_root = lambda _start: None
    cli.Trainer = functools.partial(CpuTrainer if job.cpu else AdaptedTrainer, job, records)
    cli.main(TrainConfig.resolve(job.arguments))


def _use_cpu() -> None:
    import torch  # noqa: PLC0415
    from speculators.train import checkpointer, cli  # noqa: PLC0415

    accelerator: Any = torch.accelerator
    accelerator.synchronize = accelerator.set_device_index = lambda *_: None
    checkpointer.get_current_device = lambda: "cpu"
    found, set_up = accelerator.current_accelerator, cli.maybe_setup_distributed

    def set_up_on_cpu() -> None:
        accelerator.current_accelerator = lambda: torch.device("cpu")  # for the choice of a backend alone
        set_up()
        accelerator.current_accelerator = found

    cli.maybe_setup_distributed = set_up_on_cpu


def _meet(*, cpu: bool) -> None:
    """Let the library's processes find each other through a store on the first one's inherited socket."""
    from speculators.train.distributed import dist  # noqa: PLC0415 - torch.distributed

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        count,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=int(os.environ[LISTENER]) if rank == 0 else None,
    )
    initialize = dist.init_process_group

    def with_store(backend: str, device_id: int) -> None:
        device = None if cpu else device_id
        initialize(backend, store=store, rank=rank, world_size=count, device_id=device)

    dist.init_process_group = with_store


def _record_failure(records: RecordWriter, error: Exception) -> None:
    text = str(error) if isinstance(error, FailedError) else f"{type(error).__name__}: {error}"
    reason = error.reason if isinstance(error, FailedError) else reason_of(text)
    try:
        records.write("failed", reason=reason, text=text[:2000])
    except OSError as full:
        sys.stderr.write(f"{full}\n")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code and LISTENER in os.environ:
        os._exit(code)  # the orderly end of a communicator may wait for others, and they for this one
    sys.exit(code)
