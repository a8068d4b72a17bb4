"""EAGLE-3 drafts of other projects propose what their own code proposes; see `fixtures/eagle3/make.py`."""

import pytest
import torch
from safetensors.torch import load_file

from hf_dspark import DecodingOptions, Eagle3DraftModel, FullBlock
from hf_dspark.models.slot_cache import SlotCache
from tests.eagle3_target import DEFAULT_TAPS, GAMMA, NUM_TOKENS, PROMPT, make_target, target_features
from tests.features import new_context
from tests.models.test_modeling_dspark import ForcedSampler
from tests.samplers import ChainSampler

PROJECTS = {
    "safeailab": DEFAULT_TAPS, "specforge": [0, 2, 6], "specforge_narrow": DEFAULT_TAPS,
    "speculators_qwen3": DEFAULT_TAPS, "speculators_llama": [0, 2, 6], "modelopt": [1, 3, 5],
    "angelslim": DEFAULT_TAPS, "speculators_peagle": DEFAULT_TAPS,
}  # fmt: skip


@pytest.fixture(scope="module")
def eagle3_target():
    return make_target()


@pytest.fixture(params=PROJECTS)
def project(request):
    return request.param


@pytest.fixture
def pair(fixtures, eagle3_target, project):
    draft = Eagle3DraftModel.from_pretrained(fixtures / "eagle3" / project).bind(eagle3_target).eval()
    draft.config.block_size = GAMMA
    return eagle3_target, draft, load_file(fixtures / "eagle3" / project / "io.safetensors")


def propose(draft, features, token_ids, sampler):
    """Draft after committed tokens, of which all but the last one have features."""
    ids = torch.as_tensor(token_ids)
    return draft.draft_block(new_context(ids[-1:], features[None], SlotCache(), committed_ids=ids[1:]), sampler)


def test_taps_are_those_of_the_projects_code(pair, project):
    target, draft, _ = pair
    assert draft.config.target_layer_ids == PROJECTS[project]
    assert draft.config.num_target_layers in (None, target.config.num_hidden_layers)


@pytest.mark.one_in(3)
def test_chains_match_the_projects_code(pair):
    target, draft, io = pair
    features = target_features(target, io["answer"].tolist(), draft.config.target_layer_ids)
    forced = ForcedSampler(torch.tensor([[*io["forced"].tolist(), 0]]))
    propose(draft, features[:-1], io["answer"], forced)
    torch.testing.assert_close(torch.cat(forced.scores), io["logits"], atol=1e-5, rtol=1e-5)
    for row, expected in enumerate(io["drafts"]):
        proposed = propose(draft, features[: row + 1], io["answer"][: row + 2], ChainSampler())
        assert torch.equal(proposed.token_ids[0], expected)


@pytest.mark.one_in(4)
def test_rounds_accept_what_the_projects_drafts_would(pair):
    target, draft, io = pair
    rounds = []
    draft.decoding = DecodingOptions(policy=FullBlock(), observer=rounds.append)
    output = target.generate(torch.tensor([PROMPT]), assistant_model=draft, do_sample=False, max_new_tokens=NUM_TOKENS)
    answer, drafts = io["answer"].tolist(), io["drafts"].tolist()
    assert output[0].tolist() == answer
    counts = [int(outcome.num_accepted[0]) for outcome in rounds]
    expected, length = [], len(answer) - sum(counts) - len(counts)
    while length < len(answer):
        following = zip(drafts[length - 2], answer[length:-1], strict=False)
        expected.append(next((n for n, (ours, truth) in enumerate(following) if ours != truth), None))
        if expected[-1] is None:  # all that fit were right
            expected[-1] = min(GAMMA, len(answer) - length - 1)
        length += expected[-1] + 1
    assert counts == expected and sum(counts) > 0
