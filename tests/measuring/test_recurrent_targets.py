"""Calibration, evaluation and profiles of recurrent and hybrid targets."""

import pytest
import torch

from hf_dspark import DSparkConfig, DSparkDraftModel, calibrate, evaluate, profile_throughput
from hf_dspark.measuring.profile import passes_by_slots
from hf_dspark.targets.recurrent import Mixer
from tests.hybrids import HAVE_PROTOCOL, build

pytestmark = pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [11, 12]]


@pytest.fixture(params=["qwen3_5_text", "lfm2"])
def pair(request):
    target = build(request.param)
    torch.manual_seed(1)
    config = DSparkConfig.from_target(target, block_size=4, num_hidden_layers=1, markov_rank=8)
    return target, DSparkDraftModel(config).eval()


@pytest.mark.filterwarnings("ignore:a calibration on")
def test_a_draft_is_calibrated_and_evaluated(pair):
    target, draft = pair
    calibrate(target, draft, PROMPTS, max_new_tokens=12, do_sample=False)
    assert len(draft.config.sts_temperatures["greedy"]) == 4
    found = evaluate(target, draft, {"talk": PROMPTS}, None, compare_plain=True, max_new_tokens=12, do_sample=False)
    speedup = found.metrics["talk"].speedup
    assert speedup.identical == 3 and speedup.best_tokens == 36


def test_a_profile_measures_passes_that_read_accepted_tokens_again(monkeypatch):
    target, advanced = build("qwen3_5_text"), []
    advance = Mixer._advance
    monkeypatch.setattr(Mixer, "_advance", lambda *args: advanced.append(args[-1]) or advance(*args))
    prompt = torch.arange(12)[None]
    run = passes_by_slots(target, prompt, 2)
    for width in (5, 5, 1, 1):
        advanced.clear()
        run(torch.ones(2, width, dtype=torch.long))
    assert set(advanced) == {1}  # all of the block of one token
    run = passes_by_slots(target, prompt, 2)
    for _ in range(2):
        advanced.clear()
        run(torch.ones(2, 5, dtype=torch.long))
    assert set(advanced) == {3}


def test_a_profile_of_a_hybrid_target_gives_a_table(pair, steady_clock):
    profile = profile_throughput(*pair, batch_sizes=(1, 2), context_lengths=(8, 24), repetitions=1, cache=False)
    assert profile.table.verify_tokens[:5] == (1, 2, 3, 4, 5)
