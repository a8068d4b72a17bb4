"""EAGLE-3 drafts on their way between formats: nothing that they compute with is lost, or the format is refused."""

import pytest
import torch
from safetensors.torch import load_file

from hf_dspark import Eagle3Config, Eagle3DraftModel, convert_checkpoint
from hf_dspark.models.slot_cache import SlotCache
from tests.config_files import read_config
from tests.eagle3_target import HIDDEN_SIZE, fill, make_target
from tests.features import new_context
from tests.models.test_published_eagle3 import PROJECTS
from tests.samplers import ChainSampler

# Where a draft came from, and what became of it on the way there and back.
NAMES = {"name_or_path", "_name_or_path", "transformers_version", "target_model_type", "num_target_layers"}
FIRST_ALONE = {"embedding_in_all_layers"}  # without meaning for one layer
SEVERAL_LAYERS = ("speculators_qwen3", "speculators_llama", "speculators_peagle", "modelopt")


@pytest.fixture(scope="module")
def eagle3_target(tmp_path_factory):
    target = make_target()
    target.save_pretrained(folder := tmp_path_factory.mktemp("target"))
    return target, str(folder)


def drafts(draft, target):
    """Return what a draft proposes after tokens with random features."""
    draft = draft.bind(target).eval()
    features = torch.randn(1, 5, 3 * HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 9, 1, 14, 20])
    context = new_context(ids[-1:], features, SlotCache(), committed_ids=ids)
    return draft.draft_block(context, ChainSampler()).token_ids.tolist()


def facts(config):
    return {name: value for name, value in config.to_dict().items() if name not in NAMES}


@pytest.mark.one_in(11)
@pytest.mark.parametrize("format", ["speculators", "sglang"])
@pytest.mark.parametrize("project", PROJECTS)
def test_published_drafts_go_there_and_back(fixtures, eagle3_target, tmp_path, project, format):
    (target, target_folder), source = eagle3_target, fixtures / "eagle3" / project
    if format == "sglang" and project in SEVERAL_LAYERS:
        with pytest.raises(ValueError, match="has one layer: use the format 'speculators'"):
            convert_checkpoint(source, tmp_path / "there", format, target=target_folder)
        return
    convert_checkpoint(source, tmp_path / "ours", "hf_dspark", target=target_folder)
    there = convert_checkpoint(source, tmp_path / "there", format, target=target_folder)
    convert_checkpoint(there.folder, tmp_path / "back", "hf_dspark", target=target_folder)
    ours, back = (Eagle3DraftModel.from_pretrained(tmp_path / name) for name in ("ours", "back"))
    assert facts(ours.config) == facts(back.config)
    state, again = ours.state_dict(), back.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    read = Eagle3DraftModel.from_pretrained(there.folder)
    assert drafts(read, target) == drafts(ours, target) == drafts(Eagle3DraftModel.from_pretrained(source), target)


def test_flat_files_have_the_names_that_engines_look_for(fixtures, eagle3_target, tmp_path):
    source = fixtures / "eagle3" / "specforge"
    report = convert_checkpoint(source, tmp_path / "there", "sglang", target=eagle3_target[1], engine="sglang")
    theirs, written = (load_file(folder / "model.safetensors") for folder in (source, report.folder))
    assert theirs.keys() == written.keys() and all(torch.equal(theirs[name], written[name]) for name in theirs)
    before, after = (read_config(folder) for folder in (source, report.folder))
    for name in ("architectures", "draft_vocab_size", "fc_norm", "head_dim", "rope_theta", "eagle_config"):
        assert after[name] == before[name]
    assert after["rope_scaling"].items() <= before["rope_scaling"].items()


def default_draft(target, **overrides):
    draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, block_size=5, **overrides))
    fill(draft, seed=1)
    return draft


def test_drafts_of_ours_go_to_speculators_with_the_targets_head(eagle3_target, tmp_path):
    target, folder = eagle3_target
    draft = default_draft(target)
    report = convert_checkpoint(draft, tmp_path / "there", "speculators", target=folder)
    back = Eagle3DraftModel.from_pretrained(report.folder)
    written = load_file(report.folder / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], target.lm_head.weight) and "embed_tokens.weight" not in written
    assert back.config.block_size == 5 and back.config.target_layer_ids == draft.config.target_layer_ids
    found = {name for name in facts(back.config) if facts(back.config)[name] != facts(draft.config)[name]}
    assert found <= FIRST_ALONE | {"architectures", "dtype"}


REFUSED = [
    ("sglang", {}, "those of Llama.*'speculators'"),
    ("sglang", {"qk_norm": False}, "taps three layers"),
    ("sglang", {"qk_norm": False, "target_layer_ids": [1, 4, 6], "norm_before_fc": True}, "no single norm before fc"),
    ("sglang", {"qk_norm": False, "target_layer_ids": [1, 4, 6], "norm_before_residual": True}, "before the residual"),
    ("sglang", {"qk_norm": False, "target_layer_ids": [1, 4, 6], "own_embedding": True}, "has its own"),
    ("sglang", {"qk_norm": False, "target_layer_ids": [1, 4, 6], "mask_token_id": 2}, "one token a pass: use"),
    ("deepspec", {"mask_token_id": 2}, "one token a pass .mask_token_id"),
    ("speculators", {"num_hidden_layers": 2}, "first layer alone reads the embedded token"),
    ("speculators", {"draft_top_k": 3}, "draft_top_k"),
    ("deepspec", {"qk_norm": False}, "normalise queries and keys"),
    ("deepspec", {"fc_norm": True}, "fc_norm"),
    ("deepspec", {"norm_output": True}, "norm_output"),
    ("deepspec", {"norm_before_residual": True}, "norm_before_residual"),
    ("deepspec", {"draft_vocab_size": 16}, "pruned vocabulary"),
    ("deepspec", {"embedding_in_all_layers": False, "num_hidden_layers": 2}, "embedding_in_all_layers"),
    ("transformers", {}, "no place for drafts of the kind 'dspark_eagle3'"),
]


@pytest.mark.parametrize(("format", "overrides", "message"), REFUSED)
def test_drafts_that_cannot_be_held_are_refused(eagle3_target, tmp_path, format, overrides, message):
    target, folder = eagle3_target
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(default_draft(target, **overrides), tmp_path / "there", format, target=folder)
    assert not list(tmp_path.iterdir())
