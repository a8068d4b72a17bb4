"""What drafts learn from: the tapped layers and the last hidden state of a forward pass of the frozen target."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.modeling_draft import DraftModel, input_device
from ..targets.feature_capture import FeatureCapture


@dataclass(frozen=True)
class TargetStates:
    """What is kept of a target forward pass."""

    features: torch.Tensor  # tapped layers, concatenated, [B, S, m*d]
    last_hidden: torch.Tensor  # after the final norm, [B, S, d]: the LM head's input


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
    """Run the frozen target without its LM head on right-padded rows `[B, S]`; keep what drafts are trained on.

    `position_ids [B, S]` are those of packed rows. DSpark Section 5.1.
    """
    batch = len(input_ids)
    rows: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if position_ids is not None:
        # transformers keeps documents apart whose positions start again, unless an attention mask is given.
        rows = {"input_ids": input_ids, "position_ids": position_ids}
        # Flash attention is told of documents only in a batch of one; the others would pay for it with a wider mask.
        if "flash" in str(target.config._attn_implementation):
            rows = {name: value.reshape(1, -1) for name, value in rows.items()}
    home = input_device(target.get_input_embeddings())  # an offloaded target's own device is meta
    capture = FeatureCapture(target, target_layer_ids)
    try:
        with capture:
            output = target.get_decoder()(use_cache=False, **{name: value.to(home) for name, value in rows.items()})
            features = capture.take(device, dtype)
    finally:
        capture.detach()  # for an interrupt while the capture is left
    last_hidden = output.last_hidden_state.to(device=device, dtype=dtype)
    return TargetStates(*(states.reshape(batch, -1, states.shape[-1]) for states in (features, last_hidden)))


def require_separable_documents(target: PreTrainedModel, target_layer_ids: list[int]) -> None:
    """Raise a `ValueError` if a document in a packed row sees the one before it.

    Compares the second documents of two packed rows with the same documents alone.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, vocab_size, (2, 16), generator=generator)
    lengths = (7, 11)  # of the first document in each row
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


@torch.no_grad()
def require_same_logits(target: PreTrainedModel, draft: DraftModel) -> None:
    """Raise a `ValueError` if a bound draft computes other logits from the target's last hidden states.

    Families differ in what they do around the LM head. With a factor that the draft's config does not know, the draft
    would learn, and draft from, a wrong distribution.
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
