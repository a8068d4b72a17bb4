"""What tensors a checkpoint holds, against those that its configuration needs: one comparison for loading, import and
export. Nothing is loaded before names, shapes and types are right.
"""

from collections.abc import Collection, Mapping

import torch

from ..messages import listed
from .files import TensorInfo

# DeepSpec stores copies of the target's tensors, speculators what d2t says already; neither is the draft's own.
NOT_OURS = ("embed_tokens.weight", "lm_head.weight", "t2d")
_FLOATING = ("F64", "F32", "F16", "BF16")
_STORED_AS = {torch.int64: ("I64",), torch.bool: ("BOOL",)}


def compare_tensors(
    found: Mapping[str, TensorInfo], expected: Mapping[str, torch.Tensor], name: str, ignored: Collection[str] = ()
) -> None:
    """Raise a `ValueError` that lists every tensor that is missing, unexpected, of another shape or of another type.

    `expected` may be on the meta device; floating-point types stand for each other. `ignored` may be there, too.
    """
    common = sorted(expected.keys() & found.keys())
    shapes = {key: (found[key].shape, tuple(expected[key].shape)) for key in common}
    faults = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys() - set(ignored)),
        "of another shape": [
            f"{key} {list(theirs)} instead of {list(ours)}" for key, (theirs, ours) in shapes.items() if theirs != ours
        ],
        "of another type": [key for key in common if found[key].dtype not in _types_for(expected[key])],
    }
    if any(faults.values()):
        raise misfit(name, "; ".join(f"{fault}: {listed(keys)}" for fault, keys in faults.items() if keys))


def misfit(name: str, found: str) -> ValueError:
    """Return the error about tensors that are not those of the configuration."""
    return ValueError(
        f"the checkpoint {name} does not match its config. Tensors {found}. Check markov_rank, markov_head_type, "
        "enable_confidence_head, num_hidden_layers and the norms in config.json."
    )


def _types_for(tensor: torch.Tensor) -> tuple[str, ...]:
    return _FLOATING if tensor.is_floating_point() else _STORED_AS[tensor.dtype]


def require_finite(tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Raise a `ValueError` if a weight is not a number or infinite, which only damage explains."""
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not all(map(torch.isfinite, tensor.aminmax())):
            raise ValueError(
                f"the checkpoint {name} is damaged: {key} has values that are not finite. Download or train it again"
            )


def kept_token_ids(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the target's token of each draft logit, `[V_d]`: speculators' draft id i is the target's i + d2t[i]."""
    token_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    known = (token_ids >= 0) & (token_ids < vocab_size)
    if not bool(known.all()) or len(token_ids.unique()) < len(token_ids):
        raise ValueError(
            f"d2t must name {len(d2t)} distinct tokens of the target's vocabulary of {vocab_size}; it does not: load "
            "another checkpoint"
        )
    return token_ids


def kept_tokens_mask(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which of the target's tokens a pruned vocabulary has, `[V]`: speculators' t2d."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept_token_ids(d2t, vocab_size), True)
