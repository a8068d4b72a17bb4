"""Scheduling never changes the distribution: exact enumeration of whole rounds over a two-token vocabulary.

A `World` holds, for every prefix of a request's block, the target's distribution, the draft's distribution and the
confidence of the next slot. All joint draft paths of all requests are enumerated, with every uniform; so the total
variations are exact, and zero means zero up to float64 rounding. Rules known to be lossy are measured the same way.
"""

import copy
import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.policy_baselines import EarlyStopScheduler, EliminationScheduler, GlobalScheduler
from hf_dspark.scheduling import scheduler
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.learning import Experience, LearnedCosts
from hf_dspark.scheduling.policies import ConfidenceThreshold, FullBlock, Policy
from hf_dspark.scheduling.ranking import Ranking, survival
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.scheduler import Scheduler
from tests.distributions import joint_distribution, total_variation
from tests.scheduling.test_policies import chains

EXACT = 1e-9

APPENDIX_A = ThroughputTable((1, 2, 3), (1.0, 0.5, 0.45))


def jagged_curve(seed, length=14):
    """Random step times with cliffs and drops."""
    generator = random.Random(seed)
    return ThroughputTable(
        tuple(range(1, length + 1)),
        tuple(1 / (1 + 0.12 * b + generator.choice((0, 0.1, 0.3, 0.5, 0.8))) for b in range(length)),
    )


@dataclass
class World:
    """Distributions of one request; token 1 has the probability given, token 0 the rest."""

    target: dict[tuple[int, ...], float]
    draft: dict[tuple[int, ...], float]
    confidence: dict[tuple[int, ...], float]

    @classmethod
    def random(cls, seed, length, token_free=False):
        """Confidences from a coarse grid, so that ties, zeros and certainties occur; not calibrated on purpose."""
        generator, grid = random.Random(seed), (0.0, 0.3, 0.6, 0.9, 1.0)
        prefixes = [prefix for size in range(length + 1) for prefix in itertools.product((0, 1), repeat=size)]
        by_depth = [generator.choice(grid) for _ in range(length + 1)]
        target, draft = ({prefix: generator.uniform(0.05, 0.95) for prefix in prefixes} for _ in range(2))
        by_prefix = {prefix: generator.choice(grid) for prefix in prefixes}
        return cls(target, draft, {prefix: by_depth[len(prefix)] for prefix in prefixes} if token_free else by_prefix)

    def confidences(self, committed, path):
        """c_1..c_γ of a block drafted after `committed`: c_k reads the tokens before slot k."""
        return [self.confidence[committed + path[:slot]] for slot in range(len(path))]


def distribution(probability, token):
    return probability if token else 1.0 - probability


def path_probability(world, committed, path):
    return math.prod(distribution(world.draft[committed + path[:slot]], token) for slot, token in enumerate(path))


def verified(world, committed, path, length):
    """Yield (new tokens, number accepted, probability) of verifying the first `length` tokens of a path."""
    reached = 1.0
    for slot in range(length + 1):
        prefix = committed + path[:slot]
        target = [distribution(world.target[prefix], token) for token in (0, 1)]
        if slot == length:
            stop, following = 1.0, target
        else:
            draft = [distribution(world.draft[prefix], token) for token in (0, 1)]
            stop = 1.0 - min(1.0, target[path[slot]] / draft[path[slot]])
            residual = [max(t - d, 0.0) for t, d in zip(target, draft, strict=True)]
            following = [value / sum(residual) for value in residual] if sum(residual) > 0 else target
        for token in (0, 1):
            if stop * following[token] > 0:
                yield path[:slot] + (token,), slot, reached * stop * following[token]
        reached *= 1.0 - stop


def completed(world, sequences, length):
    """Continue sequences by the target's own distribution."""
    complete = defaultdict(float)
    for sequence, probability in sequences.items():
        for tail in itertools.product((0, 1), repeat=max(0, length - len(sequence))):
            masses = (distribution(world.target[sequence + tail[:index]], token) for index, token in enumerate(tail))
            complete[(sequence + tail)[:length]] += probability * math.prod(masses)
    return complete


