"""Token distributions, verification of chains as DeepSpec does it, and the search for the largest scores. That rounds
keep the target's distribution is enumerated in `test_block_verification.py` and `test_trees.py`."""

import pytest
import torch

from hf_dspark.sampling import distributions
from hf_dspark.sampling.distributions import (
    TokenDistribution,
    draw_if_any,
    largest,
    residual_distribution,
    scatter_to_vocabulary,
)
from hf_dspark.sampling.drafts import DraftBlock
from hf_dspark.sampling.verification import verify_chains
from tests.samplers import ChainSampler


def verify(block, lengths, target_probs, accept_uniforms, uniform=None):
    uniform = torch.rand(len(lengths)) if uniform is None else uniform
    return verify_chains(block, lengths, TokenDistribution(target_probs), accept_uniforms, uniform)


def distributions_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).mul(1.5).softmax(dim=-1)


# ---- acceptance and residual


def test_residual_distribution_is_the_normalised_excess_or_the_targets_distribution_where_there_is_none():
    residual = residual_distribution(torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.1, 0.3, 0.6]))
    torch.testing.assert_close(residual, torch.tensor([0.8, 0.2, 0.0]))
    target_probs = distributions_of(50, 8)
    assert torch.equal(residual_distribution(target_probs, target_probs), target_probs)
    target_probs[:, 3] = 0.0  # forbidden
    target_probs /= target_probs.sum(-1, keepdim=True)
    residual = residual_distribution(target_probs, distributions_of(50, 8))
    assert (residual[:, 3] == 0).all()
    torch.testing.assert_close(residual.sum(-1), torch.ones(50))


# ---- parity with DeepSpec


@pytest.mark.parametrize("case", ["verify_all", "verify_partial2", "verify_none"])
@pytest.mark.parametrize("name", ["draft_vanilla", "draft_rnn", "draft_dflash"])
def test_the_distribution_after_accepted_tokens_matches_deepspec(golden, name, case):
    data = golden(name)
    accepted = data.info[case]["accepted_draft_tokens"]
    distribution = data.io["verify.target_probs"][:, accepted]
    if accepted < 5:
        distribution = residual_distribution(distribution, data.io["verify.draft_probs"][:, accepted])
    torch.testing.assert_close(distribution, data.io[f"{case}.next_token_probs"][:, 0], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["draft_vanilla", "draft_rnn", "draft_dflash"])
@torch.no_grad()
def test_verify_chains_matches_deepspec_for_greedy_decoding(golden, name):
    data = golden(name)
    expected, verify_ids = data.info["verify_greedy"], data.io["verify_greedy.verify_input_ids"]
    logits = data.target(torch.cat([data.io["prompt_ids"], verify_ids], dim=1)).logits[:, -6:]
    one_hot = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    block = DraftBlock(verify_ids[:, 1:], None, None)
    verified = verify(block, torch.tensor([5]), one_hot, torch.rand(1, 5))
    accepted = int(verified.num_accepted)
    assert accepted == expected["accepted_draft_tokens"]
    assert verified.next_token_ids.tolist() == [expected["next_token"]]
    assert [*verify_ids[0, 1 : 1 + accepted].tolist(), *verified.next_token_ids.tolist()] == expected["committed"]


# ---- distributions that are none


@pytest.mark.parametrize("scores", [[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3])
@pytest.mark.parametrize("candidate_ids", [None, torch.tensor([[5, 6, 7], [8, 9, 4]])])
def test_no_token_is_drawn_where_there_is_no_distribution(scores, candidate_ids):
    distribution = TokenDistribution(
        torch.tensor([scores, [-torch.inf, 0.0, -torch.inf]]).softmax(dim=-1), candidate_ids
    )
    assert draw_if_any(distribution, torch.tensor([0.7, 0.7])).tolist() == [-1, 1 if candidate_ids is None else 9]


# ---- samplers


def test_arg_max_chains_hold_token_ids_not_candidate_indices():
    logits = torch.tensor([[0.1, 2.0, 0.3], [5.0, 2.0, 0.3]])
    assert ChainSampler().draw(logits, None)[0].tolist() == [1, 0]
    candidates = torch.tensor([[7, 4, 9], [8, 1, 2]])
    token_ids, distribution = ChainSampler().draw(logits, candidates)
    assert token_ids.tolist() == [4, 8] and distribution is None


def scores_of(vocab_size, dtype):
    """Random scores, of which a token after the last group is the largest in the first row."""
    scores = torch.randn(2, 6, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[0, 0, -1] = 100.0
    return scores


each_size = pytest.mark.parametrize(
    "vocab_size", [7, distributions.LARGE_VOCABULARY, distributions.LARGE_VOCABULARY + 5]
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the latter has many equal scores


@each_size
@each_dtype
def test_largest_scores_are_those_of_topk(vocab_size, dtype):
    scores = scores_of(vocab_size, dtype)
    scores[1, 1, 4:] = -torch.inf  # fewer possible tokens than asked for
    values, ids = largest(scores, 6)
    assert torch.equal(values, scores.topk(6, dim=-1).values)
    assert torch.equal(scores.gather(-1, ids), values)
    assert all(len(set(row)) == 6 for row in ids.flatten(0, 1).tolist())


def test_largest_scores_are_searched_by_groups_where_that_is_less(monkeypatch):
    scores, searched, topk = torch.randn(1, distributions.LARGE_VOCABULARY), [], torch.Tensor.topk

    def recording(scores, *args, **options):
        searched.append(scores.shape[-1])
        return topk(scores, *args, **options)

    monkeypatch.setattr(torch.Tensor, "topk", recording)
    largest(scores, 4)
    largest(scores, scores.shape[-1] // 2)
    assert searched == [scores.shape[-1] // distributions.GROUP_SIZE, 4 * distributions.GROUP_SIZE, scores.shape[-1]]


@each_size
@each_dtype
def test_the_first_of_the_largest_scores_is_that_of_argmax(vocab_size, dtype):
    scores = scores_of(vocab_size, dtype)
    scores[0, 1, [3, 5, -1]] = 100.0  # equal ones of a group, and after the last
    scores[0, 2, vocab_size // 2 :: distributions.GROUP_SIZE] = 100.0  # of several groups
    scores[1, 0] = -torch.inf
    scores[1, 1] = 0.0
    scores[1, 2, -2] = torch.nan
    assert torch.equal(distributions.best_of(scores)[1], scores.argmax(dim=-1))


def test_scatter_to_vocabulary_forbids_every_other_token():
    full = scatter_to_vocabulary(torch.tensor([[1.0, 2.0]]), torch.tensor([[3, 0]]), 5)
    assert full.tolist() == [[2.0, -torch.inf, -torch.inf, 1.0, -torch.inf]]
