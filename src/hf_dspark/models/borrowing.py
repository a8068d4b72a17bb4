"""A target's embedding and LM head on loan to its draft, and whether what a draft brings along is a copy of them."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

_ROWS_AT_A_TIME = 4096
_ANSWERS_TOLERANCE = 0.3  # of one token's answers: rounding to four bits is well below, another matrix far above


class Borrowed(NamedTuple):
    """What belongs to the target: a copy of a draft borrows it, too, and a pickled draft leaves it behind."""

    embedding: nn.Module
    lm_head: nn.Module
    dtype: torch.dtype  # that the head computes in
    copied: frozenset[str] = frozenset()  # names of the draft's own tensors that were equal and therefore dropped

    def module_of(self, name: str) -> nn.Module:
        return self.embedding if name.startswith("embed_tokens") else self.lm_head

    def copies(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the weights that stand for those that were dropped."""
        weights = {name: plain_weight(self.module_of(name)) for name in self.copied}
        return {name: weight.detach()[:num_tokens] for name, weight in weights.items() if weight is not None}

    @torch.no_grad()
    def equals(self, name: str, own: torch.Tensor) -> bool | None:
        """Tell whether a draft's weight `[V, d]` is a copy of the target's, but for rounding to their types.

        Modules whose weight is not plain, such as quantised ones, are asked for answers. `None` if there are no values
        to compare with: on the meta device, or in other processes.
        """
        from accelerate.utils import align_module_device  # slow to import

        module = self.module_of(name)
        with align_module_device(module):
            if (weight := plain_weight(module)) is not None:
                bias = getattr(module, "bias", None)
                return is_same_matrix(own, weight) and (bias is None or not bool(bias.any()))
            if all(parameter.is_meta or not parameter.numel() for parameter in module.parameters()):
                return None
        if module is self.embedding:
            ids = torch.arange(0, len(own), max(1, len(own) // _ROWS_AT_A_TIME))
            return _are_alike(own[ids].float() * (scale_inside(module) or 1.0), ask(module, ids).float())
        states = torch.randn(16, own.shape[1], generator=torch.Generator().manual_seed(0))
        logits = torch.nn.functional.linear(states.to(own.dtype), own).float()
        return _are_alike(logits.T, ask(module, states.to(self.dtype)).float().T[: len(own)])

    def __deepcopy__(self, memo: dict[int, Any]) -> "Borrowed":
        return self

    def __reduce__(self) -> tuple[type[None], tuple]:
        return type(None), ()


def input_device(module: nn.Module) -> torch.device:
    """Return where a module wants its input; between calls, offloaded weights live on the meta device."""
    hook = vars(module).get("_hf_hook")
    for part in getattr(hook, "hooks", [hook]):  # accelerate chains several
        if getattr(part, "execution_device", None) is not None:
            return torch.device(part.execution_device)
    weight = module._parameters.get("weight")
    # Packed weights have names of their own, and may be buffers.
    return (next(itertools.chain(module.parameters(), module.buffers())) if weight is None else weight).device


def lm_head_of(target: PreTrainedModel) -> nn.Module:
    """Return the LM head of a target; some multimodal targets have it inside a whole causal LM."""
    inner = [module for module in target.children() if isinstance(module, PreTrainedModel)]
    heads = (module.get_output_embeddings() for module in (target, *inner))
    head = next((head for head in heads if head is not None), None)
    if head is None:
        raise ValueError(f"the target {type(target).__name__} has no LM head: load it with AutoModelForCausalLM")
    return head


def scale_inside(embedding: nn.Module) -> float | None:
    """Return the factor by which an embedding scales its own rows, as Gemma's does; `None` if it does not."""
    if type(embedding) is nn.Embedding:  # which has neither, and takes long to miss them
        return None
    scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    return None if scale is None else float(scale)


def plain_weight(module: nn.Module) -> torch.Tensor | None:
    """Return the weight of an embedding or a linear layer, `None` if it is packed, adapted, or not here."""
    weight = getattr(module, "weight", None)
    is_plain = type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.is_floating_point()
    known = isinstance(module, nn.Embedding) or type(module) is nn.Linear
    return weight if known and is_plain and not weight.is_meta and weight.numel() else None


def is_same_matrix(own: torch.Tensor, lent: torch.Tensor) -> bool:
    """Tell whether a weight `[V, d]` is the first V rows of another, but for rounding; some rows come first."""
    if own.shape[1:] != lent.shape[1:] or len(own) > len(lent):
        return False
    some = slice(None, None, max(1, len(own) // 64))
    starts = range(0, len(own), _ROWS_AT_A_TIME)
    parts = (some, *(slice(start, start + _ROWS_AT_A_TIME) for start in starts))
    return all(_is_same(own[rows].to(lent.device), lent[: len(own)][rows]) for rows in parts)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if {one.dtype, other.dtype} == {torch.float16, torch.bfloat16}:  # neither holds all values of the other
        return torch.allclose(one.float(), other.float(), rtol=2**-7, atol=1e-7)
    return torch.equal(one.to(other.dtype), other) or torch.equal(one, other.to(one.dtype))


def _are_alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare answers `[tokens, *]`, token by token."""
    if ours.shape != theirs.shape:
        return False
    lengths = theirs.norm(dim=-1)
    return bool(((ours - theirs).norm(dim=-1) <= _ANSWERS_TOLERANCE * (lengths + lengths.mean())).all())


def ask(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return module(inputs.to(input_device(module))).cpu()