def bias_of_one_round(policy, worlds, gamma, max_lengths=None, draws=None, other_tokens=0):
    """Return the total variation of the joint distribution of all requests' first γ+1 tokens."""
    limits = torch.tensor(max_lengths or [gamma] * len(worlds))
    load = Load(range(len(worlds)), other_tokens=other_tokens)
    joint = defaultdict(float)
    for paths, probability in (draws or independent_draws)(worlds, gamma):
        confidence = torch.tensor([world.confidences((), path) for world, path in zip(worlds, paths, strict=True)])
        outputs = []
        for world, path, length in zip(
            worlds, paths, policy.plan_verify(confidence, limits, load).tolist(), strict=True
        ):
            distribution_of_row = defaultdict(float)
            for sequence, _, mass in verified(world, (), path, length):
                distribution_of_row[sequence] += mass
            outputs.append(completed(world, distribution_of_row, gamma + 1))
        for keys, mass in joint_distribution(outputs).items():
            joint[keys] += probability * mass
    return total_variation(joint, joint_distribution([completed(world, {(): 1.0}, gamma + 1) for world in worlds]))


def independent_draws(worlds, gamma):
    paths = list(itertools.product((0, 1), repeat=gamma))
    rows = [{path: path_probability(world, (), path) for path in paths} for world in worlds]
    yield from joint_distribution(rows).items()


def shared_noise_draws(worlds, gamma):
    """All requests draw slot k with the same uniform number: the mistake that a shared noise key makes."""

    def extend(paths, probability):
        if len(paths[0]) == gamma:
            yield paths, probability
            return
        ones = [world.draft[path] for world, path in zip(worlds, paths, strict=True)]
        edges = sorted({0.0, 1.0, *ones})
        for low, high in itertools.pairwise(edges):
            tokens = [int(high <= one) for one in ones]
            longer = tuple(path + (token,) for path, token in zip(paths, tokens, strict=True))
            yield from extend(longer, probability * (high - low))

    yield from extend(tuple(() for _ in worlds), 1.0)


def bias_of_two_rounds(policy, world, gamma, earlier=(), peeks=False):
    """Return the total variation after two rounds of one request, the policy remembering the first and `earlier` ones.
    Rounds take longer the more is accepted. `peeks` lets it learn from what is drawn in a round before it plans it:
    a negative control."""
    output, load = defaultdict(float), Load()

    def play(committed, probability, history, rounds_left):
        if rounds_left == 0:
            output[committed] += probability
            return
        current = copy.deepcopy(policy).fresh()
        for past in history:
            current.plan_draft(load)
            current.observe(past)
        if not current.plan_draft(load):
            past = RoundOutcome((0,), None, torch.tensor([0]), torch.tensor([0]), 1.0, drafted=False)
            for token in (0, 1):
                mass = distribution(world.target[committed], token)
                play(committed + (token,), probability * mass, [*history, past], rounds_left - 1)
            return
        for path in itertools.product((0, 1), repeat=gamma):
            confidence = torch.tensor([world.confidences(committed, path)])
            plans, whole = copy.deepcopy(current) if peeks else current, torch.tensor([gamma])
            if peeks:
                plans.observe(RoundOutcome((0,), confidence, whole, torch.tensor([gamma * path[0]]), 1.0))
            planned = plans.plan_verify(confidence, whole, load)
            drawn = probability * path_probability(world, committed, path)
            for new, accepted, mass in verified(world, committed, path, int(planned[0])):
                count = torch.tensor([accepted])
                past = RoundOutcome((0,), confidence, planned, count, 1.0 + 2 * accepted, draft_seconds=0.3)
                play(committed + new, drawn * mass, [*history, past], rounds_left - 1)

    play((), 1.0, list(earlier), 2)
    return total_variation(
        *(completed(world, distribution_of, 2 * gamma + 2) for distribution_of in (output, {(): 1.0}))
    )


