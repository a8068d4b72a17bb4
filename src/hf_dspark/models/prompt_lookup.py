"""Drafts without a draft model: what the text has said before is proposed again."""

import torch
from transformers import PreTrainedModel

from ..sampling.drafts import Drafts, Sampler
from .auto import require_target
from .configuration_draft import text_config
from .configuration_dspark import DSparkConfig
from .modeling_draft import DraftModel, NewContext


class PromptLookup(DraftModel):
    """Prompt lookup for any number of sequences: proposes what followed the longest earlier match of a text's end.

    It has no weights and needs no training. It pays where answers repeat their prompts: code edits, extraction,
    retrieval. Drafts use it in their trees, too, so it is for targets that have none.

    Args:
        target (`PreTrainedModel`): The causal LM that it is for.

    Raises:
        ValueError: In `generate()`, if the target cannot verify trees, or options ask for drafted blocks.

    Example:

    ```python
    output = target.generate(**inputs, assistant_model=PromptLookup(target), max_new_tokens=64)
    ```
    """

    config_class = DSparkConfig
    grows_trees = True
    drafts_blocks = False
    unsaved = "PromptLookup has no weights to save or publish: make one with PromptLookup(target)"

    def __init__(self, target: PreTrainedModel) -> None:
        require_target(target)
        facts = {"num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False}
        config = DSparkConfig.from_target(target, target_layer_ids=[-1], confidence_head_with_markov=False, **facts)
        super().__init__(config)
        self._home = target.device, target.dtype

    def bind(self, target: PreTrainedModel) -> "PromptLookup":
        """Follow a target as it is now, of any size, and return the draft itself."""
        text, self._home = text_config(target), (target.device, target.dtype)
        self.config.vocab_size, self.config.hidden_size = text.vocab_size, text.hidden_size
        self.config.num_target_layers = text.num_hidden_layers
        return super().bind(target)

    @property
    def device(self) -> torch.device:
        return self._home[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._home[1]

    def _read(self, context: NewContext) -> None:
        """Keep nothing of the context."""

    def _draw(self, hidden: None, context: NewContext, sampler: Sampler, num_tokens: int | None) -> Drafts:
        return sampler.finish()  # it knows what was matched
