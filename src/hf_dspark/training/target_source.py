"""Where a training batch's target states come from: the target in process, the cache on disk, or both."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.modeling_draft import DraftModel
from .arguments import DSparkTrainingArguments
from .feature_cache import FeatureCache
from .target_states import TargetStates, require_same_logits, require_separable_documents, target_states

ROW_PARTS = ("input_ids", "position_ids", "attention_mask")
Document = tuple[slice, list[int]]  # where it stands in its row, and its token ids


class TargetSource:
    """Gives the states of batches, and binds the draft to the target, or to what the cache keeps of it.

    With a target, what is missing in the cache is computed and added.
    """

    def __init__(self, draft: DraftModel, target: PreTrainedModel | None, args: DSparkTrainingArguments) -> None:
        folder, device = args.feature_cache_dir, args.device
        if target is None and folder is None:
            raise ValueError("the target's states are needed: pass target=..., or args.feature_cache_dir with them")
        self._target_layer_ids = draft.config.target_layer_ids
        self._packing = args.packing
        self._has_room = True
        self.cache = None if folder is None else FeatureCache(folder, draft.config, target)
        self._target = None if target is None else _placed(target.eval(), device)
        if target is None:
            lent = self.cache.borrowed(device)
            draft.bind_parts(lent.embedding, lent.lm_head, lent.dtype)
            return
        draft.bind(target)
        require_same_logits(target, draft)
        if args.packing:
            require_separable_documents(target, self._target_layer_ids)

    def require_rows(self, sets: Sequence[Sequence[Any]], announce: bool = True) -> None:
        """Raise a `ValueError` if states are neither cached nor can be computed, or the disk is too small for them.

        Rows of the data sets hold one document each. `announce` prints what they need on disk, in one process of all.
        """
        if self.cache is None:
            return
        missing = self.cache.missing(itertools.chain.from_iterable(sets))
        if missing and self._target is None:
            raise ValueError(
                f"{len(missing)} of {sum(map(len, sets))} rows are not in the feature cache {self.cache.folder}, "
                "and there is no target to compute them: pass target=..., or fill the cache with the same data, "
                "tokenizer and max_length"
            )
        if missing and announce:
            self.cache.require_space(sum(map(len, missing)))
            self.cache.prepare()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Keep gradients out of the target's parameters; which of them can be trained is afterwards as it was."""
        parameters = [] if self._target is None else list(self._target.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)

    def states(self, batch: dict[str, torch.Tensor], draft: DraftModel) -> TargetStates:
        """Return the target's states of a batch, on the draft's device, in its dtype."""
        if self.cache is None:
            return self._compute(batch, draft)
        rows = [_documents(*row) for row in zip(*(batch[name].cpu() for name in ROW_PARTS), strict=True)]
        missing = [number for number, row in enumerate(rows) if not all(ids in self.cache for _, ids in row)]
        if self._target is None:
            missing = []  # a `KeyError` will name the row
        known = [[] if number in missing else row for number, row in enumerate(rows)]
        states = self._read(known, batch["input_ids"].shape[1], draft)
        if missing:
            computed = self._compute({name: batch[name][missing] for name in ROW_PARTS}, draft)
            self._keep([rows[number] for number in missing], computed)
            # As they will be read: what a batch sees must not depend on what was cached before it.
            for part in ("features", "last_hidden"):
                new = getattr(computed, part).to(torch.bfloat16)
                getattr(states, part)[missing] = new.to(states.features.dtype)
        return states

    def _compute(self, batch: dict[str, torch.Tensor], draft: DraftModel) -> TargetStates:
        return target_states(
            self._target, self._target_layer_ids, batch["input_ids"], batch["attention_mask"], draft.device,
            draft.dtype, batch["position_ids"] if self._packing else None,
        )  # fmt: skip

    def _read(self, rows: list[list[Document]], length: int, draft: DraftModel) -> TargetStates:
        """Return the states of rows of cached documents, zeros after their ends."""
        size = draft.config.hidden_size
        # To an accelerator travels what is on the disk; memory on the CPU is touched once only.
        dtype = draft.dtype if draft.device.type == "cpu" else torch.bfloat16
        features = torch.zeros(len(rows), length, len(self._target_layer_ids) * size, dtype=dtype)
        last_hidden = torch.zeros(len(rows), length, size, dtype=dtype)
        for index, row in enumerate(rows):
            for part, ids in row:
                states = self.cache.read(ids)
                features[index, part], last_hidden[index, part] = states.features, states.last_hidden
        return TargetStates(*(states.to(draft.device, draft.dtype) for states in (features, last_hidden)))

    def _keep(self, rows: list[list[Document]], states: TargetStates) -> None:
        """Add the states of a batch to the cache; training goes on without it when the disk is full."""
        if not self._has_room:
            return
        try:
            for index, row in enumerate(rows):
                for part, ids in row:
                    self.cache.add(ids, TargetStates(states.features[index, part], states.last_hidden[index, part]))
        except OSError as error:
            self._has_room = False
            warnings.warn(f"training goes on, but nothing more is added to the cache: {error}", stacklevel=2)


def _placed(target: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move the target to the device, unless it was spread or quantised: then it is where it must be."""
    placed = getattr(target, "hf_device_map", None) is not None or getattr(target, "is_quantized", False)
    return target if placed else target.to(device)


def _documents(input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[Document]:
    """Return the documents of a row, without its padding."""
    length = int(attention_mask.sum())
    starts = [*(position_ids[:length] == 0).nonzero()[:, 0].tolist(), length]
    return [(slice(*ends), input_ids[slice(*ends)].tolist()) for ends in itertools.pairwise(starts)]
