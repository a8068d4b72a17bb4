"""`draft.policy`, `draft.load` and calibration in `generate()`: who decides, what is refused, what skipping leaves
intact."""

import json
import logging

import pytest
import torch

from hf_dspark import (
    AdaptiveDrafting,
    ConfidenceThreshold,
    DSparkConfig,
    DSparkDraftModel,
    FullBlock,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    SLOLimit,
    ThroughputTable,
)
from hf_dspark.decoding import hook as generate_hook
from hf_dspark.maths.costs import ForwardCost, LinearCost
from hf_dspark.maths.policies import EliminationScheduler, GlobalScheduler
from hf_dspark.maths.sampling import greedy_sampler
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.targets.feature_capture import FeatureCapture

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16, "pad_token_id": 0}
STEEP = LinearCost(ForwardCost(0.0, 0.2, 1.0), ForwardCost(0.0, 0.0, 0.1))
SLOW_DRAFT = LinearCost(ForwardCost(0.0, 0.2, 1.0), ForwardCost(0.0, 0.0, 6.0))
TABLE = ThroughputTable(tuple(range(1, 9)), tuple(1 / (1 + 0.1 * b + (b > 4)) for b in range(1, 9)))


@pytest.fixture(scope="module")
def prompts(fixtures):
    reference = json.loads((fixtures / "deepspec" / "trained" / "generation.json").read_text())
    return [torch.tensor([ids]) for ids in reference["prompts"]]


@pytest.fixture(autouse=True)
def untouched_draft(pair):
    yield
    draft = pair[1]
    draft.policy, draft.load, draft.domain, draft.observer = None, 0, None, None
    draft.config.sts_temperatures = None


class EverySecond(Policy):
    """Drafts in every second round only."""

    def __init__(self):
        self.rounds = 0

    def fresh(self):
        return EverySecond()

    def plan_draft(self, load):
        self.rounds += 1
        return self.rounds % 2 == 0

    def plan_verify(self, confidence, max_lengths, load):
        return max_lengths


