"""The distribution of what trees of drafts decode is the target's own: the real loop enumerated, samples, greedy
answers."""

import itertools

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper

from hf_dspark import DecodingOptions, PromptLookup
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.decoding.tree_drafting import DrawnTrees, TreeSampler
from hf_dspark.sampling import verification
from hf_dspark.sampling.drafts import DraftTree, DraftTrees, SiblingDistribution
from hf_dspark.scheduling.prompt_lookup import MatchAcceptance
from hf_dspark.scheduling.scheduler import Scheduler
from hf_dspark.scheduling.tree_plans import TreePlan
from tests.decoding.test_lossless_batches import SLOPE, enumerate_rounds
from tests.distributions import HEADS, PROMPT, make_pair, p_value_of_samples
from tests.hybrids import make_own_draft
from tests.rows import padded

ONE_ROW = PROMPT.tolist()


@pytest.mark.one_in(11)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_round_of_a_tree_has_the_targets_distribution(make_target, monkeypatch, head):
    pair = make_pair(make_target, seed=5, **head)
    found, counts = enumerate_rounds(monkeypatch, *pair, Scheduler(num_nodes=4), prompts=ONE_ROW)
    assert found < 5e-6 and any(count > 2 for (count,) in counts)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("head", "nodes", "options"),
    [
        ({}, 3, {"processors": [TopKLogitsWarper(3)]}),
        ({"markov_rank": 0, "enable_confidence_head": False}, 4, {}),
        ({}, 2, {"rounds": 2}),
        pytest.param({}, 3, {"rounds": 2}, marks=pytest.mark.slow),
    ],
    ids=["no_truncation", "independent_slots", "two_rounds", "two_larger_rounds"],
)
def test_rounds_of_trees_have_the_targets_distribution(make_target, monkeypatch, head, nodes, options):
    pair = make_pair(make_target, seed=5, **head)
    assert enumerate_rounds(monkeypatch, *pair, Scheduler(num_nodes=nodes), prompts=ONE_ROW, **options)[0] < 5e-6


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "policy", [Scheduler(num_nodes=2), Scheduler(SLOPE, trees=True, skip=False)], ids=["budget", "scheduler"]
)
def test_a_round_of_two_trees_has_the_joint_distribution(make_target, monkeypatch, policy):
    found, counts = enumerate_rounds(monkeypatch, *make_pair(make_target, seed=5), policy)
    assert found < 5e-6 and max(map(sum, counts)) > 1


@pytest.mark.one_in(5)
@pytest.mark.parametrize("chances", [0.6, 0.1], ids=["before", "after"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_with_prompt_lookup_have_the_targets_distribution(make_target, monkeypatch, chances, rounds):
    """What was matched stands before the drawn siblings, or after the first of them."""
    monkeypatch.setattr(MatchAcceptance, "of", lambda self, length: chances)
    known, honest = [], TreeSampler.finish

    def finish(self, *args):
        drafts = honest(self, *args)
        known.extend(mass == 0.0 for tree in drafts.trees for mass in tree.masses)
        return drafts

    monkeypatch.setattr(TreeSampler, "finish", finish)
    pair, every_match = make_pair(make_target, seed=5), [[0, 0, 1, 1, 2, 2, 0, 2, 1, 0]]
    budget = Scheduler(num_nodes=2 if rounds == 2 else 4)
    options = {"prompts": every_match, "rounds": rounds, "length": 6, "prompt_lookup": True}
    found, _ = enumerate_rounds(monkeypatch, *pair, budget, **options)
    assert found < 5e-6 and any(known) and not all(known)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("num_rows", "rounds"), [(1, 2), (2, 1)])
def test_rounds_of_prompt_lookup_alone_have_the_targets_distribution(make_target, monkeypatch, num_rows, rounds):
    monkeypatch.setattr(MatchAcceptance, "of", lambda self, length: 0.9)
    target, _ = make_pair(make_target, seed=5)
    pair = target, PromptLookup(target)
    every_match = [[0, 0, 1, 1, 2, 2, 0, 2, 1, 0]] * num_rows
    length = 4 if num_rows == 2 else 6
    options = {"prompts": every_match, "rounds": rounds, "length": length, "prompt_lookup": True}
    found, counts = enumerate_rounds(monkeypatch, *pair, Scheduler(num_nodes=2), **options)
    assert found < 5e-6 and max(map(max, counts)) > 1


def test_a_round_of_prompt_lookup_before_one_of_drafts_keeps_the_targets_distribution(make_target, monkeypatch):
    """The draft reads what it missed in the second round."""
    monkeypatch.setattr(MatchAcceptance, "of", lambda self, length: 0.9)
    plans = itertools.cycle([TreePlan(0.01, 2, 2, drafts=False), TreePlan(0.01, 2, 2)])
    monkeypatch.setattr(Scheduler, "plan_tree", lambda *args: next(plans))
    drafted, honest = [], Drafter._read
    monkeypatch.setattr(Drafter, "_read", lambda self, *args, **how: drafted.append(1) or honest(self, *args, **how))
    every_match = [[0, 0, 1, 1, 2, 2, 0, 2, 1, 0]]
    options = {"prompts": every_match, "rounds": 2, "length": 6, "prompt_lookup": True}
    found, counts = enumerate_rounds(monkeypatch, *make_pair(make_target, seed=5), Scheduler(num_nodes=2), **options)
    assert found < 5e-6 and drafted and max(map(max, counts)) > 1


class ByTheNeighbour(TreePlan):
    """What the second row gets depends on the draw of the first."""

    def admit(self, depth, rows, survivals, trees):
        if depth == 0:
            return np.ones(len(rows), dtype=int)
        return np.array([row * (1 + (trees[0].token_ids == [0])) for row in rows])

    def has_room(self, tree, trees, survival):
        return False

    def kept(self, trees):
        raise AssertionError("nodes were drawn")


def test_a_budget_by_the_neighbours_draws_keeps_the_joint_distribution(make_target, monkeypatch):
    monkeypatch.setattr(Scheduler, "plan_tree", lambda *args, **kwargs: ByTheNeighbour(0.0, 3, 6))
    found, counts = enumerate_rounds(monkeypatch, *make_pair(make_target, seed=5, depth=4), Scheduler(num_nodes=3))
    assert found < 5e-6 and len(counts) > 1


def test_enumeration_catches_a_node_left_out_by_its_token(make_target, monkeypatch):
    """As a reranking at temperature 1 would."""
    honest = DrawnTrees.finish

    def finish(self, *args):
        (tree,) = honest(self, *args).trees
        if tree.token_ids[-1] != 0:
            for part in (tree.token_ids, tree.parents, tree.depths, tree.survivals, tree.masses):
                part.pop()
        return DraftTrees([tree])

    monkeypatch.setattr(DrawnTrees, "finish", finish)
    pair = make_pair(make_target, seed=5, depth=4)
    assert enumerate_rounds(monkeypatch, *pair, Scheduler(num_nodes=1), prompts=ONE_ROW)[0] > 0.005


def test_enumeration_catches_siblings_tested_in_another_order(make_target, monkeypatch):
    honest = verification.verify_tree

    def backwards(tree, distribution, accept_uniforms):
        children = DraftTree.children
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftTree, "children", lambda self, place: children(self, place)[::-1])
            return honest(tree, distribution, accept_uniforms)

    monkeypatch.setattr(verification, "verify_tree", backwards)
    pair = make_pair(make_target, seed=5)
    assert enumerate_rounds(monkeypatch, *pair, Scheduler(num_nodes=3), prompts=ONE_ROW)[0] > 0.005


