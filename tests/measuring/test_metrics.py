"""Metrics of turns, against counts made by hand."""

import json
from dataclasses import asdict

import pytest
import torch

from hf_dspark import Rounds
from hf_dspark.measuring.metrics import Metrics, metrics_by_task, metrics_table
from hf_dspark.measuring.timed_decoding import Answer
from hf_dspark.scheduling.calibration import expected_calibration_error, roc_auc
from hf_dspark.scheduling.rounds import RoundSeconds


def turn(proposed, accepted, confidence=None, num_requests=1, plain=None, **facts) -> Answer:
    count = len(proposed)
    said = [None if each is None else torch.tensor(each) for each in confidence or [None] * count]
    committed, seconds = [n + 1 for n in accepted], [RoundSeconds(num_requests, 0.1, 0.2, 0.4)] * count
    rounds = Rounds([0] * count, proposed, proposed, accepted, committed, said, seconds)
    known = {"group": "math", "index": 0, "turn": 0, "prefill_seconds": 1.0, "seconds": 4.0,
             "token_ids": [5] * (1 + count + sum(accepted))}  # fmt: skip
    return Answer(**(known | facts), rounds=rounds, plain=plain)


def test_tau_and_acceptance_are_averaged_over_the_rounds_of_all_turns():
    records = [turn([3, 3, 1], [3, 0, 1]), turn([2], [1], index=1, prefill_seconds=3.0)]
    found = Metrics.of(records, block_size=4)
    assert (found.prompts, found.turns, found.rounds, found.tokens) == (2, 2, 4, 11)
    assert found.tau == 1 + 5 / 4  # not the mean of the turns' own, which are 7/3 and 2
    assert found.reached == [4, 2, 1, 0]
    assert found.acceptance == [3 / 4, 1 / 2, 1.0, None]
    assert found.acceptance_rate == 5 / 9 and found.proposed_per_round == 9 / 4
    assert found.tokens_per_second == 11 / 8
    assert found.time_to_first_token == 2.0
    assert found.speedup is None and found.calibration == [] and found.ece_mean is None and found.auc is None


def test_a_round_of_several_turns_counts_once_in_the_times():
    def with_times(seconds, num_requests):
        record = turn([1], [0], num_requests=num_requests)
        record.rounds.seconds = [RoundSeconds(num_requests, seconds / 4, seconds / 2, seconds)]
        return record

    # One round of three turns that took 8 s, and one of a single turn that took 4 s.
    times = Metrics.of([with_times(8.0, 3)] * 3 + [with_times(4.0, 1)], 1).seconds_per_round
    assert times == pytest.approx({"draft": 1.5, "verify": 3.0, "rest": 1.5, "total": 6.0})


def test_round_that_ends_with_an_accepted_end_of_sequence_gains_no_bonus_token():
    record = turn([3, 2], [3, 2], token_ids=[5] * 7)
    record.rounds.committed = [4, 2]  # the second token of the second block ends
    found = Metrics.of([record], block_size=3)
    assert found.tau == 3.0 and found.acceptance == [1.0, 1.0, 1.0] and found.acceptance_rate == 1.0


def test_calibration_is_that_of_the_survival():
    torch.manual_seed(3)
    confidence = torch.rand(20, 3).mul(0.98).add(0.01)
    accepted = [int(count) for count in torch.randint(0, 4, (20,))]
    record = turn([3] * 20, accepted, confidence.tolist())
    found = Metrics.of([record], 3)
    survival = confidence.double().cumprod(dim=-1)
    happened = (torch.arange(3) < torch.tensor(accepted)[:, None]).double()
    expected = [expected_calibration_error(survival[:, place], happened[:, place]) for place in range(3)]
    assert [part.ece for part in found.calibration] == pytest.approx(expected, abs=1e-5)
    assert found.ece_mean == pytest.approx(sum(expected) / 3)
    reached = torch.arange(3) <= torch.tensor(accepted)[:, None]
    assert found.auc == pytest.approx(roc_auc(confidence[reached], happened[reached]))
    assert [part.num_rounds for part in found.calibration] == [20, 20, 20]


def test_rounds_that_drafted_nothing_say_nothing_of_calibration():
    record = turn([2, 0, 1, 2], [1, 0, 1, 0], [[0.5, 0.5], None, [1.0, 0.0], [0.9, 0.9]])
    found = Metrics.of([record], 2)
    assert [part.num_rounds for part in found.calibration] == [3, 2]
    assert json.dumps(asdict(found), allow_nan=False)
    alone = Metrics.of([turn([2, 0], [1, 0], [None, None])], 2)
    assert alone.ece_mean is None and alone.calibration == []


def test_speed_up_is_the_ratio_of_medians_with_the_quartiles_of_the_turns():
    def pair(place, plain_seconds, identical):
        said = {"identical": identical, "num_best": 10 if identical else 9}
        plain = turn([], [], token_ids=[5] * 10, seconds=plain_seconds)
        return turn([], [], index=place, token_ids=[5] * 10, seconds=10.0, plain=plain, **said)

    records = [pair(place, 10.0 * factor, factor != 4) for place, factor in enumerate((1, 2, 3, 4, 10))]
    found = Metrics.of(records, 4).speedup
    assert found.ratio_of_medians == found.median == 3.0
    assert (found.lower_quartile, found.upper_quartile) == (2.0, 4.0)
    assert found.plain_tokens_per_second == 50 / 200
    assert found.identical == 4 and found.best_tokens == 49
    sampled = [turn([], [], token_ids=[5], plain=turn([], [], token_ids=[6]))]
    assert Metrics.of(sampled, 4).speedup.identical is Metrics.of(sampled, 4).speedup.best_tokens is None


def test_tasks_are_summed_up_alone_and_together():
    records = [turn([1], [1]), turn([1], [0], group="code")]
    found = metrics_by_task(records, ["math", "code", "empty"], 1)
    assert [found[name].tau for name in ("math", "code", "empty", "all")] == [2.0, 1.0, None, 1.5]
    assert found["empty"].tokens_per_second is None and found["empty"].seconds_per_round is None
    table = metrics_table(found | {"a|b": found["math"]})
    assert "| math | 1 | 1 | 3 | 1 | 2.00 | 1.00 | – | 0.8 | 100.00 / 200.00 / 100.00 | 1000.0 |" in table
    assert r"| a\|b |" in table and "| empty | 0 | 0 | 0 | 0 | – | – |" in table


def test_a_record_survives_json():
    record = turn([2, 1], [1, 1], [[0.25, 0.5], None], plain=turn([], []), identical=True)
    assert Answer.from_dict(json.loads(json.dumps(record.to_dict()))).to_dict() == record.to_dict()
