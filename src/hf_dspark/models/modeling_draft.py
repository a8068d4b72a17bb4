"""What all drafts have in common: the target's embedding and LM head on loan, and the training pass.

The embedding and the LM head are the target's, borrowed by [`DraftModel.bind`] and held outside the module tree, so
they are neither saved, nor trained, nor moved, nor kept twice. Knows nothing of how a draft computes its hidden
states, of `generate()` or of policies.
"""

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..cpu.few_rows import apply_to_few_rows, products_with_rows, rough_product
from ..formats.files import (
    HUB_ARGUMENTS,
    TensorInfo,
    listed,
    load_tensors,
    open_checkpoint,
    read_tensor_infos,
    shortened,
)
from ..maths.losses import LossWeights, SlotScores, block_losses
from ..maths.policies import Policy, RoundOutcome
from ..maths.sampling import DraftBlock, Sampler
from .block_attention import BlockLayout
from .configuration_draft import require_decoder_only
from .slot_cache import SlotCache

# With fewer, picking out the candidates' rows of the head takes the time that rough logits save.
TOKENS_PER_CANDIDATE = 128


@dataclass
class DraftTrainingOutput(ModelOutput):
    """Losses of N anchored blocks per row. All but `loss` is detached.

    Attributes:
        loss (`torch.Tensor`, scalar): The value to differentiate.
        weight_sum (`torch.Tensor`, scalar): Sum of the slots' weights: the denominator of the means below.
        cross_entropy, l1 (`torch.Tensor`, scalar): Weighted sums.
        soft_cross_entropy, confidence (`torch.Tensor`, scalar, *optional*): Weighted sums.
        acceptance (`torch.FloatTensor` of shape `[B, N, γ]`): c*_k of every slot.
        confidence_logits (`torch.FloatTensor` of shape `[B, N, γ]`, *optional*): Pre-sigmoid c_k.
    """

    loss: torch.Tensor | None = None
    weight_sum: torch.Tensor | None = None
    cross_entropy: torch.Tensor | None = None
    l1: torch.Tensor | None = None
    soft_cross_entropy: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    acceptance: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None


@dataclass(frozen=True)
class _Borrowed:
    """The target's embedding and head, outside the module tree."""

    embedding: nn.Module
    lm_head: nn.Module
    dtype: torch.dtype


