"""Trees of drafts keep the target's distribution: exact enumeration of whole rounds over tiny vocabularies.

Every sequence of draws and uniforms is walked through, in float64: total variations are exact up to rounding.
Rules that are known to be wrong are measured the same way, and must be caught.
"""

import itertools
import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hf_dspark.sampling import verification
from hf_dspark.sampling.distributions import TokenDistribution
from hf_dspark.sampling.drafts import DraftTree, SiblingDistribution, invert_without
from hf_dspark.sampling.verification import verify_tree, walk_tree
from tests.distributions import Paths, decide_trees, extend, joint_distribution, total_variation

EXACT = 1e-9


@dataclass
class World:
    """The distributions of one request after each prefix."""

    target: dict
    draft: dict

    @classmethod
    def random(cls, seed, vocab, depth, zeros=False, top_k=None):
        generator = np.random.default_rng(seed)

        def distribution(kept):
            probs = generator.dirichlet(np.full(vocab, 0.7))
            if zeros and generator.random() < 0.5:
                probs[generator.integers(vocab)] = 0.0
            if kept is not None:
                probs[np.argsort(probs)[: vocab - kept]] = 0.0
            return probs / probs.sum()

        prefixes = [prefix for size in range(depth + 1) for prefix in itertools.product(range(vocab), repeat=size)]
        return cls(
            {prefix: distribution(top_k) for prefix in prefixes}, {prefix: distribution(top_k) for prefix in prefixes}
        )


def draw_siblings(probs, uniform, taken=()):
    distribution = SiblingDistribution(probs)
    for index in taken:
        distribution.remove(index)
    return [drawn for number in uniform if (drawn := distribution.draw(number)) is not None]


def grow(world, tree, count, paths_known=(), depth=3):
    """Grow a tree level by level as `count(tree, place, prefix)` says. `paths_known` are tokens known beforehand, by
    prefix; they come first among their siblings."""
    known = dict(paths_known)
    level = [0]
    for _ in range(depth):
        following = []
        for place in level:
            prefix = tuple(tree.tokens(tree.path(place)))
            before = [known[prefix]] if prefix in known else []
            for token in before:
                following.append(tree.add(place, token))
            number = count(tree, place, prefix)
            drawn = draw_siblings(world.draft[prefix], [0.5] * number, before)
            if drawn:
                tree.distributions[place] = (TokenDistribution(torch.from_numpy(world.draft[prefix])[None]), 0)
            for token, mass in drawn:
                following.append(tree.add(place, token, mass=mass))
        level = following
    return tree


@pytest.fixture
def paths(monkeypatch):
    """Every decision of drawing and accepting in turn."""
    walker = Paths()
    decide_trees(monkeypatch, walker)
    return walker


def target_distribution(world, tree):
    places = [tuple(tree.tokens(tree.path(place))) for place in range(tree.num_nodes + 1)]
    return TokenDistribution(torch.from_numpy(np.stack([world.target[prefix] for prefix in places])))


def completed(world, distribution, length):
    return extend(world.target.__getitem__, distribution, length, len(world.target[()]))


def bias(paths, worlds, grow_all, depth, verify=verify_tree):
    """Return the total variation of the joint distribution of all rows' first tokens, from one round and the targets
    alone."""
    joint = {}
    for path in paths:
        drafted = grow_all()
        rows = []
        for world, tree in zip(worlds, drafted, strict=True):
            accepted, following = verify(tree, target_distribution(world, tree), [0.5] * tree.num_nodes)
            sequence = tuple(tree.tokens(accepted))
            probs = following.probs.tolist()
            rows.append(completed(world, {(*sequence, t): p for t, p in enumerate(probs) if p > 0}, depth + 1))
        for key, mass in joint_distribution(rows).items():
            joint[key] = joint.get(key, 0.0) + path.probability * mass
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-9)
    return total_variation(joint, joint_distribution([completed(world, {(): 1.0}, depth + 1) for world in worlds]))


