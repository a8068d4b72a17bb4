"""Drafts of the DFlash family as their own projects wrote them: what those computed, and what our loop makes of it."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_dspark import DecodingOptions, DSparkDraftModel, FullBlock
from hf_dspark.hub.convert import convert_checkpoint
from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.scheduling.scheduler import Scheduler
from tests.config_files import change_config, read_config
from tests.features import new_context
from tests.rows import padded
from tests.samplers import ChainSampler

DRAFTS = ("z_lab", "domino_anchored", "domino_fill_in", "dflash2")
TAPS = (1, 5)


@pytest.fixture(scope="module")
def verifier(fixtures):
    verifier = AutoModelForCausalLM.from_pretrained(fixtures / "speculators" / "verifier").eval()
    verifier.generation_config.eos_token_id = None
    return verifier


@pytest.fixture
def folder(request, fixtures) -> Path:
    return fixtures / "dflash" / request.param


@pytest.mark.parametrize("folder", DRAFTS, indirect=True)
@torch.no_grad()
def test_two_rounds_are_those_of_the_drafts_own_code(folder, verifier):
    draft, io = DSparkDraftModel.from_pretrained(folder).bind(verifier).eval(), load_file(folder / "io.safetensors")
    cache, gamma = SlotCache(), io["blocks"].shape[1] - 1
    for name, block in zip(("r1", "r2"), io["blocks"], strict=False):
        features = io[f"{name}.features"]
        hidden = draft.read_block(new_context(block[:1], features, cache))
        torch.testing.assert_close(hidden, io[f"{name}.hidden"], atol=1e-5, rtol=1e-5)
        drafts = draft.sample_block(hidden, draft.base_logits(draft.predicting(hidden)), block[:1], ChainSampler())
        assert torch.equal(drafts.token_ids[0, :gamma], block[1:])


@pytest.mark.parametrize("folder", DRAFTS, indirect=True)
@torch.no_grad()
def test_training_pass_gives_the_logits_of_the_drafts_own_code(folder, verifier):
    draft, io = DSparkDraftModel.from_pretrained(folder).bind(verifier).eval(), load_file(folder / "io.safetensors")
    gamma, length = draft.config.block_size, io["input_ids"].shape[1]
    block = torch.nn.functional.pad(io["blocks"][:1], (0, 1))  # the last label is not read
    input_ids = torch.cat([io["input_ids"], block], dim=1)
    features = torch.nn.functional.pad(io["r1.features"], (0, 0, 0, block.shape[1]))
    anchors, positions = torch.tensor([[length]]), torch.arange(input_ids.shape[1])[None]
    layout = BlockLayout(anchors, anchors > 0, positions, gamma)
    slots, _ = draft.teacher_forced(input_ids, features, layout, block[:, None, 1 : gamma + 1])
    logits = slots.compute(*slots.inputs)[0]
    torch.testing.assert_close(logits, io["r1.logits"][:, -gamma:], atol=1e-5, rtol=1e-5)


def accepted_there(io: dict[str, torch.Tensor]) -> list[int]:
    """Return how many draft tokens of each round but the last the draft's own loop accepted."""
    said, place, found = io["generated"][0].tolist(), 0, []
    for anchor, *drafted in io["blocks"].tolist():
        assert anchor == said[place]
        rest = said[place + 1 : place + 1 + len(drafted)]
        number = next(
            (i for i, (ours, theirs) in enumerate(zip(drafted, rest, strict=False)) if ours != theirs), len(rest)
        )
        found.append(number)
        place += number + 1
    return found[:-1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("folder", DRAFTS, indirect=True)
def test_decoding_accepts_what_the_drafts_own_loop_accepts(folder, verifier):
    draft, io = DSparkDraftModel.from_pretrained(folder).eval(), load_file(folder / "io.safetensors")
    count, theirs = io["generated"].shape[1], accepted_there(io)
    # Their loops draw four tokens, though a block that predicts from its anchor's slot has five.
    options = {"max_new_tokens": count, "do_sample": False, "num_assistant_tokens": 4}
    output = verifier.generate(io["input_ids"], assistant_model=draft, **options)
    assert torch.equal(output[:, -count:], io["generated"])
    assert draft.last_stats.accepted[: len(theirs)] == theirs and sum(theirs) > len(theirs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("folder", DRAFTS, indirect=True)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_greedy_batches_are_those_of_plain_decoding(folder, verifier, batch, trees):
    draft = DSparkDraftModel.from_pretrained(folder).eval()
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=12) if trees else FullBlock())
    prompts = [list(range(5 + row, 12 + 3 * row)) for row in range(batch)]
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    alone = [verifier.generate(torch.tensor([row]), **options)[0, len(row) :].tolist() for row in prompts]
    together = verifier.generate(**padded(prompts), assistant_model=draft, **options)
    assert [row[-16:] for row in together.tolist()] == alone
    assert max(draft.last_stats.proposed) > (draft.config.block_size if trees else 0)


