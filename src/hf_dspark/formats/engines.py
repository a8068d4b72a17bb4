"""What each engine that serves drafts must find in a checkpoint, and which drafts it cannot run, as tables.

Loaders skip what they do not know and start what they miss at random: a checkpoint is sound for an engine if every
row of its table is there. Knows nothing of files, or of how a format is read and written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from .rows import Format, Refusal, look_up


@dataclass(frozen=True)
class TensorRow:
    """Tensors that a checkpoint has.

    Attributes:
        name (`str`): Ours; `{i}` stands for each layer.
        shape (`tuple[str, ...]`): In the letters of [`tensor_sizes`].
        when (`Callable`): For which of our configurations.
    """

    name: str
    shape: tuple[str, ...]
    when: Callable[[PreTrainedConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Engine:
    """A program that reads draft checkpoints.

    Attributes:
        name (`str`): Its name.
        config_keys (`Mapping[str, tuple[str, ...]]`): By format, what it must find in `config.json`.
        refusals (`tuple[Refusal, ...]`): Drafts that it cannot run.
    """

    name: str
    config_keys: Mapping[str, tuple[str, ...]]
    refusals: tuple[Refusal, ...] = ()


# ---- engines

_FLAT_GEOMETRY = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "layer_types",
)  # fmt: skip
_FLAT_DSPARK = (
    "block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "num_target_layers", "sample_from_anchor",
)  # fmt: skip
_NESTED_DSPARK = (
    "architectures", "speculators_model_type", "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size",
    "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "sample_from_anchor", "transformer_layer_config.model_type", "transformer_layer_config.hidden_size",
    "transformer_layer_config.num_hidden_layers", "transformer_layer_config.num_attention_heads",
    "transformer_layer_config.num_key_value_heads", "transformer_layer_config.head_dim",
    "transformer_layer_config.intermediate_size", "transformer_layer_config.vocab_size",
    "transformer_layer_config.layer_types", "transformer_layer_config.rope_parameters",
    "speculators_config.algorithm", "speculators_config.proposal_methods",
)  # fmt: skip
_VERIFIER = ("speculators_config.verifier.name_or_path",)
_SPECFORGE = ("dflash_config.target_layer_ids", "dflash_config.mask_token_id", "dflash_config.projector_type")

_RANK_ZERO = "it needs a Markov head (markov_rank > 0)"
_DROPS_ANCHOR = (
    "as DFlash it would drop the anchor's slot, from which this draft predicts its first token, and as DSpark "
)

ENGINES = (
    Engine(
        "deepspec",
        {"deepspec": (*_FLAT_GEOMETRY, "target_layer_ids", "num_target_layers")},
    ),
    Engine(
        "llama.cpp",
        {"deepspec": (*_FLAT_GEOMETRY, "block_size", "target_layer_ids", "mask_token_id", "markov_rank")},
        refusals=(
            Refusal(
                lambda c: getattr(c, "markov_head_type", "") != "vanilla",
                "its converter knows the vanilla Markov head only",
            ),
            Refusal(lambda c: getattr(c, "markov_rank", 0) == 0, _DROPS_ANCHOR + _RANK_ZERO),
        ),
    ),
    Engine(
        "vllm",
        {
            "deepspec": (*_FLAT_GEOMETRY, *_FLAT_DSPARK),
            "speculators": (*_NESTED_DSPARK, *_VERIFIER),
        },
        refusals=(
            Refusal(
                lambda c: getattr(c, "markov_rank", 0) > 0 and getattr(c, "markov_head_type", "") != "vanilla",
                "it serves the vanilla Markov head only (vLLM 0.33)",
            ),
            Refusal(
                lambda c: getattr(c, "markov_rank", 0) == 0 and getattr(c, "sample_from_anchor", True),
                _DROPS_ANCHOR + _RANK_ZERO,
            ),
            Refusal(
                lambda c: getattr(c, "markov_rank", 0) == 0 and not getattr(c, "sample_from_anchor", True),
                "its DSpark loader builds a Markov head always: markov_rank must be positive",
            ),
        ),
    ),
    Engine(
        "sglang",
        {
            "deepspec": (*_FLAT_GEOMETRY, *_FLAT_DSPARK),
            "sglang": (*_FLAT_GEOMETRY, *_FLAT_DSPARK, *_SPECFORGE),
            "speculators": _NESTED_DSPARK,
        },
        refusals=(
            Refusal(
                lambda c: getattr(c, "markov_rank", 0) == 0 and getattr(c, "sample_from_anchor", True),
                _DROPS_ANCHOR + _RANK_ZERO,
            ),
            Refusal(
                lambda c: getattr(c, "markov_rank", 0) == 0 and not getattr(c, "sample_from_anchor", True),
                "it needs a Markov head in a DSpark draft (markov_rank > 0)",
            ),
            Refusal(
                lambda c: getattr(c, "draft_vocab_size", None) is not None,
                "it needs the full vocabulary and ignores d2t and the draft's own LM head",
            ),
            Refusal(lambda c: c.hidden_act != "silu", "its DFlash layers have the activation silu only"),
            Refusal(
                lambda c: any(a >= b for a, b in zip([-1, *c.target_layer_ids], c.target_layer_ids, strict=False)),
                "it taps layers from 0 on, in ascending order: target_layer_ids must be so",
            ),
            Refusal(
                lambda c: not getattr(c, "sample_from_anchor", True) and getattr(c, "markov_head_type", "") == "rnn",
                "it starts the recurrent head behind the anchor's slot, this draft at it",
            ),
        ),
    ),
    Engine("speculators", {"speculators": _NESTED_DSPARK}),
    Engine(
        "transformers",
        {
            "transformers": (
                "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings",
                "sliding_window", "layer_types", "block_size", "mask_token_id", "target_layer_ids",
            )
        },
    ),
)  # fmt: skip
ENGINES_BY_NAME = {engine.name: engine for engine in ENGINES}


# ---- tensors


def _has_head(kind: str) -> Callable[[PreTrainedConfig], bool]:
    return lambda config: config.markov_rank > 0 and config.markov_head_type == kind


_DSPARK_ROWS = (
    TensorRow("fc.weight", ("d", "md")),
    TensorRow("hidden_norm.weight", ("d",)),
    TensorRow("norm.weight", ("d",)),
    TensorRow("layers.{i}.self_attn.q_proj.weight", ("q", "d")),
    TensorRow("layers.{i}.self_attn.k_proj.weight", ("kv", "d")),
    TensorRow("layers.{i}.self_attn.v_proj.weight", ("kv", "d"), lambda c: not c.attention_k_eq_v),
    TensorRow("layers.{i}.self_attn.o_proj.weight", ("d", "q")),
    TensorRow("layers.{i}.self_attn.q_proj.bias", ("q",), lambda c: c.attention_bias),
    TensorRow("layers.{i}.self_attn.k_proj.bias", ("kv",), lambda c: c.attention_bias),
    TensorRow("layers.{i}.self_attn.v_proj.bias", ("kv",), lambda c: c.attention_bias and not c.attention_k_eq_v),
    TensorRow("layers.{i}.self_attn.o_proj.bias", ("d",), lambda c: c.attention_output_bias),
    TensorRow("layers.{i}.self_attn.q_norm.weight", ("h",), lambda c: c.qk_norm),
    TensorRow("layers.{i}.self_attn.k_norm.weight", ("h",), lambda c: c.qk_norm),
    TensorRow("layers.{i}.self_attn.attention_sink_bias", ("heads",), lambda c: c.attention_sinks),
    TensorRow("layers.{i}.mlp.gate_proj.weight", ("f", "d")),
    TensorRow("layers.{i}.mlp.up_proj.weight", ("f", "d")),
    TensorRow("layers.{i}.mlp.down_proj.weight", ("d", "f")),
    TensorRow("layers.{i}.input_layernorm.weight", ("d",)),
    TensorRow("layers.{i}.post_attention_layernorm.weight", ("d",)),
    TensorRow("layers.{i}.pre_feedforward_layernorm.weight", ("d",), lambda c: c.sandwich_norms),
    TensorRow("layers.{i}.post_feedforward_layernorm.weight", ("d",), lambda c: c.sandwich_norms),
    TensorRow("layers.{i}.layer_scalar", ("1",), lambda c: c.layer_scalar),
    TensorRow("markov_head.markov_w1.weight", ("V", "r"), lambda c: c.markov_rank > 0),
    TensorRow("markov_head.markov_w2.weight", ("Vd", "r"), lambda c: c.markov_rank > 0),
    TensorRow("markov_head.gate_proj.weight", ("r", "d+r"), _has_head("gated")),
    TensorRow("markov_head.gate_proj.bias", ("r",), _has_head("gated")),
    TensorRow("markov_head.joint_proj.weight", ("3r", "d+2r"), _has_head("rnn")),
    TensorRow("markov_head.joint_proj.bias", ("3r",), _has_head("rnn")),
    TensorRow("confidence_head.proj.weight", ("1", "c"), lambda c: c.enable_confidence_head),
    TensorRow("confidence_head.proj.bias", ("1",), lambda c: c.enable_confidence_head),
    TensorRow("lm_head.weight", ("Vd", "d"), lambda c: c.draft_vocab_size is not None),
    TensorRow("d2t", ("Vd",), lambda c: c.draft_vocab_size is not None),
)  # fmt: skip

_EAGLE3_ROWS = (
    TensorRow("fc.weight", ("d", "md")),
    TensorRow("norm.weight", ("d",)),
    TensorRow("layers.{i}.self_attn.q_proj.weight", ("q", "2d")),
    TensorRow("layers.{i}.self_attn.k_proj.weight", ("kv", "2d")),
    TensorRow("layers.{i}.self_attn.v_proj.weight", ("kv", "2d")),
    TensorRow("layers.{i}.self_attn.o_proj.weight", ("d", "q")),
    TensorRow("layers.{i}.self_attn.q_proj.bias", ("q",), lambda c: c.attention_bias),
    TensorRow("layers.{i}.self_attn.k_proj.bias", ("kv",), lambda c: c.attention_bias),
    TensorRow("layers.{i}.self_attn.v_proj.bias", ("kv",), lambda c: c.attention_bias),
    TensorRow("layers.{i}.self_attn.o_proj.bias", ("d",), lambda c: c.attention_output_bias),
    TensorRow("layers.{i}.self_attn.q_norm.weight", ("h",)),
    TensorRow("layers.{i}.self_attn.k_norm.weight", ("h",)),
    TensorRow("layers.{i}.mlp.gate_proj.weight", ("f", "d")),
    TensorRow("layers.{i}.mlp.up_proj.weight", ("f", "d")),
    TensorRow("layers.{i}.mlp.down_proj.weight", ("d", "f")),
    TensorRow("layers.{i}.hidden_norm.weight", ("d",)),
    TensorRow("layers.{i}.input_layernorm.weight", ("d",)),
    TensorRow("layers.{i}.post_attention_layernorm.weight", ("d",)),
)
TENSORS = {"dspark": _DSPARK_ROWS, "dspark_eagle3": _EAGLE3_ROWS}
# What formats hold besides a draft's own tensors.
_EXTRA_SHAPES = {"embed_tokens.weight": ("V", "d"), "lm_head.weight": ("V", "d"), "t2d": ("V",)}


def tensor_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Return the sizes that the letters of the shape table stand for.

    d: hidden, md: tapped layers, q and kv: all heads, h: one head, heads: their number, f: MLP, V and Vd:
    vocabularies, r: Markov rank, c: what the confidence head reads.
    """
    d, r = config.hidden_size, getattr(config, "markov_rank", 0)
    with_markov = bool(getattr(config, "confidence_head_with_markov", False))
    return {
        "1": 1, "d": d, "2d": 2 * d, "md": len(config.target_layer_ids) * d, "h": config.head_dim,
        "heads": config.num_attention_heads,
        "q": config.num_attention_heads * config.head_dim, "kv": config.num_key_value_heads * config.head_dim,
        "f": config.intermediate_size, "V": config.vocab_size,
        "Vd": getattr(config, "draft_vocab_size", None) or config.vocab_size,
        "r": r, "3r": 3 * r, "d+r": d + r, "d+2r": d + 2 * r, "c": d + with_markov * r,
    }  # fmt: skip


