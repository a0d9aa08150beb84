"""SGLang 0.5.9's DeepSeek target, Kimi wrapper and EAGLE-3 drafter, small and on the CPU, in a process of their own.

    python program_0_5_9.py DRAFTER_DIRECTORY    # SGLang from PYTHONPATH; answers with one line of JSON

Real are the modules, their layers, norms, communicators and weight loading. Not real are MLA (a mixing of rows stands
in: its CPU form needs kernels that are not there) and the kernels of sgl_kernel and vllm, none of which is called.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import NonCallableMagicMock

import torch

LAYERS, HIDDEN, ROWS = 4, 96, 9  # as wide as the drafter's fc takes
IDS = [0, 2]  # in the drafter's config: in this release the outputs of these layers


class MissingKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of sgl_kernel and vllm is there, with names that can be imported and not called."""

    class Module(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__") or name == "convert_weight_packed":
                raise AttributeError(name)
            return NonCallableMagicMock(name=name)

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("sgl_kernel", "vllm"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return self.Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


class Mixing(torch.nn.Module):
    """In place of MLA: each row becomes a linear map of the mean of the rows up to it."""

    def __init__(self, config, **_):
        super().__init__()
        self.map = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.prepare_qkv_latent = None

    def forward(self, positions, hidden_states, forward_batch, **_):
        count = torch.arange(1, len(hidden_states) + 1)[:, None]
        return self.map(hidden_states.cumsum(0) / count)


def start_sglang():
    """What SGLang's own start does before it builds a model: arguments and process groups, for one rank."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs.__new__(ServerArgs)  # not __init__: it asks the machine for GPUs
    for field in dataclasses.fields(ServerArgs):
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default
        setattr(arguments, field.name, None if default is dataclasses.MISSING else default)
    arguments.device, arguments.disable_shared_experts_fusion = "cpu", True
    set_global_server_args_for_scheduler(arguments)
    port_file = Path(os.environ["EAGLE3_SERVE_REPORT_DIR"]) / "store"
    where = f"file://{port_file}"
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=where)
    initialize_model_parallel()
    initialize_dp_attention(arguments, SimpleNamespace(dtype=torch.float32, hidden_size=HIDDEN))


def build_target():
    import sglang.srt.models.deepseek_v2 as deepseek
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=97,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
    )
    config.architectures, config.moe_layer_freq, config.pad_token_id = ["DeepseekV3ForCausalLM"], 1, 0
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    deepseek.DeepseekV2AttentionMLA = Mixing
    torch.manual_seed(0)
    model = deepseek.DeepseekV3ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def wrap(language_model):
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration

    wrapper = KimiK25ForConditionalGeneration.__new__(KimiK25ForConditionalGeneration)  # without a vision tower
    torch.nn.Module.__init__(wrapper)
    wrapper.language_model = language_model
    return wrapper


class Residuals:
    """The residual stream after each layer, -1 the embedding, taken by hooks."""

    def __init__(self, model):
        self.states = {}
        model.model.embed_tokens.register_forward_hook(lambda *call: self.keep(-1, call[2]))
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda *call, number=number: self.keep(number, call[2][0] + call[2][1]))

    def keep(self, layer, state):
        self.states[layer] = state.clone()


def run(model):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    ids = torch.arange(ROWS) * 7
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, can_run_tbo=False, input_ids=ids, nsa_cp_metadata=None)
    batch.req_pool_indices, batch.extend_seq_lens = torch.tensor([3]), torch.tensor([ROWS])
    with torch.no_grad():
        return model.model(ids, torch.arange(ROWS), batch)


def distances(captured, residuals, layers):
    """Largest difference, for each layer, of what was captured to the residual stream after it."""
    return [(state - residuals[layer]).abs().max().item() for state, layer in zip(captured, layers, strict=True)]


def fuse_all_reduce(model):
    """As on two ranks with the all-reduce fused into the next norm: a layer leaves half, and the norm has the whole."""
    for number, layer in enumerate(model.model.layers):
        layer.layer_communicator.should_fuse_mlp_allreduce_with_next_layer = lambda _, last=number == LAYERS - 1: (
            not last
        )
        norm = layer.input_layernorm
        norm.forward_with_allreduce_fusion = lambda hidden, residual, norm=norm: norm(2 * hidden, residual)
        if number < LAYERS - 1:
            layer.mlp.register_forward_hook(lambda *call: call[2] / 2)


def capture_with(target, ids):
    """As SGLang 0.5.9 starts: its default layers once more before CUDA graphs, and the drafter's ids in between."""
    result = []
    for layer_ids in (None, ids, None):
        target.set_eagle3_layers_to_capture(layer_ids)
        result.append(list(target.model.layers_to_capture))
    target.set_eagle3_layers_to_capture(ids)
    return result


def load_drafter(directory):
    from safetensors.torch import load_file
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(directory)
    drafter = LlamaForCausalLMEagle3(config)
    drafter.load_weights(load_file(directory / "model.safetensors").items())
    return list(drafter.model.fc.weight.shape)


def read_tap():
    """As `serving/tap.py` does: ask through a file, wait for the answer."""
    from safetensors import safe_open

    reports = Path(os.environ["EAGLE3_SERVE_REPORT_DIR"])
    (reports / "tap-requests" / "x.json").write_text(json.dumps({"ranks": [0]}))
    answer = reports / "tap-rank0-x.safetensors"
    for _ in range(100):
        if answer.exists():
            with safe_open(answer, "pt") as file:
                return json.loads(file.metadata()["target.layers"]), file.get_tensor("target.states")[-ROWS:]
        time.sleep(0.1)
    raise TimeoutError("the tap does not answer")


def main():
    sys.meta_path.insert(0, MissingKernels())
    start_sglang()
    model = build_target()
    residuals = Residuals(model)
    contract = os.environ.get("EAGLE3_SERVE_AUX_LAYERS")
    layers = [int(layer) for layer in contract.split(",")] if contract else IDS
    answer = {"file": sys.modules[type(model).__module__].__file__}
    without = run(model)
    answer["layers_to_capture"] = capture_with(model, IDS)
    wrapper = wrap(model)
    answer["delegates"] = hasattr(wrapper, "set_eagle3_layers_to_capture")
    if answer["delegates"]:
        wrapper.set_eagle3_layers_to_capture(IDS)
        embedding, head = wrapper.get_embed_and_head()
        answer["shares"] = embedding is model.model.embed_tokens.weight and head is model.lm_head.weight
    hidden, captured = run(model)
    answer["same_output"] = torch.equal(hidden, without)
    answer["distances"] = distances(captured, residuals.states, layers)
    if os.environ.get("EAGLE3_SERVE_TAP"):
        tapped, states = read_tap()
        answer["tapped"] = tapped
        answer["tap_distances"] = distances(states.unbind(1), residuals.states, tapped)
    else:
        answer["fc"] = load_drafter(Path(sys.argv[1]))
        answer |= run_special_cases(model, residuals, layers)
    print(json.dumps(answer))


def run_special_cases(model, residuals, layers):
    """A fused all-reduce, and the embedding alone."""
    model.model.layers_to_capture = [layer + 1 for layer in layers]
    whole = dict(residuals.states)
    fuse_all_reduce(model)
    answer = {"fused": distances(run(model)[1], whole, layers)}
    model.model.layers_to_capture = [0]
    try:
        return answer | {"embedding": len(run(model)[1])}
    except TypeError as error:
        return answer | {"embedding": str(error)}


if __name__ == "__main__":
    main()
