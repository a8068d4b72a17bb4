"""Formats of other projects: what they compute, what our exporter writes, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextNormedEmbedding
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantModel

from hf_dspark import DSparkConfig, DSparkDraftModel, Eagle3Config, Eagle3DraftModel
from hf_dspark.formats.engines import ENGINES, draft_tensors
from hf_dspark.formats.tables import FORMAT_NAMES, FORMATS, config_from_format, config_to_format, find_format
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sharing.convert import (
    check_exported,
    convert_checkpoint,
    detect_format,
    export_checkpoint,
    read_checkpoint,
    target_facts,
)

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


def config_file(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, **changes) -> None:
    """Change keys of a config.json; `None` deletes one."""
    config = config_file(folder) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


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


# ---- parity with speculators


@pytest.mark.parametrize("name", SPECULATORS)
@torch.no_grad()
def test_speculators_drafts_compute_what_speculators_computed(fixtures, verifier, name):
    folder = fixtures / "speculators" / name
    draft = DSparkDraftModel.from_pretrained(folder).bind(verifier).eval()
    io = load_file(folder / "io.safetensors")
    anchors, real = io["out.anchor_positions"][None], io["out.anchor_valid"][None]
    assert real.all()
    layout = draft.block_layout(anchors, real, io["in.position_ids"])
    slots = anchors[0, :, None] + torch.arange(5)
    previous_ids = io["in.input_ids"][0, slots][None]
    hidden = draft.block_hidden(io["in.input_ids"], io["in.hidden_states"], layout, previous_ids)

    def expected(key):
        return io[key].unflatten(1, (anchors.shape[1], 5))

    torch.testing.assert_close(hidden, expected("out.backbone_hidden"), atol=1e-5, rtol=0)
    torch.testing.assert_close(draft.base_logits(hidden), expected("out.base_logits"), atol=1e-5, rtol=0)
    logits = draft.slot_logits(*draft.slot_inputs(hidden, previous_ids))
    kept = draft.draft_token_ids()
    if kept is not None:
        lacking = torch.ones(96, dtype=torch.bool).index_fill(0, kept, False)
        assert (logits[..., lacking] == -torch.inf).all()
        logits = logits[..., kept]
    torch.testing.assert_close(logits, expected("out.draft_logits"), atol=1e-5, rtol=0)
    confidence = draft.slot_confidence(hidden, previous_ids)
    torch.testing.assert_close(confidence, io["out.confidence_logits"].view(1, -1, 5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_drafts_decode_exactly(fixtures, verifier, name):
    draft = DSparkDraftModel.from_pretrained(fixtures / "speculators" / name).eval()
    assert draft.config.num_target_layers is None
    prompt = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(4))
    options = {"max_new_tokens": 12, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    plain = verifier.generate(prompt, **options)
    assert torch.equal(verifier.generate(prompt, assistant_model=draft, **options), plain)
    assert sum(draft.last_stats.proposed) > 0


def prune(draft, target, kept: torch.Tensor) -> DSparkDraftModel:
    """Restrict a draft to some of the target's tokens."""
    config = DSparkConfig.from_dict(draft.config.to_dict() | {"draft_vocab_size": len(kept)})
    pruned = DSparkDraftModel(config).eval()
    state = dict(draft.state_dict()) | {
        "markov_head.markov_w2.weight": draft.markov_head.markov_w2.weight[kept],
        "lm_head.weight": target.get_output_embeddings().weight[kept], "d2t": kept - torch.arange(len(kept)),
    }  # fmt: skip
    pruned.load_state_dict(state)
    return pruned


