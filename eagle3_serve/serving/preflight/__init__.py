"""Everything cheap that can be wrong, checked before anything is spawned: one function a check, one file a subject.

Each check returns findings that say what is wrong and what to do; `require` turns the errors among them into one
exception. `launch --dry-run` shows all of them before it does.
"""

from eagle3_serve.serving.preflight.checkpoints import (
    DRAFTER_ARCHITECTURE,
    Checkpoints,
    check_drafter,
    check_target,
    read_checkpoints,
)
from eagle3_serve.serving.preflight.engine import (
    check_arguments,
    check_attention_backends,
    check_devices,
    check_kernels,
    check_release,
    check_tap,
)
from eagle3_serve.serving.preflight.features import check_features
from eagle3_serve.serving.preflight.findings import Finding, require
from eagle3_serve.serving.preflight.host import check_directories, check_exposure, check_ports
from eagle3_serve.serving.preflight.rope import check_rope
from eagle3_serve.serving.preflight.states import check_layers_of_release, check_states
from eagle3_serve.serving.preflight.tensors import check_draft_vocabulary, check_tensors
from eagle3_serve.serving.preflight.tokens import check_tokens

__all__ = [
    "DRAFTER_ARCHITECTURE",
    "Checkpoints",
    "Finding",
    "check_arguments",
    "check_attention_backends",
    "check_devices",
    "check_directories",
    "check_draft_vocabulary",
    "check_drafter",
    "check_exposure",
    "check_features",
    "check_kernels",
    "check_layers_of_release",
    "check_ports",
    "check_release",
    "check_rope",
    "check_states",
    "check_tap",
    "check_target",
    "check_tensors",
    "check_tokens",
    "read_checkpoints",
    "require",
]
