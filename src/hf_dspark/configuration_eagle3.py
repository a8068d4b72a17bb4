"""The configuration of an Eagle3 draft: model facts only.

Knows nothing of losses, machines or policies; those are training arguments, tables and generation options.
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .draft_config import DraftConfig


@strict
class Eagle3Config(DraftConfig):
    """Configuration of an [`Eagle3DraftModel`].

    Args:
        block_size (`int`): γ, the number of draft tokens, one pass each; DeepSpec calls it `ttt_length`.
        kwargs: As for [`DraftConfig`]. Queries and keys have an RMS norm per head, as in Qwen3.

    Raises:
        ValueError: For each inconsistent value, naming it.
    """

    model_type = "dspark_eagle3"
    is_autoregressive: ClassVar[bool] = True
    deepspec_architecture: ClassVar[str] = "Eagle3Model"

    @classmethod
    def _translate_deepspec(cls, source: dict[str, Any]) -> dict[str, Any]:
        if source["model_type"] != "qwen3":
            raise ValueError(
                f"DeepSpec's Eagle3 drafts are supported for Qwen3 targets, got one for {source['model_type']!r} "
                f"(architectures {source['architectures']})"
            )
        config = super()._translate_deepspec(source)
        if set(config.pop("layer_types", None) or ["full_attention"]) != {"full_attention"}:
            raise ValueError(
                f"an Eagle3 draft attends to its whole context, got layer_types={source['layer_types']}: train one "
                "with full_attention layers"
            )
        config["block_size"] = config.pop("ttt_length")
        return {name: value for name, value in config.items() if name not in _LEFTOVERS}


# Of DeepSpec's training, or of the target: they say nothing about this draft.
_LEFTOVERS = ("step_loss_decay", "draft_num_hidden_layers", "sliding_window")
