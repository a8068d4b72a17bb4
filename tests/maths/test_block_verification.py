"""Blocks verified as a whole: exact by enumeration with scheduled lengths, and never shorter in expectation."""

import itertools
import math

import pytest
import torch

from hf_dspark.maths.block_verification import prefix_chances, prefix_weights, verify_jointly
from hf_dspark.maths.sampling import DraftBlock, TokenLaw, draft_probabilities, residual_distribution, verify_block
from tests.maths.test_trees import World, completed

EXACT = 1e-9


def drafted(world, path):
    laws = [torch.from_numpy(world.draft[path[:slot]]) for slot in range(len(path))]
    return DraftBlock(torch.tensor([path]), TokenLaw(torch.stack(laws)[None]), None)


def law_of_round(world, gamma, length_of):
    """Return the law of the first tokens after one round, and the mean of the accepted ones."""
    vocab, law, accepted = len(world.target[()]), {}, 0.0
    for path in itertools.product(range(vocab), repeat=gamma):
        block = drafted(world, path)
        probability = math.prod(world.draft[path[:slot]][token] for slot, token in enumerate(path))
        if probability == 0.0:
            continue
        length = length_of(path)
        rows = [torch.from_numpy(world.target[path[:slot]]) for slot in range(length + 1)]
        target, first = TokenLaw(torch.stack(rows)), torch.zeros(1, dtype=torch.long)
        weights, left = prefix_weights(block, target, first), probability
        for count in range(length, -1, -1):
            chance = 1.0
            if count == length:
                chance = float(weights[0, count])
            elif count > 0:
                chance = float(prefix_chances(block, target, first, weights, count)[0])
            mass, left = left * chance, left * (1.0 - chance)
            if mass == 0.0:
                continue
            after = target[count]
            following = after.probs
            if count < length:
                draft = draft_probabilities(block, torch.tensor([count]), target[torch.tensor([count])])[0]
                following = residual_distribution(after.probs * weights[0, count], draft)
                following = following / following.sum()
            for token, prob in enumerate(following.tolist()):
                key = (*path[:count], token)
                law[key] = law.get(key, 0.0) + mass * prob
            accepted += mass * count
    return law, accepted


def bias(world, gamma, length_of):
    law, accepted = law_of_round(world, gamma, length_of)
    found, truth = completed(world, law, gamma + 1), completed(world, {(): 1.0}, gamma + 1)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return 0.5 * sum(abs(found.get(key, 0.0) - truth.get(key, 0.0)) for key in found.keys() | truth.keys()), accepted


def by_prefix(path):
    """Stops after a 1 that follows the first token: known before the next one is drawn."""
    return next((slot + 1 for slot, token in enumerate(path) if slot and token == 1), len(path))


RULES = {"whole": len, "fixed": lambda path: 1, "by_prefix": by_prefix}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("options", [{}, {"zeros": True}, {"top_k": 2}], ids=["full", "zeros", "truncated"])
def test_a_round_keeps_the_targets_law_with_scheduled_lengths(vocab, gamma, rule, options):
    for seed in range(3):
        assert bias(World.random(seed, vocab, gamma + 1, **options), gamma, rule)[0] < EXACT


def test_enumeration_catches_a_length_that_depends_on_the_token_it_cuts():
    rule = lambda path: 0 if path[0] == 1 else len(path)  # noqa: E731
    assert max(bias(World.random(seed, 3, 3), 2, rule)[0] for seed in range(3)) > 0.01


def token_by_token(world, gamma):
    """Return the expected number of accepted tokens if each is tested alone: the mean of the survivals."""
    paths = [path for size in range(1, gamma + 1) for path in itertools.product(range(3), repeat=size)]
    shares = {path: min(world.target[path[:-1]][path[-1]], world.draft[path[:-1]][path[-1]]) for path in paths}
    return sum(math.prod(shares[path[: k + 1]] for k in range(len(path))) for path in paths)


def test_no_block_is_shorter_in_expectation_than_token_by_token():
    gains = []
    for seed in range(20):
        world = World.random(seed, 3, 4)
        gains.append(bias(world, 3, len)[1] - token_by_token(world, 3))
    assert min(gains) > -EXACT and max(gains) > 0.02


@pytest.mark.parametrize("on_candidates", [False, True])
def test_the_batch_draws_what_the_formulas_say(on_candidates):
    """Ragged rows, many coins: frequencies of accepted lengths and of the next token."""
    world, path, lengths = World.random(4, 3, 4), (2, 0, 1), torch.tensor([3, 1, 2])
    block = drafted(world, path)
    block = DraftBlock(block.token_ids.repeat(3, 1), TokenLaw(block.law.probs.repeat(3, 1, 1)), None)
    rows = [torch.from_numpy(world.target[path[:slot]]) for length in lengths for slot in range(int(length) + 1)]
    target, first = TokenLaw(torch.stack(rows)), torch.tensor([0, 4, 6])
    if on_candidates:
        order = torch.tensor([2, 0, 1])
        target = TokenLaw(target.probs[:, order], order.expand(len(target.probs), -1))
    weights = prefix_weights(block, target, first)
    torch.manual_seed(0)
    counts = torch.zeros(3, 4)
    for _ in range(3000):
        found = verify_jointly(block, lengths, target, first, torch.rand(3, 3).double(), torch.rand(3).double())
        counts[torch.arange(3), found.num_accepted] += 1
    expected = torch.zeros(3, 4)
    for row, length in enumerate(lengths.tolist()):
        left = 1.0
        for count in range(length, -1, -1):
            chance = 1.0 if count == 0 else float(
                weights[row, count] if count == length else prefix_chances(block, target, first, weights, count)[row]
            )  # fmt: skip
            expected[row, count], left = left * chance, left * (1.0 - chance)
    assert (counts / 3000 - expected).abs().max() < 0.03


def test_one_token_is_tested_as_always():
    world = World.random(9, 3, 2)
    block, first = drafted(world, (1,)), torch.zeros(1, dtype=torch.long)
    target = TokenLaw(torch.stack([torch.from_numpy(world.target[()]), torch.from_numpy(world.target[(1,)])]))
    for coin in torch.linspace(0, 0.99, 23).double():
        noise = coin[None, None], torch.tensor([0.4]).double()
        ours = verify_jointly(block, torch.tensor([1]), target, first, *noise)
        theirs = verify_block(block, torch.tensor([1]), target, first, *noise)
        assert torch.equal(ours.num_accepted, theirs.num_accepted)
        assert torch.equal(ours.next_token_ids, theirs.next_token_ids)
