"""Calibration, evaluation and profiles of recurrent and hybrid targets."""

import pytest

from hf_dspark import calibrate, evaluate, profile_throughput
from tests.hybrids import HAVE_PROTOCOL, build, make_own_draft

pytestmark = pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [11, 12]]


@pytest.fixture(params=["qwen3_5_text", "lfm2"])
def pair(request):
    return (target := build(request.param)), make_own_draft(target)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a calibration on")
def test_a_draft_is_calibrated_and_evaluated(pair):
    target, draft = pair
    calibrate(target, draft, PROMPTS, max_new_tokens=12, do_sample=False)
    assert len(draft.config.sts_temperatures["greedy"]) == 4
    found = evaluate(target, draft, {"talk": PROMPTS}, None, compare_plain=True, max_new_tokens=12, do_sample=False)
    speedup = found.metrics["talk"].speedup
    assert speedup.identical == 3 and speedup.best_tokens == 36


@pytest.mark.one_in(2)
def test_a_profile_of_a_hybrid_target_gives_a_table(pair):
    profile = profile_throughput(*pair, batch_sizes=(1, 2), context_lengths=(8, 24), repetitions=1, cache=False)
    assert profile.table.verify_tokens[:5] == (1, 2, 3, 4, 5)
