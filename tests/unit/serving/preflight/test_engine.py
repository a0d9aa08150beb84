from __future__ import annotations

import pytest

from eagle3_serve.config.schema import Config
from eagle3_serve.core.errors import ConfigError
from eagle3_serve.serving import preflight
from eagle3_serve.serving.machine import Gpu, KernelImport, Machine, Package
from tests.unit.serving.conftest import changed
from tests.unit.serving.preflight.conftest import errors, levels

BLACKWELL = Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, (12, 0))
EIGHT_BLACKWELLS = Machine((BLACKWELL,) * 8, cores=64, sglang="0.5.23", torch="2.14.1")
LAPTOP = Machine((), cores=2, sglang=None, torch=None)


def test_a_python_without_this_package_cannot_run_the_patched_files(config: Config) -> None:
    bare = Machine((), 2, sglang="0.5.23", torch="2.14.1", has_runtime=False)
    (error,) = errors(preflight.check_release(config, bare, ["0.5.23"]))
    assert "eagle3-serve" in error.message


def test_sglang_must_be_there_in_the_release_of_the_configuration(config: Config) -> None:
    supported = ["0.5.16", "0.5.23"]
    (missing,) = errors(preflight.check_release(config, LAPTOP, supported))
    assert "pip install sglang==0.5.23" in missing.remedy
    other = Machine((), 2, sglang="0.5.16", torch="2.11.0")
    (wrong,) = errors(preflight.check_release(config, other, supported))
    assert "0.5.16 is installed" in wrong.message
    unknown = Machine((), 2, sglang="0.9.0", torch="3.0")
    (unsupported,) = errors(preflight.check_release(changed(config, engine={"release": None}), unknown, supported))
    assert "no patches for SGLang 0.9.0" in unsupported.message


def test_too_few_gpus_or_cores_are_refused(config: Config) -> None:
    (cores,) = errors(preflight.check_devices(changed(config, engine={"tp_size": 4}), LAPTOP))
    assert "2 processor cores" in cores.message
    on_gpu = changed(config, engine={"device": "cuda", "tp_size": 8})
    (gpus,) = errors(preflight.check_devices(on_gpu, LAPTOP))
    assert "shows 0 GPUs" in gpus.message
    assert errors(preflight.check_devices(on_gpu, EIGHT_BLACKWELLS)) == []


@pytest.mark.parametrize("backend", ["trtllm_mla", "trtllm_mha", "tokenspeed_mla"])
def test_backends_that_do_not_run_on_sm120_are_refused_with_an_alternative(config: Config, backend: str) -> None:
    chosen = changed(
        config,
        engine={"device": "cuda", "attention_backend": backend},
        drafter={"attention_backend": "triton"},
    )
    (error,) = errors(preflight.check_attention_backends(chosen, EIGHT_BLACKWELLS))
    assert "12.0" in error.message
    assert "triton" in error.remedy


def test_a_drafter_does_not_inherit_an_mla_only_backend(config: Config) -> None:
    hopper = Machine((Gpu("NVIDIA H200", 143771, (9, 0)),), 16, "0.5.23", "2.14.1")
    inherited = changed(config, engine={"device": "cuda", "attention_backend": "flashmla"})
    (error,) = errors(preflight.check_attention_backends(inherited, hopper))
    assert "drafter.attention_backend" in error.remedy
    own = changed(inherited, drafter={"attention_backend": "triton"})
    assert errors(preflight.check_attention_backends(own, hopper)) == []


@pytest.mark.parametrize(
    "extra",
    [
        {"numa-node": ["0", "--speculative-algorithm", "EAGLE"]},
        {"log-level": "--speculative-algorithm=EAGLE"},
        {"numa-node": ["0", "--speculative_algo=EAGLE"]},
        {"numa-node": ["0", "--speculative-draft-model", "/other"]},
        {"numa-node": ["0", "--tp", "4"]},
    ],
    ids=str,
)
def test_an_argument_hidden_in_the_values_of_another_is_refused(config: Config, extra: dict[str, object]) -> None:
    (error,) = errors(preflight.check_arguments(changed(config, engine={"extra_args": extra})))
    assert "which is set by" in error.message
    assert error.error is ConfigError


