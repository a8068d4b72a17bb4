"""What all drafts have in common: the target's embedding and LM head on loan, loading, and the training pass.

What [`DraftModel.bind`] borrows stands outside the module tree: neither saved, trained, nor moved, nor kept twice.

A checkpoint of any format may hold an embedding or an LM head, `embed_tokens.weight` and `lm_head.weight`. Whether
they are copies of the target's is seen when the draft is bound: copies are dropped, others become frozen modules of
the draft, and its config says so by `own_embedding` and `own_lm_head`. A kind of draft makes the modules that its
config names by calling `add_own_weights`, and reads them through `embed` and `base_logits` alone.
"""

import copy
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from ..files import listed, shortened
from ..formats.checkpoint import HUB_ARGUMENTS, QUANTISATION, Checkpoint, kept_tokens_mask
from ..formats.translate import places_of, stored_names
from ..sampling.drafts import Drafts, Sampler
from ..scheduling.options import DecodingOptions
from . import publisher
from .block_attention import BlockLayout
from .borrowing import Borrowed, input_device, lm_head_of, scale_inside
from .configuration_draft import BITSANDBYTES_ALONE, SHAREABLE, DraftConfig, target_scales, text_config
from .losses import BlockLosses, LossWeights, SlotLogits, block_losses
from .slot_cache import SlotCache

NO_GENERATION_CONFIG = (
    "a draft has no generation_config. Say in the call how much is drafted:\n"
    "target.generate(..., assistant_model=draft, num_assistant_tokens=4, assistant_confidence_threshold=0.4)"
)
SAME_SCALE = 0.01  # scales whose ratio is closer to one than this differ by rounding
OPTIONS = {field.name for field in fields(DecodingOptions)}  # not set on a draft itself, where nothing reads them


@dataclass(frozen=True)
class AnchoredBlocks:
    """N training blocks per row."""

    layout: BlockLayout
    labels: torch.Tensor  # [B, N, γ], x*_1..x*_γ: the tokens after each anchor
    weights: torch.Tensor  # [B, N, γ], in the losses; positive on the contiguous supervised prefix, 0 elsewhere

    @property
    def supervised(self) -> torch.Tensor:
        return self.weights > 0


@dataclass(frozen=True)
class NewContext:
    """What a draft reads before it drafts: what was committed since it did so last, of R requests."""

    anchor_ids: torch.Tensor  # [R], x_0, the last committed token of each request
    features: torch.Tensor  # [T, m*d], tapped target layers of the tokens before the anchors, packed
    counts: Sequence[int]  # how many of these belong to each request
    cache: SlotCache  # its rows 0..R-1 hold the earlier context; the new one is appended
    committed_ids: torch.Tensor | None = None  # [T], the committed token after each of them; not all drafts read it