def p_value(target, draft, policy, prompt_lookup):
    draft.decoding = DecodingOptions(policy=policy, prompt_lookup=prompt_lookup)
    return p_value_of_samples(target, draft, calls=6, rows=100, length=5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("prompt_lookup", [False, True], ids=["", "prompt_lookup"])
def test_samples_of_calls_with_trees_have_the_targets_distribution(make_target, prompt_lookup):
    assert p_value(*make_pair(make_target, gamma=3, seed=5), Scheduler(num_nodes=7), prompt_lookup) > 1e-3


@pytest.mark.slow
def test_samples_catch_siblings_drawn_with_replacement(make_target, monkeypatch):
    honest = SiblingDistribution.draw

    def again(self, uniform):
        index, _ = honest(SiblingDistribution(self._probs), uniform)
        mass = 1.0 - sum(size for _, size in self._removed)
        self.remove(index)
        return index, mass

    monkeypatch.setattr(SiblingDistribution, "draw", again)
    assert p_value(*make_pair(make_target, gamma=3, seed=5), Scheduler(num_nodes=7), prompt_lookup=False) < 1e-6


PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5], [11, 4, 8, 8, 25, 13, 17, 31, 22, 6, 5, 39]]
OPTIONS = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "ends": {"eos_token_id": [7, 9]},
}


HEADS = ("vanilla", "gated", "rnn", "selector", "domino")
TREES = [*itertools.product(HEADS, ["plain"], [False]), *itertools.product(HEADS[:2], ["penalty", "ends"], [True])]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("head", "options", "prompt_lookup"), TREES)
def test_greedy_batches_with_trees_are_those_of_plain_decoding(make_target, head, options, prompt_lookup):
    target = make_target()
    draft = make_own_draft(target, confidence_head_with_markov=head != "domino", markov_head_type=head)
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=20), prompt_lookup=prompt_lookup)
    greedy = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0} | OPTIONS[options]
    alone = [target.generate(torch.tensor([row]), **greedy)[0, len(row) :].tolist() for row in PROMPTS]
    batch = padded(PROMPTS)
    together = target.generate(**batch, assistant_model=draft, **greedy)[:, batch["input_ids"].shape[1] :].tolist()
    assert [row[: len(own)] for row, own in zip(together, alone, strict=True)] == alone
    assert max(draft.last_stats.proposed) > 4 and (prompt_lookup or max(draft.last_stats.depths) <= 4)


def test_scores_and_states_are_those_along_the_accepted_path(make_target):
    target = make_target(seed=3)
    draft = make_own_draft(target)
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=20))
    wanted = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, "return_dict_in_generate": True,
              "output_scores": True, "output_hidden_states": True}  # fmt: skip
    ids = torch.tensor(PROMPTS[:1])
    plain, drafted = target.generate(ids, **wanted), target.generate(ids, assistant_model=draft, **wanted)
    assert torch.equal(plain.sequences, drafted.sequences)
    torch.testing.assert_close(torch.stack(plain.scores), torch.stack(drafted.scores), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(drafted.hidden_states[1:], plain.hidden_states[1:], strict=True):
        torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-4, atol=1e-4)
