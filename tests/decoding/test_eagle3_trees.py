"""EAGLE-3 drafts as chains and as trees: each node reads its own path, and the output is the target's."""

import pytest
import torch

from hf_dspark import DecodingOptions, Eagle3Config, Eagle3DraftModel, FullBlock, generate_many
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.scheduling.scheduler import Scheduler
from tests import eagle3_target
from tests.decoding.test_lossless_batches import enumerate_rounds
from tests.distributions import PROMPT, VOCAB
from tests.features import new_context
from tests.models.test_modeling_dspark import ForcedSampler
from tests.models.test_published_eagle3 import PROJECTS
from tests.rows import padded

KINDS = {
    "deepspec": {"num_hidden_layers": 2},
    "first_layer_alone": {"num_hidden_layers": 2, "embedding_in_all_layers": False, "qk_norm": False},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "other_norms": {"norm_before_fc": True, "norm_before_residual": True},
    "pruned": {"draft_vocab_size": 2},
    "own_size": {"hidden_size": 16, "target_hidden_size": 32, "own_embedding": True, "own_lm_head": True},
    "draft_top_k": {"draft_top_k": 2},
    "p_eagle": {"mask_token_id": 1, "num_hidden_layers": 2},
    "mtp": {"mtp": True, "target_layer_ids": [2], "norm_output": True},
}


def make_pair(make_target, vocab_size=VOCAB, seed=5, **kind):
    target = make_target(vocab_size=vocab_size, num_hidden_layers=3, seed=seed, pad_token_id=None)
    options = {"block_size": 2, "target_layer_ids": [0, 1]} | kind
    draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6 + ("norm" in name))
        if draft.config.draft_vocab_size is not None:
            kept = torch.arange(vocab_size)[-draft.config.draft_vocab_size :]
            draft.d2t.copy_(kept - torch.arange(len(kept)))
    return target, draft.bind(target).eval()


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


# ---- what nodes read


class AnyTree:
    """Grows trees of a given shape by given tokens, and keeps the scores of each node's children by its path."""

    reads_confidence = False

    def __init__(self, num_rows, shapes):
        self.shapes, self.paths, self.scores = shapes, [(row, ()) for row in range(num_rows)], {}

    def __call__(self, logits, candidate_ids, confidence_logits):
        self.scores |= dict(zip(self.paths, logits, strict=True))
        level = [
            (number, (row, (*path, token)))
            for number, (row, path) in enumerate(self.paths)
            for token in self.shapes[row].get(path, ())
        ]
        self.paths = [path for _, path in level]
        return (torch.tensor([path[-1] for _, path in self.paths]), [number for number, _ in level]) if level else None

    def finish(self, confidence_logits=None):
        return self


SHAPES = (
    {(): (7, 3), (7,): (1, 2, 40), (3,): (5,), (7, 2): (9, 8)},
    {},
    {(): (4,), (4,): (4, 6), (4, 6): (11,)},
)


@pytest.mark.one_in(7)
def test_each_node_reads_what_a_chain_of_its_path_reads(make_target, kind):
    _, draft = make_pair(make_target, vocab_size=48, **kind | {"block_size": 4, "draft_vocab_size": None})
    for counts in ([5, 2, 1], [3, 0, 4]):  # none: its last round failed
        features = [torch.randn(count, draft.config.num_taps * draft.config.feature_size) for count in counts]
        ids = [torch.randint(0, 48, (count,)) for count in counts]
        anchors = torch.stack([own[-1] if len(own) else torch.tensor(7) for own in ids])
        sampler, cache = AnyTree(3, SHAPES), SlotCache(3)
        draft.draft_block(new_context(anchors, torch.cat(features), cache, counts, torch.cat(ids)), sampler)
        assert cache.lengths == tuple(counts)  # what was drafted does not count
        for (row, path), scores in sampler.scores.items():
            chain = ForcedSampler(torch.tensor([[*path, 0, 0, 0, 0]]))
            given = anchors[row : row + 1], features[row], SlotCache(), counts[row : row + 1], ids[row]
            draft.draft_block(new_context(*given), chain)
            torch.testing.assert_close(scores, chain.scores[len(path)][0], atol=1e-5, rtol=1e-5)
        assert sum(len(path) == 3 for _, path in sampler.scores) == 3


# ---- exactness


@pytest.mark.one_in(11)
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=4)], ids=["chain", "tree"])
def test_a_round_has_the_targets_distribution(make_target, monkeypatch, kind, policy):
    found, counts = enumerate_rounds(monkeypatch, *make_pair(make_target, **kind), policy, prompts=PROMPT.tolist())
    assert found < 5e-6 and any(count > 1 for (count,) in counts)


@pytest.mark.slow
def test_two_rounds_of_a_tree_have_the_targets_distribution(make_target, monkeypatch):
    pair, facts = make_pair(make_target), {"prompts": PROMPT.tolist(), "rounds": 2}
    assert enumerate_rounds(monkeypatch, *pair, Scheduler(num_nodes=3), **facts)[0] < 5e-6


@pytest.mark.slow
def test_a_round_of_two_trees_has_the_joint_distribution(make_target, monkeypatch):
    found, counts = enumerate_rounds(monkeypatch, *make_pair(make_target), Scheduler(num_nodes=2))
    assert found < 5e-6 and max(map(sum, counts)) > 1


# ---- drafts of other projects


@pytest.fixture(scope="module")
def published_target():
    return eagle3_target.make_target()


@pytest.fixture(scope="module")
def alone(published_target):
    """What the target answers without a draft."""
    return [published_target.generate(torch.tensor([prompt]), **WITHOUT_DRAFT)[0].tolist() for prompt in PROMPTS]


@pytest.fixture(params=PROJECTS)
def published(request, fixtures, published_target):
    return Eagle3DraftModel.from_pretrained(fixtures / "eagle3" / request.param).bind(published_target).eval()


PROMPTS = [eagle3_target.PROMPT, [3, 3, 8], [11, 4, 8, 8, 20, 13], [7], [5, 17, 2, 9, 9, 21, 15, 14]]
WITHOUT_DRAFT = {"do_sample": False, "max_new_tokens": eagle3_target.NUM_TOKENS, "pad_token_id": 0}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("num_rows", [*(pytest.param(rows, marks=pytest.mark.slow) for rows in (1, 3)), 5])
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=9)], ids=["chain", "tree"])
def test_greedy_answers_are_the_targets(published, published_target, alone, num_rows, policy):
    published.decoding = DecodingOptions(policy=policy)
    prompts = PROMPTS[:num_rows]
    output = published_target.generate(**padded(prompts), assistant_model=published, **WITHOUT_DRAFT)
    rows, width = zip(output.tolist(), prompts, strict=True), max(map(len, prompts))
    assert [row[width - len(prompt) :] for row, prompt in rows] == alone[:num_rows]
    assert published.last_stats.tau > 1


@pytest.mark.one_in(5)
def test_generate_many_answers_as_the_target_does(published, published_target, alone):
    published.decoding = DecodingOptions(policy=Scheduler(num_nodes=9))
    for answer in generate_many(published_target, published, PROMPTS, batch_size=2, **WITHOUT_DRAFT):
        assert answer.error is None
        assert PROMPTS[answer.index] + answer.token_ids.tolist() == alone[answer.index]
