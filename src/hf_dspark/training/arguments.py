"""The arguments of a training: those of transformers' `Trainer`, and what a batch, an anchor and a loss are."""

from dataclasses import dataclass

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy, SchedulerType

from ..models.losses import LossWeights, argument


@dataclass
class DSparkTrainingArguments(LossWeights, TrainingArguments):
    """Arguments of [`DSparkTrainer`]; those of `TrainingArguments` keep their meaning.

    Epochs, learning rate and its schedule default to the method's: with `Trainer`'s 5e-5, a draft learns half as much.

    Args:
        cross_entropy_weight, l1_weight, confidence_weight, soft_cross_entropy_weight, position_decay: See
            [`~losses.LossWeights`].
        num_anchors (`int`): Blocks per document and step at most.
        max_length (`int`, *optional*): Rows are cut to this many tokens; `None` leaves them as they are.
        packing (`bool`): Join short documents into rows of `max_length`.
        chat_template_kwargs (`dict`, *optional*): For the tokenizer's chat template, such as
            `{"enable_thinking": False}`.
        feature_cache_dir (`str`, *optional*): The target's states are read from this folder; those that it lacks are
            computed before training, or as the rows of a stream come. Without a target, all must be there.
        dataset_num_proc (`int`, *optional*): Processes that tokenise.

    Example:

    ```python
    arguments = DSparkTrainingArguments(
        "out/draft", num_train_epochs=4, packing=True, max_length=1024, num_anchors=128
    )
    ```
    """

    num_train_epochs: float = argument(10.0, "Passes over the training set.")
    learning_rate: float = argument(6e-4, "The largest learning rate.")
    lr_scheduler_type: SchedulerType | str = argument("cosine", "How the learning rate falls after the warm-up.")
    warmup_steps: float = argument(0.04, "Steps in which the learning rate rises; below 1, their share of all.")
    num_anchors: int = argument(64, "Blocks per document and step at most.")
    max_length: int | None = argument(2048, "Rows are cut to this many tokens.")
    packing: bool = argument(False, "Join short documents into rows of max_length.")
    chat_template_kwargs: dict | str | None = argument(
        None, "For the chat template, as JSON, such as '{\"enable_thinking\": false}'."
    )
    feature_cache_dir: str | None = argument(None, "Where the target's states are kept; filled before training.")
    dataset_num_proc: int | None = argument(None, "Processes that tokenise.")

    # Trainer parses strings for these fields: one more than its own.
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "chat_template_kwargs"]

    def __post_init__(self) -> None:
        LossWeights.__post_init__(self)
        TrainingArguments.__post_init__(self)
        # The rows' own columns are needed; the model's forward takes blocks.
        self.remove_unused_columns = False
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.accelerator.is_available()  # else it warns
        for name in ("num_anchors", "max_length", "gradient_accumulation_steps"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if self.packing and self.max_length is None:
            raise ValueError("packing joins documents into rows of max_length tokens: give one, got None")
        if self.push_to_hub and self.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            strategy = f"hub_strategy={self.hub_strategy.value!r}"
            raise ValueError(f"{strategy} would publish pickled states, which are unsafe to load: choose 'end'")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the steps of the warm-up: a share is rounded down, as the first step of a warm-up trains nothing."""
        return int(self.warmup_steps if self.warmup_steps >= 1 else self.warmup_steps * num_training_steps)
