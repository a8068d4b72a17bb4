"""The pair under `examples/gsm8k_pair`: what the README says about it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dspark
from benchmarks.policy_baselines import linear_cost
from hf_dspark import DecodingOptions, DSparkDraftModel, FullBlock, Scheduler, ThroughputTable
from hf_dspark.scheduling.step_costs import Machine, ThroughputProfile
from tests.rows import assert_rows, padded

PAIR = Path(__file__).parent.parent / "examples" / "gsm8k_pair"
TABLES = sorted((Path(hf_dspark.__file__).parent / "tables").glob("*.json"))
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
    prompts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().strip().split("\n")]
    return target, draft, [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]


def compare(shipped, prompts, options, length=128) -> float:
    """Assert equality with plain `generate()` on every prompt; return tau."""
    target, draft, _ = shipped
    plain_options = {key: value for key, value in options.items() if "assistant" not in key}
    tokens, rounds = 0, 0
    for ids in prompts:
        plain = target.generate(ids, do_sample=False, max_new_tokens=length, **plain_options)
        assisted = target.generate(ids, do_sample=False, max_new_tokens=length, assistant_model=draft, **options)
        assert assisted.tolist() == plain.tolist()
        tokens, rounds = tokens + sum(draft.last_stats.committed), rounds + draft.last_stats.rounds
    return tokens / rounds


def test_shipped_pair_is_small_and_complete(shipped):
    target, draft, prompts = shipped
    size = sum(file.stat().st_size for file in PAIR.rglob("*") if file.is_file())
    assert size <= 30e6
    assert len(prompts) == 50
    assert (PAIR / "LICENSE-GSM8K").exists()
    assert 12 <= target.config.num_hidden_layers <= 16
    assert (draft.config.num_hidden_layers, draft.config.block_size) == (2, 7)


@pytest.mark.parametrize(
    ("policy", "sizes", "length"),
    [
        pytest.param(FullBlock(), (1, 2, 5, 16), 64, id="full_block", marks=pytest.mark.slow),
        pytest.param(None, (1, 2, 5, 16), 64, id="default", marks=pytest.mark.slow),
        pytest.param(None, (3,), 24, id="few"),
    ],
)
def test_batches_of_real_prompts_are_answered_row_by_row_as_alone(shipped, policy, sizes, length, monkeypatch):
    target, draft, prompts = shipped
    prompts = [ids[0] for ids in prompts[: max(sizes)]]
    options = {"do_sample": False, "max_new_tokens": length, "pad_token_id": 0}
    alone = [target.generate(ids[None], **options)[0, len(ids) :].tolist() for ids in prompts]
    monkeypatch.setattr(draft, "decoding", DecodingOptions(policy=policy))
    for size in sizes:
        batch = padded([row.tolist() for row in prompts[:size]])
        output = target.generate(**batch, assistant_model=draft, **options)
        assert_rows(output, batch["input_ids"].shape[1], alone[:size])


def test_shipped_pair_answers_as_the_target_alone(shipped):
    assert compare(shipped, shipped[2][:2], {}, length=64) > 2.5


def test_shipped_draft_is_calibrated_in_both_regimes(shipped):
    draft = shipped[1]
    assert set(draft.config.sts_temperatures) == {"greedy", "sampled", "default"}
    assert draft.config.confidence_fits_for(None, True) != draft.config.confidence_fits_for(None, False)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_shipped_tables_are_complete(path):
    profile = ThroughputProfile.from_dict(json.loads(path.read_text()))
    assert ThroughputTable.load(path).verify_tokens == profile.table.verify_tokens
    assert {"device", "dtype", "threads", "torch", "transformers"} <= set(profile.table.provenance)
    assert profile.table.verify_tokens[: 1 + profile.machine.draft["block_size"]] == tuple(range(1, 9))


def test_a_table_is_shipped_for_the_pair(shipped):
    machine = Machine.of(*shipped[:2])
    assert any(
        (profile.machine.target, profile.machine.draft) == (machine.target, machine.draft)
        for profile in (ThroughputProfile.from_dict(json.loads(path.read_text())) for path in TABLES)
    )


def test_scheduled_rounds_verify_less_and_answer_the_same(shipped, monkeypatch):
    """By default, with a table that prices tokens: whatever machine runs this test."""
    target, draft, prompts = shipped
    cost = linear_cost(1e-3, 8e-3, 3e-3)
    monkeypatch.setattr(draft, "decoding", DecodingOptions(policy=Scheduler(cost, trees=False, skip=False)))
    compare(shipped, prompts[:1], {}, length=64)
    assert sum(draft.last_stats.proposed) < 6 * draft.last_stats.rounds


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("draft_top_k", [None, 32], ids=["full_vocabulary", "draft_top_k"])
def test_shipped_prompts_are_answered_as_by_the_target_alone(shipped, options, draft_top_k):
    shipped[1].config.draft_top_k = draft_top_k
    compare(shipped, shipped[2][:: 5 if options or draft_top_k else 1], options)


@pytest.mark.slow
def test_all_shipped_prompts_are_answered_alike_with_tails(shipped, monkeypatch):
    drawn, slow = [], ThroughputTable((1, 4, 8), (1.0, 0.95, 0.9), drafting=0.5)
    policy = Scheduler(slow, tails=True, trees=False, skip=False)
    options = DecodingOptions(policy=policy, observer=lambda outcome: drawn.append(outcome.is_tail))
    monkeypatch.setattr(shipped[1], "decoding", options)
    compare(shipped, shipped[2], {})
    assert len(shipped[2]) == 50 and sum(drawn) > 25
