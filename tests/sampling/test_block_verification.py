"""Blocks verified as a whole: exact by enumeration with scheduled lengths, and never shorter in expectation."""

import itertools
import math
from dataclasses import fields, replace

import pytest
import torch

from hf_dspark.sampling import verification
from hf_dspark.sampling.distributions import Scores, TokenDistribution
from hf_dspark.sampling.drafts import DraftBlock
from hf_dspark.sampling.noise import BlockNoise
from hf_dspark.sampling.verification import prefix_weights, verify, verify_chains
from tests.distributions import outcomes, total_variation
from tests.sampling.test_trees import World, completed

EXACT = 1e-9


def drafted(world, path):
    distributions = [torch.from_numpy(world.draft[path[:slot]]) for slot in range(len(path))]
    return DraftBlock(torch.tensor([path]), TokenDistribution(torch.stack(distributions)[None]), None)


def targets(world, path, length):
    """Return the target's distributions, `[1, 1 + tokens, V]`; after the length they are none."""
    rows = [torch.from_numpy(world.target[path[:slot]]) for slot in range(length + 1)]
    rows += [torch.full_like(rows[0], torch.nan)] * (len(path) - length)
    return TokenDistribution(torch.stack(rows)[None])


def enumerate_round(world, gamma, length_of):
    """Return how far the distribution of a round is from the target's, and the mean of the accepted tokens."""
    distribution, accepted = {}, 0.0
    for path in itertools.product(range(len(world.target[()])), repeat=gamma):
        probability = math.prod(world.draft[path[:slot]][token] for slot, token in enumerate(path))
        if probability == 0.0:
            continue
        length = length_of(path)
        for count, chance, following in outcomes(drafted(world, path), length, targets(world, path, length)):
            for token, prob in enumerate(following):
                key = (*path[:count], token)
                distribution[key] = distribution.get(key, 0.0) + probability * chance * prob
            accepted += probability * chance * count
    found, truth = completed(world, distribution, gamma + 1), completed(world, {(): 1.0}, gamma + 1)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return total_variation(found, truth), accepted


def by_prefix(path):
    """Stops after a 1 that follows the first token: known before the next one is drawn."""
    return next((slot + 1 for slot, token in enumerate(path) if slot and token == 1), len(path))


RULES = {"whole": len, "one": lambda path: 1, "none": lambda path: 0, "by_prefix": by_prefix}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("options", [{}, {"zeros": True}, {"top_k": 2}], ids=["full", "zeros", "truncated"])
def test_a_round_keeps_the_targets_distribution_with_scheduled_lengths(vocab, gamma, rule, options):
    for seed in range(3):
        assert enumerate_round(World.random(seed, vocab, gamma + 1, **options), gamma, rule)[0] < EXACT


def test_enumeration_catches_a_length_that_depends_on_the_token_it_cuts():
    worlds = [World.random(seed, 3, 3) for seed in range(3)]
    assert max(enumerate_round(world, 2, lambda path: 2 * (path[0] != 1))[0] for world in worlds) > 0.01


def test_enumeration_catches_a_wrong_residual(monkeypatch):
    monkeypatch.setattr(verification, "excess_over", lambda drafted, target, weights: torch.ones_like(target.probs))
    assert enumerate_round(World.random(0, 3, 3), 2, len)[0] > 0.01


def token_by_token(world, gamma):
    """Return the expected number of accepted tokens if each is tested alone: the sum of the survivals."""
    paths = [path for size in range(1, gamma + 1) for path in itertools.product(range(3), repeat=size)]
    shares = {path: min(world.target[path[:-1]][path[-1]], world.draft[path[:-1]][path[-1]]) for path in paths}
    return sum(math.prod(shares[path[: slot + 1]] for slot in range(len(path))) for path in paths)


def test_no_block_is_shorter_in_expectation_than_token_by_token():
    worlds = [World.random(seed, 3, 4) for seed in range(20)]
    gains = [enumerate_round(world, 3, len)[1] - token_by_token(world, 3) for world in worlds]
    assert min(gains) > -EXACT and max(gains) > 0.02


def test_the_first_k_tokens_are_accepted_as_often_however_many_are_sent():
    world, path = World.random(4, 3, 4), (2, 0, 1)
    weights = prefix_weights(drafted(world, path), targets(world, path, 3))[0]
    mean = dict.fromkeys((1, 2, 3), 0.0)
    for length in mean:
        for rest in itertools.product(range(3), repeat=length - 1):
            whole = (2, *rest)
            share = math.prod(world.draft[whole[:slot]][whole[slot]] for slot in range(1, length))
            padded = drafted(world, (*whole, *path[length:]))
            found = outcomes(padded, length, targets(world, (*whole, *path[length:]), length))
            mean[length] += share * sum(chance for count, chance, _ in found if count >= 1)
    assert all(value == pytest.approx(float(weights[1]), abs=EXACT) for value in mean.values())