def limited(cost, seconds, **how):
    """The same where a round may take so long, as one that committed two tokens has shown."""
    policy = chains(cost, tpot_seconds=seconds / 2, **how)
    two = torch.tensor([2])
    policy.observe(RoundOutcome((0,), torch.full((1, 2), 0.5), two, two - 1, 1.0))
    return policy


CAUSAL = {
    "full_block": lambda cost: FullBlock(),
    "threshold": lambda cost: ConfidenceThreshold(0.5),
    "cumulative_threshold": lambda cost: ConfidenceThreshold(0.4, cumulative=True),
    "algorithm_one": EarlyStopScheduler,
    "hull_and_fill": chains,
    "limit": lambda cost: limited(cost, 1.8),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("gamma", [2, 3])
@pytest.mark.parametrize("make_policy", CAUSAL.values(), ids=CAUSAL)
def test_one_request_keeps_the_target_distribution(make_policy, gamma):
    for seed in range(60):
        policy = make_policy(jagged_curve(seed))
        assert policy.is_causal(confidence_reads_tokens=True)
        assert bias_of_one_round(policy, [World.random(seed, gamma + 1)], gamma) < EXACT


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("gamma", "limits"), [(2, [2, 2]), (2, [1, 2]), (3, [3, 3]), (3, [3, 1])])
@pytest.mark.parametrize("make_policy", CAUSAL.values(), ids=CAUSAL)
def test_two_requests_keep_their_joint_distribution(make_policy, gamma, limits):
    for seed in range(12 if gamma == 2 else 4):
        worlds = [World.random(2 * seed, gamma + 1), World.random(2 * seed + 1, gamma + 1)]
        assert bias_of_one_round(make_policy(jagged_curve(seed)), worlds, gamma, limits) < EXACT


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("requests", "gamma"), [(1, 2), (1, 3), (2, 2), (2, 3)])
def test_lagged_budget_keeps_the_joint_distribution(requests, gamma):
    for seed in range(4):
        for policy in (chains(jagged_curve(seed), lag=2), limited(jagged_curve(seed), 3.6, lag=2)):
            for age in range(2):
                older = torch.rand(requests, gamma, generator=torch.Generator().manual_seed(seed + age))
                none = torch.zeros(requests, dtype=torch.long)
                policy.observe(RoundOutcome(range(requests), older, none, none, 1.0))
            worlds = [World.random(seed + 10 * row, gamma + 1) for row in range(requests)]
            assert bias_of_one_round(policy, worlds, gamma) < EXACT


def test_a_cap_is_not_shared_out_by_what_would_be_chosen_in_all():
    """A's x_2 must not be verified because its c_3 is low and leaves room for it."""
    first, second = World.random(0, 4), World.random(1, 4)
    first.confidence |= {prefix: 0.6 for prefix in first.confidence if len(prefix) < 2}
    first.confidence |= {prefix: 0.9 if prefix[1] else 0.1 for prefix in first.confidence if len(prefix) == 2}
    second.confidence |= {prefix: 0.45 if prefix else 1.0 for prefix in second.confidence}
    cost = ThroughputTable((1, 5, 6), (1.0, 1.0, 0.1))
    assert bias_of_one_round(limited(cost, 2.0), [first, second], 3) < EXACT