POLICIES = {
    "full": FullBlock(),
    "threshold": ConfidenceThreshold(0.6),
    "cumulative": ConfidenceThreshold(0.5, cumulative=True),
    "hull_and_fill": PrefixScheduler(TABLE),
    "lagged": LaggedScheduler(TABLE),
    "global": GlobalScheduler(TABLE),
    "elimination": EliminationScheduler(TABLE),
    "step_limit": SLOLimit(FullBlock(), TABLE, 1.4),
    "expected_limit": SLOLimit(FullBlock(), TABLE, 0.5, mode="expected"),
    "adaptive": AdaptiveDrafting(PrefixScheduler(STEEP), SLOW_DRAFT),
    "every_second": EverySecond(),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_greedy_tokens_are_the_same_under_every_policy(pair, prompts, policy):
    target, draft = pair
    draft.policy = policy
    for prompt in prompts[:4]:
        plain = target.generate(prompt, **GREEDY)
        assert torch.equal(target.generate(prompt, assistant_model=draft, **GREEDY), plain)


def test_policies_really_differ_in_what_they_verify(pair, prompts):
    target, draft = pair
    proposed = {}
    for name, policy in POLICIES.items():
        draft.policy = policy
        target.generate(prompts[0], assistant_model=draft, **GREEDY)
        proposed[name] = tuple(draft.last_stats.proposed)
    assert len(set(proposed.values())) >= 7
    assert 0 in proposed["every_second"] and 0 in proposed["adaptive"]


def test_skipped_rounds_feed_the_drafts_context(pair, prompts):
    """A block drafted after skipped rounds must be the block that a draft with the whole context would write."""
    target, draft = pair
    seen = []

    class Spy(EverySecond):
        def fresh(self):
            return self

        def observe(self, outcome):
            seen.append(outcome)

    draft.policy = Spy()
    output = target.generate(prompts[0], assistant_model=draft, **GREEDY)
    committed = prompts[0].shape[1] + 1
    drafted = 0
    for outcome in seen:
        if outcome.block is not None:
            drafted += 1
            prefix = output[:, :committed]
            with FeatureCapture(target, draft.config.target_layer_ids) as capture, torch.no_grad():
                target(prefix[:, :-1])
                features = capture.take(draft.device, draft.dtype)
            block = draft.draft_block(prefix[:, -1], features, SlotCache(), greedy_sampler)
            torch.testing.assert_close(outcome.block.confidence_logits, block.confidence_logits, atol=1e-3, rtol=1e-3)
            assert torch.equal(outcome.block.token_ids, block.token_ids)
        committed += int(outcome.num_accepted[0]) + 1
    assert drafted > 5 and len(seen) > 2 * drafted - 2


def test_statistics_count_skipped_rounds(pair, prompts):
    target, draft = pair
    draft.policy = EverySecond()
    target.generate(prompts[0], assistant_model=draft, **GREEDY)
    stats = draft.last_stats
    assert stats.rounds == len(stats.proposed) == len(stats.confidence)
    assert sum(stats.accepted) + stats.rounds == GREEDY["max_new_tokens"] - 1
    for proposed, confidence in zip(stats.proposed, stats.confidence, strict=True):
        assert (proposed == 0) or confidence is not None


def test_threshold_of_the_call_comes_before_the_drafts_policy(pair, prompts):
    target, draft = pair
    draft.policy = ConfidenceThreshold(1.0)
    target.generate(prompts[0], assistant_model=draft, **GREEDY)
    assert sum(draft.last_stats.proposed) == 0
    target.generate(prompts[0], assistant_model=draft, assistant_confidence_threshold=0.0, **GREEDY)
    assert max(draft.last_stats.proposed) == draft.config.block_size


def test_policy_is_limited_by_num_assistant_tokens(pair, prompts):
    target, draft = pair
    draft.policy = PrefixScheduler(ThroughputTable((1, 100), (1.0, 1.0)))
    target.generate(prompts[0], assistant_model=draft, num_assistant_tokens=2, **GREEDY)
    assert set(draft.last_stats.proposed[:-1]) == {2}


def test_calls_do_not_share_a_policys_memory(pair, prompts):
    target, draft = pair
    draft.policy = LaggedScheduler(TABLE)
    runs = []
    for _ in range(2):
        target.generate(prompts[0], assistant_model=draft, **GREEDY)
        runs.append(draft.last_stats.proposed)
    assert runs[0] == runs[1] and len(draft.policy._history) == 0


# ---- load


def test_drafts_get_shorter_as_the_engine_fills(pair, prompts):
    target, draft = pair
    draft.policy = PrefixScheduler(ThroughputTable((1, 64, 128, 256), (100.0, 99.0, 50.0, 25.0)))
    totals, asked = [], []
    for tokens in (0, 100, 200):

        def load(tokens=tokens):
            asked.append(tokens)
            return tokens

        draft.load = load
        target.generate(prompts[0], assistant_model=draft, **GREEDY)
        totals.append(sum(draft.last_stats.proposed) / draft.last_stats.rounds)
        assert asked.count(tokens) >= draft.last_stats.rounds - 1  # asked anew in every round
    draft.load = 200
    target.generate(prompts[0], assistant_model=draft, **GREEDY)
    assert sum(draft.last_stats.proposed) / draft.last_stats.rounds == totals[2]
    assert totals[0] > totals[1] and totals[0] > totals[2]


@pytest.mark.parametrize("load", [-1, float("nan"), float("inf"), None, "5", lambda: -5])
def test_impossible_loads_are_refused(pair, prompts, load):
    target, draft = pair
    draft.policy, draft.load = PrefixScheduler(TABLE), load
    with pytest.raises(ValueError, match="draft.load must be a number of tokens, 0 or more, got"):
        target.generate(prompts[0], assistant_model=draft, **GREEDY)


# ---- the default


def test_uncalibrated_drafts_verify_the_full_block(pair, prompts, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(generate_hook, "find_cost", lambda *_: TABLE)
    assert generate_hook.default_policy(draft, target) == FullBlock()


def test_calibrated_drafts_are_scheduled_when_the_machine_is_known(pair, prompts, monkeypatch):
    target, draft = pair
    draft.config.sts_temperatures = {"default": [1.0] * draft.config.block_size}
    monkeypatch.setattr(generate_hook, "find_cost", lambda *_: TABLE)
    assert generate_hook.default_policy(draft, target) == AdaptiveDrafting(PrefixScheduler(TABLE), TABLE)
    monkeypatch.setattr(generate_hook, "find_cost", lambda *_: None)
    assert generate_hook.default_policy(draft, target) == FullBlock()


def test_default_scheduler_runs_in_generate(pair, prompts, monkeypatch, caplog):
    target, draft = pair
    draft.config.sts_temperatures = {"default": [1.0] * draft.config.block_size}
    monkeypatch.setattr(generate_hook, "find_cost", lambda *_: STEEP)
    plain = target.generate(prompts[0], **GREEDY)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(target.generate(prompts[0], assistant_model=draft, **GREEDY), plain)
    assert min(draft.last_stats.proposed[:-1]) < draft.config.block_size
    assert not caplog.text


# ---- refusals


@pytest.mark.parametrize("scheduler", [GlobalScheduler, EliminationScheduler])
def test_policies_that_look_ahead_are_refused_when_drafts_are_sampled(pair, prompts, scheduler):
    target, draft = pair
    for policy in (
        scheduler(TABLE),
        SLOLimit(scheduler(TABLE), TABLE, 5.0),
        AdaptiveDrafting(scheduler(TABLE), TABLE),
    ):
        draft.policy = policy
        with pytest.raises(ValueError, match=r"not causal with this draft.*accept_bias=True"):
            target.generate(prompts[0], assistant_model=draft, **SAMPLED)
    draft.policy = scheduler(TABLE, accept_bias=True)
    target.generate(prompts[0], assistant_model=draft, **SAMPLED)


def test_global_search_is_welcome_when_the_head_reads_no_token(target, make_draft):
    draft = make_draft(target, confidence_head_with_markov=False)
    draft.policy = GlobalScheduler(TABLE)
    ids = torch.tensor([[5, 6, 7]])
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **SAMPLED)
    assert draft.last_stats.rounds > 0


def test_what_is_no_policy_is_refused_by_name(pair, prompts):
    target, draft = pair
    draft.policy = "full"
    with pytest.raises(TypeError, match=r"must be a hf_dspark.Policy, got str without plan_draft"):
        target.generate(prompts[0], assistant_model=draft, **GREEDY)


def test_a_class_instead_of_a_policy_is_refused(pair, prompts):
    target, draft = pair
    draft.policy = PrefixScheduler
    with pytest.raises(TypeError, match="got the class PrefixScheduler: call it"):
        target.generate(prompts[0], assistant_model=draft, **GREEDY)


@pytest.mark.parametrize("length", [-1, 99])
def test_impossible_lengths_of_a_policy_are_refused(pair, prompts, length):
    class Odd(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            return torch.full_like(max_lengths, length)

    target, draft = pair
    draft.policy = Odd()
    with pytest.raises(ValueError, match=rf"Odd.plan_verify must return lengths in .*got \[{length}\]"):
        target.generate(prompts[0], assistant_model=draft, **GREEDY)


def test_the_observer_sees_every_round(pair, prompts):
    target, draft = pair
    seen = []
    draft.observer = seen.append
    target.generate(prompts[0], assistant_model=draft, **GREEDY)
    assert [int(outcome.lengths[0]) for outcome in seen] == draft.last_stats.proposed
    assert all(outcome.drafted == (outcome.block is not None) for outcome in seen)


def test_schedulers_need_a_confidence_head(pair, prompts):
    target, _ = pair
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, markov_rank=4, enable_confidence_head=False))
    for policy in (
        PrefixScheduler(TABLE),
        AdaptiveDrafting(FullBlock(), TABLE),
        SLOLimit(PrefixScheduler(TABLE), TABLE, 1.0),
    ):
        draft.policy = policy
        with pytest.raises(ValueError, match="needs a draft with a confidence head"):
            target.generate(prompts[0], assistant_model=draft, **GREEDY)


