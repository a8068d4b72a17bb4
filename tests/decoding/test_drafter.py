"""Policies in calls: what is drafted, how it is cut, and what a round that does not draft leaves intact."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from benchmarks.policy_baselines import EliminationScheduler, GlobalScheduler, linear_cost
from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    Eagle3Config,
    Eagle3DraftModel,
    FullBlock,
    Policy,
    Scheduler,
    ThroughputTable,
    generate_many,
)
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.targets.feature_capture import FeatureCapture
from hf_dspark.targets.support import TargetSupport
from tests.distributions import HEADS, PROMPT, TABLE, EnumeratingSampler, make_pair
from tests.features import new_context
from tests.rows import GREEDY, EverySecond, alone, assert_same_tokens
from tests.samplers import ChainSampler

SLOW_DRAFT = linear_cost(0.2, 1.0, 6.0)


class AtMostThree(Policy):
    def limit_lengths(self, max_lengths, load):
        return max_lengths.clamp(max=3)

    def plan_verify(self, confidence, max_lengths, load):
        return max_lengths.clamp(max=3)


POLICIES = {
    "full": FullBlock(),
    "threshold": ConfidenceThreshold(0.6),
    "cumulative": ConfidenceThreshold(0.5, cumulative=True),
    "hull_and_fill": Scheduler(TABLE, trees=False, skip=False),
    "lagged": Scheduler(TABLE, lag=2, skip=False),
    "global": GlobalScheduler(TABLE),
    "elimination": EliminationScheduler(TABLE),
    "limit": Scheduler(TABLE, trees=False, skip=False, tpot_seconds=0.5),
    "adaptive": Scheduler(SLOW_DRAFT, trees=False),
    "every_second": EverySecond(),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_greedy_tokens_are_the_same_under_every_policy(target, draft, prompt_ids, policy):
    draft.decoding = DecodingOptions(policy=policy)
    for prompt in prompt_ids[:2]:
        assert_same_tokens(target, draft, prompt)


def test_policies_really_differ_in_what_they_verify(target, draft, prompt_ids):
    proposed = {}
    for name, policy in POLICIES.items():
        draft.decoding = DecodingOptions(policy=policy)
        target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
        proposed[name] = tuple(draft.last_stats.proposed)
    assert len(set(proposed.values())) >= 7
    assert 0 in proposed["every_second"] and 0 in proposed["adaptive"]


def test_skipped_rounds_feed_the_drafts_context(target, draft, prompt_ids):
    """A block drafted after skipped rounds must be the block that a draft with the whole context would write."""
    seen = []

    class Spy(EverySecond):
        def fresh(self):
            return self

        def observe(self, outcome):
            seen.append(outcome)

    draft.decoding = DecodingOptions(policy=Spy())
    output = target.generate(prompt_ids[0], assistant_model=draft, **GREEDY | {"max_new_tokens": 40})
    committed = prompt_ids[0].shape[1] + 1
    drafted, support = 0, TargetSupport.of(target)
    for outcome in seen:
        if outcome.drafted:
            drafted += 1
            prefix = output[:, :committed]
            with FeatureCapture(support, draft.config.target_layer_ids) as capture, torch.no_grad():
                target(prefix[:, :-1])
                features = capture.take(draft.device, draft.dtype)
            num_tokens = outcome.drafts.token_ids.shape[1]
            block = draft.draft_block(new_context(prefix[:, -1], features, SlotCache()), ChainSampler(), num_tokens)
            torch.testing.assert_close(outcome.drafts.confidence_logits, block.confidence_logits, atol=1e-3, rtol=1e-3)
            assert torch.equal(outcome.drafts.token_ids, block.token_ids)
        committed += int(outcome.num_accepted[0]) + 1
    assert drafted > 5 and len(seen) > 2 * drafted - 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("policy", "options", "widths"),
    [
        (FullBlock(), {"num_assistant_tokens": 2}, {2}),
        (AtMostThree(), {}, {3}),
        (FullBlock(), {}, {5}),
    ],
    ids=["num_assistant_tokens", "policy", "whole"],
)
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_blocks_end_where_nothing_more_can_be_sent(target, draft, prompt_ids, kind, policy, options, widths):
    if kind == "eagle3":
        draft = Eagle3DraftModel(Eagle3Config.from_target(target.config, block_size=5)).eval()
    rounds, options = [], GREEDY | {"eos_token_id": None} | options  # of the observer
    draft.decoding = DecodingOptions(policy=policy, observer=rounds.append)
    output = target.generate(prompt_ids[0], assistant_model=draft, **options)
    assert torch.equal(output, target.generate(prompt_ids[0], **(options | {"num_assistant_tokens": None})))
    room = [GREEDY["max_new_tokens"] - 1 - sum(draft.last_stats.committed[:place]) - 1 for place in range(len(rounds))]
    assert [int(outcome.lengths[0]) for outcome in rounds] == draft.last_stats.proposed
    for outcome, left in zip(rounds, room, strict=True):
        width = outcome.drafts.token_ids.shape[1]
        assert outcome.drafted == (width > 0)
        assert width in {min(most, left) for most in widths} and width == int(outcome.lengths[0])


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_shorter_block_is_the_beginning_of_a_whole_one(make_target, head):
    """The same tokens, by the same distributions, with the same confidences: only what cannot be sent is left out."""
    target, draft = make_pair(make_target, gamma=3, **head)
    features = torch.randn(1, 4, len(draft.config.target_layer_ids) * draft.config.hidden_size)
    headless = not draft.config.enable_confidence_head
    samplers = [EnumeratingSampler((0, 2, 1), LogitsProcessorList(), headless) for _ in range(2)]
    whole, short = (
        draft.draft_block(new_context(PROMPT[:, -1], features, SlotCache()), sampler, count)
        for sampler, count in zip(samplers, (None, 2), strict=True)
    )
    assert torch.equal(short.token_ids, whole.token_ids[:, :2])
    torch.testing.assert_close(short.distribution.probs, whole.distribution.probs[:, :2])
    torch.testing.assert_close(short.confidence_logits, whole.confidence_logits[:, :2])


def test_drafts_get_shorter_as_the_engine_fills(target, draft, prompt_ids):
    policy = Scheduler(ThroughputTable((1, 64, 128, 256), (100.0, 99.0, 50.0, 25.0)), trees=False, skip=False)
    means, asked = [], []

    def two_hundred():
        asked.append(200)
        return 200

    for tokens in (0, 100, 200, two_hundred):
        draft.decoding = DecodingOptions(policy=policy, other_tokens=tokens)
        target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
        means.append(sum(draft.last_stats.proposed) / draft.last_stats.rounds)
    assert means[0] > means[1] and means[0] > means[2] == means[3]
    assert len(asked) >= draft.last_stats.rounds - 1  # asked anew in every round


@pytest.mark.parametrize("length", [-1, 99])
def test_impossible_lengths_of_a_policy_are_refused(target, draft, prompt_ids, length):
    class Odd(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            return torch.full_like(max_lengths, length)

    draft.decoding = DecodingOptions(policy=Odd())
    with pytest.raises(ValueError, match=rf"Odd.plan_verify must return lengths in .*got \[{length}\]"):
        target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)


@pytest.mark.parametrize("parts", [1, 16])
def test_the_draft_reads_on_while_nothing_is_drafted(target, draft, prompts, monkeypatch, parts):
    class Never(Policy):
        def plan_draft(self, load):
            return load.context_tokens > 40

        def plan_verify(self, confidence, max_lengths, load):
            return max_lengths.clone()

    monkeypatch.setattr("hf_dspark.decoding.drafter.WAITING_AT_MOST", 8)
    monkeypatch.setattr("hf_dspark.decoding.drafter.PARTS_AT_MOST", parts)
    waiting, drafted = [], []
    honest = draft.read_block

    def read_block(context):
        waiting.append(max(context.counts))
        return honest(context)

    monkeypatch.setattr(draft, "read_block", read_block)
    observer = lambda outcome: drafted.append((outcome.drafted, outcome.drafts))  # noqa: E731
    draft.decoding = DecodingOptions(policy=Never(), observer=observer)
    ids = torch.tensor(prompts[:1])
    output = target.generate(ids, assistant_model=draft, **(GREEDY | {"max_new_tokens": 70, "eos_token_id": None}))
    late, longest_wait = next(block for was, block in drafted if was), max(waiting)
    times = draft.last_stats.seconds
    idle = [spent.draft for spent, proposed in zip(times, draft.last_stats.proposed, strict=True) if not proposed]
    assert 0 in idle and any(idle)  # reading on is the draft's time, too
    drafted.clear()
    draft.decoding = DecodingOptions(observer=observer)
    target.generate(output[:, : 41 - 1], assistant_model=draft, **(GREEDY | {"max_new_tokens": 3}))
    assert longest_wait <= 9
    assert output[0, ids.shape[1] :].tolist() == alone(target, prompts[0], max_new_tokens=70, eos_token_id=None)
    block = drafted[0][1].token_ids
    assert block.tolist() == late.token_ids[:, : block.shape[1]].tolist()


# ---- numbers that overflow


HALF = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "top_k": {"do_sample": True, "top_k": 20, "top_p": 0.9},
    "forbidding": {"do_sample": True, "suppress_tokens": [1, 2]},
    "threshold": {"assistant_confidence_threshold": 0.5},
    "transformers": {"do_sample": True, "use_transformers_loop": True},
    "transformers, greedy": {"use_transformers_loop": True},
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("options", HALF.values(), ids=HALF)
@pytest.mark.parametrize("head", [{}, {"draft_top_k": 8}, {"draft_vocab_size": 24}], ids=["dense", "top_k", "pruned"])
def test_a_draft_that_overflows_drafts_nothing_and_says_so_once(make_target, make_draft, head, options):
    target = make_target()
    with torch.no_grad():  # massive activations, as real targets have them
        target.model.layers[0].mlp.down_proj.weight.mul_(3e5)
    draft = make_draft(target, **head).half()
    draft.name_or_path = "me/draft"
    options = {"max_new_tokens": 12} | options
    by_transformers = options.pop("use_transformers_loop", False)
    draft.decoding = DecodingOptions(policy=FullBlock(), use_transformers_loop=by_transformers)
    batch = {"input_ids": torch.randint(1, 48, (1 if by_transformers else 3, 9))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with pytest.warns(UserWarning, match="NaN or infinite") as warnings:
        output = target.generate(**batch, assistant_model=draft, **options)
    said = [str(each.message) for each in warnings if "NaN or infinite" in str(each.message)]
    assert len(said) == 1 and "me/draft" in said[0] and "torch.float16" in said[0]
    assert set(draft.last_stats.proposed) == {0} and (draft.last_stats.loop == "transformers") == by_transformers
    if "do_sample" not in options:
        options.pop("assistant_confidence_threshold", None)
        assert torch.equal(output, target.generate(**batch, **options))


TWO_ROWS = torch.tensor([[5, 6, 8], [9, 4, 3]])
WHOLE = {"attention_mask": torch.ones_like(TWO_ROWS), "max_new_tokens": 30}


def test_a_confidence_that_is_no_number_disturbs_no_policy_that_can_do_without(make_target, make_draft):
    target = make_target()
    draft = make_draft(target)
    with torch.no_grad():
        draft.confidence_head.proj.bias.fill_(torch.nan)
    draft.decoding = DecodingOptions(policy=AtMostThree())
    output = target.generate(TWO_ROWS, assistant_model=draft, do_sample=False, **WHOLE)
    assert torch.equal(output, target.generate(TWO_ROWS, do_sample=False, **WHOLE))
    assert 0 < max(draft.last_stats.proposed) < draft.config.block_size  # the limit did choose


def test_rows_whose_numbers_do_not_overflow_go_on_drafting(make_target, make_draft):
    target = make_target()
    draft = make_draft(target)
    draft.decoding = DecodingOptions(policy=FullBlock())
    plain = target.generate(TWO_ROWS, do_sample=False, **WHOLE)
    broken = next(token for token in plain[0, 5:].tolist() if token not in plain[1])
    with torch.no_grad():
        draft.markov_head.markov_w1.weight[broken] = torch.nan
    with pytest.warns(UserWarning, match="NaN or infinite"):
        assert torch.equal(target.generate(TWO_ROWS, do_sample=False, assistant_model=draft, **WHOLE), plain)
    rounds = list(zip(draft.last_stats.request_ids, draft.last_stats.proposed, strict=True))
    first, second = ([length for row, length in rounds if row == each] for each in (0, 1))
    assert first[0] == 4 and first[-2:] == [0, 0] and 0 not in second[:-1]


def nan_after(target, token):
    """Let the target give no numbers after a token."""

    def spoil(module, arguments, output):
        hidden = output.last_hidden_state
        hidden[..., 0] = torch.where(module.seen == token, torch.nan, hidden[..., 0])
        return output

    target.model.register_forward_pre_hook(
        lambda module, _, kwargs: setattr(module, "seen", kwargs["input_ids"]), with_kwargs=True
    )
    target.model.register_forward_hook(spoil)


class ForbidsAllFrom(LogitsProcessor):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        return scores if input_ids.shape[1] < self.length else torch.full_like(scores, -torch.inf)


MESSAGE = "probability tensor contains either `inf`, `nan` or element < 0"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use_transformers_loop", [False, True])
@pytest.mark.parametrize("length", [0, 9], ids=["at_once", "later"])
@pytest.mark.parametrize("truncation", [{"top_k": 0}, {"top_k": 20, "top_p": 0.9}], ids=["all", "top_k"])
def test_forbidding_all_tokens_fails_as_in_plain_sampling_and_goes_on_greedily(
    target, draft, prompt_ids, length, truncation, use_transformers_loop
):
    draft.decoding = DecodingOptions(use_transformers_loop=use_transformers_loop)
    processors = LogitsProcessorList([ForbidsAllFrom(prompt_ids[0].shape[1] + length)])
    sampled = GREEDY | {"do_sample": True, "eos_token_id": None, "logits_processor": processors} | truncation
    for assistant in (None, draft):
        with pytest.raises(RuntimeError, match=MESSAGE):
            target.generate(prompt_ids[0], assistant_model=assistant, **sampled)
    assert_same_tokens(target, draft, prompt_ids[0], logits_processor=processors)


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("error:the draft .* NaN")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
def test_a_draft_is_not_blamed_for_what_processors_do(target, draft, prompt_ids, value, options):
    class Spoils(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, value) if input_ids.shape[1] > 20 else scores

    processors = LogitsProcessorList([Spoils()])
    options = GREEDY | options | {"logits_processor": processors, "eos_token_id": None}
    if not options["do_sample"]:
        assert_same_tokens(target, draft, prompt_ids[0], **options)
    else:
        with pytest.raises(RuntimeError, match=MESSAGE):
            target.generate(prompt_ids[0], assistant_model=draft, **options)


def test_a_target_without_numbers_fails_as_in_plain_sampling_and_goes_on_greedily(make_target, make_draft):
    target = make_target()
    draft = make_draft(target)
    nan_after(target, int(target.generate(TWO_ROWS, do_sample=False, **WHOLE)[0, 8]))
    plain = target.generate(TWO_ROWS, do_sample=False, **WHOLE)
    assert (plain[0, 9:] == 0).any(), "the arg-max of what is no number is token 0"
    assert torch.equal(target.generate(TWO_ROWS, do_sample=False, assistant_model=draft, **WHOLE), plain)
    for assistant in (None, draft):
        with pytest.raises(RuntimeError, match=MESSAGE):
            target.generate(TWO_ROWS, assistant_model=assistant, do_sample=True, temperature=1e-3, **WHOLE)


def test_of_many_prompts_only_those_without_a_possible_token_fail(target, draft, prompts):
    processors = LogitsProcessorList([ForbidsAllFrom(25)])
    options = GREEDY | {"do_sample": True, "top_k": 1, "eos_token_id": None, "max_new_tokens": 10}
    found = generate_many(target, draft, prompts, progress=False, **options, logits_processor=processors)
    for each in found:
        if len(prompts[each.index]) + 10 <= 25:
            assert each.token_ids.tolist() == alone(target, prompts[each.index], **options)
        else:
            assert MESSAGE in str(each.error) and (each.token_ids >= 0).all()
    everything_forbidden = LogitsProcessorList([ForbidsAllFrom(10)])
    found = generate_many(target, draft, prompts, progress=False, **options, logits_processor=everything_forbidden)
    assert all(MESSAGE in str(each.error) for each in found)