@pytest.mark.one_in(4)
@pytest.mark.parametrize("other_tokens", [0, 5, 100, 252, 253, 254, 255, 256, 5000])
def test_the_hull_does_not_depend_on_what_can_survive(other_tokens):
    """Also where the window reaches beyond the table's last probe."""
    world = World.random(0, 4)
    world.confidence |= dict.fromkeys(world.confidence, 0.9)
    world.confidence |= {prefix: 0.9 if prefix[1] else 0.0 for prefix in world.confidence if len(prefix) == 2}
    for table in (
        ThroughputTable((1, 254, 255, 4000), (1.0, 1.0, 1 / 1.1, 1 / 1.1)),
        ThroughputTable((1, 253, 254), (1.0, 1.0, 1 / 1.1)),
        jagged_curve(3),
    ):
        assert bias_of_one_round(chains(table), [world], 3, other_tokens=other_tokens) < EXACT


def test_filling_the_bucket_keeps_the_distribution_where_it_hangs_on_the_first_token_left_out():
    """Stop after x_1; the bucket is filled because a_2 = .1 makes it pay, whatever x_2 reveals about a_3."""
    world = World.random(0, 4)
    world.confidence |= {prefix: 1 / 6 for prefix in world.confidence if len(prefix) == 1} | {(): 0.6}
    world.confidence |= {prefix: 1.0 if prefix[1] else 0.01 for prefix in world.confidence if len(prefix) == 2}
    bucket = ThroughputTable((1, 2, 3, 4, 5), tuple(1 / seconds for seconds in (1.0, 1.5, 1.62, 1.62, 3.0)))
    for path in ((1, 1, 1), (0, 0, 0)):
        confidence = torch.tensor([world.confidences((), path)])
        assert chains(bucket).plan_verify(confidence, torch.tensor([3]), Load()).tolist() == [3]
        assert EarlyStopScheduler(bucket).plan_verify(confidence, torch.tensor([3]), Load()).tolist() == [1]
    assert bias_of_one_round(chains(bucket), [world], 3) < EXACT


@pytest.mark.parametrize("search", [GlobalScheduler, EliminationScheduler])
def test_global_search_is_exact_for_heads_that_read_no_token(search):
    for seed in range(6):
        worlds = [World.random(seed, 3, token_free=True), World.random(seed + 50, 3, token_free=True)]
        assert bias_of_one_round(search(jagged_curve(seed)), worlds, 2) < EXACT


REMEMBERING = {
    "lagged": lambda cost: chains(cost, lag=1),
    "skipping": lambda cost: Scheduler(replace(cost, drafting=0.3), trees=False),
    "limited": lambda cost: chains(cost, tpot_seconds=0.9),
}


pytestmark = pytest.mark.learns  # by no clock: rounds say what they took


def learning(cost, **how):
    """Hull and fill, by costs and acceptances that earlier rounds have shown."""
    return Scheduler(Experience(LearnedCosts(replace(cost, drafting=0.3), 2)), trees=False, **how)


# Without a round before, the first one is not learnt from: the draft reads its prompt.
EARLIER = [RoundOutcome((0,), torch.full((1, 2), 0.5), torch.tensor([1]), torch.tensor([0]), 1.0, draft_seconds=0.3)]


def test_learning_from_earlier_rounds_keeps_the_distribution(no_benefit_of_the_doubt):
    for seed in range(8):
        world = World.random(seed, 6)
        for how in ({}, {"skip": False}):
            assert bias_of_two_rounds(learning(jagged_curve(seed), **how), world, 2, EARLIER) < EXACT


def test_learning_from_the_present_round_is_caught(no_benefit_of_the_doubt):
    biases = [
        bias_of_two_rounds(learning(jagged_curve(seed), skip=False), World.random(seed, 6), 2, EARLIER, peeks=True)
        for seed in range(8)
    ]
    assert max(biases) > 0.01


def test_what_was_learnt_really_changes_the_second_round_in_those_enumerations(no_benefit_of_the_doubt):
    plans = set()
    for seed, accepted in itertools.product(range(8), range(3)):
        policy = learning(jagged_curve(seed), skip=False)
        for outcome in (*EARLIER, replace(EARLIER[0], lengths=torch.tensor([2]), num_accepted=torch.tensor([accepted]),
                                          seconds=1.0 + 2 * accepted)):  # fmt: skip
            policy.plan_draft(Load())
            policy.observe(outcome)
        plans.add((seed, int(policy.plan_verify(torch.tensor([[0.35, 0.5]]), torch.tensor([2]), Load())[0])))
    assert len(plans) > 8


