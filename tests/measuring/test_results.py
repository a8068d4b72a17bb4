"""Result files hold who was measured, what was found and where, or say what is missing."""

import json

import pytest
import torch
from transformers import GenerationConfig

from hf_dspark import ConfidenceThreshold, FullBlock, Scheduler, ThroughputTable
from hf_dspark.files import Journal
from hf_dspark.measuring.results import (
    describe_draft,
    describe_sampling,
    describe_target,
    read_results,
    short_policy,
    write_result,
)
from hf_dspark.measuring.timed_decoding import effective_config

FOUND = {"sampling": {"do_sample": False}, "policy": {"name": "FullBlock"}, "domains": {"math": {"tau": 3.0}}}


def test_what_was_written_is_read(make_target, make_draft, tmp_path):
    make_target().save_pretrained(tmp_path / "private" / "mine")
    target = type(make_target()).from_pretrained(tmp_path / "private" / "mine")
    assert describe_target(target)["name"] == "mine"  # no path is shown
    who = describe_target(target), describe_draft(make_draft(target))
    written = write_result(tmp_path / "deep" / "eval.json", "acceptance", *who, **FOUND)
    assert read_results([tmp_path / "deep"]) == [written]
    assert written["draft"]["num_parameters"] > 0 and written["provenance"]["device"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["eval.json"]
    assert who[0]["device"] == "cpu"
    meta = write_result(tmp_path / "a.json", "acceptance", who[0] | {"device": "meta"}, {}, **FOUND)
    assert meta["provenance"]["device"] == "meta"


def test_settings_of_an_interrupted_evaluation_are_no_result(tmp_path):
    written = write_result(tmp_path / "a.json", "acceptance", {}, {}, **FOUND)
    Journal(tmp_path / "b.json.partial.jsonl", {"seed": 0}).append({"index": 0})
    assert len(list(tmp_path.iterdir())) == 3 and read_results(tmp_path) == [written]


def test_policies_are_named_in_a_few_words():
    one = ThroughputTable((1, 8), (95, 94))
    assert short_policy(None) == short_policy("FullBlock()") == short_policy(FullBlock().to_dict()) == "whole block"
    assert short_policy(ConfidenceThreshold(0.5, cumulative=True).to_dict()) == "survival threshold 0.5"
    assert short_policy(Scheduler(one, lag=5).to_dict()) == "Scheduler, lag 5"
    assert short_policy(Scheduler(one, tpot_seconds=0.02).to_dict()) == "Scheduler, 20 ms"


CONFIG = GenerationConfig(max_new_tokens=8)
COOL_CONFIG = GenerationConfig(max_new_tokens=8, temperature=0.5)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 0, "temperature": 0.7}, {"generation_config": CONFIG}, {"generation_config": COOL_CONFIG}],
)
def test_sampling_is_described_as_generate_draws(make_target, options):
    target = make_target()
    target.generation_config.update(do_sample=True, temperature=0.6, eos_token_id=[3, 5])
    # What transformers hands to a decoding method of one's own is what it would decode by itself.
    method = lambda *_, generation_config, **__: generation_config  # noqa: E731
    prepared = target.generate(torch.tensor([[1, 2]]), custom_generate=method, **options)
    found = describe_sampling(options, target, seed=0)
    assert found["do_sample"] and prepared.do_sample
    drawn = {name: getattr(prepared, name) for name in ("temperature", "top_k", "top_p")}
    assert {"top_p": 1.0} | {name: found[name] for name in drawn if name in found} == drawn
    assert effective_config(target, options).eos_token_id == prepared.eos_token_id == [3, 5]


def test_results_without_their_facts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs domains"):
        write_result(tmp_path / "a.json", "acceptance", {}, {}, sampling={}, policy={})
    with pytest.raises(ValueError, match="one of .*'acceptance'.* got 'wishes'"):
        write_result(tmp_path / "a.json", "wishes", {}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "acceptance"}', '{"tau": 9}'])
def test_files_that_are_no_results_are_named(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ValueError, match=r"b\.json"):
        read_results([tmp_path])


def test_numbers_that_json_cannot_hold_are_refused_and_nothing_is_left(tmp_path):
    old = write_result(tmp_path / "c.json", "acceptance", {}, {}, **FOUND)
    with pytest.raises(ValueError):
        write_result(tmp_path / "c.json", "acceptance", {}, {}, **FOUND | {"domains": {"x": float("nan")}})
    assert json.loads((tmp_path / "c.json").read_text()) == old
