"""Every option of a training, frozen and checked; `options_file.py` reads them, `library.py` alone knows what the
library calls them.

`null` means: decided by the target, the store or the device when the run begins, and written down in OUT/run.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
# The shape of the drafter, which one that is trained further brings with it.
SHAPE = (
    "draft_vocab_size",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "max_position_embeddings",
    "fc_norm",
    "norm_before_fc",
    "norm_output",
)


class TrainOptions(BaseModel):
    """The keys of train.yaml. Sizes are in tokens unless the name says otherwise."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, populate_by_name=True
    )

    initial: Path | None = Field(
        default=None,
        alias="from",
        description="Drafter to train further, in SGLang's layout; it brings its shape and vocabulary. null: a new one",
    )
    draft_vocab_size: Count | None = Field(
        default=None,
        description="Target tokens that the drafter can propose, the most frequent ones; null: 32000 or all",
    )
    heads: Count | None = Field(default=None, description="Attention heads; null: hidden size / head_dim")
    kv_heads: Count | None = Field(default=None, description="Key and value heads; null: as many as heads")
    head_dim: Count | None = Field(
        default=None, description="Width of a head; null: 128, and 32 below hidden size 1024"
    )
    intermediate_size: Count | None = Field(
        default=None, description="Width of the MLP; null: the target's dense one, else 3 times the hidden size"
    )
    rope_theta: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Base of the rotary embedding; null: the target's, without its scaling"
    )
    max_position_embeddings: Count | None = Field(default=None, description="Longest context; null: the target's")
    fc_norm: bool = Field(default=False, description="A norm on each state before fc (EAGLE-3.1; SGLang 0.5.23)")
    norm_before_fc: bool = Field(
        default=False, description="One norm on the joined states before fc (SGLang 0.5.16 on)"
    )
    norm_output: bool = Field(
        default=False, description="Feed normed hidden states to the next step (EAGLE-3.1; SGLang 0.5.23)"
    )

    ttt_steps: Annotated[int, Field(ge=1, le=16)] = Field(
        default=3, description="Training-time test steps: drafting steps that are trained, at least as many as served"
    )
    ttt_loss_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Weight of each step's loss relative to the one before"
    )
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"] = Field(
        default="kl_div", description="Distance to the target's distribution over the draft vocabulary"
    )
    optimizer: Literal["muon", "adamw"] = Field(
        default="muon", description="muon: Muon for matrices and AdamW for norms; adamw: AdamW for everything"
    )
    lr: Annotated[float, Field(gt=0)] = Field(default=1e-3, description="Learning rate, of both optimizers")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.01, description="AdamW's weight decay")
    muon_weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.1, description="Muon's weight decay")
    scheduler: Literal["cosine", "linear", "none"] = Field(default="cosine", description="How the rate falls")
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.03, description="Part of all steps over which the rate rises"
    )
    epochs: Annotated[int, Field(ge=0)] = Field(
        default=5, description="Passes over the store; 0 writes the drafter as it is before training"
    )
    tokens_per_step: Annotated[int, Field(ge=16)] = Field(
        default=4096, description="Tokens packed into a step on each device; longer samples are cut to this"
    )
    validation_share: Rate = Field(
        default=0.05, description="Part of the store's samples, its last ones, that is measured and not trained on"
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(default=42, description="Of weights and of the samples' order")

    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of the computation (weights are kept in float32); auto: bfloat16 on CUDA only"
    )
    attention: Literal["auto", "flex", "sdpa", "eager"] = Field(
        default="auto", description="Attention kernel; auto: flex on CUDA, sdpa on the CPU"
    )
    loss_kernel: Literal["auto", "fused", "eager"] = Field(
        default="auto", description="Kernel of the loss; auto: fused on CUDA, eager on the CPU"
    )
    devices: Count = Field(
        default=1, description="GPUs of this machine, on a CPU processes, each with its own tokens_per_step"
    )
    shard: bool = Field(default=False, description="Shard the drafter's weights over the devices (FSDP)")
    workers: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Processes that read the store; null: 4 on CUDA, none on the CPU"
    )
    checkpoints_per_epoch: Count = Field(
        default=1, description="Checkpoints an epoch; the best one and the newest one are kept"
    )
    log_every: Count | None = Field(
        default=None, description="Steps between two records of the training loss; null: 10 on CUDA, 1 on the CPU"
    )
    publish: Literal["best", "last"] = Field(
        default="best",
        description="Checkpoint that becomes the drafter: the one most often right in validation, or the last",
    )
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="Dtype of the drafter's weights")

    @model_validator(mode="after")
    def _fits_together(self) -> TrainOptions:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are one norm in two places: choose one")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.shard and self.devices == 1:
            raise ValueError("shard needs devices above 1")
        given = sorted(name for name in self.model_fields_set & set(SHAPE) if getattr(self, name) is not None)
        if self.initial is not None and given:
            raise ValueError(f"from brings the drafter's shape, so it leaves no choice of {', '.join(given)}")
        return self

    def as_dict(self) -> dict[str, object]:
        """Plain data under the names of train.yaml."""
        return self.model_dump(mode="json", by_alias=True)