def test_another_algorithm_is_refused_with_what_it_would_silently_do(config: Config) -> None:
    smuggled = changed(config, engine={"extra_args": {"numa-node": ["0", "--speculative-algorithm", "EAGLE"]}})
    (error,) = errors(preflight.check_arguments(smuggled))
    assert "accept length is 1.0" in error.message


def test_a_file_of_further_arguments_is_refused(config: Config) -> None:
    (error,) = errors(preflight.check_arguments(changed(config, engine={"extra_args": {"config": "more.yaml"}})))
    assert "read more arguments from a file" in error.message


def test_arguments_that_the_configuration_does_not_own_pass(config: Config) -> None:
    extra = {"numa-node": [0, 0, 1, 1], "log-level": "warning", "watchdog-timeout": -1, "chat-template": "-x"}
    assert list(preflight.check_arguments(changed(config, engine={"extra_args": extra}))) == []


UNDEFINED = (
    "ImportError: /x/common_ops.abi3.so: undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
)


def with_kernels(failure: str | None = None, *, installed_torch: str = "2.11.0", timed_out: bool = False) -> Machine:
    packages = {
        "torch": Package("torch", installed_torch, "2.14.1"),
        "sgl_kernel": Package("sglang-kernel", "0.4.10", "0.4.10"),
        "flashinfer": Package("flashinfer-python", "0.7.2", "0.7.2"),
    }
    kernels = KernelImport(3.0, failure, timed_out)
    return Machine((BLACKWELL,), 16, "0.5.23", installed_torch, packages=packages, kernels=kernels)


def on_gpu(config: Config) -> Config:
    return changed(config, engine={"device": "cuda"})


def test_kernels_built_for_another_torch_are_an_error_with_both_versions_and_what_to_install(config: Config) -> None:
    (error,) = preflight.check_kernels(on_gpu(config), with_kernels(UNDEFINED))
    assert error.level == "error"
    for part in ("undefined symbol", "sglang-kernel 0.4.10", "torch 2.11.0 (SGLang requires 2.14.1)", "another torch"):
        assert part in error.message
    assert "pip install torch==2.14.1 sglang-kernel==0.4.10" in error.remedy


def test_missing_kernels_are_an_error_that_does_not_blame_torch(config: Config) -> None:
    missing = with_kernels("ModuleNotFoundError: No module named 'sgl_kernel'", installed_torch="2.14.1")
    (error,) = preflight.check_kernels(on_gpu(config), missing)
    assert "another torch" not in error.message
    assert "sglang-kernel==0.4.10" in error.remedy


def test_kernels_that_load_beside_another_torch_are_a_warning(config: Config) -> None:
    found = list(preflight.check_kernels(on_gpu(config), with_kernels()))
    assert levels(found) == ["ok", "warning"]
    assert "requires torch 2.14.1" in found[1].message


def test_kernels_of_the_required_versions_are_fine_whatever_their_local_build(config: Config) -> None:
    assert levels(preflight.check_kernels(on_gpu(config), with_kernels(installed_torch="2.14.1+cu130"))) == ["ok"]


def test_kernels_that_load_for_too_long_are_a_warning(config: Config) -> None:
    slow = with_kernels(installed_torch="2.14.1", timed_out=True)
    assert levels(preflight.check_kernels(on_gpu(config), slow)) == ["warning"]


def test_the_cpu_engine_and_a_machine_without_gpus_need_no_kernels(config: Config) -> None:
    assert list(preflight.check_kernels(config, with_kernels(UNDEFINED))) == []
    assert list(preflight.check_kernels(on_gpu(config), LAPTOP)) == []