def test_pruned_drafts_accept_what_they_know_and_leave_the_output_alone(pair):
    target, draft = pair
    prompt = torch.randint(1, 60, (3, 6), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 24, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    plain = target.generate(prompt, **options)
    written = plain[:, 6:].unique()
    kept = written[::2]  # half of what the target says, so that blocks are accepted and cut
    pruned = prune(draft, target, kept)
    assert torch.equal(target.generate(prompt, assistant_model=pruned, **options), plain)
    assert 0 < sum(pruned.last_stats.accepted) < sum(pruned.last_stats.proposed)
    assert not torch.isin(written, kept).all()


def test_drafts_that_do_not_say_how_deep_their_target_is_refuse_one_that_lacks_a_tapped_layer(fixtures, make_target):
    draft = DSparkDraftModel.from_pretrained(fixtures / "speculators" / "full_vocab_vanilla")
    draft.bind(make_target(vocab_size=96, num_hidden_layers=6))
    with pytest.raises(ValueError, match="num_target_layers: draft 6, target 5"):
        draft.bind(make_target(vocab_size=96, num_hidden_layers=5))


# ---- the two layouts


@pytest.mark.parametrize(("anchored", "gamma"), [(True, 5), (False, 4)])
def test_speculators_layout_must_be_said_where_the_file_does_not(fixtures, tmp_path, anchored, gamma):
    folder = tmp_path / "draft"
    shutil.copytree(fixtures / "speculators" / "full_vocab_vanilla", folder)
    edit(folder, sample_from_anchor=None)
    with pytest.raises(ValueError, match="lacks 'sample_from_anchor'.*true means.*false that the anchor's slot"):
        DSparkDraftModel.from_pretrained(folder)
    config = DSparkConfig.from_pretrained(folder, sample_from_anchor=anchored)
    assert (config.sample_from_anchor, config.block_size, config.num_slots) == (anchored, gamma, 5)
    read = read_checkpoint(folder, sample_from_anchor=anchored).config
    assert (read.sample_from_anchor, read.block_size) == (anchored, gamma)


def test_speculators_layout_cannot_be_overridden_where_the_file_says_it(fixtures):
    with pytest.raises(ValueError, match="asked for, but the speculators draft says otherwise"):
        read_checkpoint(fixtures / "speculators" / "full_vocab_vanilla", sample_from_anchor=False)


def test_fill_in_blocks_count_the_anchor_in_speculators_only(make_draft, target):
    config = make_draft(target, **fill_in()).config
    written = config_to_format(config, find_format("speculators", config), target_facts(target))
    assert (config.block_size, written["block_size"], written["sample_from_anchor"]) == (4, 5, False)
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


# ---- golden files


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
# What describes the writing software, or the run that trained the draft, and no draft; we add sample_from_anchor.
EXCEPTIONS = {
    "speculators": {"auto_map", "transformers_version"},
    "deepspec": {"num_anchors", "sample_from_anchor", "transformers_version"},
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
    assert differences(config_file(written), config_file(fixtures / name)) <= allowed


def test_golden_eagle3_checkpoint_is_written_as_it_was(fixtures, tmp_path):
    folder = fixtures / "deepspec" / "eagle3"
    golden = load_file(folder / "model.safetensors")
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=8,
            num_hidden_layers=8,
            num_attention_heads=2,
            head_dim=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            name_or_path="tiny",
        )  # fmt: skip
    )
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(golden["embed_tokens.weight"])
        target.get_output_embeddings().weight.copy_(golden["lm_head.weight"])
    export_checkpoint(Eagle3DraftModel.from_pretrained(folder), tmp_path / "written", "deepspec", target=target)
    assert_same_tensors(load_file(tmp_path / "written" / "model.safetensors"), golden)
    assert differences(config_file(tmp_path / "written"), config_file(folder)) <= {"transformers_version"}


# ---- round trips


def formats_for(head: str) -> list[str]:
    flat = [] if head in ("no_markov", "dflash") else ["sglang"]
    return ["hf_dspark", "deepspec", "speculators", *flat]


