"""How `generate()` reaches a draft: the wraps, `decode_with`, pipelines, whose options hold, the default policy."""

import copy
import subprocess
import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, pipeline
from transformers.generation import GenerationMixin

from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    FullBlock,
    Scheduler,
    decode_with,
    generate_many,
)
from hf_dspark.decoding import hook, install
from hf_dspark.targets.support import TargetSupport
from tests.distributions import TABLE
from tests.rows import GREEDY, assert_same_tokens, padded


def test_installing_twice_wraps_once():
    before = GenerationMixin._assisted_decoding
    install.install()
    assert GenerationMixin._assisted_decoding is before


@pytest.mark.slow
def test_draft_without_the_import_gets_transformers_own_explanation(tmp_path, pair):
    pair[1].save_pretrained(tmp_path)
    program = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "dspark" in done.stderr


def test_other_assistants_keep_working(target, prompt_ids):
    torch.manual_seed(0)
    facts = target.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}
    small = Qwen3ForCausalLM(Qwen3Config(**facts)).eval()
    assert_same_tokens(target, small, prompt_ids[0])
    assert_same_tokens(target, None, prompt_ids[0], {"prompt_lookup_num_tokens": 3})
    batch = torch.cat([prompt_ids[0][:, :5], prompt_ids[1][:, :5]])
    assert target.generate(batch, num_beams=2, **GREEDY).shape[0] == 2


def test_a_draft_that_was_left_on_the_cpu_is_warned_about(target, draft, monkeypatch):
    monkeypatch.setattr(TargetSupport, "input_device", torch.device("cuda:0"))
    with pytest.warns(UserWarning, match=r"on the CPU, the target on cuda:0: .* draft.to\('cuda:0'\)"):
        hook.plan_call(target, draft, draft.decoding, target.generation_config, {})


def test_decode_with_is_the_same_without_the_wraps(target, draft, prompts, monkeypatch):
    batch = padded(prompts)
    expected = target.generate(**batch, assistant_model=draft, **GREEDY)
    for name in install.WRAPPED_PARAMETERS:
        method = getattr(install.GenerationMixin, name)
        monkeypatch.setattr(install.GenerationMixin, name, getattr(method, "__wrapped__", method))
    assert target.generate(**batch, custom_generate=decode_with(draft), **GREEDY).tolist() == expected.tolist()
    with pytest.raises(TypeError, match="DSparkDraftModel"):
        decode_with(target.config)


def test_threshold_of_the_call_comes_before_the_drafts_policy(target, draft, prompt_ids):
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(1.0))
    target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    assert sum(draft.last_stats.proposed) == 0
    target.generate(prompt_ids[0], assistant_model=draft, assistant_confidence_threshold=0.0, **GREEDY)
    assert max(draft.last_stats.proposed) == draft.config.block_size


def test_calls_do_not_share_a_policys_memory(target, draft, prompt_ids):
    draft.decoding = DecodingOptions(policy=Scheduler(TABLE, lag=2, skip=False))
    runs = []
    for _ in range(2):
        target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
        runs.append(draft.last_stats.proposed)
    assert runs[0] == runs[1] and len(draft.decoding.policy._rankings) == 0


@pytest.mark.learns
def test_drafts_are_scheduled_by_what_calls_teach_of_these_models_and_this_regime(target, draft):
    draft = copy.deepcopy(draft)  # of which nothing is known
    ours, again = hook.default_policy(draft, target), hook.default_policy(draft, target)
    sampled, other = hook.default_policy(draft, target, None, None, (True, None)), copy.deepcopy(draft)
    assert ours == again and ours.cost is again.cost and ours != hook.default_policy(other, target)
    assert sampled.cost.costs is ours.cost.costs and sampled.cost.acceptance is not ours.cost.acceptance
    for _ in range(3):
        assert_same_tokens(target, draft, torch.tensor([[5, 6, 7]]))
    assert ours.cost.costs.rounds > 0 and draft.last_stats.policy["cost"].startswith("learned from estimate")


def test_options_of_a_call_come_before_those_of_the_draft(target, draft, prompts):
    seen, ids = [], torch.tensor(prompts[:1])
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(1.0), observer=lambda _: pytest.fail("not this one"))
    options = DecodingOptions(policy=FullBlock(), observer=seen.append)
    expected = target.generate(ids, **GREEDY)
    assert torch.equal(target.generate(ids, custom_generate=decode_with(draft, options), **GREEDY), expected)
    assert len(seen) == draft.last_stats.rounds and draft.last_stats.policy == {"name": "FullBlock"}
    (answer,) = generate_many(target, draft, prompts[:1], progress=False, decoding=options, **GREEDY)
    assert answer.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
    assert draft.last_stats.policy == {"name": "FullBlock"} and draft.decoding.policy == ConfidenceThreshold(1.0)


def test_the_default_policy_is_chosen_once_a_call(target, draft, prompt_ids, monkeypatch):
    chosen, honest = [], hook.default_policy
    monkeypatch.setattr(hook, "default_policy", lambda *models: chosen.append(models) or honest(*models))
    target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    assert len(chosen) == 1


@pytest.mark.parametrize("when", ["made", "called"])
def test_pipeline_takes_a_draft(pair, prompt_ids, tokenizer, when):
    (target, draft), ask = pair, {"do_sample": False, "max_new_tokens": 20}
    made, text = pipeline("text-generation", model=target, tokenizer=tokenizer), tokenizer.decode(prompt_ids[0][0])
    plain, assistant = made(text, **ask), {"assistant_model": draft}
    if when == "made":
        made = pipeline("text-generation", model=target, tokenizer=tokenizer, **assistant)
    assert made(text, **ask, **(assistant if when == "called" else {})) == plain
    assert draft.last_stats.tau > 2
