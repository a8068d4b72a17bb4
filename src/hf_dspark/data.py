"""From tokenised conversations to anchored blocks and the target features they are trained on.

Knows nothing of losses or of the trainer; never touches `generate()`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .feature_capture import FeatureCapture


@dataclass(frozen=True)
class AnchoredBlocks:
    """N blocks per row, cut out of the data.

    Attributes:
        anchor_positions (`torch.LongTensor` of shape `[B, N]`): Position of each anchor; 0 for dummies.
        anchor_mask (`torch.BoolTensor` of shape `[B, N]`): False for dummies, which fill rows with too few anchors.
        labels (`torch.LongTensor` of shape `[B, N, γ]`): The γ tokens behind each anchor.
        supervised (`torch.BoolTensor` of shape `[B, N, γ]`): The contiguous prefix of labels that the loss mask
            allows.
    """

    anchor_positions: torch.Tensor
    anchor_mask: torch.Tensor
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


def tokenize_prompt_completion(
    prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> dict[str, list[int]]:
    """Tokenise one example; only the completion, and the end-of-sequence token behind it, is supervised.

    Args:
        prompt, completion (`str`): Texts, joined as they are.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        max_length (`int`, *optional*): Cut to this many tokens.

    Returns:
        `dict` with `input_ids` and `loss_mask`, lists of equal length.
    """
    prompt_ids = tokenizer(prompt)["input_ids"]
    completion_ids = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    input_ids = (prompt_ids + completion_ids)[:max_length]
    loss_mask = ([0] * len(prompt_ids) + [1] * len(completion_ids))[:max_length]
    return {"input_ids": input_ids, "loss_mask": loss_mask}


class BlockCollator:
    """Pads rows of `input_ids` and `loss_mask` on the right.

    Args:
        pad_token_id (`int`): Fills the rows; never attended to, never supervised.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `loss_mask` and `attention_mask`, each `[B, S]`."""
        for row in rows:
            if len(row["input_ids"]) != len(row["loss_mask"]):
                raise ValueError(
                    f"input_ids ({len(row['input_ids'])} tokens) and loss_mask ({len(row['loss_mask'])}) differ in "
                    "length"
                )
        length = max(len(row["input_ids"]) for row in rows)

        def pad(name: str, value: int) -> torch.Tensor:
            return torch.tensor([list(row[name]) + [value] * (length - len(row[name])) for row in rows])

        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        return {
            "input_ids": pad("input_ids", self.pad_token_id),
            "loss_mask": pad("loss_mask", 0).bool(),
            "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
        }


def anchor_candidates(loss_mask: torch.Tensor) -> torch.Tensor:
    """Return which positions may be anchors, `[B, S-1]`: supervised, with a supervised token behind.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[B, S]`): Tokens the target was trained to write.
    """
    return loss_mask[:, :-1].bool() & loss_mask[:, 1:].bool()


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchor positions without replacement.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[B, S]`): See [`anchor_candidates`].
        num_anchors (`int`): N at most; fewer when no row has that many candidates.
        generator (`torch.Generator`, *optional*): Source of randomness.

    Returns:
        Positions `[B, N]`, ascending, 0 for dummies, and the mask of real anchors `[B, N]`.

    DSpark Section 3.3.
    """
    candidates = anchor_candidates(loss_mask)
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
    anchor_positions: torch.Tensor,
    anchor_mask: torch.Tensor,
    block_size: int,
) -> AnchoredBlocks:
    """Return the blocks behind given anchors.

    Args:
        input_ids (`torch.LongTensor` of shape `[B, S]`): Token ids.
        loss_mask (`torch.BoolTensor` of shape `[B, S]`): Supervised tokens.
        anchor_positions, anchor_mask (`torch.Tensor` of shape `[B, N]`): See [`sample_anchors`].
        block_size (`int`): γ.

    Returns:
        [`AnchoredBlocks`]
    """
    length = input_ids.shape[1]
    positions = anchor_positions[:, :, None] + torch.arange(1, block_size + 1, device=input_ids.device)
    inside = positions.clamp_max(length - 1).masked_fill(~anchor_mask[:, :, None], 0)
    labels = input_ids.gather(1, inside.flatten(1)).view_as(inside)
    allowed = loss_mask.bool().gather(1, inside.flatten(1)).view_as(inside)
    allowed = allowed & (positions < length) & anchor_mask[:, :, None]
    # Contiguous prefix: a slot behind an unsupervised one would be trained on a prefix that is never verified.
    return AnchoredBlocks(anchor_positions, anchor_mask, labels, allowed.long().cumprod(dim=-1).bool())


def label_hidden(last_hidden: torch.Tensor, blocks: AnchoredBlocks) -> torch.Tensor:
    """Return the target's hidden states that predict each label, `[B, N, γ, d]`.

    The label at position p is predicted from position p - 1.

    Args:
        last_hidden (`torch.Tensor` of shape `[B, S, d]`): After the final norm.
        blocks ([`AnchoredBlocks`]): The blocks.
    """
    batch, num_anchors, gamma = blocks.labels.shape
    positions = blocks.anchor_positions[:, :, None] + torch.arange(gamma, device=last_hidden.device)
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
) -> TargetStates:
    """Run the frozen target without its LM head and keep what drafts are trained on.

    Args:
        target (`PreTrainedModel`): The causal LM.
        target_layer_ids (`list[int]`): The m tapped layers.
        input_ids, attention_mask (`torch.Tensor` of shape `[B, S]`): Right-padded rows.
        device, dtype: Where the draft lives, and its dtype.

    Returns:
        [`TargetStates`]

    DSpark Section 5.1.
    """
    with FeatureCapture(target, target_layer_ids) as capture:
        output = target.get_decoder()(
            input_ids=input_ids.to(target.device), attention_mask=attention_mask.to(target.device), use_cache=False
        )
        features = capture.take(device, dtype)
    return TargetStates(features, output.last_hidden_state.to(device=device, dtype=dtype))