def ragged(tree, place, prefix):
    """Two children after even sums, one after odd ones, none after two equal tokens."""
    return 0 if len(prefix) > 1 and prefix[-1] == prefix[-2] else 2 - sum(prefix) % 2


def by_earlier_branches(tree, place, prefix):
    """As many children as it takes to reach five nodes, so that branches compete by what was drawn before."""
    return max(0, min(2, 5 - tree.num_nodes - (tree.token_ids[:1] == [0])))


SHAPES = {
    "pairs": lambda tree, place, prefix: 2,
    "ragged": ragged,
    "by_earlier_branches": by_earlier_branches,
    "more_than_there_are": lambda tree, place, prefix: 3,
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"zeros": True}, {"top_k": 1}], ids=["full", "zeros", "one_token_distributions"]
)
def test_a_tree_over_two_tokens_keeps_the_targets_distribution(paths, shape, options):
    world = World.random(3, 2, 3, **options)
    assert bias(paths, [world], lambda: [grow(world, DraftTree(), shape, depth=2)], depth=2) < EXACT


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [SHAPES["pairs"], ragged], ids=["pairs", "ragged"])
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_tree_over_three_tokens_keeps_the_targets_distribution(paths, shape, top_k):
    world = World.random(5, 3, 3, top_k=top_k)
    few = lambda tree, place, prefix: min(shape(tree, place, prefix), 6 - tree.num_nodes)  # noqa: E731
    assert bias(paths, [world], lambda: [grow(world, DraftTree(), few, depth=2)], depth=2) < EXACT


def test_a_tree_three_levels_deep_keeps_the_targets_distribution(paths):
    world = World.random(7, 2, 4)
    few = lambda tree, place, prefix: min(ragged(tree, place, prefix), 6 - tree.num_nodes)  # noqa: E731
    assert bias(paths, [world], lambda: [grow(world, DraftTree(), few, depth=3)], depth=3) < EXACT


@pytest.mark.parametrize("known", [{(): 1}, {(): 1, (1,): 0, (0,): 1}], ids=["one", "a_path"])
@pytest.mark.parametrize("vocab", [2, 3])
def test_tokens_that_were_known_before_join_drawn_siblings(paths, known, vocab):
    world = World.random(11, vocab, 3, zeros=True)
    one = lambda tree, place, prefix: min(1, 4 - tree.num_nodes)  # noqa: E731
    assert bias(paths, [world], lambda: [grow(world, DraftTree(), one, known, depth=2)], depth=2) < EXACT


@pytest.mark.parametrize("vocab", [2, 3])
def test_a_known_token_between_drawn_siblings_keeps_the_targets_distribution(paths, vocab):
    world = World.random(19, vocab, 2)

    def mixed():
        tree, distribution = DraftTree(), SiblingDistribution(world.draft[()])
        tree.distributions[0] = TokenDistribution(torch.from_numpy(world.draft[()])[None]), 0
        first, mass = distribution.draw(0.5)
        tree.add(0, first, mass=mass)
        if first != 1:
            tree.add(0, 1)
            distribution.remove(1)
        last = distribution.draw(0.5)
        if last is not None:
            tree.add(0, last[0], mass=last[1])
        return [tree]

    assert bias(paths, [world], mixed, depth=1) < EXACT


def by_ratio_tests(tree, distribution, accept_uniforms):
    """Recursive rejection: each sibling by a test of its own, what follows it left aside."""
    place, path = 0, []
    while True:
        probs, tried, accepted = distribution.probs[place].numpy(), [], None
        for node in tree.children(place):
            token, mass = tree.token_ids[node - 1], tree.masses[node - 1]
            left = tree.distributions[place][0].probs[0].numpy().copy()
            left[tried] = 0.0
            left /= mass
            if verification.accepts(accept_uniforms[node - 1], min(1.0, probs[token] / left[token])):
                accepted = node
                break
            probs = np.maximum(probs - left, 0.0)
            probs = probs / probs.sum() if probs.sum() > 0 else distribution.probs[place].numpy()
            tried.append(token)
        if accepted is None:
            return path, TokenDistribution(torch.from_numpy(probs))
        place = accepted
        path.append(place)


