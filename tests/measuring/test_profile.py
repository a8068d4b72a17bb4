"""Measuring a machine: what is timed, for which targets, and which settings are refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig

from hf_dspark import (
    DecodingOptions,
    FullBlock,
    PromptLookup,
    Rounds,
    profile_throughput,
)
from hf_dspark.scheduling.learning import LearnedCosts
from hf_dspark.scheduling.step_costs import experience_of, find_cost

pytestmark = [pytest.mark.learns, pytest.mark.usefixtures("own_cache")]
SETTINGS = {"batch_sizes": (1, 2), "context_lengths": (8, 24), "repetitions": 1}


def test_a_profile_runs_rounds_of_every_size_and_is_where_calls_begin(target, draft, monkeypatch):
    seen, observe = [], LearnedCosts.observe
    monkeypatch.setattr(LearnedCosts, "observe", lambda self, *round: seen.append(round) or observe(self, *round))
    before, gamma = experience_of(target, draft), draft.config.block_size
    profile = profile_throughput(target, draft, **SETTINGS)
    sizes = {
        (load.num_requests, load.context_tokens // load.num_requests - 1, outcome.drafted, int(outcome.lengths.sum()))
        for load, outcome in seen
    }
    assert sizes == {
        *((1, length, drafted, count) for length in (8, 24) for drafted, count in
          [(False, 0), *((True, count) for count in range(gamma + 1))]),
        *((2, length, count > 0, count) for length in (8, 24) for count in (0, gamma // 2 * 2, gamma * 2)),
    }  # fmt: skip
    assert len(seen) == 2 * (gamma + 2 + 3)
    assert profile.table.verify_tokens == (*range(1, gamma + 2), 2 * (1 + gamma))
    assert 0 < profile.table.drafting < 1 / max(profile.table.steps_per_second)
    assert find_cost(target, draft).steps_per_second == pytest.approx(profile.table.steps_per_second)
    after = experience_of(target, draft)
    assert after is not before and profile.machine.key in after.name and "estimate" in before.name


def test_prompt_lookup_has_no_passes_to_measure(target):
    with pytest.raises(ValueError, match="PromptLookup runs no draft"):
        profile_throughput(target, PromptLookup(target), (1, 2), (8, 9), repetitions=1)


def test_profile_leaves_the_draft_as_it_was(target, draft):
    draft.last_stats, draft.decoding = Rounds(), DecodingOptions(policy=FullBlock())
    before = draft.last_stats, draft.decoding
    profile_throughput(target, draft, batch_sizes=(1, 2), context_lengths=(8, 24), repetitions=1)
    assert draft.last_stats is before[0] and draft.decoding is before[1]
    ids = torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    assert torch.equal(target.generate(ids, assistant_model=draft, **options), target.generate(ids, **options))


def test_a_place_that_cannot_hold_the_table_is_named_before_anything_is_measured(target, draft, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("hf_dspark.measuring.profile._teach", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(ValueError, match="file/cache/profile.json cannot be written"):
        profile_throughput(target, draft, (1, 2), (8, 9), repetitions=1)


def test_profile_is_not_remembered_when_asked_not_to(target, draft):
    profile_throughput(target, draft, (1, 2), (8, 9), repetitions=1, cache=False)
    assert find_cost(target, draft) is None


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_targets_with_sliding_windows_can_be_measured(family, make_draft):
    geometry = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "sliding_window": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    config = MistralConfig(**geometry) if family == "mistral" else Gemma3TextConfig(**geometry)
    target = AutoModelForCausalLM.from_config(config).eval()
    measured = profile_throughput(target, make_draft(target), (1, 2), (6, 30), repetitions=1)
    assert measured.table.verify_tokens[-1] == 2 * 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_sizes": ()}, "batch_sizes must be increasing"),
        ({"batch_sizes": (2, 1)}, "batch_sizes must be increasing"),
        ({"batch_sizes": (2, 4)}, "must begin with 1"),
        ({"context_lengths": (0, 8)}, "context_lengths must be increasing"),
        ({"context_lengths": (8, 256)}, "stay below the target's 256"),
        ({"repetitions": 0}, "repetitions must be at least 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_measured(target, draft, settings, message):
    with pytest.raises(ValueError, match=message):
        profile_throughput(target, draft, **{"context_lengths": (8, 16)} | settings)
