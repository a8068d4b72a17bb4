"""What each engine that serves drafts must find in a checkpoint's `config.json`, and which drafts it cannot run.

Loaders skip keys that they do not know and take defaults for keys that they miss, without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .rows import HEADS, Format, Rules, look_up


@dataclass(frozen=True)
class Engine:
    """A program that reads draft checkpoints."""

    name: str
    config_keys: Mapping[str, tuple[str, ...]]  # by format, what it must find in `config.json`
    refusals: Rules = field(default_factory=dict)  # drafts that it cannot run


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_LAYERS = (*_SIZES, "intermediate_size", "rope_parameters", "layer_types")
_BLOCK = ("architectures", "block_size", "mask_token_id", "sample_from_anchor", *HEADS)
_TAPS = "target_layer_ids"
_MODEL = ("model_type", "rms_norm_eps", "max_position_embeddings", *_LAYERS)
_FLAT = ("architectures", "vocab_size", *_MODEL)
_FLAT_DSPARK = (*_FLAT, *_BLOCK, _TAPS, "num_target_layers")
_SPECULATORS = (
    *_BLOCK,
    "speculators_model_type",
    "aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "speculators_config.algorithm",
    "speculators_config.proposal_methods",
    *(f"transformer_layer_config.{name}" for name in ("model_type", "vocab_size", *_LAYERS)),
)
_SPECFORGE = ("dflash_config.target_layer_ids", "dflash_config.mask_token_id", "dflash_config.projector_type")

_NEEDS_MARKOV_HEAD = {
    "as DFlash it would drop the anchor's slot, from which a draft with sample_from_anchor predicts its first token, "
    "and as DSpark it needs a Markov head (markov_rank > 0)": lambda c: c.markov_rank == 0
}


def _only_vanilla(reason: str) -> Rules:
    return {reason: lambda c: c.markov_rank > 0 and c.markov_head_type != "vanilla"}


ENGINES = (
    Engine("deepspec", {"deepspec": (*_FLAT, _TAPS, "num_target_layers")}),
    Engine(
        "llama.cpp",
        {"deepspec": (*_FLAT, "block_size", _TAPS, "mask_token_id", "markov_rank")},
        refusals={**_only_vanilla("its converter knows the vanilla Markov head only"), **_NEEDS_MARKOV_HEAD},
    ),
    Engine(
        "vllm",
        {"deepspec": _FLAT_DSPARK, "speculators": (*_SPECULATORS, "speculators_config.verifier.name_or_path")},
        refusals={**_only_vanilla("it serves the vanilla Markov head only (vLLM 0.33)"), **_NEEDS_MARKOV_HEAD},
    ),
    Engine(
        "sglang",
        {"deepspec": _FLAT_DSPARK, "sglang": (*_FLAT_DSPARK, *_SPECFORGE), "speculators": _SPECULATORS},
        refusals={
            **_NEEDS_MARKOV_HEAD,
            "it needs the full vocabulary and ignores d2t and the draft's own LM head": lambda c: (
                c.draft_vocab_size is not None
            ),
            "its DFlash layers have the activation silu only": lambda c: c.hidden_act != "silu",
            "it taps layers from 0 on, in ascending order: target_layer_ids must be so": lambda c: (
                c.target_layer_ids != sorted(c.target_layer_ids) or min(c.target_layer_ids) < 0
            ),
            "it starts the recurrent head after the anchor's slot, this draft at it": lambda c: (
                not c.sample_from_anchor and c.markov_head_type == "rnn"
            ),
        },
    ),
    Engine("speculators", {"speculators": _SPECULATORS}),
    Engine("transformers", {"transformers": (*_MODEL, "sliding_window", "block_size", "mask_token_id", _TAPS)}),
)


def missing_keys(written: Mapping[str, Any], entry: Format, engine: Engine) -> list[str]:
    """Return what an engine must find in a `config.json` of a format and does not."""
    return [key for key in engine.config_keys.get(entry.name, ()) if look_up(written, key, None) is None]
