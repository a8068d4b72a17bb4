"""From rows of tokens to anchored blocks and the target features they are trained on.

A row of a batch holds one document, padded on the right, or several, packed one behind the other; positions that start
again at 0 tell them apart. Knows nothing of losses or of the trainer; never touches `generate()`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.block_attention import BlockLayout
from ..models.modeling_draft import input_device
from ..targets.feature_capture import FeatureCapture


@dataclass(frozen=True)
class AnchoredBlocks:
    """N blocks per row, cut out of the data.

    Attributes:
        layout ([`BlockLayout`]): Where they stand.
        labels (`torch.LongTensor` of shape `[B, N, γ]`): The γ tokens behind each anchor.
        supervised (`torch.BoolTensor` of shape `[B, N, γ]`): The contiguous prefix of labels that the loss mask
            allows.
    """

    layout: BlockLayout
    labels: torch.Tensor
    supervised: torch.Tensor


@dataclass(frozen=True)
class TargetStates:
    """What is kept of a target forward pass.

    Attributes:
        features (`torch.Tensor` of shape `[B, S, m*d]`): Tapped layers, concatenated.
        last_hidden (`torch.Tensor` of shape `[B, S, d]`): After the final norm: the LM head's input.
    """

    features: torch.Tensor
    last_hidden: torch.Tensor


class BlockCollator:
    """Makes a batch of rows of `input_ids` and `loss_mask`, padded on the right.

    Args:
        pad_token_id (`int`): Fills the rows; never attended to, never supervised.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `loss_mask`, `position_ids` and `attention_mask`, each `[B, S]`.

        A packed row brings its `position_ids`; those of its padding start again at 0: a document that nobody reads.
        """
        for row in rows:
            if len(row["input_ids"]) != len(row["loss_mask"]):
                raise ValueError(
                    f"input_ids ({len(row['input_ids'])} tokens) and loss_mask ({len(row['loss_mask'])}) differ in "
                    "length"
                )
        length = max(len(row["input_ids"]) for row in rows)

        def pad(name: str, value: int) -> torch.Tensor:
            return torch.tensor([list(row[name]) + [value] * (length - len(row[name])) for row in rows])

        def positions(row: dict[str, Any]) -> torch.Tensor:
            own = torch.as_tensor(row.get("position_ids", range(len(row["input_ids"]))))
            return torch.cat([own, torch.arange(length - len(own))])

        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        return {
            "input_ids": pad("input_ids", self.pad_token_id),
            "loss_mask": pad("loss_mask", 0).bool(),
            "position_ids": torch.stack([positions(row) for row in rows]),
            "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
        }


class PackedRows(torch.utils.data.Dataset):
    """Several documents per row, so that little is padding: best fit, longest first.

    Args:
        rows (`Sequence`): Rows of `input_ids` and `loss_mask`.
        max_length (`int`): Tokens of a packed row at most.

    Raises:
        ValueError: If a document is longer than `max_length`.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], max_length: int) -> None:
        self._rows = rows
        lengths = [len(row["input_ids"]) for row in rows]
        if max(lengths) > max_length:
            raise ValueError(f"a row of {max(lengths)} tokens does not fit into packed rows of {max_length}")
        self._groups: list[list[int]] = []
        free: list[tuple[int, int]] = []  # tokens left in a group, and the group; ascending
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            best = bisect_left(free, (lengths[index], 0))
            if best == len(free):
                room, group = max_length, len(self._groups)
                self._groups.append([])
            else:
                room, group = free.pop(best)
            self._groups[group].append(index)
            if room > lengths[index]:
                insort(free, (room - lengths[index], group))

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return one packed row: `input_ids`, `loss_mask`, and `position_ids` that start again with each document."""
        return join_documents([self._rows[part] for part in self._groups[index]])


class PackedStream(torch.utils.data.IterableDataset):
    """The same for rows that come one by one: documents are joined in their order.

    Args:
        rows (`Iterable`): Rows of `input_ids` and `loss_mask`.
        max_length (`int`): Tokens of a packed row at most; longer documents are an error.
    """

    def __init__(self, rows: Any, max_length: int) -> None:
        self._rows = rows
        self._max_length = max_length

    def set_epoch(self, epoch: int) -> None:
        """Let the rows be shuffled anew, if they can be."""
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        waiting: list[dict[str, Any]] = []
        for row in self._rows:
            if len(row["input_ids"]) > self._max_length:
                raise ValueError(
                    f"a row of {len(row['input_ids'])} tokens does not fit into packed rows of {self._max_length}"
                )
            if sum(len(part["input_ids"]) for part in waiting) + len(row["input_ids"]) > self._max_length:
                yield join_documents(waiting)
                waiting = []
            waiting.append(row)
        if waiting:
            yield join_documents(waiting)


def join_documents(documents: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Return documents one behind the other as one row, with `position_ids` that start again at 0."""
    return {
        "input_ids": [token for part in documents for token in part["input_ids"]],
        "loss_mask": [flag for part in documents for flag in part["loss_mask"]],
        "position_ids": [position for part in documents for position in range(len(part["input_ids"]))],
    }


