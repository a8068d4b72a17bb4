"""The pair under `examples/gsm8k_pair`: what the README says about it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import DSparkDraftModel

PAIR = Path(__file__).parent.parent / "examples" / "gsm8k_pair"
OPTIONS = {
    "default": {},
    "threshold": {"assistant_confidence_threshold": 0.6},
    "three_drafts": {"num_assistant_tokens": 3},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "no_repeat_ngram": {"no_repeat_ngram_size": 6},
    "min_new_tokens": {"min_new_tokens": 100},
}


@pytest.fixture(scope="module")
def shipped():
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    draft = DSparkDraftModel.from_pretrained(PAIR / "draft", dtype=torch.float32).eval()
    prompts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    return target, draft, [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]


def compare(shipped, prompts, options) -> float:
    """Assert equality with plain `generate()` on every prompt; return tau."""
    target, draft, _ = shipped
    plain_options = {key: value for key, value in options.items() if "assistant" not in key}
    accepted, rounds = 0, 0
    for ids in prompts:
        plain = target.generate(ids, do_sample=False, max_new_tokens=128, **plain_options)
        assisted = target.generate(ids, do_sample=False, max_new_tokens=128, assistant_model=draft, **options)
        assert assisted.tolist() == plain.tolist()
        accepted, rounds = accepted + sum(draft.last_stats.accepted), rounds + draft.last_stats.rounds
    return 1 + accepted / rounds


def test_shipped_pair_is_small_and_complete(shipped):
    target, draft, prompts = shipped
    size = sum(file.stat().st_size for file in PAIR.rglob("*") if file.is_file())
    assert size <= 30e6
    assert len(prompts) == 50
    assert (PAIR / "LICENSE-GSM8K").exists()
    assert 12 <= target.config.num_hidden_layers <= 16
    assert (draft.config.num_hidden_layers, draft.config.block_size) == (2, 7)


def test_shipped_pair_answers_as_the_target_alone(shipped):
    assert compare(shipped, shipped[2][:6], {}) > 2.5


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("draft_top_k", [None, 32], ids=["full_vocabulary", "draft_top_k"])
def test_all_shipped_prompts_are_answered_as_by_the_target_alone(shipped, options, draft_top_k):
    shipped[1].config.draft_top_k = draft_top_k
    compare(shipped, shipped[2], options)