ROUND_TRIPS = [
    *((format, HEADS[head], f"{format}-{head}") for head in HEADS for format in formats_for(head)),
    *(("speculators", fill_in(**HEADS[head]), f"speculators-fill_in-{head}") for head in HEADS),
    ("speculators", {"draft_vocab_size": 20}, "speculators-pruned"),
    ("speculators", fill_in(draft_vocab_size=20, markov_head_type="rnn"), "speculators-fill_in-pruned"),
    ("speculators", SLIDING | {"sliding_window": 3, "sliding_from_anchor": True}, "speculators-sliding"),
    (
        "speculators",
        SLIDING | {"sliding_window": 6, "sliding_from_anchor": True, "causal_sliding": True},
        "speculators-causal_sliding",
    ),
    ("speculators", {"target_layer_ids": [-1, 1]}, "speculators-embeddings"),
    ("deepspec", {"attention_bias": True, "attention_output_bias": True}, "deepspec-biases"),
    ("sglang", SLIDING | {"sliding_window": 6, "causal_sliding": True}, "sglang-sliding"),
    ("transformers", fill_in(**HEADS["dflash"]), "transformers"),
    ("transformers", fill_in(**HEADS["dflash"], **SLIDING, sliding_window=6), "transformers-sliding"),
    ("hf_dspark", {"draft_vocab_size": 20, "draft_top_k": 5, "logit_scale": 0.5}, "hf_dspark-all"),
]


@pytest.mark.parametrize(
    ("format", "overrides"), [case[:2] for case in ROUND_TRIPS], ids=[case[2] for case in ROUND_TRIPS]
)
def test_export_and_import_are_the_identity(make_draft, target, tmp_path, format, overrides):
    if overrides.get("markov_rank") == 0:
        overrides = overrides | {"markov_head_type": "vanilla"}
    draft = make_draft(target, **overrides)
    report = export_checkpoint(draft, tmp_path / "there", format, target=target)
    assert "config.json" in report.files and "model.safetensors" in report.files
    assert detect_format(config_file(tmp_path / "there")) == format
    back = read_checkpoint(tmp_path / "there", target=target)
    assert differences(back.config.to_diff_dict(), draft.config.to_diff_dict()) <= {"architectures", "dtype"}
    assert_same_tensors(back.tensors, dict(draft.state_dict()))
    convert_checkpoint(tmp_path / "there", tmp_path / "back", "hf_dspark", target=target)
    assert_same_tensors(
        dict(DSparkDraftModel.from_pretrained(tmp_path / "back").state_dict()), dict(draft.state_dict())
    )


@pytest.mark.parametrize("format", [name for name in FORMAT_NAMES if name != "transformers"])
def test_conversion_keeps_the_type_of_the_weights(make_draft, target, tmp_path, format):
    draft = make_draft(target).to(torch.bfloat16)
    export_checkpoint(draft, tmp_path / "there", format, target=target)
    assert_same_tensors(read_checkpoint(tmp_path / "there").tensors, dict(draft.state_dict()))
    assert config_file(tmp_path / "there")["dtype"] == "bfloat16"
    assert DSparkDraftModel.from_pretrained(tmp_path / "there", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("format", ["deepspec", "speculators", "sglang"])
def test_exported_drafts_load_with_from_pretrained(make_draft, target, tmp_path, format):
    draft = make_draft(target)
    export_checkpoint(draft, tmp_path / "there", format, target=target)
    assert_same_tensors(
        dict(DSparkDraftModel.from_pretrained(tmp_path / "there").state_dict()), dict(draft.state_dict())
    )


def test_temperatures_travel_beside_formats_that_have_no_field_for_them(make_draft, target, tmp_path):
    temperatures = {"default": [1.0, 1.5, 2.0, 0.5], "math/greedy": [0.7] * 4}
    draft = make_draft(target, sts_temperatures=temperatures)
    report = export_checkpoint(draft, tmp_path / "there", "sglang", target=target)
    assert "sts.json" in report.files and any("sts.json" in note for note in report.notes)
    assert json.loads((tmp_path / "there" / "sts.json").read_text())["temperatures"] == temperatures["default"]
    assert read_checkpoint(tmp_path / "there").config.sts_temperatures == temperatures
    assert DSparkDraftModel.from_pretrained(tmp_path / "there").config.sts_temperatures == temperatures


def test_sglangs_own_calibration_file_is_read(make_draft, target, tmp_path):
    export_checkpoint(make_draft(target), tmp_path / "there", "sglang", target=target)
    (tmp_path / "there" / "sts.json").write_text('{"temperatures": [1.0, 2.0, 3.0, 4.0], "dataset": "x"}')
    assert read_checkpoint(tmp_path / "there").config.sts_temperatures == {"default": [1.0, 2.0, 3.0, 4.0]}


# ---- what SpecForge wrote


def specforge(target, **changes) -> dict:
    text = target.config
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 5,
        "dflash_config": {
            "mask_token_id": 47, "target_layer_ids": [0, 2], "projector_type": "dspark", "markov_rank": 6,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
        },
        "head_dim": 12, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "layer_types": ["full_attention"], "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2,
        "num_target_layers": text.num_hidden_layers, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000.0,
        "vocab_size": text.vocab_size,
    } | changes  # fmt: skip


