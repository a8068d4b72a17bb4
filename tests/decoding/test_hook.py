"""How `generate()` reaches a draft: the wraps, `decode_with`, whose options hold, and the default policy."""

import logging
import subprocess
import sys

import pytest
import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation import GenerationMixin

from hf_dspark import (
    AdaptiveDrafting,
    ConfidenceThreshold,
    DecodingOptions,
    FullBlock,
    LaggedScheduler,
    PrefixScheduler,
    ThroughputTable,
    decode_with,
    generate_many,
)
from hf_dspark.decoding import hook, install
from hf_dspark.maths.costs import ForwardCost, LinearCost
from tests.rows import GREEDY, padded


def test_wrapped_methods_have_the_parameters_that_are_used():
    import inspect

    for name, parameters in install.WRAPPED_PARAMETERS.items():
        assert set(parameters) <= set(inspect.signature(getattr(GenerationMixin, name)).parameters)


def test_installing_twice_wraps_once():
    before = GenerationMixin._assisted_decoding
    install.install()
    assert GenerationMixin._assisted_decoding is before


def test_draft_without_the_import_gets_transformers_own_explanation(tmp_path, pair):
    pair[1].save_pretrained(tmp_path)
    program = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "dspark" in result.stderr
    result = subprocess.run(
        [sys.executable, "-c", "import hf_dspark; " + program], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_other_assistants_keep_working(pair, prompt_ids):
    target, _ = pair
    torch.manual_seed(0)
    small = Qwen3ForCausalLM(
        Qwen3Config(**(target.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}))
    ).eval()
    plain = target.generate(prompt_ids[0], **GREEDY)
    assert target.generate(prompt_ids[0], assistant_model=small, **GREEDY).tolist() == plain.tolist()
    assert target.generate(prompt_ids[0], prompt_lookup_num_tokens=3, **GREEDY).tolist() == plain.tolist()
    batch = torch.cat([prompt_ids[0][:, :5], prompt_ids[1][:, :5]])
    assert target.generate(batch, num_beams=2, **GREEDY).shape[0] == 2


def test_decode_with_is_the_same_without_the_wraps(pair, prompts, monkeypatch):
    target, draft = pair
    batch = padded(prompts)
    expected = target.generate(**batch, assistant_model=draft, **GREEDY)
    for name in install.WRAPPED_PARAMETERS:
        method = getattr(install.GenerationMixin, name)
        monkeypatch.setattr(install.GenerationMixin, name, getattr(method, "__wrapped__", method))
    assert target.generate(**batch, custom_generate=decode_with(draft), **GREEDY).tolist() == expected.tolist()


def test_decode_with_needs_a_draft(pair):
    with pytest.raises(TypeError, match="DSparkDraftModel"):
        decode_with(pair[0])


def test_threshold_of_the_call_comes_before_the_drafts_policy(pair, prompt_ids):
    target, draft = pair
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(1.0))
    target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    assert sum(draft.last_stats.proposed) == 0
    target.generate(prompt_ids[0], assistant_model=draft, assistant_confidence_threshold=0.0, **GREEDY)
    assert max(draft.last_stats.proposed) == draft.config.block_size


def test_calls_do_not_share_a_policys_memory(pair, prompt_ids):
    target, draft = pair
    draft.decoding = DecodingOptions(policy=LaggedScheduler(TABLE))
    runs = []
    for _ in range(2):
        target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
        runs.append(draft.last_stats.proposed)
    assert runs[0] == runs[1] and len(draft.decoding.policy._history) == 0


TABLE = ThroughputTable(tuple(range(1, 9)), tuple(1 / (1 + 0.1 * b + (b > 4)) for b in range(1, 9)))


STEEP = LinearCost(ForwardCost(0.0, 0.2, 1.0), ForwardCost(0.0, 0.0, 0.1))


def test_uncalibrated_drafts_verify_the_full_block(pair, prompt_ids, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(hook, "find_cost", lambda *_: TABLE)
    assert hook.default_policy(draft, target) == FullBlock()


def test_calibrated_drafts_are_scheduled_when_the_machine_is_known(pair, prompt_ids, monkeypatch):
    target, draft = pair
    draft.config.sts_temperatures = {"default": [1.0] * draft.config.block_size}
    monkeypatch.setattr(hook, "find_cost", lambda *_: TABLE)
    assert hook.default_policy(draft, target) == AdaptiveDrafting(PrefixScheduler(TABLE))
    monkeypatch.setattr(hook, "find_cost", lambda *_: None)
    assert hook.default_policy(draft, target) == FullBlock()


def test_default_scheduler_runs_in_generate(pair, prompt_ids, monkeypatch, caplog):
    target, draft = pair
    draft.config.sts_temperatures = {"default": [1.0] * draft.config.block_size}
    monkeypatch.setattr(hook, "find_cost", lambda *_: STEEP)
    plain = target.generate(prompt_ids[0], **GREEDY)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(target.generate(prompt_ids[0], assistant_model=draft, **GREEDY), plain)
    assert min(draft.last_stats.proposed[:-1]) < draft.config.block_size
    assert not caplog.text


def test_options_of_a_call_come_before_those_of_the_draft(pair, prompts):
    target, draft = pair
    seen, ids = [], torch.tensor(prompts[:1])
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(1.0), observer=lambda _: pytest.fail("not this one"))
    options = DecodingOptions(policy=FullBlock(), observer=seen.append)
    expected = target.generate(ids, **GREEDY)
    assert torch.equal(target.generate(ids, custom_generate=decode_with(draft, options), **GREEDY), expected)
    assert len(seen) == draft.last_stats.rounds and draft.last_stats.policy == FullBlock()
    (answer,) = generate_many(target, draft, prompts[:1], progress=False, decoding=options, **GREEDY)
    assert answer.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
    assert draft.last_stats.policy == FullBlock() and draft.decoding.policy == ConfidenceThreshold(1.0)


def test_the_default_policy_is_chosen_once_a_call(pair, prompt_ids, monkeypatch):
    target, draft = pair
    chosen, honest = [], hook.default_policy
    monkeypatch.setattr(hook, "default_policy", lambda *models: chosen.append(models) or honest(*models))
    target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    assert len(chosen) == 1