@pytest.mark.parametrize("folder", DRAFTS, indirect=True)
def test_drafts_go_there_and_back(folder, tmp_path):
    convert_checkpoint(folder, tmp_path / "ours", "hf_dspark")
    report = convert_checkpoint(tmp_path / "ours", tmp_path / "theirs", "sglang")
    assert report.engines == (("sglang",) if folder.name.startswith("domino") else ("sglang", "vllm"))
    first, again = (DSparkDraftModel.from_pretrained(place) for place in (folder, tmp_path / "theirs"))
    said, found = first.config.to_dict(), again.config.to_dict()
    assert {key for key in said if said[key] != found[key]} <= {"_name_or_path", "dtype", "transformers_version"}
    theirs, original = (read_config(place) for place in (tmp_path / "theirs", folder))
    assert original["dflash_config"].items() <= theirs["dflash_config"].items()
    assert theirs["dflash_config"].keys() - original["dflash_config"].keys() <= {"block_size"}
    assert {key for key in original if original[key] != theirs.get(key)} <= {
        "architectures",
        "dflash_config",
        "emb_dim",
    }
    written, stored = (load_file(place / "model.safetensors") for place in (tmp_path / "theirs", folder))
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)


@pytest.mark.parametrize(("folder", "name"), [("z_lab", "dflash"), ("dflash2", "dflash2")], indirect=["folder"])
def test_drafts_without_windows_go_to_speculators_and_back(folder, name, verifier, tmp_path):
    shutil.copytree(folder, tmp_path / "there")
    change_config(
        tmp_path / "there", layer_types=["full_attention"] * 2, sliding_window=None, use_sliding_window=False
    )
    convert_checkpoint(tmp_path / "there", tmp_path / "written", "speculators", target=verifier, engine="vllm")
    config = read_config(tmp_path / "written")
    assert (config["speculators_model_type"], config["block_size"], config["sample_from_anchor"]) == (name, 5, False)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    first, again = (DSparkDraftModel.from_pretrained(tmp_path / place) for place in ("there", "written"))
    features, anchor = torch.randn(1, 6, 64), torch.tensor([4])
    hidden = [each.bind(verifier).read_block(new_context(anchor, features, SlotCache())) for each in (first, again)]
    assert torch.equal(*hidden)
    assert all(torch.equal(ours, again.state_dict()[name]) for name, ours in first.state_dict().items())


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        ("z_lab", {"dflash_config": {"target_layer_ids": [1, 5]}}, "mask_token_id"),
        ("z_lab", {"architectures": ["LagunaDFlashDraftModel"]}, "architectures is .*LagunaDFlash"),
        ("z_lab", {"is_causal": True}, "blocks are causal"),
        ("dflash2", {"conv_group_size": 5}, "conv_group_size must divide"),
        ("dflash2", {"conv_kernel_size": 6}, r"conv_kernel_size must lie in \[0, 5\]"),
        ("dflash2", {"selector_top_k": None}, "lacks 'selector_top_k'"),
        ("dflash2", {"selector_top_k": 97}, r"draft_top_k must lie in \[1, 96\]"),
        ("dflash2", {"selector_rank": 7}, "of another shape"),
        ("dflash2", {"attention_mode": "mla"}, "attention_mode"),
        ("domino_anchored", {"projector_type": "causal_v5"}, "projector_type is 'causal_v5'"),
        ("domino_anchored", {"gru_hidden_dim": None}, "lacks 'gru_hidden_dim'"),
        ("domino_anchored", {"pure_draft_prefix_len": 6}, r"markov_start must lie in \[0, 5\]"),
    ],
    indirect=["folder"],
)
def test_what_is_missing_or_not_known_is_refused_by_name(folder, changes, message, tmp_path):
    shutil.copytree(folder, tmp_path / "there")
    section = read_config(folder)["dflash_config"]
    nested = {key: value for key, value in changes.items() if key in section or key == "attention_mode"}
    others = {key: value for key, value in changes.items() if key not in nested}
    change_config(tmp_path / "there", **{"dflash_config": section | nested} | others)
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(tmp_path / "there")


@pytest.mark.parametrize(
    ("folder", "pattern", "replacement"),
    [
        ("dflash2", r"(_codebook)$", r"\1.weight"),  # as z-lab's code saves them
        ("domino_fill_in", r"^(prefix_gru|embed_proj)", r"logit_head.\1"),  # SpecForge's first drafts
    ],
    indirect=["folder"],
)
def test_other_names_of_tensors_are_known(folder, pattern, replacement, tmp_path):
    shutil.copytree(folder, tmp_path / "there")
    stored = load_file(folder / "model.safetensors")
    renamed = {re.sub(pattern, replacement, name): tensor for name, tensor in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, tmp_path / "there" / "model.safetensors")
    first, again = (DSparkDraftModel.from_pretrained(place).state_dict() for place in (folder, tmp_path / "there"))
    assert all(torch.equal(first[name], again[name]) for name in first)
