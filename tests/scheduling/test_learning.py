"""What rounds teach: step times, acceptance, and when not to draft."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_dspark.sampling.drafts import DraftTree, DraftTrees
from hf_dspark.scheduling import step_costs
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.scheduling.learning import Experience, LearnedAcceptance, LearnedCosts, LearnedCurve, ReprobeCounter
from hf_dspark.scheduling.rounds import RoundOutcome
from hf_dspark.scheduling.scheduler import Scheduler
from hf_dspark.scheduling.step_costs import ThroughputProfile, cache_folder, experience_of, known_profiles
from hf_dspark.scheduling.tree_plans import usual_acceptance

pytestmark = pytest.mark.learns
SIZES = (1, 2, 4, 8, 16, 32)


@pytest.fixture
def noise():
    return np.random.default_rng(0)


# ---- step times


def test_a_curve_finds_times_that_it_was_not_told_whatever_single_rounds_take(noise):
    truth = 0.01 * (1 + np.array(SIZES) / 10)
    curve = LearnedCurve(SIZES, np.full(6, 3.0))
    for _ in range(400):
        place = noise.integers(6)
        outlier = 20.0 if noise.random() < 0.05 else 1.0
        curve.add(SIZES[place], truth[place] * outlier * np.exp(noise.normal(0, 0.1)))
    assert curve.seconds == pytest.approx(truth, rel=0.1)
    assert float(curve.at(6)) == pytest.approx(0.016, rel=0.1)


def test_a_curve_follows_the_load_and_carries_over_what_it_was_not_shown():
    curve = LearnedCurve(SIZES, 1 + np.array(SIZES) / 10)
    for seconds in (0.018, 0.036):  # twice as slow from then on
        for _ in range(20):
            curve.add(8, seconds)
        assert curve.seconds == pytest.approx(seconds / 1.8 * (1 + np.array(SIZES) / 10), rel=0.02)


def test_a_larger_pass_never_takes_less_time():
    curve = LearnedCurve(SIZES, (1, 1, 1, 1, 1, 1))
    for size, seconds in ((8, 2.0), (16, 0.5), (1, 3.0)) * 20:
        curve.add(size, seconds)
    assert (np.diff(curve.seconds) >= 0).all()


def test_cached_tokens_cost_what_rounds_of_several_depths_show(noise):
    curve = LearnedCurve(SIZES, (1,) * 6)
    for _ in range(1500):
        context = int(noise.integers(10, 4000))
        curve.add(8, 0.02 + 1e-5 * context, context)
    assert curve.context_seconds == pytest.approx(1e-5, rel=0.2)
    for context in (200, 3800):
        assert float(curve.at(8)) + curve.context_seconds * context == pytest.approx(0.02 + 1e-5 * context, rel=0.3)


# ---- acceptance


def test_confidences_are_corrected_by_position_and_older_rounds_fade(noise):
    learned, shown = LearnedAcceptance(), torch.tensor([[0.9, 0.8]])
    assert torch.equal(learned.corrected(shown), shown)
    for chances in ((0.9, 0.3), (0.4, 0.9)):
        for _ in range(900):
            accepted = int((noise.random(2) < chances).cumprod().sum())
            learned.observe(RoundOutcome((0,), shown, torch.tensor([2]), torch.tensor([accepted]), 1.0))
        assert learned.corrected(shown)[0].tolist() == pytest.approx(list(chances), abs=0.12)
    assert learned.corrected(torch.tensor([[0.0, 1.0]])).tolist() == [[0.0, 1.0]]  # a broken slot stays one
    assert learned.corrected(torch.tensor([[0.5, 0.7, 0.6]]))[0, 2] == pytest.approx(0.6)


def test_drafting_is_priced_by_the_speed_of_the_latest_rounds_whatever_these_drafted():
    costs = LearnedCosts(ThroughputTable((1, 8, 64), (50, 48, 40), 0.004), 7)
    trees = DraftTrees([DraftTree([3], [0], [1])])

    def play(rounds, speed, drafting, drafts=None):
        past = (0,), None, torch.tensor([1]), torch.tensor([0])
        outcome = RoundOutcome(*past, seconds=(0.1 + drafting) / speed, drafted=drafting > 0, drafts=drafts)
        for _ in range(rounds):
            costs.observe(Load(), replace(outcome, draft_seconds=drafting / speed))
        return costs.at(Load())

    assert play(32, speed=1.0, drafting=0.02).drafting == pytest.approx(0.02, rel=0.02)
    assert play(32, speed=2.0, drafting=0.0).drafting == pytest.approx(0.01, rel=0.02)
    play(32, speed=2.0, drafting=0.02)
    assert play(16, speed=2.0, drafting=0.03, drafts=trees).growth[False] == pytest.approx(1.5, rel=0.02)
    later = play(128, speed=0.5, drafting=0.03, drafts=trees)
    assert later.drafting == pytest.approx(0.04, rel=0.02) and later.growth[False] == pytest.approx(1.5, rel=0.02)
    play(32, speed=0.5, drafting=0.02)  # a tree takes no less than these, however slow they were
    assert play(16, speed=2.0, drafting=0.03, drafts=trees).growth[False] == 1.0


def test_trees_are_compared_with_chains_of_the_same_rounds():
    learned, tree = LearnedAcceptance(), DraftTree()
    first, second = tree.add(0, 5, 0.5, 0.5), tree.add(0, 6, 0.2, 0.5)
    tree.add(first, 7, 0.3, 0.5)
    for _ in range(16):
        learned.expect([0.9, 0.8])  # of chains, in easier texts
        learned.observe(tree_round(tree, [second]))
    siblings = learned.siblings(usual_acceptance(False, 2))
    assert siblings.of_chain().tolist() == [0.0, 0.0] and siblings.best_nodes(3).tolist() == [1.0, 0.0, 0.0]


def test_the_first_trees_show_what_their_passes_take():
    costs, load, tree = LearnedCosts(ThroughputTable((1, 8, 32), (50, 48, 47), 0.001), 7), Load(), DraftTree()
    for place in range(31):
        tree.add(place % 7, place, 0.5, 0.5)
    scheduler, nothing = Scheduler(Experience(costs)), torch.tensor([0])
    chain = RoundOutcome((0,), torch.full((1, 7), 0.8), nothing + 7, nothing + 4, 0.04, draft_seconds=0.01)
    of_tree = replace(tree_round(tree, [1, 2]), seconds=0.09, draft_seconds=0.01)
    for _ in range(100):
        drafts = scheduler.plan_draft(load)
        if scheduler.plan_tree(usual_acceptance(False, 7), load) is not None:
            scheduler.observe(of_tree)
        elif drafts:
            scheduler.observe(chain)
        else:
            scheduler.observe(RoundOutcome((0,), None, nothing, nothing, 0.029, drafted=False))
    assert costs.at(load).tree_seconds(load, 31, False)[[7, 31]].tolist() == pytest.approx([0.04, 0.09], rel=0.1)


def tree_round(tree, path):
    counts = torch.tensor([tree.num_nodes]), torch.tensor([len(path)])
    return RoundOutcome((0,), None, *counts, seconds=1.0, drafts=DraftTrees([tree]), paths=[path])


# ---- whether to draft


class Machine:
    """A machine and a draft, played round by round against a scheduler."""

    def __init__(self, scheduler, noise):
        self.scheduler, self.noise, self.seconds = scheduler, noise, 0.0

    def play(self, rounds, chance, drafting=0.4):
        """Return the share of rounds that were drafted, and the tokens per second."""
        load, drafted, tokens, started = Load(), 0, 0, self.seconds
        for _ in range(rounds):
            drafts, confidence, length, accepted = self.scheduler.plan_draft(load), None, 0, 0
            if drafts:
                confidence = torch.full((1, 7), 0.8)
                length = int(self.scheduler.plan_verify(confidence, torch.tensor([7]), load)[0])
                accepted = int((self.noise.random(length) < chance).cumprod().sum())
            seconds = (1 + 0.05 * length) * self.noise.uniform(0.9, 1.1)
            lengths, extra = torch.tensor([length]), drafting * drafts
            past = (0,), confidence, lengths, torch.tensor([accepted]), seconds + extra, drafts
            self.scheduler.observe(RoundOutcome(*past, draft_seconds=extra))
            drafted, tokens, self.seconds = drafted + drafts, tokens + 1 + accepted, self.seconds + seconds + extra
        return drafted / rounds, tokens / (self.seconds - started)


def test_drafting_that_never_pays_ends_and_begins_again_when_it_pays(noise):
    experience = Experience(LearnedCosts(ThroughputTable((1, 8, 64), (50, 48, 40), 0.001), 7))
    machine = Machine(Scheduler(experience, trees=False), noise)
    machine.play(200, chance=0.02)
    share, rate = machine.play(2000, chance=0.02)
    assert share < 0.03 and rate > 0.97
    machine.scheduler = machine.scheduler.fresh()  # a later call
    assert not machine.scheduler.plan_draft(Load())
    machine.play(300, chance=0.8)
    share, rate = machine.play(500, chance=0.8)
    assert share > 0.97 and rate > 1.8


def test_plain_steps_are_looked_at_ever_more_rarely(noise):
    experience = Experience(LearnedCosts(ThroughputTable((1, 8, 64), (50, 48, 40), 0.001), 7))
    machine = Machine(Scheduler(experience, trees=False), noise)
    shares = [machine.play(rounds, chance=0.9)[0] for rounds in (50, 200, 1000)]
    assert shares[0] < shares[1] < shares[2] and shares[2] > 0.99


def test_looking_again_becomes_rarer_until_it_pays():
    counter = ReprobeCounter(most=64)
    waits, rounds = [], 0
    for _ in range(300):
        rounds += 1
        if counter.look_again():
            waits, rounds = [*waits, rounds], 0
    assert waits == [17, 33, 65, 65, 65]
    counter.reset()
    assert [counter.look_again() for _ in range(17)] == [False] * 16 + [True]


# ---- what is kept


@pytest.fixture
def only_cache(own_cache, tmp_path, monkeypatch):
    """An empty cache, and no shipped tables."""
    monkeypatch.setattr(step_costs, "SHIPPED_TABLES", tmp_path)
    return own_cache


def taught(target, draft, rounds=64):
    costs = experience_of(target, draft).costs
    for _ in range(rounds):
        nothing = torch.tensor([0])
        costs.observe(Load(), RoundOutcome((0,), None, nothing, nothing, 0.25, drafted=False))
    return costs


def test_what_was_learnt_is_where_the_next_process_begins(target, draft, only_cache):
    taught(target, draft, 63)
    assert not only_cache.exists()
    costs = taught(target, draft, 1)
    (kept,) = only_cache.glob("*.learned.json")
    assert ThroughputProfile.from_dict(json.loads(kept.read_text())).table.provenance["learned_rounds"] == 64
    known_profiles.cache_clear()
    step_costs._experiences.clear()
    again = experience_of(target, draft).costs
    assert again is not costs and again.at(Load()).plain_seconds(Load()) == pytest.approx(0.25)
    assert again.first_answer(Load()) is True  # as no round of those has drafted
    kept.write_text(kept.read_text()[:40])  # a disk that was full
    known_profiles.cache_clear()
    step_costs._experiences.clear()
    assert "estimate" in experience_of(target, draft).name


def test_writers_do_not_meet_and_a_read_only_place_is_no_fault(target, draft, only_cache, monkeypatch):
    table = taught(target, draft).table()
    machine = step_costs.Machine.of(target, draft)
    writers = [
        threading.Thread(target=step_costs.keep_profile, args=(machine, table, ".learned.json")) for _ in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.name for path in cache_folder().iterdir()] == [f"{machine.key}.learned.json"]
    ThroughputProfile.from_dict(json.loads(next(only_cache.iterdir()).read_text()))
    monkeypatch.setenv("HF_DSPARK_CACHE", "/proc/nowhere")
    taught(target, draft, 64)


@pytest.mark.parametrize(("provenance", "tries"), [({"drafted": {}}, 9), ({}, 1)], ids=["estimate", "measured"])
def test_a_guess_that_drafts_cost_too_much_is_put_to_the_test_for_each_size_of_batch(provenance, tries):
    """By rounds in turns with rounds without drafts. Of the first round for new requests nothing is learnt."""
    costs = LearnedCosts(ThroughputTable((1, 8, 64), (1.0, 0.9, 0.8), drafting=0.9, provenance=provenance), 4)
    for requests in (1, 8):
        policy, answers = Scheduler(Experience(costs), trees=False), []
        load, nothing = Load(tuple(range(requests))), torch.zeros(requests, dtype=torch.long)
        for _ in range(20):
            answers.append(policy.plan_draft(load))
            facts = load.request_ids, torch.full((requests, 4), 0.1), nothing, nothing
            drafting = 0.9 * answers[-1]
            policy.observe(RoundOutcome(*facts, 0.1 + drafting, drafted=answers[-1], draft_seconds=drafting))
        assert sum(answers) in (tries, tries + 1) and (tries == 1 or answers[2:14].count(False) == 6)


def test_a_round_that_reads_what_came_while_the_draft_rested_does_not_tell_what_drafting_costs():
    costs, nothing = LearnedCosts(ThroughputTable((1, 8), (1.0, 0.9), drafting=0.3), 4), torch.tensor([0])

    def observe(draft_seconds, drafted=True):
        costs.observe(
            Load(),
            RoundOutcome((0,), None, nothing, nothing, 0.7 + draft_seconds, drafted, draft_seconds=draft_seconds),
        )

    for _ in range(60):
        for _ in range(5):
            observe(0.0, drafted=False)
        observe(3.0)
        observe(0.3)
    assert costs.at(Load()).drafting == pytest.approx(0.3, rel=0.1)


# ---- tails

SLOW_DRAFT = ThroughputTable((1, 4, 8), (1.0, 0.9, 0.8), drafting=0.8)
FAST_DRAFT = replace(SLOW_DRAFT, drafting=0.01)


def observed(policy, load, answer, accepted):
    """Let a policy see a round of one request with sure confidences, and what was accepted of it."""
    length = torch.tensor([load.tails[0] if answer == "tail" else 4])
    confidence = torch.full((1, int(length)), 0.9)
    outcome = RoundOutcome((0,), confidence, length, torch.tensor([accepted]), 1.0, is_tail=answer == "tail")
    policy.observe(outcome)


@pytest.mark.parametrize(
    ("cost", "accepted", "wanted"), [(SLOW_DRAFT, 2, True), (SLOW_DRAFT, 0, False), (FAST_DRAFT, 1, False)]
)
def test_scheduler_draws_tails_where_they_bring_more_per_second(cost, accepted, wanted):
    policy, load = Scheduler(cost, tails=True, trees=False), Load(tails=(3,))
    answers = []
    for _ in range(120):
        answers.append(policy.plan_draft(load))
        if answers[-1] == "tail":
            observed(policy, load, "tail", accepted)
        observed(policy, load, policy.plan_draft(Load()), 3)
    assert answers[:16].count("tail") < 16 and "tail" in answers[:18]  # they are tried
    assert (answers[60:].count("tail") > 50) is wanted and answers[60:].count("tail") > 0  # and tried again


def test_lagged_budgets_and_tails_exclude_each_other():
    with pytest.raises(ValueError, match="drop lag=2 or tails=True"):
        Scheduler(SLOW_DRAFT, lag=2, tails=True)
