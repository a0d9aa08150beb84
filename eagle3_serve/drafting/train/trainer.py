"""The library's Trainer with the adaptations that `worker.py` lists. Importing this imports the whole library."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from speculators.train.recovery import BatchRecoveryCoordinator
from speculators.train.trainer import Trainer
from torch import distributed

from eagle3_serve.drafting.train import library
from eagle3_serve.drafting.train.hooks import MetricsHandler, StopRequestedError, StopSignal, require_whole
from eagle3_serve.drafting.train.job import Job
from eagle3_serve.drafting.train.records import BEFORE, RecordWriter

_EMBEDDING = "embed_tokens.weight"


class StrictRecovery(BatchRecoveryCoordinator):  # type: ignore[misc]
    """Sees every batch of training and of validation. The library goes on without a sample whose tokens are not those
    of the dataset, and says so in the metrics of the steps that it logs."""

    def consume(self, batch: dict[str, Any], *, synchronize: bool = False) -> None:
        """Raises FailedError for a batch without all of its samples."""
        require_whole(batch, self.phase)
        super().consume(batch, synchronize=synchronize)


class AdaptedTrainer(Trainer):  # type: ignore[misc]
    """`records`: None in all processes but the first. `rest`: as the library gives it."""

    def __init__(self, job: Job, records: RecordWriter | None, model: Any, *rest: Any) -> None:
        self.job, self.records = job, records
        # Weights of a drafter that is trained further come in its own dtype, and master weights are float32.
        model._keys_to_ignore_on_save = [*(model._keys_to_ignore_on_save or []), _EMBEDDING]
        super().__init__(model.float(), *rest)
        self.checkpointer.save_checkpoint = functools.partial(
            self.checkpointer.save_checkpoint, float_dtype=torch.float32
        )
        self.stop = StopSignal()
        # Of the CPU: a collective of the GPUs would wait for every step that still runs there.
        self.agreement: Any = distributed.new_group(backend="gloo") if self.is_distributed else None
        self.metrics = MetricsHandler(records, job.coverage)
        # Here, because the library sets its loggers up anew before it makes its trainer.
        logging.getLogger("speculators.metrics").addHandler(self.metrics)
        logging.getLogger("speculators.metrics").propagate = False

    def run_training(self) -> None:
        self.stop.install()
        if self.records is not None:
            self.records.write(
                "begin",
                epochs=self.config.num_epochs,
                steps_per_epoch=len(self.train_loader),
                from_epoch=self.current_epoch if self.job.validate is None else self.job.validate,
                from_step=self.global_step,
            )
        if self.config.num_epochs == 0:
            self.maybe_save_checkpoint(0)
        if self.job.validate is not None:
            self.metrics.before_training = self.job.validate == BEFORE
            self.val_epoch(max(self.job.validate, 0))  # the library's sampler has no batches for an epoch -1
            self.metrics.before_training = False
        super().run_training()

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        self.stop.install()  # over the library's own handlers, which end a run in the middle of a step
        self.stop.defer = True
        self.train_loader.batch_sampler.set_epoch(epoch)
        steps = len(self.train_loader)  # of the whole epoch; the library cuts it down where it goes on within one
        done = self._resume_local_step if epoch == self.current_epoch else 0

        def after_step() -> None:
            nonlocal done
            done += 1
            if step_callback is not None:
                step_callback()
            if self._stop_asked():
                self.maybe_save_checkpoint(epoch, local_step=done % steps)

        super().train_epoch(epoch, step_callback=after_step)

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        if not isinstance(epoch, int):
            raise StopRequestedError  # the library would write one here that no run can go on from
        place = self.checkpointer.path
        self.checkpointer.path = library.staging(place)
        try:
            super().maybe_save_checkpoint(epoch, local_step)
        finally:
            self.checkpointer.path = place
        if self.records is not None:
            library.settle(place, epoch)
            self.records.write("checkpoint", epoch=epoch, step=self.global_step, step_in_epoch=local_step)
        if self._stop_asked():  # also: no process goes on, or ends, before the checkpoint has its name
            raise StopRequestedError
        self.stop.defer = local_step > 0

    def _stop_asked(self) -> bool:
        """Whether a signal asked any of the processes for the end; all get the same answer after the same step."""
        if self.agreement is None:
            return self.stop.asked
        asked = torch.tensor(int(self.stop.asked))
        distributed.all_reduce(asked, distributed.ReduceOp.MAX, group=self.agreement)
        return bool(asked)

    def maybe_update_best(self, epoch: int, val_metrics: Any) -> None:
        """The best epoch is read off the records."""


class CpuTrainer(AdaptedTrainer):
    """Where the library moves tensors to, and the device type of its autocast."""

    local_rank = property(lambda self: "cpu", lambda self, value: None)
    device_type = property(lambda self: "cpu", lambda self, value: None)