class DraftModel(PreTrainedModel):
    """Base of all drafts: pass one to `target.generate(..., assistant_model=draft)`, train it with [`DSparkTrainer`].

    What `generate()` reads from it besides its weights, all settable at any time:

    Attributes:
        policy ([`Policy`], *optional*): Whether to draft and how much of a block is verified. `None`:
            [`PrefixScheduler`] within [`AdaptiveDrafting`] if the draft is calibrated and this machine's throughput is
            known, else the full block.
        load (`int` or `Callable`): Tokens per step that the rest of the engine adds to the target's forward pass, or
            a function that returns them.
        domain (`str`, *optional*): Whose temperatures calibrate the confidences; `None`: by the sampling regime.
        observer (`Callable`, *optional*): Is called with the [`RoundOutcome`] of each round.
        use_transformers_loop (`bool`): Whether transformers' own assisted loop verifies and commits, one sequence at
            a time; for comparison.
        last_stats ([`RoundStatistics`], *optional*): Of the last call.
    """

    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # DeepSpec stores copies of the target's tensors; the target's own are used. speculators' t2d says what d2t says.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.weight$", r"^lm_head\.weight$", r"^t2d$"]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.policy: Policy | None = None
        self.load: int | Callable[[], int] = 0
        self.domain: str | None = None
        self.observer: Callable[[RoundOutcome], None] | None = None
        self.use_transformers_loop = False
        self.last_stats = None
        # A tuple is not searched for submodules: what is borrowed stays out of state_dict, parameters and `.to()`.
        self._borrowed: tuple[_Borrowed, ...] = ()
        self.gradient_checkpointing = False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> "DraftModel":
        """Load a draft: one of ours, or of DeepSpec, speculators or SpecForge.

        Checkpoints may come from strangers: of the weights, safetensors alone are read, no code is run, and names,
        shapes and types of all tensors are compared with the config before any memory is taken.

        Args:
            pretrained_model_name_or_path (`str` or `PathLike`): A folder, or a repository on the Hub.
            args, kwargs: As in transformers, without those that choose other files.

        Raises:
            ValueError: If tensors are missing, unexpected, of another shape or type than the config says, or not
                finite; if the checkpoint is damaged or holds no safetensors.
        """
        if pretrained_model_name_or_path is None:  # the caller has the weights
            return super().from_pretrained(None, *args, **kwargs)
        _refuse_other_files(kwargs)
        name = os.fspath(pretrained_model_name_or_path)
        hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
        config, revision = kwargs.pop("config", None), None
        if config is None:
            files = open_checkpoint(name, **hub)
            infos, revision = files.tensors, files.revision
            config = cls.config_class.from_pretrained(name, **hub | ({"revision": revision} if revision else {}))
        else:
            infos = read_tensor_infos(name, **hub)
            if not isinstance(config, PreTrainedConfig):
                config = cls.config_class.from_pretrained(config, **hub)
        tensors = load_tensors(infos, cls._expected_tensors(config, infos, name))
        require_finite(tensors, name)
        # Given the tensors, transformers looks for no files, adapters or code of its own.
        loaded = super().from_pretrained(None, *args, config=config, state_dict=tensors, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = name
        model.config._commit_hash = revision
        if cls._auto_class is None:  # the repository's code is not used, nor saved along
            vars(model.config).pop("auto_map", None)
        try:
            model.draft_token_ids()
        except ValueError as error:
            raise ValueError(f"the checkpoint {name} is damaged: {error}") from None
        return loaded

    @classmethod
    def _expected_tensors(cls, config: PreTrainedConfig, infos: dict[str, TensorInfo], name: str) -> list[str]:
        """Return the tensors that a draft of this config has, all of which must be there as it says."""
        ignored = re.compile("|".join(cls._keys_to_ignore_on_load_unexpected))
        layers = {match[1] for match in map(_LAYER.match, infos) if match}
        if len(layers) < config.num_hidden_layers:
            raise _misfit(name, f"are those of {len(layers)} layers, num_hidden_layers is {config.num_hidden_layers}")
        with torch.device("meta"):
            expected = cls(copy.deepcopy(config)).state_dict()
        faults = {
            "missing": sorted(expected.keys() - infos.keys()),
            "unexpected": sorted(key for key in infos.keys() - expected.keys() if not ignored.search(key)),
            "of another shape": sorted(
                key for key in expected.keys() & infos.keys() if tuple(expected[key].shape) != infos[key].shape
            ),
            "of another type": sorted(
                key
                for key in expected.keys() & infos.keys()
                if infos[key].dtype not in (_FLOATING if expected[key].is_floating_point() else _INTEGER)
            ),
        }
        if any(faults.values()):
            raise _misfit(name, "; ".join(f"{fault}: {listed(keys)}" for fault, keys in faults.items() if keys))
        return list(expected)

    @property
    def sharing(self) -> ModuleType:
        """How drafts are published: by a floor above this one, imported when it is used."""
        return import_module("hf_dspark.sharing.hub")

    def push_to_hub(self, repo_id: str, results: Iterable[str | Path] = (), **kwargs: Any) -> str:
        """Publish the draft with its model card, and with the code that lets transformers alone decode with it.

        Args:
            repo_id (`str`): The repository, `user/name`; made if it does not exist.
            results (`Iterable`): Result files, or folders of them, that the card is made of.
            kwargs: For [`~hub.push_draft`]: `private`, `token`, `revision`, `commit_message`, `max_shard_size`,
                `license`, ...

        Returns:
            `str`: URL of the commit.

        Raises:
            ValueError: If a result belongs to another draft or target; nothing was uploaded.
            OSError: If the upload failed.
        """
        return self.sharing.push_draft(self, repo_id, results, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a draft proposes what its target decodes.

        Raises:
            TypeError: Always; it says what to call.
        """
        raise TypeError(
            "a draft does not generate by itself, nor with an assistant: call "
            "target.generate(..., assistant_model=draft), or hf_dspark.generate_many(target, draft, prompts)"
        )

    def get_input_embeddings(self) -> nn.Module | None:
        return self._borrowed[0].embedding if self._borrowed else None

    def get_output_embeddings(self) -> nn.Module | None:
        return self._borrowed[0].lm_head if self._borrowed else None

    def bind(self, target: PreTrainedModel) -> "DraftModel":
        """Borrow the target's embedding and LM head; checks that draft and target fit. Costs no memory.

        Args:
            target (`PreTrainedModel`): A decoder-only causal LM.

        Returns:
            The draft itself.

        Raises:
            ValueError: If vocabulary, hidden size or layer count differ, or the target is an encoder-decoder.
        """
        check_fits(self.config, target)
        return self.bind_parts(target.get_input_embeddings(), target.get_output_embeddings(), target.dtype)

    def bind_parts(self, embedding: nn.Module, lm_head: nn.Module, dtype: torch.dtype) -> "DraftModel":
        """Borrow an embedding and an LM head of a target that is not there itself.

        Args:
            embedding (`nn.Module`): From token ids to rows `[..., d]`.
            lm_head (`nn.Module`): From hidden states to logits `[..., V]`.
            dtype (`torch.dtype`): In which the head computes.

        Returns:
            The draft itself.
        """
        self._borrowed = (_Borrowed(embedding, lm_head, dtype),)
        return self

    def _require_target(self) -> _Borrowed:
        if not self._borrowed:
            raise ValueError(
                "the draft has no embedding and no LM head of its own: call draft.bind(target) first "
                "(target.generate(..., assistant_model=draft) does it for you)"
            )
        return self._borrowed[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's embedding rows, scaled, on the draft's device and in its dtype; `[..., d]`."""
        embedding = self._require_target().embedding
        token_ids = token_ids.to(input_device(embedding))
        with_norm = self.config.embedding_norm or not hasattr(embedding, "embed_norm")
        rows = embedding(token_ids) if with_norm else F.embedding(token_ids, embedding.weight)
        # Gemma 3 and 4 scale inside the module, Gemma 1 and 2 and Granite outside of it.
        if self.config.embedding_scale != 1.0 and not hasattr(embedding, "embed_scale"):
            rows = rows * self.config.embedding_scale
        return rows.to(device=self.device, dtype=self.dtype)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the target's LM head says, scaled and soft-capped; `[..., V]` in the dtype of `hidden`.

        Args:
            hidden (`torch.Tensor` of shape `[..., d]`): Hidden states after the final norm, the target's or a draft's.
        """
        borrowed = self._require_target()
        hidden_there = hidden.to(device=input_device(borrowed.lm_head), dtype=borrowed.dtype)
        logits = apply_to_few_rows(borrowed.lm_head, hidden_there)
        return self.scaled_logits(logits.to(hidden))

    def base_logits(self, block_hidden: torch.Tensor) -> torch.Tensor:
        """Return U_k, the target's LM head on h_k; `[..., V]` in the draft's dtype."""
        return self.target_logits(block_hidden)

    def draft_head(self) -> nn.Module:
        """Return the LM head behind U_k."""
        return self._require_target().lm_head

    def rough_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return what tells the `draft_top_k` tokens with the largest base logits, in less time than those take.

        Whom they miss, the draft does not propose: that decides speed alone, as its law is what it draws from.

        Args:
            hidden (`torch.Tensor` of shape `[..., d]`): As for [`~DraftModel.base_logits`].

        Returns:
            `torch.Tensor` of shape `[..., V]`, *optional*: Comparable within a row. `None` where they save nothing,
            and without `draft_top_k`.
        """
        head, count = self.draft_head(), self.config.draft_top_k
        # Heads of other classes, which may have no such attribute, have no rough product.
        if count is None or count * TOKENS_PER_CANDIDATE > getattr(head, "out_features", 0):
            return None
        return rough_product(head, hidden)

    def candidate_logits(self, hidden: torch.Tensor, candidate_ids: torch.Tensor) -> torch.Tensor:
        """Return the base logits of some candidates alone, where [`~DraftModel.rough_logits`] has chosen them.

        Args:
            hidden (`torch.Tensor` of shape `[..., d]`): As for [`~DraftModel.base_logits`].
            candidate_ids (`torch.LongTensor` of shape `[..., n]`): Ids of the draft's logits.

        Returns:
            `torch.Tensor` of shape `[..., n]`, in the dtype of `hidden`.
        """
        weight = self.draft_head().weight
        return self.scaled_logits(products_with_rows(weight, candidate_ids, hidden.to(weight.dtype)).to(hidden))

    def draft_token_ids(self) -> torch.Tensor | None:
        """Return the target's token of each draft logit, `[V_d]`; `None` where the vocabularies are one."""
        return None

    def scaled_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply what the target does to the output of its LM head: a factor, then a soft cap."""
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def draft_block(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        sampler: Sampler,
        num_features: Sequence[int] | None = None,
        committed_ids: torch.Tensor | None = None,
    ) -> DraftBlock:
        """Draft one block per request.

        Args:
            anchor_ids (`torch.LongTensor` of shape `[B]`): x_0, the last committed token of each request.
            features (`torch.Tensor` of shape `[B, C, m*d]`, or `[T, m*d]` with `num_features`): Tapped target layers
                of the committed tokens not yet in `cache`, the anchor excluded; packed, request by request.
            cache ([`SlotCache`]): Rows 0..B-1 hold the requests' context; the new one is appended.
            sampler ([`Sampler`]): Draws each token; supplied by the caller.
            num_features (`Sequence[int]`, *optional*): How many tokens of `features` belong to each request.
            committed_ids (`torch.LongTensor` of shape `[T]`, *optional*): The committed token behind each token of
                `features`, the anchor behind the last one; read by autoregressive drafts only.

        Returns:
            [`DraftBlock`]
        """
        raise NotImplementedError

    def read_block(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        num_features: Sequence[int] | None = None,
        committed_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read the new context into `cache`, as [`~DraftModel.draft_block`] does, and draw nothing.

        Args:
            anchor_ids, features, cache, num_features, committed_ids: As there.

        Returns:
            `torch.Tensor`: The draft's own hidden states.
        """
        raise NotImplementedError

    def block_hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return h of N anchored blocks per row along their labels, `[B, N, slots, d]`.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, S]`): The target's sequences.
            features (`torch.Tensor` of shape `[B, S, m*d]`): Tapped target layers of all positions.
            layout ([`BlockLayout`]): Where the blocks stand.
            labels (`torch.LongTensor` of shape `[B, N, γ]`): x*_1..x*_γ of each block.
        """
        raise NotImplementedError

    def block_layout(
        self, anchor_positions: torch.Tensor, anchor_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> BlockLayout:
        """Return where this draft's training blocks stand.

        Args:
            anchor_positions, anchor_mask, position_ids: As in [`BlockLayout`].
        """
        return BlockLayout(anchor_positions, anchor_mask, position_ids, self.config.block_size)

    def previous_ids(self, anchor_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the token before the one that each slot predicts, `[..., slots]`.

        Args:
            anchor_ids (`torch.LongTensor` of shape `[...]`): x_0.
            labels (`torch.LongTensor` of shape `[..., γ]`): x*_1..x*_γ.
        """
        # Where the anchor's slot predicts nothing it still passes through a recurrent head, with the anchor itself.
        anchors = anchor_ids[..., None].expand(*anchor_ids.shape, 1 + self.config.num_slots - labels.shape[-1])
        return torch.cat([anchors, labels[..., :-1]], dim=-1)

    def predicting(self, per_slot: torch.Tensor) -> torch.Tensor:
        """Return the γ slots that predict, `[..., γ, *]` of `[..., slots, *]`."""
        return per_slot[..., -self.config.block_size :, :]

    def slot_inputs(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all that [`~DraftModel.slot_logits`] needs of each predicting slot, `[..., γ, *]` each.

        Args:
            hidden (`torch.Tensor` of shape `[..., slots, d]`): h of all slots.
            previous_ids (`torch.LongTensor` of shape `[..., slots]`): From [`~DraftModel.previous_ids`].
        """
        return (self.predicting(hidden),)

    def slot_logits(self, hidden: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the draft logits `[n, V]` of any n slots.

        Args:
            hidden, inputs: From [`~DraftModel.slot_inputs`], `[n, *]` each.
        """
        return self.base_logits(hidden)

    def slot_parameters(self) -> list[nn.Parameter]:
        """Return the draft's own parameters that [`~DraftModel.slot_logits`] reads."""
        return []

    def slot_confidence(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """Return pre-sigmoid c_k `[..., γ]`, or `None` without a confidence head.

        Args:
            hidden, previous_ids: As in [`~DraftModel.slot_inputs`].
        """
        return None

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        label_hidden: torch.Tensor,
        layout: BlockLayout,
        labels: torch.Tensor,
        supervised: torch.Tensor,
        weights: LossWeights | None = None,
        weight_sum: torch.Tensor | None = None,
    ) -> DraftTrainingOutput:
        """Return the losses of N anchored blocks per row; the training pass.

        Logits exist for supervised slots alone, a chunk at a time.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, S]`): The target's sequences.
            features (`torch.Tensor` of shape `[B, S, m*d]`): Tapped target layers of all positions.
            label_hidden (`torch.Tensor` of shape `[B, N, γ, d]`): The target's last hidden states that predict the
                labels.
            layout ([`BlockLayout`]): Where the blocks stand.
            labels (`torch.LongTensor` of shape `[B, N, γ]`): x*_1..x*_γ of each block.
            supervised (`torch.BoolTensor` of shape `[B, N, γ]`): Slots that count.
            weights ([`LossWeights`], *optional*): Of the losses.
            weight_sum (`torch.Tensor`, *optional*): Denominator of the means; that of these blocks unless given.

        Returns:
            [`DraftTrainingOutput`]

        DSpark Section 3.3.
        """
        hidden = self.block_hidden(input_ids, features, layout, labels)
        anchor_ids = input_ids.gather(1, layout.anchor_positions)
        previous_ids = self.previous_ids(anchor_ids, labels)
        confidence_logits = self.slot_confidence(hidden, previous_ids)
        scores = SlotScores(
            self.slot_logits, self.slot_inputs(hidden, previous_ids), self.slot_parameters(),
            self.target_logits, label_hidden, self.config.vocab_size,
        )  # fmt: skip
        losses = block_losses(scores, labels, supervised, confidence_logits, weights or LossWeights(), weight_sum)
        soft, confidence = losses.soft_cross_entropy, losses.confidence
        return DraftTrainingOutput(
            loss=losses.total,
            weight_sum=losses.l1.denominator,
            cross_entropy=losses.cross_entropy.numerator,
            l1=losses.l1.numerator,
            soft_cross_entropy=None if soft is None else soft.numerator,
            confidence=None if confidence is None else confidence.numerator,
            acceptance=losses.acceptance,
            confidence_logits=None if confidence_logits is None else confidence_logits.detach().float(),
        )


_FLOATING, _INTEGER = ("F64", "F32", "F16", "BF16"), ("I64",)
_LAYER = re.compile(r"layers\.(\d+)\.")
# What would make transformers read other files, or other tensors, than those that were checked.
_OTHER_FILES = ("gguf_file", "ignore_mismatched_sizes", "key_mapping", "state_dict", "variant")


def _refuse_other_files(kwargs: dict[str, Any]) -> None:
    """Take out of the arguments of `from_pretrained` those that choose files, and raise a `ValueError` if one does."""
    if kwargs.pop("use_safetensors", True) is False or kwargs.pop("weights_only", True) is False:
        raise ValueError(
            "drafts are loaded from safetensors only, because pickled weights can run code: leave out "
            "use_safetensors=False and weights_only=False"
        )
    if (kwargs.pop("adapter_kwargs", None) or {}).get("_adapter_model_path") is not None:
        raise ValueError("the checkpoint holds a PEFT adapter, which a draft cannot use: merge it into the weights")
    for name in _OTHER_FILES:
        if given := kwargs.pop(name, None):
            raise ValueError(
                f"drafts cannot be loaded with {name}={shortened(given)}: all weights are read from "
                "model.safetensors, or the shards in its index, as they are. Leave it out"
            )


def _misfit(name: str, found: str) -> ValueError:
    return ValueError(
        f"the checkpoint {name} does not match its config. Tensors {found}. Check markov_rank, markov_head_type, "
        "enable_confidence_head, num_hidden_layers and the norms in config.json."
    )


def require_finite(tensors: dict[str, torch.Tensor], name: str) -> None:
    """Raise a `ValueError` if a weight is not a number or infinite, which only damage explains."""
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not all(map(torch.isfinite, tensor.aminmax())):
            raise ValueError(
                f"the checkpoint {name} is damaged: {key} has values that are not finite. Download or train it again"
            )


def input_device(module: nn.Module) -> torch.device:
    """Return where a module wants its input; between calls, offloaded weights live on the meta device."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):  # accelerate chains several
        if getattr(part, "execution_device", None) is not None:
            return torch.device(part.execution_device)
    # Packed weights have names of their own, and may be buffers.
    return next(itertools.chain(module.parameters(), module.buffers())).device


def check_fits(config: PreTrainedConfig, target: PreTrainedModel) -> None:
    """Raise a `ValueError` that names every way in which draft and target do not fit."""
    require_decoder_only(target.config)
    text = target.config.get_text_config(decoder=True)
    facts = {
        "vocab_size": (config.vocab_size, text.vocab_size),
        "hidden_size": (config.hidden_size, text.hidden_size),
        # Where a checkpoint does not say how deep its target was, that its last layer is not tapped is what is known.
        "num_target_layers": (
            config.num_target_layers or max(text.num_hidden_layers, max(config.target_layer_ids) + 2),
            text.num_hidden_layers,
        ),
    }
    wrong = [f"{name}: draft {ours}, target {theirs}" for name, (ours, theirs) in facts.items() if ours != theirs]
    if wrong:
        raise ValueError(
            f"this draft was not made for this target ({'; '.join(wrong)}). A draft fits only the model it was "
            "trained on: load the matching pair, or train one with "
            f"{type(config).__name__}.from_target(target.config)."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"the target {type(target).__name__} has no LM head: load it with AutoModelForCausalLM")
