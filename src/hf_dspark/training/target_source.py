"""Where a training batch's target states come from: the target in process, the cache on disk, or both.

Knows nothing of blocks, losses or drafts' insides.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.modeling_draft import DraftModel, input_device
from .blocks import TargetStates, target_states
from .feature_cache import FeatureCache

ROW_PARTS = ("input_ids", "position_ids", "attention_mask")


class TargetSource:
    """Gives the states of batches, and lends the draft the target's embedding and head.

    Args:
        target (`PreTrainedModel`, *optional*): The frozen target; moved to `device` unless it was placed already.
        cache ([`FeatureCache`], *optional*): States on disk. With a target, what it lacks is computed and added.
        draft_config (`PreTrainedConfig`): Of the draft.
        device (`torch.device`): Where training runs.
    """

    def __init__(
        self,
        target: PreTrainedModel | None,
        cache: FeatureCache | None,
        draft_config: PreTrainedConfig,
        device: torch.device,
    ) -> None:
        self._target = None if target is None else _placed(target.eval().requires_grad_(False), device)
        self._cache = cache
        self._device = device
        self._has_room = True
        self._target_layer_ids = draft_config.target_layer_ids

    def lend_to(self, draft: DraftModel) -> None:
        """Bind the draft to the target, or to what the cache keeps of it."""
        if self._target is not None:
            draft.bind(self._target)
            require_same_logits(self._target, draft)
            return
        lent = self._cache.borrowed(self._device)
        draft.bind_parts(lent.embedding, lent.lm_head, lent.dtype)

    def require_rows(self, sets: Sequence[Sequence[Any]], announce: bool = True) -> None:
        """See to it that all documents can be had, before training starts.

        Args:
            sets (`Sequence`): Data sets of rows of one document each; looked at only if there is a cache.
            announce (`bool`): Print what they need on disk, and check that it is there.

        Raises:
            ValueError: If some are neither cached nor can be computed, or the disk is too small for them.
        """
        if self._cache is None:
            return
        missing = self._cache.missing(itertools.chain.from_iterable(sets))
        if missing and self._target is None:
            raise ValueError(
                f"{len(missing)} of {sum(map(len, sets))} rows are not in the feature cache {self._cache.folder}, "
                "and there is no target to compute them: pass target=..., or fill the cache with the same data, "
                "tokenizer and max_length"
            )
        if missing and announce:
            self._cache.require_space(sum(map(len, missing)))
            self._cache.prepare()

    def states(self, batch: dict[str, torch.Tensor], draft: DraftModel, packed: bool) -> TargetStates:
        """Return the target's states of a batch, on the draft's device and in its dtype.

        Args:
            batch (`dict`): From [`~data.BlockCollator`].
            draft ([`DraftModel`]): Who reads them.
            packed (`bool`): Whether rows hold several documents.
        """
        if self._cache is None:
            return self._computed(batch, draft, packed)
        rows = [_documents(*row) for row in zip(*(batch[name].cpu() for name in ROW_PARTS), strict=True)]
        documents = [document for row in rows for document in row]
        if all(document in self._cache for document in documents):
            states = self._cache.read(documents, draft.device, draft.dtype, [len(row) for row in rows])
            behind = (0, 0, 0, batch["input_ids"].shape[1] - states.features.shape[1])
            return TargetStates(F.pad(states.features, behind), F.pad(states.last_hidden, behind))
        if self._target is None:
            raise ValueError(f"a document is not in the feature cache {self._cache.folder}, and there is no target")
        states = self._computed(batch, draft, packed)
        if self._has_room:
            with self._going_on():
                self._add(rows, states)
        # As they are read back: what a batch sees must not depend on what was cached before it.
        return TargetStates(
            *(part.to(torch.bfloat16).to(part.dtype) for part in (states.features, states.last_hidden))
        )

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Training is worth more than its cache: a disk that is full ends the latter only."""
        try:
            yield
        except OSError as error:
            self._has_room = False
            warnings.warn(f"training goes on, but nothing more is added to the cache: {error}", stacklevel=3)

    def _add(self, rows: list[tuple[torch.Tensor, ...]], states: TargetStates) -> None:
        for index, row in enumerate(rows):
            start = 0
            for document in row:
                part = slice(start, start + len(document))
                self._cache.add(document, states.features[index, part], states.last_hidden[index, part])
                start += len(document)

    def _computed(self, batch: dict[str, torch.Tensor], draft: DraftModel, packed: bool) -> TargetStates:
        return target_states(
            self._target, self._target_layer_ids, batch["input_ids"], batch["attention_mask"], draft.device,
            draft.dtype, batch["position_ids"] if packed else None,
        )  # fmt: skip

    def refresh(self) -> None:
        """See what other processes have added to the cache."""
        if self._cache is not None:
            self._cache.refresh()

    def flush(self) -> None:
        """Write what the cache has not written yet."""
        if self._cache is not None and self._has_room:
            with self._going_on():
                self._cache.flush()

    def close(self) -> None:
        """Write what is not written yet, and let others write to the cache. Whatever comes later opens it again."""
        self.flush()
        if self._cache is not None:
            self._cache.close()


def _placed(target: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move the target to the device, unless it was spread or quantised: then it is where it must be."""
    placed = getattr(target, "hf_device_map", None) is not None or getattr(target, "is_quantized", False)
    return target if placed else target.to(device)


@torch.no_grad()
def require_same_logits(target: PreTrainedModel, draft: DraftModel) -> None:
    """Raise a `ValueError` if the draft, given the target's own last hidden states, computes other logits.

    Families differ in what they do around the LM head; a factor that the draft's config does not know would be a wrong
    law to learn, and to draft from.
    """
    home, vocab_size = input_device(target.get_input_embeddings()), draft.config.vocab_size
    input_ids = torch.arange(1, 9, device=home)[None] % vocab_size
    logits = target(input_ids=input_ids, use_cache=False).logits.float().cpu()
    states = target_states(
        target, draft.config.target_layer_ids, input_ids, torch.ones_like(input_ids), draft.device, torch.float32
    )
    ours = draft.target_logits(states.last_hidden).float().cpu()
    difference = ((ours - logits).norm() / logits.norm()).item()
    if not difference < 0.1:  # rounding of half-precision and quantised heads is well below
        raise ValueError(
            f"{type(target).__name__} does something to its logits that this draft's config does not say (they differ "
            f"by {difference:.0%}): set logit_scale={draft.config.logit_scale}, final_logit_softcapping="
            f"{draft.config.final_logit_softcapping} to what the target does"
        )


def _documents(
    input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the ids of each document of a row; its padding is none."""
    length = int(attention_mask.sum())
    starts = (position_ids[:length] == 0).nonzero()[1:, 0].tolist()
    return torch.tensor_split(input_ids[:length], starts)