def read_flat(config: dict) -> DSparkConfig:
    entry = next(entry for entry in FORMATS if entry.recognise(config))
    assert entry.name == "sglang"
    return DSparkConfig.from_dict(config_from_format(config, entry))


def test_specforges_nested_heads_and_old_rotary_fields_are_read(target):
    config = read_flat(specforge(target))
    assert (config.markov_rank, config.target_layer_ids, config.mask_token_id) == (6, [0, 2], 47)
    assert (config.block_size, config.sample_from_anchor, config.enable_confidence_head) == (5, True, True)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}


def test_specforges_dflash_drafts_have_an_anchor_that_predicts_nothing(target):
    nested = {"mask_token_id": 47, "target_layer_ids": [0, 2]}
    config = read_flat(specforge(target, dflash_config=nested))
    assert (config.markov_rank, config.enable_confidence_head) == (0, False)
    assert (config.block_size, config.num_slots, config.sample_from_anchor) == (4, 5, False)


def test_specforges_sliding_layers_are_causal_unless_it_says_otherwise(target):
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    assert read_flat(specforge(target, **sliding)).causal_sliding
    assert not read_flat(specforge(target, **sliding, is_causal=False)).causal_sliding


def test_specforges_attention_sinks_are_read_written_and_refused_elsewhere(make_draft, target, tmp_path):
    nested = specforge(target)["dflash_config"] | {"attention_sink_bias": True}
    assert read_flat(specforge(target, dflash_config=nested)).attention_sinks
    draft = make_draft(target, attention_sinks=True)
    export_checkpoint(draft, tmp_path / "there", "sglang", target=target)
    back = DSparkDraftModel.from_pretrained(tmp_path / "there")
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in draft.state_dict().items())
    for format in ("deepspec", "speculators", "transformers"):
        with pytest.raises(ValueError, match="no sinks"):
            export_checkpoint(draft, tmp_path / format, format, target=target)


# ---- transformers' own DFlash


@pytest.mark.parametrize("window", [None, 6], ids=["full", "sliding"])
@torch.no_grad()
def test_transformers_computes_the_same_from_the_exported_draft(make_draft, target, tmp_path, window):
    sliding = {} if window is None else SLIDING | {"sliding_window": window}
    draft = make_draft(target, **fill_in(**HEADS["dflash"], **sliding))
    export_checkpoint(draft, tmp_path / "native", "transformers", target=target)
    native, info = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and native.config.block_size == 5
    features = torch.randn(1, 17, 64)
    ours, theirs = SlotCache(), DFlashCache(config=native.config)
    theirs.activate_past_recording()
    for start, stop in ((0, 11), (11, 13), (13, 17)):
        anchor = torch.tensor([stop])
        hidden = draft.read_block(anchor, features[:, start:stop], ours)
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
    export_checkpoint(draft, tmp_path / "native", "transformers", target=target)
    native = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native").eval()
    prompt = torch.arange(9)[None]
    options = {"max_new_tokens": 20, "attention_mask": torch.ones_like(prompt), "do_sample": False}
    plain = target.generate(prompt, **options)
    assert torch.equal(target.generate(prompt, assistant_model=native, speculation_type="dflash", **options), plain)
    assert torch.equal(target.generate(prompt, assistant_model=draft, **options), plain)


