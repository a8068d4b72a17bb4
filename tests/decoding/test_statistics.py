"""Statistics of the rounds of a call."""

import pytest

from hf_dspark import DecodingOptions
from tests.rows import GREEDY, EverySecond


def test_statistics_describe_the_call(target, draft, prompt_ids):
    ids = target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    stats = draft.last_stats
    # One token comes from the prefill, each round adds its accepted drafts and one token of the target.
    assert ids.shape[1] - prompt_ids[0].shape[1] == 1 + sum(stats.committed)
    assert sum(stats.committed) == sum(stats.accepted) + stats.rounds
    assert stats.tau == pytest.approx(1 + sum(stats.accepted) / stats.rounds)
    assert stats.proposed_at(1) >= stats.proposed_at(5) and stats.accepted_at(1) >= stats.accepted_at(5) > 0
    assert 0 < stats.acceptance_rate <= 1
    assert min(stats.draft_seconds, stats.verify_seconds, stats.rest_seconds, stats.prefill_seconds) > 0


def test_statistics_count_skipped_rounds(target, draft, prompt_ids):
    draft.decoding = DecodingOptions(policy=EverySecond())
    target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    stats = draft.last_stats
    assert stats.rounds == len(stats.proposed) == len(stats.confidence)
    assert sum(stats.accepted) + stats.rounds == GREEDY["max_new_tokens"] - 1
    for proposed, confidence in zip(stats.proposed, stats.confidence, strict=True):
        assert (proposed == 0) or confidence is not None
