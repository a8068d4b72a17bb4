"""The configuration of an Eagle3 draft: facts about the model, and nothing else."""

from collections.abc import Iterator
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_draft import DraftConfig, Target, text_config

NUM_DEFAULT_TAPS = 3


@strict
class Eagle3Config(DraftConfig):
    """Configuration of an [`Eagle3DraftModel`].

    `target_layer_ids` and `num_target_layers` may both be `None`, as in most published drafts: then binding to a
    target of n layers taps the layers 1, n // 2 - 1 and n - 4.

    Args:
        block_size (`int`): γ, the number of draft tokens, one pass each; DeepSpec calls it `ttt_length`.
        target_hidden_size (`int`, *optional*): d of the target where the draft's differs; such a draft has an
            embedding and an LM head of its own.
        embedding_in_all_layers (`bool`): Whether each layer reads the embedded token anew (DeepSpec), or the first
            alone. Drafts of one layer do not differ.
        norm_before_residual (`bool`): Whether the residual of layers that read the embedding is what their norm gave.
        fc_norm, norm_before_fc (`bool`): A norm for each tapped layer, or one for all together, before `fc`.
        mtp (`bool`): Whether it is built as multi-token prediction modules are (DeepSeek-V3, GLM-4.5, Qwen3-Next): it
            reads the target's last hidden state alone, `target_layer_ids` being the last layer, without an `fc`; a
            projection of normalised embedding and hidden state enters an ordinary decoder layer.
        norm_output (`bool`): Whether the next step reads the output after the final norm (EAGLE-3.1), not before.
        mask_token_id (`int`, *optional*): Token that stands for the drafted ones; the target should not use it. With
            one, a single pass drafts all γ tokens (P-EAGLE): slots after the first read it, and a learnt state.
        kwargs: As for [`DraftConfig`].

    Example:

    ```python
    config = Eagle3Config.from_target(target.config, block_size=5)
    ```
    """

    model_type = "dspark_eagle3"
    taps_by_depth: ClassVar[bool] = True

    target_hidden_size: int | None = None
    embedding_in_all_layers: bool = True
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    mtp: bool = False
    mask_token_id: int | None = None

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        yield from super().rules()
        for name, has in (("own_embedding", self.own_embedding), ("own_lm_head", self.has_lm_head)):
            yield has or self.feature_size == self.hidden_size, name, "be True: the target's has rows of another size"
        need = "not be True together with fc_norm: the features pass one of them"
        yield not (self.fc_norm and self.norm_before_fc), "norm_before_fc", need
        if self.mtp:
            last = (self.num_target_layers or 0) - 1
            yield last >= 0, "num_target_layers", "be known: an MTP draft reads the last layer"
            yield self.target_layer_ids == [last], "target_layer_ids", f"be [{last}], the last layer, with mtp=True"
            for name in ("fc_norm", "norm_before_fc", "norm_before_residual", "target_hidden_size"):
                yield not getattr(self, name), name, "not be set with mtp=True, which has no such part"
        mask, tokens = self.mask_token_id, 0 if self.mtp else self.vocab_size
        yield mask is None or 0 <= mask < tokens, "mask_token_id", f"lie in [0, {tokens}), or be None"

    @classmethod
    def from_target(cls, target_config: Target, **overrides: Any) -> "Eagle3Config":
        """As [`DraftConfig.from_target`]; with `mtp=True`, one token from the target's last hidden state."""
        last, usual = text_config(target_config).num_hidden_layers - 1, {}
        if overrides.get("mtp"):
            usual = {"target_layer_ids": [last], "norm_output": True, "block_size": 1}
        return super().from_target(target_config, **(usual | overrides))

    @property
    def is_autoregressive(self) -> bool:
        return self.mask_token_id is None

    @property
    def has_lm_head(self) -> bool:
        return self.own_lm_head or self.draft_vocab_size is not None

    @property
    def num_taps(self) -> int:
        return NUM_DEFAULT_TAPS if self.target_layer_ids is None else len(self.target_layer_ids)

    def tap_by_depth(self, num_target_layers: int) -> None:
        taps = [1, num_target_layers // 2 - 1, num_target_layers - 4]
        if sorted(set(taps)) != taps:
            raise ValueError(
                f"the draft does not say which layers it taps, which means {taps} of {num_target_layers} layers, and "
                "these are not three: load the target that it was trained on, or set config.target_layer_ids"
            )
        self.num_target_layers, self.target_layer_ids = num_target_layers, taps