def test_transformers_drafts_need_their_target_to_be_read(make_draft, target, tmp_path):
    export_checkpoint(make_draft(target, **fill_in(**HEADS["dflash"])), tmp_path / "native", "transformers")
    for load in (read_checkpoint, DSparkDraftModel.from_pretrained):
        with pytest.raises(ValueError, match="neither how many tokens nor how many layers.*pass the target"):
            load(tmp_path / "native")


def test_transformers_windows_shorter_than_the_block_are_refused(make_draft, target, tmp_path):
    draft = make_draft(target, **fill_in(**HEADS["dflash"], **SLIDING, sliding_window=6))
    export_checkpoint(draft, tmp_path / "native", "transformers")
    edit(tmp_path / "native", sliding_window=3)
    with pytest.raises(ValueError, match="shorter than the block"):
        read_checkpoint(tmp_path / "native", target=target)


@torch.no_grad()
def test_transformers_drafts_read_the_table_below_a_norm_in_the_targets_embedding(make_draft, target, tmp_path):
    export_checkpoint(make_draft(target, **fill_in(**HEADS["dflash"])), tmp_path / "native", "transformers")
    glimmer = MuseGlimmerTextConfig(vocab_size=48, hidden_size=32, num_hidden_layers=4)
    checkpoint = read_checkpoint(tmp_path / "native", target=glimmer)
    assert not checkpoint.config.embedding_norm
    embedding = MuseGlimmerTextNormedEmbedding(48, 32, 0)
    read = DSparkDraftModel(checkpoint.config).bind_parts(embedding, torch.nn.Linear(32, 48), torch.float32)
    trained = DSparkDraftModel(DSparkConfig.from_target(glimmer))
    trained.bind_parts(embedding, read.get_output_embeddings(), torch.float32)
    token_ids = torch.tensor([3, 4])
    assert torch.equal(read.embed(token_ids), embedding.weight[token_ids])
    assert torch.equal(trained.embed(token_ids), embedding(token_ids))
    with pytest.raises(ValueError, match="without the norm"):
        export_checkpoint(trained, tmp_path / "there", "sglang")


# ---- what cannot be held

REFUSED = [
    ("deepspec", "vllm", {"markov_head_type": "rnn"}, "vanilla Markov head only"),
    ("speculators", "vllm", {"markov_head_type": "gated"}, "vanilla Markov head only"),
    ("deepspec", "llama.cpp", {"markov_head_type": "rnn"}, "vanilla Markov head only"),
    ("sglang", None, HEADS["dflash"], r"would drop the anchor's slot.*markov_rank > 0"),
    ("deepspec", "vllm", HEADS["no_markov"], "would drop the anchor's slot"),
    ("speculators", "sglang", fill_in(**HEADS["dflash"]), "needs a Markov head"),
    ("speculators", "sglang", {"draft_vocab_size": 20}, "needs the full vocabulary"),
    ("speculators", "sglang", fill_in(markov_head_type="rnn"), "behind the anchor's slot"),
    ("sglang", None, {"hidden_act": "gelu"}, "silu only"),
    ("sglang", None, {"target_layer_ids": [2, 0]}, "ascending order"),
    ("sglang", None, {"target_layer_ids": [-1, 0]}, "from 0 on"),
    ("sglang", None, {"draft_vocab_size": 20}, "no pruned vocabulary"),
    ("sglang", None, fill_in(), "fill-in layout"),
    ("sglang", None, SLIDING | {"sliding_window": 6}, "causal inside the block"),
    ("sglang", None, SLIDING | {"sliding_window": 6, "sliding_from_anchor": True}, "from the anchor"),
    ("speculators", None, SLIDING | {"sliding_window": 6}, "this draft's from each slot"),
    ("deepspec", None, SLIDING | {"sliding_window": 6}, "no sliding windows"),
    ("deepspec", None, {"draft_vocab_size": 20}, "no pruned vocabulary"),
    ("deepspec", None, fill_in(), "fill-in layout"),
    ("transformers", None, HEADS["dflash"], "read one position late"),
    ("transformers", None, fill_in(), "no Markov head.*no confidence head"),
    ("transformers", None, fill_in(**HEADS["dflash"], attention_bias=True, attention_output_bias=True), "no biases"),
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
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
                "partial_rotary_factor",
            ),
        )
    ),
]


