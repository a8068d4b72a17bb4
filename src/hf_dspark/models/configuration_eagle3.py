"""The configuration of an Eagle3 draft: facts about the model, and nothing else."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_draft import DraftConfig


@strict
class Eagle3Config(DraftConfig):
    """Configuration of an [`Eagle3DraftModel`].

    Args:
        block_size (`int`): γ, the number of draft tokens, one pass each; DeepSpec calls it `ttt_length`.
        kwargs: As for [`DraftConfig`]. Queries and keys have an RMS norm per head, as in Qwen3.

    Example:

    ```python
    config = Eagle3Config.from_target(target.config, block_size=5)
    ```
    """

    model_type = "dspark_eagle3"
    is_autoregressive: ClassVar[bool] = True
