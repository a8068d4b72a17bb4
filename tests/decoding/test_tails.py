"""The slots that a block has left are drawn anew: exact, with noise of their own, for the right place and request."""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from hf_dspark import DecodingOptions, FullBlock, Scheduler, generate_many
from hf_dspark.decoding import drafter as drafter_module
from hf_dspark.decoding import tree_drafting
from hf_dspark.decoding.tails import LastBlocks
from hf_dspark.scheduling.costs import ThroughputTable
from hf_dspark.scheduling.policies import ConfidenceThreshold
from tests.decoding.test_lossless_batches import PROMPTS, enumerate_rounds
from tests.distributions import HEADS, make_pair, p_value_of_samples
from tests.rows import GREEDY, alone, assert_as_alone, assert_rows, padded

SLOW_DRAFT = ThroughputTable((1, 4, 8), (1.0, 0.95, 0.9), drafting=0.5)


@dataclass(frozen=True)
class Tails(FullBlock):
    """Draws in every slot that is left before it asks for a new block; trees of some nodes, if any."""

    draws_tails = True
    nodes: int = 0

    def plan_draft(self, load):
        return "tail" if load.tails else True

    @property
    def most_nodes(self):
        return self.nodes

    def plan_tree(self, siblings, load, matches=()):
        return Scheduler(num_nodes=self.nodes).plan_tree(siblings, load, matches) if self.nodes else None


class CutTails(ConfidenceThreshold):
    draws_tails, plan_draft = True, Tails.plan_draft


def watched(draft, policy=None):
    """Return how many tokens of tails a draft will have sent, round by round."""
    sent = []
    observer = lambda outcome: sent.extend(outcome.lengths.tolist() if outcome.is_tail else [])  # noqa: E731
    draft.decoding = DecodingOptions(policy or Tails(), observer=observer)
    return sent


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("head", "policy", "gamma"),
    [
        ("vanilla", Tails(), 2),
        ("dflash2", Tails(), 2),
        ("vanilla", Tails(nodes=3), 2),
        ("vanilla", Scheduler(SLOW_DRAFT, tails=True, trees=False), 2),
        *(pytest.param(head, Tails(), 2, marks=pytest.mark.slow) for head in ("gated", "draft_top_k", "pruned")),
        pytest.param("vanilla", CutTails(0.5), 3, marks=pytest.mark.slow),
        pytest.param("headless", CutTails(0.4), 2, marks=pytest.mark.slow),
    ],
)
def test_rounds_that_draw_tails_have_the_targets_distribution(monkeypatch, make_target, head, policy, gamma):
    target, draft = make_pair(make_target, gamma=gamma, **HEADS[head])
    processors = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(2)]
    drawn, tails = [], LastBlocks.tails
    monkeypatch.setattr(LastBlocks, "tails", lambda *args: drawn.append(1) or tails(*args))
    facts = {"prompts": PROMPTS[:1], "rounds": 2, "length": 2 * (gamma + 1)}
    assert enumerate_rounds(monkeypatch, target, draft, policy, processors, **facts)[0] < 5e-6 and drawn


@pytest.mark.slow
def test_enumeration_catches_tokens_of_the_old_block(monkeypatch, make_target):
    """Without a Markov head a slot's distribution is the same in both rounds, and so are tokens of the same noise."""
    off = {"markov_rank": 0, "confidence_head_with_markov": False}
    target, draft = make_pair(make_target, gamma=2, seed=5, depth=4, **off)
    honest, drawn, facts = tree_drafting.draw, [], {"prompts": PROMPTS[:1], "rounds": 2}
    tails, propose = LastBlocks.tails, drafter_module.Drafter.propose
    monkeypatch.setattr(drafter_module.Drafter, "propose", lambda *args: drawn.append([]) or propose(*args))
    is_tail = []
    monkeypatch.setattr(LastBlocks, "tails", lambda *args: is_tail.append(len(drawn)) or tails(*args))

    def draw(distribution, uniform):
        if is_tail[-1:] == [len(drawn)]:
            return drawn[-2][1]  # the one slot that is left of two
        drawn[-1].append(honest(distribution, uniform))
        return drawn[-1][-1]

    monkeypatch.setattr(tree_drafting, "draw", draw)
    assert enumerate_rounds(monkeypatch, target, draft, Tails(), **facts)[0] > 0.01


