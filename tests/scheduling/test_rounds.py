"""The record of the rounds of a call, and what is computed from it."""

import json

import pytest
import torch

from hf_dspark import DecodingOptions, Rounds, decode_with
from hf_dspark.sampling.drafts import DraftBlock, DraftTree, DraftTrees
from hf_dspark.scheduling.rounds import RoundOutcome, RoundSeconds
from tests.rows import GREEDY, EverySecond


@pytest.fixture
def prompt_ids(fixtures):
    reference = json.loads((fixtures / "deepspec" / "trained" / "generation.json").read_text())
    return torch.tensor(reference["prompts"][:1])


def test_rounds_describe_the_call(pair, prompt_ids):
    target, draft = pair
    ids = target.generate(prompt_ids, assistant_model=draft, **GREEDY)
    stats = draft.last_stats
    # One token comes from the prefill, each round adds its accepted drafts and one token of the target.
    assert ids.shape[1] - prompt_ids.shape[1] == 1 + sum(stats.committed)
    assert sum(stats.committed) == sum(stats.accepted) + stats.rounds
    assert stats.tau == pytest.approx(1 + sum(stats.accepted) / stats.rounds)
    assert stats.reached(1) >= stats.reached(5) and stats.accepted_at(1) >= stats.accepted_at(5) > 0
    assert 0 < stats.acceptance_rate <= 1
    assert min(stats.draft_seconds, stats.verify_seconds, stats.rest_seconds, stats.prefill_seconds) > 0


def test_skipped_rounds_count(pair, prompt_ids):
    target, draft = pair
    options = DecodingOptions(policy=EverySecond())
    target.generate(prompt_ids, custom_generate=decode_with(draft, options), **GREEDY)
    stats = draft.last_stats
    assert stats.rounds == len(stats.proposed) == len(stats.confidence)
    assert sum(stats.accepted) + stats.rounds == GREEDY["max_new_tokens"] - 1
    for proposed, confidence in zip(stats.proposed, stats.confidence, strict=True):
        assert (proposed == 0) or confidence is not None


def rounds_of_two_requests() -> Rounds:
    rounds = Rounds(prefill_seconds=0.5, policy={"name": "FullBlock"})
    confidence = torch.tensor([[0.1234567, 0.5], [0.25, 1.0]])
    both = torch.tensor([2, 2]), torch.tensor([0, 2])
    facts = {"num_committed": [1, 2], "draft_seconds": 0.1, "verify_seconds": 0.2}
    block = DraftBlock(torch.tensor([[3, 4], [5, 6]]), lengths=both[0])
    rounds.add(RoundOutcome((0, 1), confidence, *both, 0.4, drafts=block, **facts))
    trees = DraftTrees([DraftTree([3, 4, 5], [0, 0, 1], [1, 1, 2])])
    one = torch.tensor([3]), torch.tensor([1])
    rounds.add(RoundOutcome((1,), None, *one, 0.9, drafts=trees, num_committed=[2], draft_seconds=0.3))
    return rounds


def test_each_request_has_its_own_rounds_and_the_seconds_of_the_whole_ones():
    rounds = rounds_of_two_requests()
    first, second = map(rounds.of_request, (0, 1))
    assert (first.proposed, first.accepted, first.committed) == ([2], [0], [1])
    assert (second.proposed, second.depths, second.accepted, second.committed) == ([2, 3], [2, 2], [2, 1], [2, 2])
    assert second.seconds == [RoundSeconds(2, 0.1, 0.2, 0.4), RoundSeconds(1, 0.3, 0.0, 0.9)]
    assert second.confidence[0].tolist() == [0.25, 1.0] and second.confidence[1] is None
    assert rounds.total_seconds == pytest.approx(1.3) and rounds.draft_seconds == pytest.approx(0.4)
    assert rounds.rest_seconds == pytest.approx(0.7) and second.total_seconds == pytest.approx(1.1)


def test_rounds_survive_json_and_join():
    rounds = rounds_of_two_requests()
    read = Rounds.from_dict(json.loads(json.dumps(rounds.to_dict())))
    assert read.to_dict() == rounds.to_dict() and read.confidence[0].equal(rounds.confidence[0])
    both = Rounds.joined([read, rounds.of_request(0)])
    assert both.rounds == 4 and both.request_ids == [0, 1, 1, 0] and both.prefill_seconds == 1.0
    assert both.policy == {"name": "FullBlock"}
    assert repr(rounds) == "Rounds(rounds=3, tau=1.67, acceptance_rate=0.43, total_seconds=1.300)"


def test_confident_rounds_leave_out_those_without_confidence():
    rounds = rounds_of_two_requests()
    found = rounds.confident_rounds()
    assert found.num_accepted.tolist() == [0, 2] and found.proposed.tolist() == [2, 2]
    assert found.logits.sigmoid()[0].tolist() == pytest.approx([0.1234567, 0.5]) and found.logits.isfinite().all()
    rounds.confidence = [None] * 3
    assert rounds.confident_rounds() is None