@pytest.fixture
def no_benefit_of_the_doubt(monkeypatch):
    """Let one round decide: two rounds are enumerated, and a prior would make all second ones alike."""
    monkeypatch.setattr(scheduler, "PRIOR_ROUNDS", 0)


@pytest.mark.filterwarnings("ignore:the limit of")
@pytest.mark.parametrize("make_policy", REMEMBERING.values(), ids=REMEMBERING)
def test_policies_with_memory_keep_the_distribution_over_two_rounds(make_policy, no_benefit_of_the_doubt):
    for seed in range(6):
        policy = make_policy(jagged_curve(seed))
        assert policy.is_causal(confidence_reads_tokens=True)
        assert bias_of_two_rounds(policy, World.random(seed, 6), 2) < EXACT


def test_memory_really_changes_the_second_round_in_those_enumerations(no_benefit_of_the_doubt):
    """Else the test above would pass without testing anything."""
    plans = set()
    for remembered in (0.0, 1.0):
        for name in REMEMBERING:
            policy = REMEMBERING[name](jagged_curve(1))
            confidence = torch.full((1, 2), remembered)
            policy.observe(RoundOutcome((0,), confidence, torch.tensor([2]), torch.tensor([2 * remembered]), 1.0))
            drafted = policy.plan_draft(Load())
            lengths = policy.plan_verify(torch.tensor([[0.9, 0.9]]), torch.tensor([2]), Load())
            plans.add((name, drafted and int(lengths[0])))
    assert len(plans) == 6


# ---- rules that are known to be lossy: the measurement must see it


def appendix_a_world(acceptance=0.8, certain_after=1):
    """DSpark Appendix A: p_t = (.7, .3), p_d = (.5, .5); c_2 is .9 after the first token and 0 after the other."""
    world = World.random(0, 3)
    world.target[()], world.draft[()] = 0.7, 0.5
    world.confidence[()] = acceptance
    world.confidence[(certain_after,)], world.confidence[(1 - certain_after,)] = 0.9, 0.0
    return world


def first_token_distribution(policy, world, gamma):
    mass = 0.0
    for paths, probability in independent_draws([world], gamma):
        confidence = torch.tensor([world.confidences((), paths[0])])
        length = int(policy.plan_verify(confidence, torch.tensor([gamma]), Load())[0])
        mass += sum(p for new, _, p in verified(world, (), paths[0], length) if new[0] == 1) * probability
    return mass


def test_appendix_a_gives_the_papers_numbers_and_global_search_is_caught():
    world = appendix_a_world()
    for rule in (EarlyStopScheduler, chains):
        assert first_token_distribution(rule(APPENDIX_A), world, 2) == pytest.approx(0.7, abs=1e-12)
    for rule in (GlobalScheduler, EliminationScheduler):
        assert first_token_distribution(rule(APPENDIX_A), world, 2) == pytest.approx(0.85, abs=1e-12)
        assert bias_of_one_round(rule(APPENDIX_A), [world], 2) == pytest.approx(0.15)