@pytest.mark.parametrize("noise", ["its own", "of the bonus token"])
def test_tails_need_noise_of_their_own(make_target, monkeypatch, noise):
    target, draft = make_pair(make_target, gamma=3, seed=5)
    sent, honest = watched(draft), drafter_module.block_noise

    def of_the_bonus_token(seed, request_ids, blocks, *args):
        own = honest(seed, request_ids, blocks, *args)
        last = honest(seed, request_ids, [block - 1 for block in blocks], *args).next_uniforms
        return replace(own, draft_uniforms=last[:, None].expand_as(own.draft_uniforms))

    if noise != "its own":
        monkeypatch.setattr(drafter_module, "block_noise", of_the_bonus_token)
    p_value = p_value_of_samples(target, draft, calls=10, rows=100, length=4)
    assert sum(sent) and (p_value > 1e-3 if noise == "its own" else p_value < 1e-6)


def test_a_tail_stands_in_the_slots_after_its_own_requests_anchor(make_target, monkeypatch):
    """A wrong place or row would only lower acceptance."""
    target, draft = make_pair(make_target, gamma=6, seed=5)
    prompts = [[0, 1, 2], [2, 2, 1, 0], [1, 0, 0, 2, 1], [2], [0, 2]]
    sent, made, states, keep, tails = watched(draft), {}, [], LastBlocks.keep, LastBlocks.tails

    def keeping(self, requests, hidden, base_logits):
        for row, request in enumerate(requests):
            made[request.id] = request.length, hidden[row], base_logits[row]
        keep(self, requests, hidden, base_logits)

    def drawing(self, requests, num_tokens):
        found = tails(self, requests, num_tokens)
        for row, request in enumerate(requests):
            length, *kept = made.get(request.id, (0, (), ()))
            for own, slots in zip(kept, (each[row] for each in found), strict=True):
                left = own[request.length - length :]
                torch.testing.assert_close(slots[: len(left)], left[:num_tokens] if len(left) else slots[:0])
                states.append(len(left))
        return found

    monkeypatch.setattr(LastBlocks, "keep", keeping)
    monkeypatch.setattr(LastBlocks, "tails", drawing)
    done = generate_many(target, draft, prompts, batch_size=3, max_new_tokens=24, do_sample=False, pad_token_id=0)
    for completion in done:
        assert completion.token_ids.tolist() == alone(target, prompts[completion.index], max_new_tokens=24)
    assert len(set(states)) > 2 and sum(sent)


def test_greedy_answers_are_the_targets(target, draft):
    generator, sent = torch.Generator().manual_seed(0), watched(draft)
    for row in torch.randint(1, 60, (20, 6), generator=generator).tolist():
        output = target.generate(torch.tensor([row]), assistant_model=draft, **GREEDY | {"max_new_tokens": 16})
        assert output[0, 6:].tolist() == alone(target, row, max_new_tokens=16)
    assert len(sent) > 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}])
@pytest.mark.parametrize("nodes", [0, 6])
def test_batches_and_later_turns_are_the_targets(target, draft, prompts, options, nodes):
    sent = watched(draft, Tails(nodes=nodes))
    assert_as_alone(target, draft, prompts, **options)
    assert sum(sent)
    facts = GREEDY | options | {"eos_token_id": None, "return_dict_in_generate": True, "assistant_model": draft}
    first = target.generate(**padded(prompts[:1]), **facts)
    whole = first.sequences[0].tolist() + [9, 33]
    second = target.generate(**padded([whole]), past_key_values=first.past_key_values, **facts)
    assert_rows(second.sequences, len(whole), [alone(target, whole, eos_token_id=None, **options)])


def test_heads_with_a_state_have_no_tails(make_target):
    target, draft = make_pair(make_target, gamma=3, **HEADS["rnn"])
    sent = watched(draft)
    target.generate(torch.tensor([[0, 1, 2]]), assistant_model=draft, max_new_tokens=20, do_sample=False)
    assert not draft.draws_tails and not sent and draft.last_stats.accepted
