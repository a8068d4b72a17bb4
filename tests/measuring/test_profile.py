"""Measuring a machine: what is timed, for which targets, and which settings are refused."""

import itertools
import random
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig

from hf_dspark import (
    DecodingOptions,
    Eagle3Config,
    Eagle3DraftModel,
    FullBlock,
    PromptLookup,
    Rounds,
    profile_throughput,
)
from hf_dspark.measuring import profile as profiling
from hf_dspark.scheduling.costs import Load
from hf_dspark.scheduling.step_costs import cache_folder, find_cost, known_profiles


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Each test has an empty cache."""
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    known_profiles.cache_clear()
    yield
    known_profiles.cache_clear()


@pytest.fixture
def profile(target, draft, steady_clock):
    return profile_throughput(target, draft, batch_sizes=(1, 2), context_lengths=(8, 24), repetitions=1)


def test_profile_measures_every_length_of_one_request_and_full_blocks_of_several(profile, draft):
    gamma = draft.config.block_size
    assert profile.table.verify_tokens == (*range(1, gamma + 2), 2 * (1 + gamma))
    assert {(s.requests, s.verify_tokens) for s in profile.samples["target"]} == {
        *((1, 1 + length) for length in range(gamma + 1)), (2, 2), (2, 2 * (1 + gamma // 2)), (2, 2 * (1 + gamma)),
    }  # fmt: skip
    assert {s.context_tokens for s in profile.samples["target"]} == {8, 24, 16, 48}
    assert 0 < profile.table.drafting < 1 / max(profile.table.steps_per_second)


def test_profile_times_trees_and_remembers_them(target, draft, profile):
    known = find_cost(target, draft)
    assert (known.trees, known.best_trees) == (profile.table.trees, profile.table.best_trees)
    for points, is_drawn in ((known.trees, True), (known.best_trees, False)):
        nodes, seconds = zip(*points, strict=True)
        assert nodes == profiling.TREE_NODES and min(seconds) > 0
        rounds = known.tree_seconds(Load(), 31, is_drawn)
        assert rounds[[7, 15, 31]].tolist() == pytest.approx(list(seconds))


def test_a_round_takes_what_the_loop_takes_and_best_tokens_are_compared_as_if_they_were_drawn(target, draft, clock):
    # Of one request 5 passes of the target and one of the draft, then rounds with a chain and three trees, drawn and
    # best tokens; of two requests 3 passes of the target and one of the draft. Each in 5 turns, at two lengths.
    rounds = [1.6, 1.8, 1.8, 1.8] + [1.4, 1.7, 1.7, 1.7]
    clock((2 * (5 * ([1.0] * 5 + [0.5] + rounds) + 5 * ([1.0] * 3 + [0.5]))).__getitem__)
    table = profile_throughput(target, draft, cache=False, **SETTINGS).table
    assert list(table.steps_per_second) == pytest.approx([1 / 1.6] * 6) and table.drafting == 0.5
    assert [dict(points)[7] for points in (table.trees, table.best_trees)] == pytest.approx([1.8, 1.7 + 1.6 - 1.4])


def test_drafts_that_grow_no_trees_are_measured_without(target, steady_clock):
    draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, block_size=4))
    draft.grows_trees = False
    table = profile_throughput(target, draft, (1, 2), (8, 9), repetitions=1).table
    assert (table.trees, table.best_trees) == ((), ())


def test_prompt_lookup_has_no_passes_to_measure(target):
    with pytest.raises(ValueError, match="PromptLookup runs no draft"):
        profile_throughput(target, PromptLookup(target), (1, 2), (8, 9), repetitions=1)


def test_profile_leaves_the_draft_as_it_was(target, draft, steady_clock):
    draft.last_stats, draft.decoding = Rounds(), DecodingOptions(policy=FullBlock())
    before = draft.last_stats, draft.decoding
    profile_throughput(target, draft, batch_sizes=(1, 2), context_lengths=(8, 24), repetitions=1)
    assert draft.last_stats is before[0] and draft.decoding is before[1]
    ids = torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    assert torch.equal(target.generate(ids, assistant_model=draft, **options), target.generate(ids, **options))


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
    assert len(measured.samples["target"]) == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_sizes": ()}, "batch_sizes must be two or more increasing"),
        ({"batch_sizes": (2, 1)}, "batch_sizes must be two or more increasing"),
        ({"batch_sizes": (2, 4)}, "must begin with 1"),
        ({"context_lengths": (0, 8)}, "context_lengths must be two or more increasing"),
        ({"context_lengths": (8, 256)}, "stay below the target's 256"),
        ({"batch_sizes": (1,)}, "batch_sizes must be two or more"),
        ({"context_lengths": (8,)}, "context_lengths must be two or more"),
        ({"repetitions": 0}, "repetitions must be at least 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_measured(target, draft, settings, message):
    with pytest.raises(ValueError, match=message):
        profile_throughput(target, draft, **{"context_lengths": (8, 16)} | settings)


@pytest.fixture
def clock(monkeypatch):
    """Let passes take the seconds that a function returns, given their number, in place of their own."""

    def set_to(seconds_of_pass) -> None:
        def seconds_of(one_pass, device):
            one_pass()
            return seconds_of_pass(next(number))

        number = itertools.count()
        monkeypatch.setattr(profiling, "_seconds_of", seconds_of)

    return set_to


SETTINGS = {"batch_sizes": (1, 2), "context_lengths": (8, 16), "repetitions": 4}


def test_a_steady_machine_is_remembered_with_time_and_spread(target, draft, clock):
    clock(lambda number: 1.0 + 0.001 * (number % 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = profile_throughput(target, draft, **SETTINGS)
    assert 0 < profile.table.provenance["spread"] < 0.01 and profile.table.provenance["measured"].startswith("20")
    assert find_cost(target, draft).provenance["spread"] == profile.table.provenance["spread"]


def test_a_pass_that_scattered_is_measured_again_and_the_steady_times_are_kept(target, draft, clock):
    noise = random.Random(0)
    clock(lambda number: 1.0 if number >= 40 else noise.choice((1.0, 9.0)))  # other work ends after 40 passes
    profile = profile_throughput(target, draft, **SETTINGS)
    assert find_cost(target, draft) is not None and profile.table.provenance["spread"] < 0.5
    assert all(sample.seconds == 1.0 for part in profile.samples.values() for sample in part)


def test_passes_are_timed_in_turns(target, draft, clock):
    """A machine that slows down for good while it is measured slows all kinds of passes alike."""
    clock(lambda number: 1.0 + 0.01 * number)
    samples = profile_throughput(target, draft, cache=False, **SETTINGS).samples
    setting = [
        each.seconds for part in samples.values() for each in part if (each.requests, each.context_tokens) == (1, 8)
    ]
    assert len(setting) == 14 and max(setting) - min(setting) < 0.15


@pytest.mark.parametrize(
    ("seconds_of_pass", "fault"),
    [
        (lambda number: random.Random(number).choice((1.0, 9.0)), "lay .* apart"),
        # Of one request there are 14 in turns: passes over 1 to 5 tokens, one of the draft, and whole rounds.
        (
            lambda number: 5.0 if number % 14 == 0 and number < 3 * 5 * 14 else 1.0,
            "over 1 tokens? took 5.0 times as long",
        ),
    ],
)
def test_what_cannot_be_believed_to_the_end_is_not_kept(target, draft, clock, seconds_of_pass, fault):
    clock(seconds_of_pass)
    with pytest.warns(UserWarning, match=f"is not kept: .* {fault}.* measure again when nothing else runs"):
        profile_throughput(target, draft, **SETTINGS)
    assert find_cost(target, draft) is None and not cache_folder().exists()
