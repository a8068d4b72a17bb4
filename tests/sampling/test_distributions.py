"""Verification of drafts: parity with DeepSpec, and the target's own distribution in, the target's own distribution
out."""

import pytest
import torch

from hf_dspark.sampling import distributions
from hf_dspark.sampling.distributions import (
    TokenDistribution,
    draw,
    largest,
    residual_distribution,
    scatter_to_vocabulary,
)
from hf_dspark.sampling.drafts import ChainSampler, DraftBlock
from hf_dspark.sampling.verification import verify_chains


@pytest.fixture
def drawn_distributions(monkeypatch):
    """The distributions that tokens were drawn from, in order."""
    drawn, invert = [], distributions.invert

    def recording(distribution, uniform):
        drawn.append(distribution)
        return invert(distribution, uniform)

    monkeypatch.setattr(distributions, "invert", recording)
    return drawn


def verify(block, lengths, target_probs, accept_uniforms, uniform=None):
    """Verify blocks whose target distributions `[B, γ+1, V]` follow one another, as after a packed pass."""
    width = target_probs.shape[1]
    return verify_chains(
        block, lengths, TokenDistribution(target_probs.flatten(0, 1)), torch.arange(len(lengths)) * width,
        accept_uniforms, torch.rand(len(lengths)) if uniform is None else uniform,
    )  # fmt: skip


def distributions_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).mul(1.5).softmax(dim=-1)