@pytest.mark.parametrize(("format", "engine", "overrides", "message"), REFUSED)
def test_drafts_are_refused_where_they_cannot_be_held(
    make_draft, target, tmp_path, format, engine, overrides, message
):
    draft = make_draft(target, **overrides)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(draft, tmp_path / "there", format, target=target, engine=engine)
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


def test_refusals_list_every_reason_at_once(make_draft, target, tmp_path):
    draft = make_draft(target, **fill_in(draft_vocab_size=20, logit_scale=2.0))
    with pytest.raises(ValueError, match="'sglang' cannot hold this draft: .*logit_scale; .*fill-in.*; .*pruned"):
        export_checkpoint(draft, tmp_path / "there", "sglang")


def test_report_says_which_engines_cannot_run_the_draft(make_draft, target, tmp_path):
    report = export_checkpoint(make_draft(target, markov_head_type="rnn"), tmp_path / "a", "deepspec", target=target)
    assert report.engines == ("deepspec", "sglang")
    assert any(note.startswith("vllm cannot run it") for note in report.notes)


def test_eagle3_drafts_have_a_place_in_deepspecs_format_only(target, tmp_path):
    draft = Eagle3DraftModel(Eagle3Config.from_target(target.config))
    for format in ("speculators", "sglang", "transformers"):
        with pytest.raises(ValueError, match="no place for drafts of the kind 'dspark_eagle3'"):
            export_checkpoint(draft, tmp_path / "there", format, target=target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "not 'dspark'"),
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
    folder = tmp_path / "draft"
    shutil.copytree(fixtures / "speculators" / "full_vocab_vanilla", folder)
    edit(folder, **change)
    for load in (read_checkpoint, DSparkConfig.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type"),
        ({"sample_from_anchor": False}, "contradicts the layout"),
        ({"is_causal": True}, "is_causal is set for full-attention"),
        ({"rope_theta": None}, "lacks 'rope_parameters'"),
    ],
)
def test_specforges_drafts_with_unknown_features_are_refused(target, change, message):
    with pytest.raises(ValueError, match=message):
        read_flat(specforge(target, **change))


def test_targets_that_scale_their_embedding_inside_are_refused_for_formats_that_read_plain_rows(fixtures):
    gemma = fixtures / "deepspec" / "gemma4" / "target_gemma4_text"
    with pytest.raises(ValueError, match="reads embedding rows unscaled.*'gemma4_text' target are scaled"):
        read_checkpoint(fixtures / "speculators" / "full_vocab_vanilla", target=gemma)


# ---- tables


def test_shape_table_says_what_the_models_have(make_draft, target):
    cases = [*HEADS.values(), {"draft_vocab_size": 20}, {"attention_bias": True}, {"attention_output_bias": True}]
    cases += [
        {"attention_sinks": True},
        {"sandwich_norms": True, "layer_scalar": True, "attention_k_eq_v": True},
        {"qk_norm": False},
    ]
    for overrides in cases:
        draft = make_draft(target, **overrides)
        assert draft_tensors(draft.config) == {name: tuple(t.shape) for name, t in draft.state_dict().items()}, (
            overrides
        )
    eagle3 = Eagle3DraftModel(Eagle3Config.from_target(target.config))
    assert draft_tensors(eagle3.config) == {name: tuple(t.shape) for name, t in eagle3.state_dict().items()}


def test_every_format_has_an_engine_whose_table_is_checked():
    for entry in FORMATS:
        readers = [engine for engine in ENGINES if engine.name in entry.engines]
        assert len(readers) == len(entry.engines)
        assert all(engine.config_keys[entry.name] for engine in readers), entry.name


