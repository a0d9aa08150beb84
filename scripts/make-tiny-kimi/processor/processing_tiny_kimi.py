"""The processor that SGLang 0.5.16 asks of every Kimi-K2.5 checkpoint, for one that has no vision weights.

Text passes through the tokenizer. An image is refused: the tiny Kimi's vision tower does not exist.
"""

from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin


class NoMedia:
    """Stands where Kimi has its image processor; the sizes are those of the config's `vision_config`."""

    media_proc_cfg: ClassVar[dict[str, Any]] = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 16,
        "patch_limit_on_one_side": 8,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        """Raises ValueError, which the server answers with status 400."""
        raise ValueError("the tiny Kimi reads text only")


class TinyKimiProcessor(ProcessorMixin):
    """Tokenizer plus `NoMedia`."""

    attributes: ClassVar[list[str]] = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> None:
        self.image_processor = None
        self.media_processor = NoMedia()
        super().__init__(tokenizer)

    def __call__(self, text: Any = None, images: Any = None, **kwargs: Any) -> Any:
        """Token ids of `text`, shape [1, tokens], int64. Raises ValueError for images."""
        if images:
            raise ValueError("the tiny Kimi reads text only")
        return self.tokenizer(text, return_tensors="pt")
