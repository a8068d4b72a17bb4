"""Acceptance measured by decoding, against the rounds that decoding itself reports."""

import math

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from hf_dspark import AcceptanceReport, compare_domains, measure_acceptance, measure_domains, tokens_per_pass

PROMPTS = [[3, 9, 12], [30, 7], [5, 5, 8, 41, 2], [17]]


def test_acceptance_is_that_of_all_rounds_of_all_prompts(pair):
    target, draft = pair
    accepted, rounds, reached = 0, 0, [[0, 0] for _ in range(5)]
    for prompt in PROMPTS:
        target.generate(torch.tensor([prompt]), assistant_model=draft, max_new_tokens=20, do_sample=False)
        accepted, rounds = accepted + sum(draft.last_stats.accepted), rounds + draft.last_stats.rounds
        for slot, counts in enumerate(reached, start=1):
            counts[0] += draft.last_stats.accepted_at(slot)
            counts[1] += draft.last_stats.reached(slot)
    report = measure_acceptance(target, draft, PROMPTS, max_new_tokens=20, do_sample=False, progress=False)
    assert report.tau == pytest.approx(1 + accepted / rounds) and report.rounds == rounds and report.prompts == 4
    assert 2 < report.tau < 6
    assert report.acceptance == pytest.approx([part / whole for part, whole in reached])


def test_measuring_leaves_the_policy_alone_even_when_a_prompt_fails(pair):
    target, draft = pair
    before = draft.policy = object()
    with pytest.raises(Exception, match="999"):
        measure_acceptance(target, draft, [[999]], max_new_tokens=4, progress=False)
    assert draft.policy is before
    draft.policy = None


def test_measuring_needs_a_prompt(pair):
    with pytest.raises(ValueError, match="there is no prompt to measure on"):
        measure_acceptance(*pair, [], progress=False)


def test_domains_are_measured_one_by_one_and_compared(pair):
    target, draft = pair
    domains = {"short": PROMPTS[:2], "long": PROMPTS[2:]}
    before = measure_domains(target, draft, domains, max_new_tokens=12, do_sample=False, progress=False)
    assert before["short"].prompts == before["long"].prompts == 2
    after = {name: AcceptanceReport(1.5 * report.tau, [0.5, 0.25], 2, 4, 24) for name, report in before.items()}
    table = compare_domains(before, after)
    assert table.count("+50%") == 2 and "| short |" in table and "→ 0.25" in table
    with pytest.raises(ValueError, match=r"before has the domains \['long', 'short'\], after has \['short'\]"):
        compare_domains(before, {"short": after["short"]})


def test_a_position_that_was_never_reached_has_no_acceptance():
    class Rounds:
        tau, rounds = 1.0, 3

        def reached(self, position):
            return 3 if position == 1 else 0

        def accepted_at(self, position):
            return 0

    report = AcceptanceReport.of(Rounds(), 2, prompts=1, tokens=3)
    assert report.acceptance[0] == 0.0 and math.isnan(report.acceptance[1])
    assert report.to_dict()["acceptance"] == [0.0, None]


def test_plain_decoding_takes_one_pass_per_token(target):
    assert tokens_per_pass(target, PROMPTS, max_new_tokens=9, do_sample=False) == 1.0


def test_tokens_per_pass_sees_transformers_own_assistance(pair):
    target, draft = pair
    report = measure_acceptance(target, draft, PROMPTS, max_new_tokens=20, do_sample=False, progress=False)
    draft.use_transformers_loop = True
    rate = tokens_per_pass(target, PROMPTS, max_new_tokens=20, do_sample=False, assistant_model=draft)
    draft.use_transformers_loop = False
    assert rate == pytest.approx(report.tau, rel=0.1)  # the last round of a prompt may be cut


def test_tokens_per_pass_measures_multi_token_prediction(monkeypatch):
    """One MTP layer, random: transformers loads real ones from the target's own checkpoint."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this transformers has no multi-token prediction")
    config = DeepseekV3Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8,
        first_k_dense_replace=3, num_nextn_predict_layers=1,
    )  # fmt: skip
    target = DeepseekV3ForCausalLM(config).eval()
    mtp = modeling_layers.MtpModel(target, 1).eval()
    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", lambda *args, **kwargs: mtp)
    rate = tokens_per_pass(target, PROMPTS, max_new_tokens=12, do_sample=False, use_mtp=True)
    assert 1.0 <= rate <= 2.0  # one draft token a round at most


def test_tokens_per_pass_needs_more_than_the_prefill(target):
    with pytest.raises(ValueError, match="nothing was decoded behind the first token"):
        tokens_per_pass(target, PROMPTS, max_new_tokens=1, do_sample=False)
