"""Formats of other projects: what they compute, what our exporter writes, and what it refuses."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DFlashCache
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding
from transformers.models.muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextNormedEmbedding
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantModel

from hf_dspark import DSparkConfig, DSparkDraftModel, Eagle3DraftModel
from hf_dspark.formats.checkpoint import Checkpoint
from hf_dspark.formats.fields import look_up
from hf_dspark.formats.translate import recognise
from hf_dspark.hub.convert import convert_checkpoint, launch_command, read_checkpoint
from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.models.slot_cache import SlotCache
from tests.config_files import change_config, read_config
from tests.features import new_context

SPECULATORS = ("full_vocab_vanilla", "pruned_vocab_vanilla", "swa_causal_vanilla")
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "hidden_only_confidence": {"confidence_head_with_markov": False},
    "no_confidence": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "no_markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
}


def fill_in(**overrides):
    return {"sample_from_anchor": False} | overrides


@pytest.fixture
def target(make_target):
    """A target that says where it is."""
    target = make_target()
    target.config.name_or_path = "tiny/target"
    return target


@pytest.fixture
def verifier(fixtures):
    return AutoModelForCausalLM.from_pretrained(fixtures / "speculators" / "verifier").eval()


def differences(ours: dict, theirs: dict, prefix: str = "") -> set[str]:
    """Return the places in which two configurations differ."""
    found = set()
    for key in ours.keys() | theirs.keys():
        left, right = ours.get(key, KeyError), theirs.get(key, KeyError)
        if isinstance(left, dict) and isinstance(right, dict):
            found |= differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.add(prefix + key)
    return found


def assert_same_tensors(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", SPECULATORS)
@torch.no_grad()
def test_speculators_drafts_compute_what_speculators_computed(fixtures, verifier, name):
    folder = fixtures / "speculators" / name
    draft = DSparkDraftModel.from_pretrained(folder).bind(verifier).eval()
    io = load_file(folder / "io.safetensors")
    anchors, real = io["out.anchor_positions"][None], io["out.anchor_valid"][None]
    assert real.all()
    layout = BlockLayout(anchors, real, io["in.position_ids"], draft.config.block_size)
    positions = anchors[0, :, None] + torch.arange(1, 6)
    labels = io["in.input_ids"][0, positions.clamp_max(io["in.input_ids"].shape[1] - 1)][None]  # the last is not read
    blocks = io["in.input_ids"], io["in.hidden_states"], layout, labels
    hidden, (slots, confidence) = draft.block_hidden(*blocks), draft.teacher_forced(*blocks)

    def expected(key):
        return io[key].unflatten(1, (anchors.shape[1], 5))

    torch.testing.assert_close(hidden, expected("out.backbone_hidden"), atol=1e-5, rtol=0)
    torch.testing.assert_close(draft.base_logits(hidden), expected("out.base_logits"), atol=1e-5, rtol=0)
    kept = draft.draft_token_ids()
    assert slots.token_ids is kept or torch.equal(slots.token_ids, kept)
    torch.testing.assert_close(slots.compute(*slots.inputs), expected("out.draft_logits"), atol=1e-5, rtol=0)
    torch.testing.assert_close(confidence, io["out.confidence_logits"].view(1, -1, 5), atol=1e-5, rtol=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_drafts_decode_exactly(fixtures, verifier, name):
    draft = DSparkDraftModel.from_pretrained(fixtures / "speculators" / name).eval()
    assert draft.config.num_target_layers is None
    prompt = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(4))
    options = {"max_new_tokens": 12, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    plain = verifier.generate(prompt, **options)
    assert torch.equal(verifier.generate(prompt, assistant_model=draft, **options), plain)
    assert sum(draft.last_stats.proposed) > 0


def test_drafts_that_do_not_say_how_deep_their_target_is_refuse_one_that_lacks_a_tapped_layer(fixtures, make_target):
    draft = DSparkDraftModel.from_pretrained(fixtures / "speculators" / "full_vocab_vanilla")
    draft.bind(make_target(vocab_size=96, num_hidden_layers=6))
    with pytest.raises(ValueError, match="num_target_layers: draft 6, target 5"):
        draft.bind(make_target(vocab_size=96, num_hidden_layers=5))


def proposing(folder: Path, tokens: int | None) -> dict:
    method = {"proposal_type": "greedy"} | ({} if tokens is None else {"speculative_tokens": tokens})
    return read_config(folder)["speculators_config"] | {"proposal_methods": [method]}


@pytest.mark.parametrize(("tokens", "anchored"), [(5, True), (4, False)])
def test_speculators_layout_is_told_by_the_number_of_tokens_it_proposes(fixtures, tmp_path, tokens, anchored):
    folder = Path(shutil.copytree(fixtures / "speculators" / "full_vocab_vanilla", tmp_path / "draft"))
    change_config(folder, sample_from_anchor=None, speculators_config=proposing(folder, tokens))
    for config in (DSparkConfig.from_pretrained(folder), read_checkpoint(folder, sample_from_anchor=anchored)[0]):
        assert (config.sample_from_anchor, config.block_size, config.num_slots) == (anchored, tokens, 5)
    with pytest.raises(ValueError, match="asked for, but the speculators draft says otherwise"):
        read_checkpoint(folder, sample_from_anchor=not anchored)


@pytest.mark.parametrize(("anchored", "gamma"), [(True, 5), (False, 4)])
@pytest.mark.parametrize("tokens", [None, 3])
def test_speculators_layout_must_be_said_where_the_file_does_not(fixtures, tmp_path, anchored, gamma, tokens):
    folder = Path(shutil.copytree(fixtures / "speculators" / "full_vocab_vanilla", tmp_path / "draft"))
    change_config(folder, sample_from_anchor=None, speculators_config=proposing(folder, tokens))
    with pytest.raises(ValueError, match="lacks 'sample_from_anchor'.*true means.*false that it predicts its own"):
        DSparkDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="asked for, but the speculators draft says otherwise"):
        read_checkpoint(fixtures / "speculators" / "full_vocab_vanilla", sample_from_anchor=False)
    config = DSparkConfig.from_pretrained(folder, sample_from_anchor=anchored)
    assert (config.sample_from_anchor, config.block_size, config.num_slots) == (anchored, gamma, 5)
    read, _ = read_checkpoint(folder, sample_from_anchor=anchored)
    assert (read.sample_from_anchor, read.block_size) == (anchored, gamma)


GOLDEN = {
    "speculators/full_vocab_vanilla": "speculators/verifier",
    "speculators/pruned_vocab_vanilla": "speculators/verifier",
    "speculators/swa_causal_vanilla": "speculators/verifier",
    "deepspec/draft_vanilla": "deepspec/target_qwen3",
    "deepspec/draft_rnn": "deepspec/target_qwen3",
    "deepspec/draft_dflash": "deepspec/target_qwen3",
    "deepspec/trained/draft": "deepspec/trained/target",
    "deepspec/gemma4/draft_vanilla": "deepspec/gemma4/target_gemma4_text",
}
# What describes the writing software, or the run that trained the draft, and no draft; we write all fields of blocks.
EXCEPTIONS = {
    "speculators": {"auto_map", "transformers_version"},
    "deepspec": {
        "num_anchors",
        "sample_from_anchor",
        "transformers_version",
        "target_model_type",
        "markov_head_type",
        "confidence_head_with_markov",
    },
    # Nulls that one version of transformers wrote beside the types of layers.
    "gemma4": {"rope_parameters.rope_theta", "rope_parameters.rope_type"},
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_checkpoints_are_written_as_they_were(fixtures, tmp_path, monkeypatch, name):
    format = name.split("/")[0]
    if format == "speculators":
        monkeypatch.chdir(fixtures / "speculators")  # the verifier has a relative name there
    target = "verifier" if format == "speculators" else fixtures / GOLDEN[name]
    through, written = tmp_path / "ours", tmp_path / "theirs"
    convert_checkpoint(fixtures / name, through, "hf_dspark", target=target)
    convert_checkpoint(through, written, format, target=target)
    assert_same_tensors(load_file(written / "model.safetensors"), load_file(fixtures / name / "model.safetensors"))
    allowed = EXCEPTIONS[format] | (EXCEPTIONS["gemma4"] if "gemma4" in name else set())
    assert differences(read_config(written), read_config(fixtures / name)) <= allowed


def test_formats_with_copies_of_a_head_refuse_its_bias(make_target, make_draft, tmp_path):
    target = make_target(name_or_path="tiny")
    draft = make_draft(target)
    target.save_pretrained(tmp_path / "stored")
    state = load_file(tmp_path / "stored" / "model.safetensors")
    bias = torch.ones(target.config.vocab_size)
    save_file(state | {"lm_head.bias": bias}, tmp_path / "stored" / "model.safetensors", {"format": "pt"})
    target.lm_head.bias = torch.nn.Parameter(bias)
    for number, each in enumerate((target, tmp_path / "stored")):
        with pytest.raises(ValueError, match="has no place for the bias of the target's LM head"):
            convert_checkpoint(draft, tmp_path / f"written {number}", "deepspec", target=each)


def test_golden_eagle3_checkpoint_is_written_as_it_was(fixtures, make_target, tmp_path):
    folder = fixtures / "deepspec" / "eagle3"
    golden = load_file(folder / "model.safetensors")
    target = make_target(vocab_size=96, hidden_size=48, num_hidden_layers=8, name_or_path="tiny")
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(golden["embed_tokens.weight"])
        target.get_output_embeddings().weight.copy_(golden["lm_head.weight"])
    convert_checkpoint(Eagle3DraftModel.from_pretrained(folder), tmp_path / "written", "deepspec", target=target)
    assert_same_tensors(load_file(tmp_path / "written" / "model.safetensors"), golden)
    assert differences(read_config(tmp_path / "written"), read_config(folder)) <= {"transformers_version"}


ROUND_TRIPS = [
    *((format, head) for head in HEADS.values() for format in ("hf_dspark", "deepspec", "speculators")),
    *(("sglang", head) for head in HEADS.values() if "markov_rank" not in head),
    *(("speculators", fill_in(**head)) for head in HEADS.values()),
    ("speculators", {"draft_vocab_size": 20}),
    ("speculators", fill_in(draft_vocab_size=20, markov_head_type="rnn")),
    ("speculators", SLIDING | {"sliding_window": 3, "sliding_from_anchor": True}),
    ("speculators", SLIDING | {"sliding_window": 6, "sliding_from_anchor": True, "causal_sliding": True}),
    ("speculators", {"target_layer_ids": [-1, 1]}),
    ("deepspec", {"attention_bias": True, "attention_output_bias": True}),
    ("sglang", SLIDING | {"sliding_window": 6, "causal_sliding": True}),
    ("sglang", SLIDING | {"sliding_window": 6}),
    ("sglang", {"attention_sinks": True}),
    ("sglang", {"rope_interleaved": True}),
    ("transformers", fill_in(**HEADS["dflash"])),
    ("transformers", fill_in(**HEADS["dflash"], **SLIDING, sliding_window=6)),
    ("hf_dspark", {"draft_vocab_size": 20, "draft_top_k": 5, "logit_scale": 0.5}),
]


@pytest.mark.one_in(11)
@pytest.mark.parametrize(
    ("format", "overrides"), ROUND_TRIPS, ids=[f"{format}-{overrides}" for format, overrides in ROUND_TRIPS]
)
def test_export_and_import_are_the_identity(make_draft, target, tmp_path, format, overrides):
    draft = make_draft(target, **overrides).bfloat16()
    report = convert_checkpoint(draft, tmp_path / "there", format, target=target)
    assert "config.json" in report.files and "model.safetensors" in report.files
    entry = recognise(Checkpoint(tmp_path / "there").config)
    assert (entry.name if entry else "hf_dspark") == format
    convert_checkpoint(tmp_path / "there", tmp_path / "back", "hf_dspark", target=target)
    config = DSparkConfig.from_pretrained(tmp_path / "back")
    assert differences(config.to_diff_dict(), draft.config.to_diff_dict()) <= {"architectures", "dtype"}
    assert_same_tensors(load_file(tmp_path / "back" / "model.safetensors"), dict(draft.state_dict()))
    for folder in ("back",) if format == "transformers" else ("there", "back"):
        loaded = DSparkDraftModel.from_pretrained(tmp_path / folder, dtype="auto")
        assert_same_tensors(dict(loaded.state_dict()), dict(draft.state_dict()))


def test_temperatures_travel_beside_formats_that_have_no_field_for_them(make_draft, target, tmp_path):
    temperatures = {"default": [1.0, 1.5, 2.0, 0.5], "math/greedy": [0.7] * 4}
    draft = make_draft(target, sts_temperatures=temperatures)
    report = convert_checkpoint(draft, tmp_path / "there", "sglang", target=target)
    assert "sts.json" in report.files and any("sts.json" in note for note in report.notes)
    assert json.loads((tmp_path / "there" / "sts.json").read_text())["temperatures"] == temperatures["default"]
    assert read_checkpoint(tmp_path / "there")[0].sts_temperatures == temperatures
    assert DSparkDraftModel.from_pretrained(tmp_path / "there").config.sts_temperatures == temperatures
    # SGLang's own file
    (tmp_path / "there" / "sts.json").write_text('{"temperatures": [1.0, 2.0, 3.0, 4.0], "dataset": "x"}')
    assert read_checkpoint(tmp_path / "there")[0].sts_temperatures == {"default": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("window", [None, 6], ids=["full", "sliding"])
@torch.no_grad()
def test_transformers_computes_the_same_from_the_exported_draft(make_draft, target, tmp_path, window):
    sliding = {} if window is None else SLIDING | {"sliding_window": window}
    draft = make_draft(target, **fill_in(**HEADS["dflash"], **sliding))
    convert_checkpoint(draft, tmp_path / "native", "transformers", target=target)
    if sliding:
        shutil.copytree(tmp_path / "native", tmp_path / "short")
        change_config(tmp_path / "short", sliding_window=3)
        with pytest.raises(ValueError, match="shorter than the block"):
            read_checkpoint(tmp_path / "short", target=target)
    native, info = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and native.config.block_size == 5
    features = torch.randn(1, 17, 64)
    ours, theirs = SlotCache(), DFlashCache(config=native.config)
    theirs.activate_past_recording()
    for start, stop in ((0, 11), (11, 13), (13, 17)):
        anchor = torch.tensor([stop])
        hidden = draft.read_block(new_context(anchor, features[:, start:stop], ours))
        block = torch.tensor([[stop] + [draft.config.mask_token_id] * 4])
        theirs.set_previous_accepted_tokens(stop - start)
        if start:
            theirs.crop(-5)
        expected = native(
            noise_embeds=draft.embed(block), context_hidden_states=features[:, start:stop],
            position_ids=torch.arange(start, stop + 5)[None], attention_mask=torch.ones(1, stop + 5, dtype=torch.long),
            past_key_values=theirs,
        ).last_hidden_state  # fmt: skip
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_transformers_decodes_with_the_exported_draft_as_we_do(make_draft, target, tmp_path):
    draft = make_draft(target, **fill_in(**HEADS["dflash"]))
    convert_checkpoint(draft, tmp_path / "native", "transformers", target=target)
    native = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native").eval()
    prompt = torch.arange(9)[None]
    options = {"max_new_tokens": 20, "attention_mask": torch.ones_like(prompt), "do_sample": False}
    plain = target.generate(prompt, **options)
    assert torch.equal(target.generate(prompt, assistant_model=native, speculation_type="dflash", **options), plain)
    assert torch.equal(target.generate(prompt, assistant_model=draft, **options), plain)


def test_transformers_drafts_need_their_target_to_be_read(make_draft, target, tmp_path):
    convert_checkpoint(make_draft(target, **fill_in(**HEADS["dflash"])), tmp_path / "native", "transformers")
    for load in (read_checkpoint, DSparkDraftModel.from_pretrained):
        with pytest.raises(ValueError, match="neither how many tokens nor how many layers.*pass the target"):
            load(tmp_path / "native")


@torch.no_grad()
def test_transformers_drafts_read_the_table_below_a_norm_in_the_targets_embedding(make_draft, target, tmp_path):
    convert_checkpoint(make_draft(target, **fill_in(**HEADS["dflash"])), tmp_path / "native", "transformers")
    glimmer = MuseGlimmerTextConfig(vocab_size=48, hidden_size=32, num_hidden_layers=4)
    config, _ = read_checkpoint(tmp_path / "native", target=glimmer)
    assert not config.embedding_norm
    embedding = MuseGlimmerTextNormedEmbedding(48, 32, 0)
    read = DSparkDraftModel(config).bind_parts(embedding, torch.nn.Linear(32, 48), torch.float32)
    trained = DSparkDraftModel(DSparkConfig.from_target(glimmer))
    trained.bind_parts(embedding, read.get_output_embeddings(), torch.float32)
    token_ids = torch.tensor([3, 4])
    assert torch.equal(read.embed(token_ids), embedding.weight[token_ids])
    assert torch.equal(trained.embed(token_ids), embedding(token_ids))
    with pytest.raises(ValueError, match="without the norm"):
        convert_checkpoint(trained, tmp_path / "there", "sglang")


REFUSED = [
    ("deepspec", "vllm", {"markov_head_type": "rnn"}, "vanilla Markov head only"),
    ("speculators", "vllm", {"markov_head_type": "gated"}, "vanilla Markov head only"),
    ("deepspec", "llama.cpp", {"markov_head_type": "rnn"}, "vanilla Markov head only"),
    ("sglang", None, HEADS["dflash"], r"would drop the anchor's slot.*markov_rank > 0"),
    ("deepspec", "vllm", HEADS["no_markov"], "would drop the anchor's slot"),
    ("speculators", "sglang", fill_in(**HEADS["dflash"]), "not by 'sglang'"),
    ("speculators", "sglang", {"draft_vocab_size": 20}, "needs the full vocabulary"),
    ("speculators", "sglang", fill_in(markov_head_type="rnn"), "after the anchor's slot"),
    ("sglang", None, {"hidden_act": "gelu"}, "silu only"),
    ("sglang", None, {"target_layer_ids": [2, 0]}, "ascending order"),
    ("sglang", None, {"target_layer_ids": [-1, 0]}, "from 0 on"),
    ("sglang", None, {"draft_vocab_size": 20}, "no pruned vocabulary"),
    ("sglang", None, fill_in(draft_vocab_size=20, logit_scale=2.0), ".*logit_scale.*; .*pruned.*; .*fill-in layout"),
    ("sglang", None, SLIDING | {"sliding_window": 6, "sliding_from_anchor": True}, "from the anchor"),
    ("speculators", None, SLIDING | {"sliding_window": 6}, "this draft's from each slot"),
    ("deepspec", None, SLIDING | {"sliding_window": 6}, "no sliding windows"),
    ("deepspec", None, {"draft_vocab_size": 20}, "no pruned vocabulary"),
    *((format, None, {"attention_sinks": True}, "no sinks") for format in ("deepspec", "speculators", "transformers")),
    *(
        (format, None, {"rope_interleaved": True}, "neighbours")
        for format in ("deepspec", "speculators", "transformers")
    ),
    ("deepspec", None, fill_in(), "fill-in layout"),
    ("transformers", None, HEADS["dflash"], "read one position late"),
    ("transformers", None, fill_in(), "no Markov head.*no confidence head"),
    ("transformers", None, fill_in(**HEADS["dflash"], attention_bias=True, attention_output_bias=True), "no biases"),
    *(
        (format, None, {"confidence_head_with_markov": False} | overrides, "DFlash 2, nor for the head of Domino")
        for format in ("deepspec", "speculators", "transformers")
        for overrides in (
            {"markov_head_type": "domino"},
            {"markov_head_type": "selector"},
            {"markov_start": 1},
            {"markov_rank": 0, "conv_kernel_size": 2, "conv_group_size": 8},
        )
    ),
    *(
        (format, None, overrides, message)
        for format in ("deepspec", "speculators", "sglang", "transformers")
        for overrides, message in (
            ({"embedding_scale": 2.0}, "embedding_scale"),
            ({"logit_scale": 0.5}, "logit_scale"),
            ({"final_logit_softcapping": 5.0}, "final_logit_softcapping"),
            ({"draft_top_k": 4}, "draft_top_k = None"),
            ({"attention_bias": True}, "here they differ"),
            ({"mlp_bias": True}, "biases in the MLPs"),
            ({"qk_norm": False}, "normalise queries and keys"),
            ({"sandwich_norms": True}, "those of Qwen3"),
            ({"attention_scaling": 1.0}, "scales attention scores"),
            ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        )
    ),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("format", "engine", "overrides", "message"), REFUSED)
def test_drafts_that_cannot_be_held_are_refused(make_draft, target, tmp_path, format, engine, overrides, message):
    draft = make_draft(target, **overrides)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(draft, tmp_path / "there", format, target=target, engine=engine)
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 64}, "target_hidden_size differs"),
        ({"topk_context": 8}, "topk_context"),
        ({"projector_type": "domino"}, "projector_type"),
        ({"aux_hidden_state_layer_ids": None}, "lacks 'aux_hidden_state_layer_ids'"),
        ({"aux_hidden_state_layer_ids": "all"}, "must be a list of integers"),
        ({"transformer_layer_config": [1]}, "lacks 'transformer_layer_config.vocab_size'"),
        ({"block_size": True}, "'block_size' must be an integer"),
    ],
)
def test_speculators_drafts_with_unknown_features_are_refused(fixtures, tmp_path, change, message):
    folder = Path(shutil.copytree(fixtures / "speculators" / "full_vocab_vanilla", tmp_path / "draft"))
    change_config(folder, **change)
    for load in (read_checkpoint, DSparkConfig.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_drafts_of_formats_that_read_bare_rows_do_so_where_the_target_scales_them_inside(fixtures):
    draft = DSparkDraftModel.from_pretrained(fixtures / "speculators" / "full_vocab_vanilla")
    size, token_ids = draft.config.hidden_size, torch.tensor([3, 4])
    scaling = Gemma4TextScaledWordEmbedding(96, size, 0, embed_scale=7.0)
    draft.bind_parts(scaling, torch.nn.Linear(size, 96), torch.float32)
    assert torch.equal(draft.embed(token_ids), scaling.weight[token_ids])
    draft.config.embedding_scale = 7.0
    assert torch.equal(draft.embed(token_ids), scaling(token_ids))


# What engines look for: they take a default for a key that they miss, without a word.
LAYERS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size".split()
LAYERS += ["rope_parameters", "layer_types", "vocab_size"]
BLOCK = "architectures block_size mask_token_id sample_from_anchor markov_rank markov_head_type".split()
FLAT = [*BLOCK, *LAYERS, "model_type", "rms_norm_eps", "target_layer_ids", "num_target_layers"]
LOOKED_FOR = {
    "deepspec": [*FLAT, "enable_confidence_head", "confidence_head_with_markov", "num_anchors"],
    "sglang": [*FLAT, "dflash_config.target_layer_ids", "dflash_config.mask_token_id", "rope_theta"],
    "speculators": [
        *BLOCK, *(f"transformer_layer_config.{name}" for name in (*LAYERS, "model_type")), "speculators_model_type",
        "aux_hidden_state_layer_ids", "draft_vocab_size", "speculators_config.algorithm",
        "speculators_config.proposal_methods", "speculators_config.verifier.name_or_path",
    ],
}  # fmt: skip


@pytest.mark.parametrize("format", LOOKED_FOR)
def test_written_configs_hold_what_engines_look_for(make_draft, target, tmp_path, format):
    convert_checkpoint(make_draft(target), tmp_path / "there", format, target=target)
    config = read_config(tmp_path / "there")
    assert not [key for key in LOOKED_FOR[format] if look_up(config, key) is None]


def test_conversion_for_one_engine_asks_what_it_can_run(make_draft, target, tmp_path):
    draft = make_draft(target, markov_head_type="rnn")
    report = convert_checkpoint(draft, tmp_path / "a", "deepspec", target=target)
    assert report.engines == ("deepspec", "sglang")
    assert any(note.startswith("vllm cannot run this draft") for note in report.notes)
    report = convert_checkpoint(draft, tmp_path / "for_one", "deepspec", target=target, engine="sglang")
    assert report.engines == ("sglang",)
    with pytest.raises(ValueError, match="is read by .*, not by 'transformers'"):
        convert_checkpoint(draft, tmp_path / "b", "deepspec", target=target, engine="transformers")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_decides_the_format_and_its_command_is_that_of_the_manual(make_draft, target, tmp_path, engine):
    draft = make_draft(target, block_size=7)
    report = convert_checkpoint(draft, tmp_path / "there", target=target, engine=engine)
    assert report.engines == (engine,) and str(tmp_path / "there") in report.launch
    manual = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text().split("\n")
    assert launch_command(engine, "Qwen/Qwen3-4B", f"for-{engine}", draft.config) in manual
    assert "TARGET" in launch_command(engine, None, "there", draft.config)


def test_a_format_or_an_engine_that_runs_the_draft_is_needed(make_draft, target, tmp_path):
    for said, message in (({}, "say the format"), ({"engine": "tgi"}, "engine must be one of .*vllm, got .tgi")):
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(make_draft(target), tmp_path / "there", target=target, **said)
    assert not list(tmp_path.iterdir())


def test_failed_conversion_leaves_nothing_and_a_good_one_a_full_folder(make_draft, target, tmp_path, monkeypatch):
    draft, folder = make_draft(target), tmp_path / "there"
    folder.mkdir()
    report = convert_checkpoint(draft, folder, "sglang")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert sorted(path.name for path in folder.iterdir()) == list(report.files) == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="not overwritten"):
        convert_checkpoint(draft, folder, "sglang")
    shutil.rmtree(folder)
    monkeypatch.chdir(tmp_path)
    for output in (".", tmp_path):
        with pytest.raises(ValueError, match="is the working folder, which cannot be replaced: name another"):
            convert_checkpoint(draft, output, "hf_dspark")
    monkeypatch.setattr("hf_dspark.hub.convert.save_torch_state_dict", Mock(side_effect=OSError("No space left")))
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(draft, folder, "sglang")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("format", "message"), [("deepspec", "embedding and LM head"), ("speculators", "says where the target is")]
)
def test_formats_that_hold_facts_of_the_target_ask_for_it(make_draft, make_target, target, tmp_path, format, message):
    other = make_target(num_hidden_layers=5, name_or_path="another")
    for given, fault in ((None, message), (other, "num_target_layers: draft 4, target 5")):
        with pytest.raises(ValueError, match=fault):
            convert_checkpoint(make_draft(target), tmp_path / "there", format, target=given)


@pytest.mark.parametrize("format", ["deepspec", "sglang"])
def test_the_target_says_how_deep_it_is_where_the_draft_does_not(make_draft, target, tmp_path, format):
    convert_checkpoint(make_draft(target), tmp_path / "shallow", "speculators", target=target)
    draft = DSparkDraftModel.from_pretrained(tmp_path / "shallow")
    assert draft.config.num_target_layers is None
    convert_checkpoint(draft, tmp_path / "there", format, target=target)
    assert read_config(tmp_path / "there")["num_target_layers"] == 4
    if format == "sglang":  # which asks for no target otherwise
        with pytest.raises(ValueError, match="how many layers the target has, the draft does not: pass target"):
            convert_checkpoint(draft, tmp_path / "again", format)


def test_deepspec_copies_come_from_the_files_of_a_tied_target(make_draft, make_target, tmp_path):
    target = make_target(tie_word_embeddings=True)
    target.save_pretrained(tmp_path / "target")
    convert_checkpoint(make_draft(target), tmp_path / "there", "deepspec", target=tmp_path / "target")
    written = load_file(tmp_path / "there" / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(written[name], target.get_input_embeddings().weight)


def test_unknown_formats_and_checkpoints_are_named(fixtures, make_draft, target, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint format 'gguf': pass one of"):
        convert_checkpoint(make_draft(target), tmp_path / "there", "gguf")
    with pytest.raises(ValueError, match="no draft in one of the formats"):
        convert_checkpoint(fixtures / "deepspec" / "target_qwen3", tmp_path / "there", "hf_dspark")
    with pytest.raises(ValueError, match="leave engine out"):
        convert_checkpoint(make_draft(target), tmp_path / "there", "hf_dspark", engine="vllm")


def test_damaged_vocabulary_maps_are_found(fixtures, tmp_path):
    folder = Path(shutil.copytree(fixtures / "speculators" / "pruned_vocab_vanilla", tmp_path / "draft"))
    tensors = load_file(folder / "model.safetensors")
    for damage, message in (
        ({"t2d": ~tensors["t2d"]}, "t2d and d2t name different tokens"),
        ({"d2t": torch.zeros(64).long()}, "name different tokens"),
        ({"d2t": torch.full((64,), 90)}, "64 distinct tokens"),
    ):
        save_file(tensors | damage, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            read_checkpoint(folder)
