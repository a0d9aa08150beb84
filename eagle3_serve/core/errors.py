"""Every way the product can fail, each with an exit code and what to do about it.

A class here is raised where the fault is found; `eagle3_serve.cli` alone turns it into one message and an exit
code. A test compares the table in the README with `exit_codes()`.
"""

from __future__ import annotations

from typing import ClassVar


class EagleServeError(Exception):
    """An expected failure: shown to the user as `message` and `remedy`, never as a traceback."""

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "unexpected failure"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  what to do: {self.remedy}" if self.remedy else self.message


class ConfigError(EagleServeError):
    exit_code = 10
    meaning = "the configuration is wrong: file, line and the nearest known key are named"


class CheckpointError(EagleServeError):
    exit_code = 11
    meaning = "a target or drafter checkpoint is missing, damaged, or not what the configuration needs"


class ContractError(EagleServeError):
    exit_code = 12
    meaning = "the layers that the drafter needs are ambiguous, contradictory, or not in the target"


class PreflightError(EagleServeError):
    exit_code = 13
    meaning = "this machine cannot run the configuration (GPUs, memory, packages, backends)"


class OverlayError(EagleServeError):
    exit_code = 14
    meaning = "no overlay for this SGLang: unknown release, modified or instrumented file, a patch that does not apply"


class PortInUseError(EagleServeError):
    exit_code = 15
    meaning = "a port is taken: port and process are named"


class EngineStartError(EagleServeError):
    exit_code = 16
    meaning = "the engine died while it was loading: its log is named"


class EngineTimeoutError(EagleServeError):
    exit_code = 17
    meaning = "the engine was not ready within engine.start_timeout_s"


class EngineDiedError(EagleServeError):
    exit_code = 18
    meaning = "the engine died while serving"


class EngineRequestError(EagleServeError):
    exit_code = 19
    meaning = "a server refused or did not answer a request that a command needs"


class VerificationError(EagleServeError):
    exit_code = 20
    meaning = "a check found a fault (wiring, losslessness, `patch strip --check`, quick start)"


class PartialResultError(EagleServeError):
    exit_code = 21
    meaning = "done, but not for everything: what was left out is listed"


class StoreError(EagleServeError):
    exit_code = 22
    meaning = "a store of hidden states is damaged, or does not belong to this target, tokenizer or contract"


class TrainingError(EagleServeError):
    exit_code = 23
    meaning = "the training of a drafter failed: its log is named, and it can be resumed"


class DiskFullError(EagleServeError):
    exit_code = 24
    meaning = "no space is left: what was written is whole, and the command can be resumed"


class InterruptedLoadError(EagleServeError):
    """The user stopped a launch that was still loading, or a check; 128 + SIGINT, as shells expect."""

    exit_code = 130
    meaning = "stopped by Ctrl-C (SIGINT) before the work was done"


class TerminatedLoadError(EagleServeError):
    """A supervisor stopped a launch that was still loading, or a check; 128 + SIGTERM."""

    exit_code = 143
    meaning = "stopped by SIGTERM before the work was done"


def exit_codes() -> dict[int, str]:
    """All exit codes with their meanings, in order; 0 and 2 (command line usage, by typer) included."""
    codes = {
        0: "success; for `launch`: stopped on request after serving, or a dry run without errors",
        2: "wrong command line",
        EagleServeError.exit_code: EagleServeError.meaning,
    }
    codes.update({cls.exit_code: cls.meaning for cls in EagleServeError.__subclasses__()})
    return dict(sorted(codes.items()))
