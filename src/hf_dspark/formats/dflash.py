"""DFlash and its successors, DFlash 2 and Domino: flat checkpoints as their own projects write them, and those of
speculators. See `tables.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .fields import NO_FILL_IN, NO_SUCCESSORS, OMIT, Field, Format, Rules, Source, architectures, is_anchored, look_up
from .fields import layout as block_layout
from .fields import speculators_base as base_of
from .flat import HEADS, LAYER_RULES, SGLANG, flat_section, is_ours, layout_rules

_PLAIN = {"enable_confidence_head": False, "confidence_head_with_markov": False}
_NO_HEADS = _PLAIN | {"markov_rank": 0, "markov_head_type": "vanilla", "markov_start": 0, "conv_kernel_size": 0}
_SELECTING = _PLAIN | {"markov_head_type": "selector", "markov_start": 0}
_ONLY_FILL_IN: Rules = {
    "its anchor's slot predicts nothing, and this draft predicts its first token from there: every token would be "
    "read one position late": lambda c: c.sample_from_anchor
}
_SELECTOR_NEEDS = _ONLY_FILL_IN | {
    "its selector chooses among candidates: set draft_top_k": lambda c: c.draft_top_k is None
}
_SELECTOR = (
    Field("markov_rank", "selector_rank"),
    Field("draft_top_k", "selector_top_k"),
    Field("conv_kernel_size"),
    Field("conv_group_size"),
)
_SELECTOR_NAMES = {
    "markov_head.markov_w1.weight": "candidate_selector.predecessor_codebook",
    "markov_head.markov_w2.weight": "candidate_selector.successor_codebook",
    "markov_head.hidden_proj.weight": "candidate_selector.hidden_projection.weight",
}


def _variant(
    of: Format, fields: tuple[Field, ...], constants: Mapping[str, Any], refusals: Rules, **changes: Any
) -> Format:
    """Return an entry without DSpark's heads, and with other fields in the place of those of their names."""
    left_out = {*HEADS, *(each.name for each in fields)}
    written = {each.name for each in fields if each.write is not OMIT}
    return replace(
        of,
        fields=(*(each for each in of.fields if each.name not in left_out), *fields),
        constants={name: value for name, value in of.constants.items() if name not in written} | constants,
        refusals={why: rule for why, rule in of.refusals.items() if why not in NO_SUCCESSORS | NO_FILL_IN} | refusals,
        **changes,
    )


# ---- flat


def _said(config: Source, name: str) -> Any:
    places = (config, *(config.get(section) for section in SGLANG.sections))
    return next((place[name] for place in places if isinstance(place, Mapping) and place.get(name) is not None), None)


def _is_flat(config: Source, architecture: str, as_dflash: bool = False) -> bool:
    """Tell whether a file is flat, and of an architecture; `as_dflash`: whether DFlash's is as good."""
    endings = (architecture, "DFlashDraftModel") if as_dflash else (architecture,)
    named = any(name.endswith(endings) for name in architectures(config))
    return named and not is_ours(config) and "speculators_model_type" not in config


def _flat(
    names: tuple[str, ...],
    fields: tuple[Field, ...],
    constants: Mapping[str, Any],
    refusals: Rules,
    kind: str = "dflash",
    **changes: Any,
) -> Format:
    common = (
        # Rows are bare and logits those of the target's head as it is, whatever the target does with both.
        Field("embedding_scale", "input_embedding_scale", 1.0, write=OMIT),
        Field("embedding_norm", read=lambda c: False, write=OMIT),
        Field("logit_scale", "output_multiplier", 1.0, write=OMIT),
        Field("final_logit_softcapping", read=lambda c: c.get("final_logit_softcapping") or None, write=OMIT),
        *block_layout(lambda c: is_anchored(c, otherwise=False), "shift_label"),
    )
    common = tuple(each for each in common if each.name not in {own.name for own in fields})
    # Who serves such drafts looks here for what is not Qwen3's.
    places = {"mask_token_id": "mask_token_id", "target_layer_ids": "target_layer_ids", "block_size": "num_slots"}
    places |= {each.place: each.name for each in fields if each.name != "block_size"}
    standard = {
        "base": lambda target: SGLANG.base(target) | {"architectures": [names[0]]},
        "writes": SGLANG.writes | {"dflash_config": flat_section(kind, places)},
        "accepts": SGLANG.accepts | {"architectures": tuple([name] for name in names), "projector_type": (None, kind)},
        "unreadable": LAYER_RULES | layout_rules(anchored=False),
        "harmless": (*SGLANG.harmless, *HEADS, "use_confidence_head", "confidence_head_alpha"),
        "evidence": {},
        "engines": ("sglang", "vllm"),
    }
    return _variant(SGLANG, (*common, *fields), constants, refusals, **standard | changes)