def test_prefix_weights_are_those_of_one_token_after_another():
    torch.manual_seed(0)
    ratios = (torch.randn(400, 7) * 6).exp()
    ratios[torch.rand(400, 7) < 0.1] = 0.0  # impossible for the target
    ratios[:3, 4] = torch.nan  # no distribution: neither is what follows
    drawn, accepted = torch.zeros(400, 7, 1, dtype=torch.long), ratios[..., None].clone()
    weights = prefix_weights(DraftBlock(drawn[..., 0]), TokenDistribution(accepted))
    one_by_one = [torch.ones(400, dtype=torch.float64)]
    for ratio in ratios.double().unbind(dim=1):
        one_by_one.append((one_by_one[-1] * ratio).clamp_max(1.0))
    expected = torch.stack(one_by_one, dim=1)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("on_candidates", ["neither", "target", "both"])
def test_rows_of_a_batch_are_verified_as_alone(on_candidates):
    worlds, path, lengths = [World.random(seed, 3, 4) for seed in range(3)], (2, 0, 1), torch.tensor([3, 1, 2])
    alone = [drafted(world, path) for world in worlds]
    pairs = zip(worlds, lengths.tolist(), strict=True)
    target = TokenDistribution(torch.cat([targets(world, path, length).probs for world, length in pairs]))
    draft, order = TokenDistribution(torch.cat([block.distribution.probs for block in alone])), torch.tensor([2, 0, 1])
    if on_candidates != "neither":
        target = TokenDistribution(target.probs[..., order], order.expand(3, 4, -1))
    if on_candidates == "both":
        draft = TokenDistribution(draft.probs[..., order], order.expand(3, 3, -1))
    uniforms = torch.rand(40, 3, 3).double(), torch.rand(40, 3).double()
    for accept, following in zip(*uniforms, strict=True):
        found = [
            verify_chains(
                DraftBlock(torch.tensor([path] * 3)[rows], draft[rows]), lengths[rows], target[rows], accept[rows],
                following[rows],
            )
            for rows in (slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3))
        ]  # fmt: skip
        together, *each = [torch.stack([one.num_accepted, one.next_token_ids], dim=1) for one in found]
        assert torch.equal(together, torch.cat(each)) and (together[:, 0] <= lengths).all()


def test_arg_max_drafts_are_drafts_with_a_one_hot_distribution():
    world, path = World.random(3, 3, 4), (2, 0, 1)
    one_hot = TokenDistribution(torch.nn.functional.one_hot(torch.tensor([path]), 3).double())
    found = [
        list(outcomes(DraftBlock(torch.tensor([path]), distribution, None), 3, targets(world, path, 3)))
        for distribution in (None, one_hot)
    ]
    assert found[0] == found[1]


NONE = [torch.nan, torch.nan]


@pytest.mark.parametrize(
    ("after", "accepted", "following"),
    [
        ([[0.6, 0.4], NONE, [0.5, 0.5]], 1, -1),  # after an accepted prefix nothing is drawn
        ([[0.0, 1.0], NONE, NONE], 0, 1),  # after an impossible draft it does no harm
    ],
)
def test_no_token_is_drawn_where_the_target_has_no_distribution(after, accepted, following):
    block = DraftBlock(torch.tensor([[0, 1]]), TokenDistribution(torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])), None)
    target, uniforms = TokenDistribution(torch.tensor([after])), (torch.zeros(1, 2), torch.tensor([0.3]))
    found = verify_chains(block, torch.tensor([2]), target, *uniforms)
    assert found.num_accepted.tolist() == [accepted] and found.next_token_ids.tolist() == [following]


def test_rows_are_verified_as_alone_when_the_end_of_one_makes_their_number_fit_a_narrower_block():
    generator, ends = torch.Generator().manual_seed(0), frozenset({4})
    for _ in range(20):
        noise = BlockNoise(*torch.rand(2, 2, 3, generator=generator), torch.rand(2, generator=generator))
        scores, logits = Scores(torch.randn(6, 5, generator=generator)), torch.zeros(6)
        distribution = TokenDistribution(torch.rand(2, 3, 5, generator=generator).softmax(dim=-1))
        block = DraftBlock(torch.tensor([[1, 4, 0], [1, 0, 0]]), distribution, ends=ends)
        together = verify(replace(block, lengths=torch.tensor([3, 1])), scores, [0, 4], noise, logits)
        for row, (first, sent, cut) in enumerate([(0, 4, 2), (4, 2, 1)]):
            one = [row]
            alone = replace(
                block, token_ids=block.token_ids[one], distribution=distribution[one], lengths=torch.tensor([cut])
            )
            own = BlockNoise(*(getattr(noise, part.name)[one] for part in fields(noise)))
            found = verify(alone, scores[first : first + sent], [0], own, logits[:sent])
            assert found.num_accepted.item() == together.num_accepted[row]
            assert found.next_token_ids.item() == together.next_token_ids[row]