def test_a_domain_may_have_temperatures_for_one_regime(pair):
    config, gamma = pair[1].config, pair[1].config.block_size
    config.sts_temperatures = {"default": [1.0] * gamma, "math/greedy": [2.0] * gamma, "math": [3.0] * gamma}
    assert [config.temperatures_for("math", do_sample)[0] for do_sample in (False, True)] == [2.0, 3.0]


def test_temperatures_set_by_hand_are_checked(pair, prompts):
    target, draft = pair
    draft.config.sts_temperatures = {"default": [2.0]}
    with pytest.raises(ValueError, match="1 temperatures for blocks of"):
        target.generate(prompts[0], assistant_model=draft, **GREEDY)


def test_unknown_domains_are_refused(pair, prompts):
    target, draft = pair
    draft.domain = "poems"
    with pytest.raises(ValueError, match="no temperatures for the domain 'poems'"):
        target.generate(prompts[0], assistant_model=draft, **GREEDY)


@pytest.mark.parametrize(
    ("temperatures", "message"),
    [
        ({"greedy": [1.0] * 7}, "have a 'default' entry"),
        ({"default": [1.0]}, "1 temperatures for blocks of 7"),
        ({"default": [0.0] * 7}, "positive numbers"),
    ],
)
def test_config_refuses_impossible_temperatures(temperatures, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig(sts_temperatures=temperatures)