@pytest.mark.parametrize("format", ["deepspec", "speculators", "sglang"])
def test_check_exported_finds_what_an_engine_would_miss(make_draft, target, tmp_path, format):
    folder = tmp_path / "there"
    export_checkpoint(make_draft(target), folder, format, target=target)
    check_exported(folder)
    whole = load_file(folder / "model.safetensors")
    for name in ("hidden_norm.weight", "markov_head.markov_w2.weight", "confidence_head.proj.bias"):
        save_file({key: value for key, value in whole.items() if key != name}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"tensor {name} .* is missing"):
            check_exported(folder)
    save_file(whole | {"fc.weight": whole["fc.weight"].T.contiguous()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor fc.weight is \[64, 32\], not \[32, 64\]"):
        check_exported(folder)
    save_file(whole, folder / "model.safetensors")
    edit(folder, sample_from_anchor=None)
    with pytest.raises(ValueError, match="sample_from_anchor"):
        check_exported(folder)


def test_check_exported_asks_what_one_engine_wants(make_draft, target, tmp_path):
    export_checkpoint(make_draft(target, markov_head_type="rnn"), tmp_path / "a", "deepspec", target=target)
    check_exported(tmp_path / "a", engine="sglang")
    with pytest.raises(ValueError, match="vllm cannot run this draft"):
        check_exported(tmp_path / "a", engine="vllm")
    with pytest.raises(ValueError, match="is read by .*, not by 'transformers'"):
        check_exported(tmp_path / "a", engine="transformers")


# ---- files


def test_conversion_never_overwrites(fixtures, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="not overwritten"):
        convert_checkpoint(fixtures / "deepspec" / "draft_vanilla", tmp_path, "hf_dspark")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_conversion_fills_an_empty_folder_and_leaves_nothing_beside_it(fixtures, tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    report = convert_checkpoint(fixtures / "deepspec" / "draft_vanilla", folder, "sglang")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert sorted(path.name for path in folder.iterdir()) == list(report.files) == ["config.json", "model.safetensors"]


def test_failed_conversion_leaves_nothing(make_draft, target, tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_dspark.sharing.convert.save_torch_state_dict", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(make_draft(target), tmp_path / "there", "sglang")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("format", "message"), [("deepspec", "embedding and LM head"), ("speculators", "where it is")]
)
def test_formats_that_hold_facts_of_the_target_ask_for_it(make_draft, target, tmp_path, format, message):
    with pytest.raises(ValueError, match=message):
        export_checkpoint(make_draft(target), tmp_path / "there", format)


def test_another_models_target_is_refused(make_draft, make_target, target, tmp_path):
    with pytest.raises(ValueError, match="num_target_layers: draft 4, target 5"):
        export_checkpoint(make_draft(target), tmp_path / "there", "deepspec", target=make_target(num_hidden_layers=5))


def test_deepspec_copies_come_from_the_files_of_a_tied_target(make_draft, make_target, tmp_path):
    target = make_target(tie_word_embeddings=True)
    target.save_pretrained(tmp_path / "target")
    export_checkpoint(make_draft(target), tmp_path / "there", "deepspec", target=tmp_path / "target")
    written = load_file(tmp_path / "there" / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(written[name], target.get_input_embeddings().weight)


def test_unknown_formats_and_checkpoints_are_named(fixtures, make_draft, target, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint format 'gguf': pass one of"):
        export_checkpoint(make_draft(target), tmp_path / "there", "gguf")
    with pytest.raises(ValueError, match="no draft in one of the formats"):
        convert_checkpoint(fixtures / "deepspec" / "target_qwen3", tmp_path / "there", "hf_dspark")
    with pytest.raises(ValueError, match="leave engine out"):
        export_checkpoint(make_draft(target), tmp_path / "there", "hf_dspark", engine="vllm")


def test_damaged_vocabulary_maps_are_found(fixtures, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(fixtures / "speculators" / "pruned_vocab_vanilla", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"t2d": ~tensors["t2d"]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="t2d and d2t name different tokens"):
        read_checkpoint(folder)
    save_file(tensors | {"d2t": torch.zeros(64).long()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="name different tokens"):
        read_checkpoint(folder)
    save_file(tensors | {"d2t": torch.full((64,), 90)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="64 distinct tokens"):
        read_checkpoint(folder)