DFLASH = _flat(
    ("DFlashDraftModel", "Qwen3DFlashDraftModel", "QwenDFlashDraftModel"),
    (),
    _NO_HEADS,
    _ONLY_FILL_IN,
    recognise=lambda c: (
        _is_flat(c, "DFlashDraftModel")
        and not _said(c, "markov_rank")
        and _said(c, "projector_type") in (None, "dflash")
    ),
)
DFLASH2 = _flat(
    ("DFlash2DraftModel", "DFlashDraftModel", "Qwen3DFlash2DraftModel"),
    _SELECTOR,
    _SELECTING,
    _SELECTOR_NEEDS,
    recognise=lambda c: _is_flat(c, "DFlash2DraftModel", as_dflash=bool(_said(c, "conv_kernel_size"))),
    renamed=_SELECTOR_NAMES,
    renames=((r"(candidate_selector\.\w+_codebook)\.weight$", r"\1"),),  # as z-lab's own code calls them
)
_LAYOUT = ("sample_from_anchor", "shift_label")
DOMINO = _flat(
    ("DominoDraftModel", "DFlashDraftModel", "Qwen3DFlashDraftModel"),
    (
        Field("markov_rank", "emb_dim"),
        Field("markov_state_size", "gru_hidden_dim"),
        Field("markov_start", "pure_draft_prefix_len", 0),
        *block_layout(lambda c: look_up(c, *_LAYOUT, default=False), "sample_from_anchor", place="shift_label"),
    ),
    _PLAIN | {"markov_head_type": "domino", "conv_kernel_size": 0},
    {},
    recognise=lambda c: _is_flat(c, "DominoDraftModel", as_dflash=_said(c, "projector_type") == "domino"),
    kind="domino",
    unreadable=LAYER_RULES,
    renamed={
        "markov_head.input_proj.weight": "prefix_gru.weight_ih_l0",
        "markov_head.state_proj.weight": "prefix_gru.weight_hh_l0",
        "markov_head.joint_proj.weight": "embed_proj.0.weight",
        "markov_head.markov_w2.weight": "embed_proj.2.weight",
    },
    engines=("sglang",),
)
FLAT_KINDS = (DFLASH2, DOMINO, DFLASH)


# ---- kinds with published drafts that nothing here computes


DFLY = replace(
    SGLANG,
    name="dfly",
    recognise=lambda c: "dfly" in f"{architectures(c)} {c.get('speculators_model_type')}".lower(),
    accepts={},
    sections=(),
    layers=(),
    unreadable={
        "DFly corrects the hidden states of DFlash by the tokens before them, which nothing here computes: load a "
        "DFlash or a Domino draft of the same target": lambda c: True
    },
)


# ---- speculators


def speculators_kinds(dspark: Format) -> tuple[Format, ...]:
    """Return the entries of speculators' DFlash and DFlash 2, of that of its DSpark."""

    def kind(name: str, *parts: Any, accepts: Mapping[str, tuple] | None = None, **changes: Any) -> Format:
        return _variant(
            dspark,
            *parts,
            recognise=lambda c: c.get("speculators_model_type") == name.lower(),
            base=lambda target: dspark.base(target) | base_of(name.lower(), f"{name}DraftModel"),
            accepts=dspark.accepts | {"speculators_model_type": (name.lower(),)} | (accepts or {}),
            engines=("speculators", "vllm"),
            **changes,
        )

    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return (
        kind("DFlash", (), _NO_HEADS, _ONLY_FILL_IN),
        kind(
            "DFlash2",
            _SELECTOR,
            _SELECTING | {"draft_vocab_size": None},
            _SELECTOR_NEEDS,
            accepts={"draft_ffn_type": (None, "dense")},
            harmless=(*dspark.harmless, *experts, "moe_experts_implementation"),
            renamed=_SELECTOR_NAMES,
        ),
    )