def mean_length(paths, world, make, verify):
    total = 0.0
    for path in paths:
        tree = make(world)
        accepted, _ = verify(tree, target_distribution(world, tree), [0.5] * tree.num_nodes)
        total += len(accepted) * path.probability
    return total


@pytest.mark.parametrize("shape", [SHAPES["pairs"], ragged], ids=["pairs", "ragged"])
def test_trees_verified_as_a_whole_commit_more_than_by_ratio_tests(paths, shape):
    few = lambda tree, place, prefix: min(shape(tree, place, prefix), 5 - tree.num_nodes)  # noqa: E731
    gains = []
    for world in map(three_tokens, range(4)):
        make = lambda w: grow(w, DraftTree(), few, depth=2)  # noqa: E731
        whole, singly = (mean_length(paths, world, make, verify) for verify in (verify_tree, by_ratio_tests))
        gains.append(whole / singly)
    assert min(gains) > 1 - EXACT and max(gains) > 1.01


def test_a_chain_is_verified_as_a_block(paths):
    """With the same weights, and the same distribution after each prefix."""
    world = World.random(23, 3, 4)
    for _ in paths:
        tree = grow(world, DraftTree(), lambda *_: 1, depth=3)
        distribution = target_distribution(world, tree)
        accepted, following = verify_tree(tree, distribution, [0.5] * 3)
        weights = [1.0]
        for place, token in enumerate(tree.token_ids):
            prefix = tuple(tree.token_ids[:place])
            weights.append(min(1.0, weights[-1] * world.target[prefix][token] / world.draft[prefix][token]))
        prefix = tuple(tree.tokens(accepted))
        expected = world.target[prefix]
        if len(prefix) < 3:
            expected = np.maximum(weights[len(prefix)] * expected - world.draft[prefix], 0.0)
        np.testing.assert_allclose(following.probs, expected / expected.sum(), atol=1e-12)


def test_a_node_without_a_distribution_is_not_passed_over():
    tree = DraftTree()
    first = tree.add(0, 1)
    tree.add(first, 0)
    distribution = TokenDistribution(torch.tensor([[0.2, 0.8], [math.nan, math.nan], [0.5, 0.5]]))
    accepted, following = verify_tree(tree, distribution, [0.5, 0.5])
    assert accepted == [first] and following.probs.isnan().all()


def test_a_budget_that_depends_on_the_neighbour_keeps_the_joint_distribution(paths):
    worlds = [World.random(13, 2, 3), World.random(17, 2, 3)]

    def both():
        first = grow(worlds[0], DraftTree(), ragged, depth=1)
        left = 3 - first.num_nodes + first.token_ids[0]
        return [first, grow(worlds[1], DraftTree(), lambda tree, *_: min(2, max(0, left - tree.num_nodes)), depth=2)]

    assert bias(paths, worlds, both, depth=2) < EXACT


def largest_bias(paths, make, verify=verify_tree):
    """Return the largest bias over some worlds: a rule may be harmless in one."""
    return max(bias(paths, [world], lambda w=world: [make(w)], 2, verify) for world in map(three_tokens, range(3)))


def three_tokens(seed):
    return World.random(seed, 3, 3)


def test_enumeration_catches_a_choice_among_drawn_nodes_by_their_probability(paths):
    def make(world):
        drawn = grow(world, DraftTree(), SHAPES["pairs"], depth=1)
        best = max((1, 2), key=lambda place: world.draft[()][drawn.token_ids[place - 1]])
        kept = drawn.only([best])
        kept.distributions, kept.masses = drawn.distributions, [1.0]
        return kept

    assert largest_bias(paths, make) > 0.01