def draft_tensors(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a draft by our names, with their shapes.

    Args:
        config (`PreTrainedConfig`): Ours.
    """
    sizes = tensor_sizes(config)
    rows = [row for row in TENSORS[config.model_type] if row.when(config)]
    return {
        row.name.format(i=index): tuple(sizes[letter] for letter in row.shape)
        for row in rows
        for index in (range(config.num_hidden_layers) if "{i}" in row.name else (0,))
    }


def format_tensors(config: PreTrainedConfig, entry: Format) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a checkpoint of a format has, by its names, with their shapes.

    Args:
        config (`PreTrainedConfig`): Ours.
        entry ([`Format`]): The format.
    """
    sizes = tensor_sizes(config)
    own = {entry.renamed.get(name, name): shape for name, shape in draft_tensors(config).items()}
    pruned = ("t2d",) if getattr(config, "draft_vocab_size", None) is not None else ()
    return own | {name: tuple(sizes[letter] for letter in _EXTRA_SHAPES[name]) for name in (*entry.copies, *pruned)}


def our_name(tensor: str, entry: Format) -> str | None:
    """Return our name of a foreign tensor; `None` if it says nothing that we do not know."""
    back = {theirs: ours for ours, theirs in entry.renamed.items()}
    return None if tensor == "t2d" else back.get(tensor, tensor)


def missing_keys(written: Mapping[str, Any], entry: Format, engine: Engine) -> list[str]:
    """Return what an engine must find in a `config.json` of a format and does not."""
    nothing = object()
    keys = engine.config_keys.get(entry.name, ())
    return [key for key in keys if look_up(written, key, nothing) in (nothing, None)]