class DraftModel(PreTrainedModel):
    """Base of all drafts: pass one to `target.generate(..., assistant_model=draft)`, train it with [`DSparkTrainer`].

    A kind of draft defines `_read` (new context into the cache; returns h), `_draw` (from h) and `teacher_forced`.

    Attributes:
        decoding ([`DecodingOptions`]): How `generate()` decodes with it; may be replaced at any time.
        last_stats ([`Rounds`], *optional*): Of the last call.
    """

    grows_trees = False  # whether `draft_block` can draw several children of a node
    draws_tails = False  # whether the slots of a block can be drawn again after some of its tokens were committed
    drafts_blocks = True  # whether it proposes anything of its own
    unsaved: str | None = None  # why there is nothing to save or publish
    reads_own_tokens = False  # whether `committed_ids` of a request begin with the token of its first feature
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.decoding = DecodingOptions()
        self.last_stats = None
        self._borrowed: Borrowed | None = None  # a tuple is not searched for submodules
        self.brought: dict[str, torch.Tensor] = {}  # of the checkpoint, not compared with a target's yet
        self.embed_tokens = self.lm_head = None
        self.gradient_checkpointing = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "decoding" and not isinstance(value, DecodingOptions):
            raise TypeError(f"draft.decoding must be DecodingOptions(policy=..., ...), got {shortened(value)}")
        if name in OPTIONS:
            raise AttributeError(f"a draft has no {name}: set draft.decoding = DecodingOptions({name}=...)")
        if name == "generation_config":
            raise AttributeError(NO_GENERATION_CONFIG)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "generation_config":  # where transformers' manual sets how much its assistants draft
            raise AttributeError(NO_GENERATION_CONFIG)
        return super().__getattr__(name)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> "DraftModel":
        """Load a draft: one of ours, or of DeepSpec, speculators or SpecForge.

        Checkpoints may come from strangers: of the weights, safetensors alone are read, no code is run, and names,
        shapes and types of all tensors are compared with the config before any memory is taken.

        Args:
            pretrained_model_name_or_path (`str` or `PathLike`): A folder, or a repository on the Hub.
            args, kwargs: As in transformers, without those that choose other files; fields of the configuration, too.
                A `target` is held against the config before any weights are read.

        Raises:
            ValueError: If the target does not fit; if tensors are missing, unexpected, of another shape or type than
                the config says, or not finite; if the checkpoint is damaged or holds no safetensors.
        """
        if pretrained_model_name_or_path is None:  # the caller has the weights
            return super().from_pretrained(None, *args, **kwargs)
        _refuse_other_files(kwargs)
        hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
        checkpoint = Checkpoint.open(pretrained_model_name_or_path, **hub)
        config = kwargs.pop("config", None) or checkpoint
        if not isinstance(config, PreTrainedConfig):
            names = {field.name for field in fields(cls.config_class)} - {"dtype"}
            facts = {name: kwargs.pop(name) for name in names & kwargs.keys()}
            config = cls.config_class.from_pretrained(config, **hub, **facts)
        if (target := kwargs.pop("target", None)) is not None:
            check_fits(config, target)
        tensors = cls.read_tensors(config, checkpoint)
        config = copy.deepcopy(config)
        config.own_embedding = config.own_lm_head = False  # until a target is there to compare them with
        brought = {name: tensors.pop(name) for name in config.shareable if name in tensors}
        if (quantisation := _quantisation(kwargs.pop(QUANTISATION, None), checkpoint)) is not None:
            kwargs[QUANTISATION] = quantisation
        # Given the tensors, transformers looks for no files, adapters or code of its own.
        loaded = super().from_pretrained(None, *args, config=config, state_dict=tensors, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _check_packable(model)
        model.name_or_path = model.config.name_or_path = checkpoint.name
        model.config._commit_hash = checkpoint.revision
        model.brought = brought
        if cls._auto_class is None:  # the repository's code is not used, nor saved along
            vars(model.config).pop("auto_map", None)
        return loaded

    @classmethod
    def read_tensors(cls, config: PreTrainedConfig, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """Read a checkpoint's tensors if names, shapes and types are those of its config; else raise `ValueError`.

        An embedding and an LM head that the files hold are among them, and `config` says so from then on.
        """
        renamed = stored_names(checkpoint)
        layers = {match[1] for match in map(_LAYER.match, renamed) if match}
        if len(layers) < config.num_hidden_layers:  # before so many are built
            found = f"are those of {len(layers)} layers, num_hidden_layers is {config.num_hidden_layers}"
            found += "" if layers else f"; their names are {listed(sorted(renamed))}"
            raise checkpoint.misfit(found, ["num_hidden_layers"])
        for name, field in config.shareable.items():
            setattr(config, field, getattr(config, field) or renamed.get(name, name) in checkpoint.tensors)
        with torch.device("meta"):
            expected = cls(copy.deepcopy(config)).state_dict()
        named = {renamed.get(key, key): tensor for key, tensor in expected.items()}
        checkpoint.compare(named, places_of(checkpoint.config))
        stored = checkpoint.load([renamed.get(key, key) for key in expected])
        tensors = {key: stored[renamed.get(key, key)] for key in expected}
        tensors |= {key: tensors[key].to(each.dtype) for key, each in expected.items() if not each.is_floating_point()}
        if "d2t" in tensors:
            try:
                kept = kept_tokens_mask(tensors["d2t"], config.vocab_size)
            except ValueError as error:
                raise ValueError(f"the checkpoint {checkpoint.name} is damaged: {error}") from None
            t2d = renamed.get("t2d")
            if t2d is not None and not torch.equal(checkpoint.load([t2d])[t2d].bool(), kept):
                raise ValueError(f"the checkpoint {checkpoint.name} is damaged: its t2d and d2t name different tokens")
        return tensors

    def push_to_hub(self, repo_id: str, results: Iterable[str | Path] = (), **kwargs: Any) -> str:
        """Publish the draft with its model card, and with the code that lets transformers alone decode with it.

        Args:
            repo_id (`str`): The repository, `user/name`; made if it does not exist.
            results (`Iterable`): Result files, or folders of them, that the card is made of. A `ValueError` names one
                of another draft or target; nothing was uploaded then.
            kwargs: `private`, `token`, `revision`, `commit_message`, `max_shard_size`, `license`, ...

        Returns:
            `str`: URL of the commit.
        """
        return publisher.load().push_draft(self, repo_id, results, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a `TypeError` that says what to call: a draft only proposes what its target decodes."""
        raise TypeError(
            "a draft does not generate by itself, nor with an assistant: call "
            "target.generate(..., assistant_model=draft), or hf_dspark.generate_many(target, draft, prompts)"
        )

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Weights that were not compared with a target's yet are the draft's own, and saved.

        A `TypeError` says that a draft has no weights of its own.
        """
        if self.unsaved is not None:
            raise TypeError(self.unsaved)
        for name, weight in self.brought.items():
            self._adopt(name, weight)
        self.brought = {}
        if getattr(self, "is_quantized", False):
            _unpack_for_cpu(self)
        super().save_pretrained(save_directory, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens or (self._borrowed and self._borrowed.embedding)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head or (self._borrowed and self._borrowed.lm_head)

    def bind(self, target: PreTrainedModel) -> "DraftModel":
        """Borrow the target's embedding and LM head, which costs no memory, and return the draft itself.

        Raises:
            ValueError: If vocabulary, hidden size or layer count differ, the target is an encoder-decoder, or the
                config's `draft_top_k` is impossible.
        """
        self.config.check_values("draft_top_k")
        check_fits(self.config, target)
        is_new = self._borrowed is None or self._borrowed.embedding is not target.get_input_embeddings()
        self.bind_parts(target.get_input_embeddings(), lm_head_of(target), target.dtype)
        for name, theirs in target_scales(text_config(target)).items() if is_new else ():
            ours = getattr(self.config, name)
            if ours != theirs and not (ours and theirs and abs(ours / theirs - 1) < SAME_SCALE):
                warnings.warn(f"the draft drafts with its own {name}={ours}, the target has {theirs}", stacklevel=2)
        return self

    def bind_parts(self, embedding: nn.Module, lm_head: nn.Module, dtype: torch.dtype) -> "DraftModel":
        """Borrow the embedding and the LM head of a target that is not loaded; the head computes in `dtype`.

        Those that the draft's checkpoint brought are compared with them. Copies are dropped. Others are used, which a
        warning says once.
        """
        former, lent = self._borrowed, Borrowed(embedding, lm_head, dtype)
        if former is not None and (former.embedding, former.lm_head, former.dtype) == lent[:3]:
            return self
        brought = self.own_weights()
        found = {name: lent.equals(name, own) for name, own in brought.items()}
        self._borrowed = lent._replace(copied=frozenset(name for name, is_same in found.items() if is_same))
        self.brought = {name: own for name, own in brought.items() if found[name] is None}
        if others := [name for name, is_same in found.items() if is_same is False]:
            for name in others:
                self._adopt(name, brought[name])
            warnings.warn(
                f"the draft {self.name_or_path} brings {' and '.join(others)}, other than the target's, and drafts "
                "with its own. If it was made for another target, load that one",
                stacklevel=3,
            )
        return self

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return what the checkpoint brought and no module holds; where a target lent the same, its weights."""
        copies = {} if self._borrowed is None else self._borrowed.copies(self.config.vocab_size)
        return copies | self.brought

    def add_own_weights(self) -> None:
        """Make the embedding and the LM head that the config says are the draft's own, frozen as a target's, and the
        tokens of a pruned vocabulary."""
        size, config = self.config.hidden_size, self.config
        if config.own_embedding and self.embed_tokens is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        if self.lm_head is None and (config.own_lm_head or config.draft_vocab_size is not None):
            self.lm_head = nn.Linear(size, config.num_draft_tokens, bias=False).requires_grad_(False)
        if config.draft_vocab_size is not None and not hasattr(self, "d2t"):
            # As other projects keep it: draft id i is the target's token i + d2t[i].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    def _adopt(self, name: str, weight: torch.Tensor) -> None:
        """Make a weight one of the draft's own."""
        setattr(self.config, SHAREABLE[name], True)
        with torch.device("meta"):
            self.add_own_weights()
        weight = weight.to(device=self.device, dtype=self.dtype, copy=True)
        self.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(weight, requires_grad=False)

    def _require_target(self) -> Borrowed:
        if self._borrowed is None:
            raise ValueError(
                "the draft borrows the target's embedding and LM head: call draft.bind(target), as generate() does"
            )
        return self._borrowed

    def as_input(self, states: torch.Tensor) -> torch.Tensor:
        """Return states on the draft's device, in the dtype it computes in, whatever its weights are stored in."""
        own = next(each for each in self.parameters() if each.is_floating_point())  # one walk through all modules
        return states.to(own.device, own.dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embedding rows, scaled, on the draft's device and in its dtype; `[..., d]`."""
        embedding, scale = self.embed_tokens or self._require_target().embedding, self.config.embedding_scale
        token_ids = token_ids.to(input_device(embedding))
        # Gemma and others scale inside the module, Granite outside of it; some drafts read bare rows.
        inside = scale_inside(embedding)
        differs = inside not in (None, 1.0) and abs(scale / inside - 1) > SAME_SCALE
        is_bare = differs or (not self.config.embedding_norm and hasattr(embedding, "embed_norm"))
        rows = F.embedding(token_ids, embedding.weight) if is_bare else embedding(token_ids)
        if scale != 1.0 and (inside is None or differs):
            rows = rows * scale
        return self.as_input(rows.detach() if self.embed_tokens is None else rows)  # the target is not trained

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's logits `[..., V]` of hidden states `[..., d]` after its own final norm or a draft's."""
        borrowed = self._require_target()
        hidden_there = hidden.to(device=input_device(borrowed.lm_head), dtype=borrowed.dtype)
        return self.scaled_logits(borrowed.lm_head(hidden_there).to(hidden))

    def base_logits(self, block_hidden: torch.Tensor) -> torch.Tensor:
        """Return U_k `[..., V]` of h_k `[..., d]`, or `[..., V_d]` of a pruned vocabulary."""
        if self.lm_head is None:
            return self.target_logits(block_hidden)
        return self.scaled_logits(self.lm_head(block_hidden))

    def draft_token_ids(self) -> torch.Tensor | None:
        """Return the target's token of each draft logit, `[V_d]`; `None` where the vocabularies are one."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def scaled_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply what the target does to the output of its LM head: a factor, then a soft cap."""
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def draft_block(self, context: NewContext, sampler: Sampler, num_tokens: int | None = None) -> Drafts:
        """Read new context, and draft a chain or a tree per request, level by level, as the sampler draws it.

        So many levels are drawn at most, 1 <= n <= γ; γ unless given.
        """
        return self._draw(self.read_block(context), context, sampler, num_tokens)

    @torch.no_grad()
    def read_block(self, context: NewContext) -> torch.Tensor:
        """Read the new context as [`~DraftModel.draft_block`] does, draw nothing, and return h. DSpark Eq. 2-3."""
        hidden = self._read(context)
        for row, count in enumerate(context.counts):
            context.cache.commit(row, count)
        return hidden

    def teacher_forced(
        self, input_ids: torch.Tensor, features: torch.Tensor, layout: BlockLayout, labels: torch.Tensor
    ) -> tuple[SlotLogits, torch.Tensor | None]:
        """Run the draft over N anchored blocks per row of `[B, S]` tokens, each slot after its label's predecessors.

        Returns the logits of the γ slots of each block, and their pre-sigmoid c_k `[B, N, γ]`, if there is a head.
        """
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        label_hidden: torch.Tensor,
        blocks: AnchoredBlocks,
        weights: LossWeights | None = None,
        weight_sum: torch.Tensor | None = None,
    ) -> BlockLosses:
        """Return the losses of N anchored blocks per row; see [`block_losses`]. DSpark Section 3.3.

        It reads tokens `[B, S]`, their features `[B, S, m*d]`, and the target's last hidden states before the labels,
        `[B, N, γ, d]`.
        """
        draft, confidence_logits = self.teacher_forced(input_ids, features, blocks.layout, blocks.labels)
        target = SlotLogits(self.target_logits, (label_hidden,), self.config.vocab_size)
        return block_losses(
            draft, target, blocks.labels, blocks.weights, weights or LossWeights(), confidence_logits, weight_sum
        )


_LAYER = re.compile(r"layers\.(\d+)\.")
# Heads are small and decide about single tokens, and candidates look up rows of theirs.
_NOT_QUANTISED = ("confidence_head", "lm_head", "markov_head")
# What would make transformers read other files, or other tensors, than those that were checked.
_OTHER_FILES = ("gguf_file", "ignore_mismatched_sizes", "key_mapping", "state_dict", "variant")


def _quantisation(given: Any, checkpoint: Checkpoint) -> BitsAndBytesConfig | None:
    """Return how a draft is to be quantised: as asked for, or as its checkpoint is; the heads stay as they are."""
    if given is not None and checkpoint.quantisation is not None:
        raise ValueError(f"the checkpoint {checkpoint.name} is quantised already: leave out quantization_config")
    given = checkpoint.quantisation if given is None else given
    if given is None:
        return None
    if isinstance(given, dict) and given.get("quant_method", "bitsandbytes") == "bitsandbytes":
        given = BitsAndBytesConfig.from_dict(given)
    if not isinstance(given, BitsAndBytesConfig):
        raise ValueError(f"got quantization_config={shortened(given)}. {BITSANDBYTES_ALONE}")
    given = copy.deepcopy(given)
    given.llm_int8_skip_modules = sorted({*(given.llm_int8_skip_modules or ()), *_NOT_QUANTISED})
    return given


def _check_packable(model: nn.Module) -> None:
    """Raise a `ValueError` where bitsandbytes, on some CPUs, cannot pack weights of 4 bits at their first use."""
    odd = []
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None and getattr(module, "support_avx512bf16_for_cpu", False) and module.weight.is_cpu:
            rows, columns = state.shape
            odd += [f"{name} has {rows} x {columns}"] * bool(rows % 32 or columns % state.blocksize)
    if odd:
        raise ValueError(
            "with 4 bits on this CPU, bitsandbytes needs weights of 32 rows and 64 columns, or multiples of them, and "
            f"{listed(odd, 3)}: load the draft with load_in_8bit=True, unquantised, or on a GPU"
        )


def _unpack_for_cpu(model: nn.Module) -> None:
    """Undo how bitsandbytes packs 4-bit weights at their first use on a CPU; it leaves their scales transposed."""
    model.state_dict()
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None and state.absmax.dim() == 2:
            state.absmax = state.absmax.T.reshape(-1).float()


def _refuse_other_files(kwargs: dict[str, Any]) -> None:
    """Take out of the arguments of `from_pretrained` those that choose files, and raise a `ValueError` if one does."""
    if kwargs.pop("use_safetensors", True) is False or kwargs.pop("weights_only", True) is False:
        raise ValueError(
            "drafts are loaded from safetensors alone: leave out use_safetensors=False and weights_only=False"
        )
    if (kwargs.pop("adapter_kwargs", None) or {}).get("_adapter_model_path") is not None:
        raise ValueError("the checkpoint holds a PEFT adapter, which a draft cannot use: merge it into the weights")
    for name in _OTHER_FILES:
        if given := kwargs.pop(name, None):
            raise ValueError(
                f"drafts cannot be loaded with {name}={shortened(given)}: all weights are read from "
                "model.safetensors, or the shards in its index, as they are. Leave it out"
            )


def check_fits(config: PreTrainedConfig, target: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise a `ValueError` that names every way in which a draft's config and a target, or its config, do not fit.

    A draft that leaves the tapped layers to the target's depth learns them here.
    """
    text = text_config(target)
    if isinstance(text, DraftConfig):
        raise ValueError(f"a target is needed, and this is a draft, of the model_type {text.model_type!r}")
    if config.target_layer_ids is None:
        config.tap_by_depth(text.num_hidden_layers)
    facts = [("vocab_size", config.vocab_size, text.vocab_size)]
    cure = (
        "It needs the target's tokenizer. If it has that, and only unused rows differ, pass AssistantDraft(assistant, "
        f"vocab_size={text.vocab_size}); if not, generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)"
    )
    if config.target_layer_ids:  # else it reads tokens alone
        # A checkpoint may not record its target's depth; then we only know that the last layer is not tapped.
        depth = config.num_target_layers or max(text.num_hidden_layers, max(config.target_layer_ids) + 2)
        facts += [
            ("hidden_size", config.feature_size, text.hidden_size),
            ("num_target_layers", depth, text.num_hidden_layers),
        ]
        made = f"{type(config).__name__}.from_target(target.config)."
        cure = f"A draft fits the model it was trained on alone: load the matching pair, or train one with {made}"
    wrong = [f"{name}: draft {ours}, target {theirs}" for name, ours, theirs in facts if ours != theirs]
    if wrong:
        raise ValueError(f"this draft was not made for this target ({'; '.join(wrong)}). {cure}")
