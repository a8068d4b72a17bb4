"""Ordinary causal LMs that draft: a packed pass over a slot cache of their own for each token."""

import inspect
from itertools import accumulate
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..models.auto import is_draft
from ..models.configuration_eagle3 import Eagle3Config
from ..models.modeling_draft import DraftModel, NewContext, check_fits
from ..models.slot_cache import SlotCache, SlotLayout
from ..sampling.drafts import Drafts, Sampler
from ..sampling.transfers import to_device
from .slot_attention import PackedTarget
from .support import TargetSupport

BLOCK_SIZE = 5


class AssistantDraft(DraftModel):
    """An ordinary causal LM as a draft: in batches, queues and conversations, by all policies.

    It takes a pass for each token that it drafts, so it pays where the target is much larger. Chains alone are drawn.

    Args:
        assistant (`PreTrainedModel`): A causal LM with the tokenizer of the target; it is not changed.
        block_size (`int`): γ, the tokens that are drafted in a round at most.
        vocab_size (`int`, *optional*): V of the target, where it has the same tokenizer, but more or fewer unused rows
            after its tokens.

    Raises:
        TypeError: If it is no causal LM, or a draft already.
        ValueError: If it is an encoder-decoder, keeps recurrent states, or cannot attend to a slot cache.

    Example:

    ```python
    draft = AssistantDraft.from_pretrained("Qwen/Qwen3-0.6B")
    output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
    ```
    """

    config_class = Eagle3Config
    config: Eagle3Config
    reads_own_tokens = True
    unsaved = "an AssistantDraft has no weights of its own to save or publish: save its assistant"

    def __init__(
        self, assistant: PreTrainedModel, block_size: int = BLOCK_SIZE, vocab_size: int | None = None
    ) -> None:
        if not is_ordinary(assistant):
            raise TypeError(f"an assistant is an ordinary causal LM that is loaded, got {type(assistant).__name__}")
        super().__init__(_config_of(assistant.config, block_size, vocab_size))
        support = TargetSupport.of(assistant)
        obstacle = support.slot_obstacle
        if support.tree_obstacle is not None:
            obstacle = f"{support.name} keeps states that cannot go back to before a rejected token"
        if obstacle is not None:
            raise ValueError(
                f"{obstacle}: take an assistant with attention alone, or pass this one to generate() as it is, which "
                "is transformers' own assisted decoding, one sequence at a time"
            )
        self.assistant = assistant
        self.name_or_path = assistant.name_or_path
        self._bound: tuple[TargetSupport, PackedTarget] | None = None
        self._takes_places = "logits_to_keep" in inspect.signature(assistant.forward).parameters

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> "AssistantDraft":
        """Load a causal LM as an assistant.

        Args:
            pretrained_model_name_or_path (`str` or `PathLike`): A folder, or a repository on the Hub.
            args, kwargs: As for `AutoModelForCausalLM`, and `block_size` and `vocab_size`. A `target` is held against
                the config before any weights are read.
        """
        target = kwargs.pop("target", None)
        own = {name: kwargs.pop(name) for name in ("block_size", "vocab_size") if name in kwargs}
        if target is not None:
            found = AutoConfig.from_pretrained(pretrained_model_name_or_path, return_unused_kwargs=True, **kwargs)[0]
            check_fits(_config_of(found, **own), target)
        return cls(AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs), **own)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_bound": None}  # whose lock is of this process

    def bind(self, target: PreTrainedModel) -> "AssistantDraft":
        """Check that the target has the same vocabulary, and return the draft itself: nothing is borrowed."""
        check_fits(self.config, target)
        support = TargetSupport.of(self.assistant)
        self._bound = support, PackedTarget(support)
        return self

    def bind_parts(self, *parts: Any) -> "AssistantDraft":
        return self

    def _read(self, context: NewContext) -> torch.Tensor:
        """Return the logits after each request's anchor, `[R, V]`. Its slot is written after the context, and read
        again in the next round."""
        counts = tuple(count + 1 for count in context.counts)
        layout = SlotLayout(context.cache.lengths[: len(counts)], counts)
        return self._logits(context.committed_ids, context.cache, layout)

    def _draw(self, logits: torch.Tensor, context: NewContext, sampler: Sampler, num_tokens: int | None) -> Drafts:
        cache, num_tokens = context.cache, num_tokens or self.config.block_size
        known, vocab_size = logits.shape[-1], self.config.vocab_size
        ids = torch.arange(known, device=logits.device).expand_as(logits) if known < vocab_size else None
        for depth in range(1, 1 + num_tokens):
            level = sampler(logits[:, :vocab_size].float(), ids, None)
            if level is None or depth == num_tokens:
                break
            starts = tuple(length + depth for length in cache.lengths[: len(context.counts)])
            logits = self._logits(level[0], cache, SlotLayout(starts, (1,) * len(starts)))
        return sampler.finish()

    def _logits(self, token_ids: torch.Tensor, cache: SlotCache, layout: SlotLayout) -> torch.Tensor:
        """Run packed tokens `[T]` through the assistant; return the logits after the last of each row, `[B, V]`."""
        support, run = self._bound
        device, last = support.input_device, [end - 1 for end in accumulate(layout.counts)]
        positions = layout.position_ids(device)
        if support.num_positions is not None and not any(support.rope_parameters):
            positions = positions.clamp(max=support.num_positions - 1)  # it has learnt no others
        picks = self._takes_places and not support.is_spread
        kept = {"logits_to_keep": to_device(last, device)} if picks else {}
        input_ids = token_ids.to(device)[None].clamp(max=support.text.vocab_size - 1)
        logits = run(cache, layout, input_ids=input_ids, position_ids=positions, **kept).logits[0]
        return (logits if picks else logits[to_device(last, logits.device)]).to(self.device)


def is_ordinary(model: Any) -> bool:
    """Tell whether this is a model that generates by itself."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not is_draft(model)


def as_draft(model: Any, target: Any = None) -> Any:
    """Return an ordinary model as a draft; anything else as it is. A `TypeError` if it is the target itself."""
    if model is target and is_ordinary(model):
        raise TypeError("the target is its own draft, which saves nothing: pass a smaller model, or 'ngram'")
    return AssistantDraft(model) if is_ordinary(model) else model


def _config_of(
    assistant: PreTrainedConfig, block_size: int = BLOCK_SIZE, vocab_size: int | None = None
) -> Eagle3Config:
    if getattr(assistant, "is_encoder_decoder", False):
        raise ValueError(f"an assistant must be decoder-only, got the encoder-decoder {assistant.model_type!r}")
    own = {"block_size": block_size, "own_embedding": True, "own_lm_head": True}
    config = Eagle3Config.from_target(assistant, **own | ({} if vocab_size is None else {"vocab_size": vocab_size}))
    config.target_layer_ids, config.num_target_layers = [], None  # it reads no features, of whatever target
    return config