def test_global_search_is_caught_at_gamma_three_and_in_random_worlds():
    """The draft equals the target, p = 1/2, and c_3 reveals x_2, c_2 reveals x_1: close to the largest bias, 1/4."""
    world = World.random(0, 4)
    for prefix in world.target:
        world.target[prefix] = world.draft[prefix] = 0.5
        world.confidence[prefix] = 1.0 if all(prefix) else 0.0
    cliff = ThroughputTable((1, 2, 3, 4), (1.0, 0.3, 0.3, 0.3))
    assert first_token_distribution(GlobalScheduler(cliff), world, 3) - 0.5 == pytest.approx(0.125)
    world.confidence[(1, 0)] = 0.9
    assert first_token_distribution(GlobalScheduler(cliff), world, 3) - 0.5 == pytest.approx(0.25)
    assert bias_of_one_round(GlobalScheduler(cliff), [world], 3) >= 0.24
    assert bias_of_one_round(chains(cliff), [world], 3) < EXACT
    for gamma in (2, 3):
        drawn = [(GlobalScheduler(jagged_curve(seed)), World.random(seed, gamma + 1)) for seed in range(20)]
        assert max(bias_of_one_round(policy, [drawn_world], gamma) for policy, drawn_world in drawn) > 0.01


class AtLeastOne(Policy):
    """Adds a fixed minimum of one draft to another policy."""

    def __init__(self, policy):
        self.policy = policy

    def plan_verify(self, confidence, max_lengths, load):
        return self.policy.plan_verify(confidence, max_lengths, load).clamp_min(1)


def test_a_fixed_minimum_is_exact_on_a_causal_rule_and_not_on_a_global_search():
    causal, search = (
        max(bias_of_one_round(AtLeastOne(rule(jagged_curve(s))), [World.random(s, 4)], 3) for s in range(30))
        for rule in (chains, GlobalScheduler)
    )
    assert causal < EXACT and search > 0.005


class SeesItsToken(Policy):
    """A threshold on a confidence that was computed after the draw."""

    def plan_verify(self, confidence, max_lengths, load):
        shifted = torch.cat([confidence[:, 1:], torch.ones(len(confidence), 1)], dim=1)
        return ConfidenceThreshold(0.5).plan_verify(shifted, max_lengths, load)


def test_confidence_computed_after_the_draw_is_caught():
    world = World.random(0, 3)
    world.target[()] = world.draft[()] = 0.5
    world.confidence |= {(0,): 0.1, (1,): 0.9}
    assert bias_of_one_round(SeesItsToken(), [world], 2) >= 0.22
    assert bias_of_one_round(ConfidenceThreshold(0.5), [world], 2) < EXACT


class LooksAtLaterSlotsOnTies(Policy):
    """One token of budget; among equally likely first tokens, that of the request which goes on better."""

    def plan_verify(self, confidence, max_lengths, load):
        alive = survival(confidence)
        best = max(range(len(confidence)), key=lambda row: (float(alive[row, 0]), float(alive[row, 1])))
        return torch.tensor([int(row == best) for row in range(len(confidence))])


class Budget(Policy):
    """As many tokens by rank: causal, as long as requests draw independently."""

    def __init__(self, tokens):
        self.tokens = tokens

    def plan_verify(self, confidence, max_lengths, load):
        return Ranking.of(confidence, max_lengths).lengths(self.tokens)


def test_a_tie_rule_that_looks_at_later_slots_is_caught():
    worlds = [appendix_a_world(), appendix_a_world(certain_after=0)]
    assert bias_of_one_round(LooksAtLaterSlotsOnTies(), worlds, 2) > 0.05
    assert bias_of_one_round(Budget(1), worlds, 2) < EXACT


def test_noise_shared_between_requests_is_caught():
    first, second = World.random(3, 3), World.random(4, 3)
    first.target[()], first.draft[()], first.confidence[()] = 0.7, 0.5, 0.8
    second.draft[()] = 0.5  # drawn with the same noise, x_1 of both agree
    second.confidence |= {(): 1.0, (1,): 1.0, (0,): 0.0}
    cost = ThroughputTable((1, 2, 3, 4, 5), (1.0, 1.0, 1.0, 1 / 1.05, 1 / 1.5))
    assert bias_of_one_round(Budget(2), [first, second], 2, draws=shared_noise_draws) > 0.05
    assert bias_of_one_round(Budget(2), [first, second], 2) < EXACT
    assert bias_of_one_round(chains(cost), [first, second], 2) < EXACT