def anchor_candidates(loss_mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return which positions may be anchors, `[B, S-1]`: supervised, with a supervised token behind in the document.

    The first token of a document is none: nothing was decoded before it.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[B, S]`): Tokens the target was trained to write.
        position_ids (`torch.LongTensor` of shape `[B, S]`): Positions in the documents.
    """
    same_document = position_ids[:, 1:] == position_ids[:, :-1] + 1
    return loss_mask[:, :-1].bool() & loss_mask[:, 1:].bool() & same_document & (position_ids[:, :-1] > 0)


def sample_anchors(
    loss_mask: torch.Tensor, position_ids: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchor positions without replacement.

    Args:
        loss_mask, position_ids (`torch.Tensor` of shape `[B, S]`): See [`anchor_candidates`].
        num_anchors (`int`): N at most; fewer when no row has that many candidates.
        generator (`torch.Generator`, *optional*): Source of randomness.

    Returns:
        Positions `[B, N]`, ascending, 0 for dummies, and the mask of real anchors `[B, N]`.

    DSpark Section 3.3.
    """
    candidates = anchor_candidates(loss_mask, position_ids)
    num_anchors = max(1, min(num_anchors, int(candidates.sum(dim=1).max())))
    priority = torch.rand(candidates.shape, generator=generator).to(candidates.device).masked_fill(~candidates, -1.0)
    priority, positions = priority.topk(num_anchors, dim=1)
    length = loss_mask.shape[1]
    positions = positions.masked_fill(priority < 0, length).sort(dim=1).values
    anchor_mask = positions < length
    return positions.masked_fill(~anchor_mask, 0), anchor_mask


def cut_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    layout: BlockLayout,
    draft_token_ids: torch.Tensor | None = None,
) -> AnchoredBlocks:
    """Return the blocks behind given anchors.

    Args:
        input_ids (`torch.LongTensor` of shape `[B, S]`): Token ids.
        loss_mask (`torch.BoolTensor` of shape `[B, S]`): Supervised tokens.
        layout ([`BlockLayout`]): Where the blocks stand.
        draft_token_ids (`torch.LongTensor` of shape `[V_d]`, *optional*): What the draft can propose, if not all: a
            block ends before any other token.

    Returns:
        [`AnchoredBlocks`]
    """
    length = input_ids.shape[1]
    slots = torch.arange(1, layout.block_size + 1, device=input_ids.device)
    real = layout.anchor_mask[:, :, None]
    positions = layout.anchor_positions[:, :, None] + slots
    inside = positions.clamp_max(length - 1).masked_fill(~real, 0)

    def at_labels(values: torch.Tensor) -> torch.Tensor:
        return values.gather(1, inside.flatten(1)).view_as(inside)

    anchors = layout.position_ids.gather(1, layout.anchor_positions)[:, :, None]
    same_document = at_labels(layout.position_ids) == anchors + slots
    allowed = at_labels(loss_mask.bool()) & (positions < length) & same_document & real
    labels = at_labels(input_ids)
    if draft_token_ids is not None:
        allowed &= torch.isin(labels, draft_token_ids.to(labels.device))
    # Contiguous prefix: a slot behind an unsupervised one would be trained on a prefix that is never verified.
    return AnchoredBlocks(layout, labels, allowed.long().cumprod(dim=-1).bool())


def label_hidden(last_hidden: torch.Tensor, blocks: AnchoredBlocks) -> torch.Tensor:
    """Return the target's hidden states that predict each label, `[B, N, γ, d]`.

    The label at position p is predicted from position p - 1.

    Args:
        last_hidden (`torch.Tensor` of shape `[B, S, d]`): After the final norm.
        blocks ([`AnchoredBlocks`]): The blocks.
    """
    batch, num_anchors, gamma = blocks.labels.shape
    positions = blocks.layout.anchor_positions[:, :, None] + torch.arange(gamma, device=last_hidden.device)
    positions = positions.clamp_max(last_hidden.shape[1] - 1).flatten(1)
    rows = last_hidden.gather(1, positions[:, :, None].expand(-1, -1, last_hidden.shape[-1]))
    return rows.view(batch, num_anchors, gamma, -1)


@torch.no_grad()
def target_states(
    target: PreTrainedModel,
    target_layer_ids: list[int],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    position_ids: torch.Tensor | None = None,
) -> TargetStates:
    """Run the frozen target without its LM head and keep what drafts are trained on.

    Args:
        target (`PreTrainedModel`): The causal LM.
        target_layer_ids (`list[int]`): The m tapped layers.
        input_ids, attention_mask (`torch.Tensor` of shape `[B, S]`): Right-padded rows.
        device, dtype: Where the draft lives, and its dtype.
        position_ids (`torch.LongTensor` of shape `[B, S]`, *optional*): Of packed rows: transformers keeps documents
            apart whose positions start again, as long as no attention mask says otherwise.

    Returns:
        [`TargetStates`]

    DSpark Section 5.1.
    """
    batch = len(input_ids)
    rows: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if position_ids is not None:
        rows = {"input_ids": input_ids, "position_ids": position_ids}
        # Flash attention is told of documents only in a batch of one; the others would pay for it with a wider mask.
        if "flash" in str(target.config._attn_implementation):
            rows = {name: value.reshape(1, -1) for name, value in rows.items()}
    home = input_device(target.get_input_embeddings())  # of an offloaded target, `target.device` is none
    with FeatureCapture(target, target_layer_ids) as capture:
        output = target.get_decoder()(use_cache=False, **{name: value.to(home) for name, value in rows.items()})
        features = capture.take(device, dtype)
    last_hidden = output.last_hidden_state.to(device=device, dtype=dtype)
    return TargetStates(*(states.reshape(batch, -1, states.shape[-1]) for states in (features, last_hidden)))


def require_separable_documents(target: PreTrainedModel, target_layer_ids: list[int]) -> None:
    """Raise a `ValueError` if this target lets a document in a packed row see the one before it.

    Compares documents behind others, in two rows, with the same documents alone.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, vocab_size, (2, 16), generator=generator)
    lengths = (7, 11)  # of the first document in each of two rows
    positions = torch.stack([torch.cat([torch.arange(first), torch.arange(16 - first)]) for first in lengths])
    device, dtype = torch.device("cpu"), torch.float32
    together = target_states(target, target_layer_ids, packed, torch.ones_like(packed), device, dtype, positions)
    difference = torch.zeros(())
    for row, first in enumerate(lengths):
        second = packed[row : row + 1, first:]
        alone = target_states(target, target_layer_ids, second, torch.ones_like(second), device, dtype).last_hidden
        difference = torch.maximum(difference, (together.last_hidden[row, first:] - alone).norm() / alone.norm())
    if not difference < 0.05:  # rounding in bfloat16 is well below, a foreign document far above
        raise ValueError(
            f"{type(target).__name__} does not keep the documents of a packed row apart (its states differ by "
            f"{difference:.0%}): use packing=False"
        )