def test_enumeration_catches_a_node_dropped_after_its_draw(paths):
    def make(world):
        drawn = grow(world, DraftTree(), lambda tree, *_: 1, depth=1)
        if drawn.token_ids == [0]:
            return DraftTree()
        return drawn

    assert largest_bias(paths, make) > 0.01


def test_enumeration_catches_siblings_with_replacement_counted_as_without(paths):
    def make(world):
        tree = grow(world, DraftTree(), lambda tree, *_: 1, depth=1)
        again = draw_siblings(world.draft[()], [0.5])[0][0]
        left = 1.0 - world.draft[()][tree.token_ids[0]]
        tree.add(0, again, mass=left)
        return tree

    assert largest_bias(paths, make) > 0.01


def test_enumeration_catches_a_residual_of_the_wrong_order(paths):
    def backwards(tree, distribution, accept_uniforms):
        return verify_tree(replace(tree, token_ids=tree.token_ids[::-1]), distribution, accept_uniforms)

    def make(world):
        tree = grow(world, DraftTree(), SHAPES["pairs"], depth=1)
        return tree

    assert largest_bias(paths, make, backwards) > 0.01


def test_siblings_are_distinct_and_stop_where_the_distribution_runs_out():
    probs = np.array([0.5, 0.0, 0.25, 0.25])
    drawn = draw_siblings(probs, [0.1, 0.1, 0.1, 0.1])
    assert [index for index, _ in drawn] == [0, 2, 3]
    assert [mass for _, mass in drawn] == pytest.approx([1.0, 0.5, 0.25])
    assert draw_siblings(probs, [0.9], taken=[3])[0] == (2, 0.75)
    assert draw_siblings(np.full(3, np.nan), [0.5]) == []


def test_each_draw_has_the_distribution_that_the_ones_before_have_left():
    generator = random.Random(0)
    probs = np.array([0.1, 0.4, 0.2, 0.3])
    cumulative = probs.cumsum()
    for removed in [(), (1,), (0, 2), (3, 1)]:
        stretches = sorted((cumulative[i] - probs[i], probs[i]) for i in removed)
        mass = 1.0 - sum(probs[i] for i in removed)
        points = [(step + generator.random()) / 4000 * mass for step in range(4000)]
        found = np.bincount([invert_without(cumulative, stretches, point) for point in points], minlength=4) / 4000
        left = np.where(np.isin(np.arange(4), removed), 0.0, probs) / mass
        assert np.abs(found - left).max() < 1e-3


def test_the_greedy_walk_follows_the_targets_best_token_down_the_tree():
    tree = DraftTree()
    first, second = tree.add(0, 7), tree.add(0, 8)
    tree.add(first, 9)
    below = tree.add(second, 9)
    assert walk_tree(tree, [8, 1, 9, 1, 5]) == ([second, below], 5)
    assert walk_tree(tree, [6, 1, 1, 1, 1]) == ([], 6)


@pytest.mark.parametrize("on_candidates", ["target", "draft", "both"])
def test_distributions_on_candidates_are_verified_like_dense_ones(on_candidates):
    world, results = World.random(2, 3, 2), []
    tree = grow(world, DraftTree(), SHAPES["pairs"], depth=1)
    distribution = target_distribution(world, tree)
    order = torch.tensor([2, 0, 1])
    for candidates in (False, True):
        shown = distribution
        if candidates and on_candidates in ("target", "both"):
            shown = TokenDistribution(distribution.probs[:, order], order.expand(len(distribution.probs), -1))
        if candidates and on_candidates in ("draft", "both"):
            tree.distributions = {
                p: (TokenDistribution(each.probs[:, order], order[None]), row)
                for p, (each, row) in tree.distributions.items()
            }
        for accept_uniforms in ([0.99, 0.01], [0.99, 0.99]):
            accepted, following = verify_tree(tree, shown, accept_uniforms)
            results.append((tree.tokens(accepted), following.dense(3).probs))
    for dense, sparse in zip(results[:2], results[2:], strict=True):
        assert dense[0] == sparse[0]
        torch.testing.assert_close(dense[1], sparse[1])