def frequencies(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return token_ids.bincount(minlength=vocab_size) / len(token_ids)


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


# ---- verification of ragged, cut and arg-max blocks


def test_verify_chains_draws_from_the_targets_distribution_after_a_shortened_block(drawn_distributions):
    target_probs = distributions_of(1, 4, 5)
    block = DraftBlock(torch.ones(1, 3, dtype=torch.long), TokenDistribution(distributions_of(1, 3, 5)), None)
    for length, uniform in ((0, 0.0), (0, 0.9999), (2, 0.0)):
        verified = verify(block, torch.tensor([length]), target_probs, torch.full((1, 3), uniform))
        assert verified.num_accepted.tolist() == [length]
        assert torch.equal(drawn_distributions[-1], target_probs[:, length])


def test_verify_chains_does_not_read_rows_after_the_length():
    target_probs = distributions_of(1, 4, 5)
    block = DraftBlock(torch.ones(1, 3, dtype=torch.long), TokenDistribution(distributions_of(1, 3, 5)), None)
    accept_uniforms = torch.tensor([[0.0, 0.9999, 0.0]])
    changed = target_probs.clone()
    changed[:, 3] = torch.nan
    results = [
        verify(block, torch.tensor([2]), distribution, accept_uniforms, torch.tensor([0.3]))
        for distribution in (target_probs, changed)
    ]
    assert results[0].num_accepted.tolist() == results[1].num_accepted.tolist()
    assert results[0].next_token_ids.tolist() == results[1].next_token_ids.tolist()


def test_verify_chains_treats_rows_independently_and_is_decided_by_its_noise():
    target_probs, draft_probs = distributions_of(64, 4, 9), distributions_of(64, 3, 9)
    token_ids, accept_uniforms, noise = torch.randint(0, 9, (64, 3)), torch.rand(64, 3), torch.rand(2, 64)
    lengths = torch.tensor([0, 1, 2, 3] * 16)

    def verified(rows, uniform):
        block = DraftBlock(token_ids[rows], TokenDistribution(draft_probs[rows]), None)
        found = verify(block, lengths[rows], target_probs[rows], accept_uniforms[rows], uniform[rows])
        return torch.stack([found.num_accepted, found.next_token_ids], dim=1)

    together = verified(slice(None), noise[0])
    assert torch.equal(together, torch.cat([verified(slice(row, row + 1), noise[0]) for row in range(64)]))
    assert not torch.equal(together, verified(slice(None), noise[1]))


def test_verify_chains_accepts_arg_max_drafts_with_the_targets_probability():
    torch.manual_seed(11)
    target_probs = torch.tensor([[[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]]]).expand(40_000, -1, -1)
    block = DraftBlock(torch.ones(40_000, 1, dtype=torch.long), None, None)
    verified = verify(block, torch.ones(40_000, dtype=torch.long), target_probs, torch.rand(40_000, 1))
    accepted = verified.num_accepted == 1
    # Four standard deviations of a frequency over 40000 draws are at most 0.01.
    assert accepted.float().mean().item() == pytest.approx(0.2, abs=0.01)
    rejected_distribution = frequencies(verified.next_token_ids[~accepted], 3)
    torch.testing.assert_close(rejected_distribution, torch.tensor([0.875, 0.0, 0.125]), atol=0.011, rtol=0)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_verify_chains_recovers_the_targets_distribution(length):
    torch.manual_seed(5)
    count, vocab_size = 100_000, 4
    target_probs, draft_probs = distributions_of(1, 3, vocab_size), distributions_of(1, 2, vocab_size)
    token_ids = torch.stack(
        [torch.multinomial(draft_probs[0, slot], count, replacement=True) for slot in range(2)], dim=1
    )
    block = DraftBlock(token_ids, TokenDistribution(draft_probs.expand(count, -1, -1)), None)
    verified = verify(block, torch.full((count,), length), target_probs.expand(count, -1, -1), torch.rand(count, 2))
    first = torch.where(verified.num_accepted > 0, token_ids[:, 0], verified.next_token_ids)
    # Four standard deviations over 100000 draws are at most 0.0064.
    torch.testing.assert_close(frequencies(first, vocab_size), target_probs[0, 0], atol=0.0065, rtol=0)
    one = verified.num_accepted == 1
    if length == 2:
        overlap = torch.minimum(target_probs[0, 0], draft_probs[0, 0]).sum()
        assert (verified.num_accepted > 0).float().mean().item() == pytest.approx(overlap.item(), abs=0.0065)
        reached = verified.num_accepted > 0
        second = torch.where(verified.num_accepted > 1, token_ids[:, 1], verified.next_token_ids)[reached]
        torch.testing.assert_close(frequencies(second, vocab_size), target_probs[0, 1], atol=0.01, rtol=0)
    elif length == 1:
        bonus = frequencies(verified.next_token_ids[one], vocab_size)
        torch.testing.assert_close(bonus, target_probs[0, 1], atol=0.01, rtol=0)
    else:
        assert not one.any()


# ---- distributions that are none


@pytest.mark.parametrize("scores", [[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3])
@pytest.mark.parametrize("candidate_ids", [None, torch.tensor([[5, 6, 7], [8, 9, 4]])])
def test_no_token_is_drawn_where_there_is_no_distribution(scores, candidate_ids):
    distribution = TokenDistribution(
        torch.tensor([scores, [-torch.inf, 0.0, -torch.inf]]).softmax(dim=-1), candidate_ids
    )
    assert draw(distribution, torch.tensor([0.7, 0.7])).tolist() == [-1, 1 if candidate_ids is None else 9]


def test_verify_chains_rejects_and_draws_nothing_where_the_target_has_no_distribution():
    target_probs = distributions_of(2, 3, 5)
    target_probs[:, 1] = torch.nan
    block = DraftBlock(torch.ones(2, 2, dtype=torch.long), TokenDistribution(target_probs[:, :2]), None)
    verified = verify(block, torch.tensor([2, 0]), target_probs, torch.zeros(2, 2))
    assert verified.num_accepted.tolist() == [1, 0]
    assert verified.next_token_ids[0] == -1 and verified.next_token_ids[1] >= 0


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
    assert torch.equal(distributions.arg_max(scores), scores.argmax(dim=-1))


def test_scatter_to_vocabulary_forbids_every_other_token():
    full = scatter_to_vocabulary(torch.tensor([[1.0, 2.0]]), torch.tensor([[3, 0]]), 5)
    assert full.tolist() == [[2.0, -torch.inf, -torch.inf, 1.0, -torch.inf]]
