"""A seed may return, and its noise must not where a call knows of earlier ones: what it knows was drawn by that."""

from collections import Counter

import pytest
import torch

from hf_dspark import ConfidenceThreshold, DecodingOptions, FullBlock, PromptLookup, attach, decode_with, generate_many
from hf_dspark.decoding import drafter as drafter_module
from hf_dspark.sampling.noise import CallKeys
from hf_dspark.scheduling import step_costs
from hf_dspark.scheduling.costs import ThroughputTable
from hf_dspark.scheduling.learning import LearnedCosts
from hf_dspark.scheduling.prompt_lookup import AnswerMemory
from tests.distributions import PROMPT, chi_square_p_value, distribution_of_call, make_pair

pytestmark = pytest.mark.learns
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}


def called(target, **options):
    return target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **SAMPLED, **options)


def attached_call(target, draft):
    with attach(target, draft):
        called(target)


def in_another_domain(target, draft):
    domain = f"{draft.decoding.domain}."
    draft.config.sts_temperatures = {domain: [1.0] * draft.config.block_size}
    draft.decoding = DecodingOptions(domain=domain)
    called(target, assistant_model=draft)


def by_another_draft(target, draft):
    other = PromptLookup(target)
    other.decoding = draft.decoding
    called(target, assistant_model=other)


DOORS = {
    "assistant_model": lambda target, draft: called(target, assistant_model=draft),
    "decode_with": lambda target, draft: called(target, custom_generate=decode_with(draft)),
    "generate_many": lambda target, draft: [
        *generate_many(target, draft, PROMPT.tolist() * 2, None, 2, progress=False, **SAMPLED)
    ],
    "attach": attached_call,
}
KNOWING = {
    "default": lambda: DecodingOptions(),
    "chains": lambda: DecodingOptions(trees=False, prompt_lookup=False),
    "answers": lambda: DecodingOptions(policy=FullBlock(), answers=AnswerMemory()),
    "both": lambda: DecodingOptions(answers=AnswerMemory()),
    "transformers_loop": lambda: DecodingOptions(use_transformers_loop=True),
}
CASES = {
    f"{door}-{name}": (DOORS[door], options)
    for door in DOORS
    for name, options in KNOWING.items()
    if name != "transformers_loop" or door == "assistant_model"
} | {"domains": (in_another_domain, KNOWING["default"]), "drafts": (by_another_draft, KNOWING["both"])}


def seeds_of(monkeypatch, call, count=4):
    """Return the seeds of the noise of calls that all begin with the same one."""
    honest, seen = drafter_module.block_noise, []
    monkeypatch.setattr(drafter_module, "block_noise", lambda seed, *rest: seen[-1].add(seed) or honest(seed, *rest))
    for _ in range(count):
        seen.append(set())
        torch.manual_seed(3)
        call()
    assert all(len(seeds) == 1 for seeds in seen)
    return set.union(*seen)


@pytest.mark.one_in(9)
@pytest.mark.filterwarnings("ignore:this call goes through transformers' assisted loop")
@pytest.mark.parametrize(("door", "options"), CASES.values(), ids=CASES)
def test_calls_that_know_of_earlier_ones_have_noise_of_their_own(make_target, monkeypatch, door, options):
    target, draft = make_pair(make_target, seed=5)
    draft.decoding = options()
    assert len(seeds_of(monkeypatch, lambda: door(target, draft))) == 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("policy", [FullBlock(), ConfidenceThreshold(0.5)], ids=["full", "threshold"])
def test_calls_that_know_of_no_other_repeat_their_noise(make_target, monkeypatch, door, policy):
    target, draft = make_pair(make_target, seed=5)
    draft.decoding = DecodingOptions(policy=policy)
    assert len(seeds_of(monkeypatch, lambda: door(target, draft))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_honest", [True, False])
def test_a_policy_that_learnt_from_a_seed_has_the_targets_distribution_with_it(make_target, monkeypatch, is_honest):
    target, draft = make_pair(make_target, gamma=3, seed=5)
    cost, counts, length = ThroughputTable((1, 64), (0.8, 1 / 17), drafting=0.05), Counter(), 3
    monkeypatch.setattr(step_costs, "estimated_cost", lambda *_: cost)
    monkeypatch.setattr(LearnedCosts, "observe", lambda *_: None)
    if not is_honest:
        monkeypatch.setattr(CallKeys, "__call__", lambda _: 0)
    for seed in range(250):
        step_costs.read_again()
        for _ in range(2):
            torch.manual_seed(seed)
            output = called(target, assistant_model=draft)
        counts[tuple(output[0, PROMPT.shape[1] :][:length].tolist())] += 1
    p_value = chi_square_p_value(counts, distribution_of_call(target, length))
    assert p_value > 1e-3 if is_honest else p_value < 1e-6
