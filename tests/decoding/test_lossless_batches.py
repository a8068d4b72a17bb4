"""The distribution of a batch is the product of its rows' distributions: exact enumeration of the real loop, and
chi-square tests.

The rows share one verification budget, and the confidences depend on the drafted tokens: a row's length depends on its
neighbour's draws, and its distribution must not.
"""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)

from benchmarks.policy_baselines import EliminationScheduler, GlobalScheduler
from hf_dspark import DecodingOptions, FullBlock, Scheduler
from hf_dspark.decoding import drafter as drafter_module
from hf_dspark.decoding.call import make_request
from hf_dspark.decoding.conversation import read_prompt
from hf_dspark.decoding.drafter import Drafter
from hf_dspark.decoding.loop import DecodingLoop
from hf_dspark.decoding.request import Call
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sampling import distributions, verification
from hf_dspark.scheduling.costs import ThroughputTable
from tests.distributions import (
    CLIFF,
    Paths,
    TargetDistribution,
    chi_square_p_value,
    decide_longest,
    decide_trees,
    extend,
    joint_distribution,
    make_pair,
    total_variation,
)
from tests.rows import padded

PROMPTS = ([0, 1, 2, 1, 0], [2, 2, 1])
GAMMA, TOP_TWO = 2, (TopKLogitsWarper(2),)
# Each token costs a little: the rows compete for what their confidences are worth.
SLOPE = ThroughputTable((1, 2, 3, 4, 5, 6), tuple(1 / (1 + 0.2 * n) for n in range(6)))
# One draft token costs as much as four: worth it only if the later ones look good.
STEP = ThroughputTable((1, 2, 3, 4, 5, 6), (1.0, 1.0, 0.85, 0.85, 0.85, 0.85))


def enumerate_rounds(
    monkeypatch,
    target,
    draft,
    policy,
    processors=TOP_TWO,
    prompts=PROMPTS,
    rounds=1,
    length=None,
    prompt_lookup=False,
    plain=None,
    answers=None,
):
    """Enumerate what rounds commit, continued by the target alone; `plain` are its processors if they are others.

    Returns how far the joint distribution of all rows is from the targets' own, and all lengths.
    """
    batch, length, processors = padded(prompts), length or rounds * (GAMMA + 1), LogitsProcessorList(processors)
    config = GenerationConfig(do_sample=True, max_length=60, pad_token_id=0)
    criteria = StoppingCriteriaList([MaxLengthCriteria(60)])
    paths, joint, lengths, truths = Paths(), {}, [], None
    options = DecodingOptions(
        observer=lambda outcome: lengths.append(tuple(outcome.lengths.tolist())),
        prompt_lookup=prompt_lookup or answers is not None,
        answers=answers,
    )
    extra, mask = {"logits_to_keep": 1}, batch["attention_mask"]
    call = Call(batch["input_ids"], processors, criteria, config, extra, policy, options=options, mask=mask)
    honest_invert = distributions.invert

    def invert(probs, uniform):
        return torch.tensor([[0 if row.isnan().any() else paths.choose(row.double())] for row in probs])

    monkeypatch.setattr(
        verification, "longest_accepted", lambda chances, accept_uniforms: decide_longest(paths, chances)
    )
    decide_trees(monkeypatch, paths)
    for path in paths:
        monkeypatch.setattr(distributions, "invert", honest_invert)
        torch.manual_seed(11)
        cache, drafter = SlotCache(len(prompts)), Drafter(target, draft, call, SlotCache(len(prompts)))
        read = [read_prompt(call, row, cache) for row in range(len(prompts))]
        requests = [make_request(call, row, row, prompt) for row, prompt in enumerate(read)]
        loop = DecodingLoop(drafter, call, cache)
        loop.admit(requests, [prompt.fed for prompt in read])  # the first tokens are the same on all paths
        starts = [request.length for request in requests]
        truths = truths or [
            TargetDistribution(target, plain or processors, prompt=request.token_ids[None]) for request in requests
        ]
        monkeypatch.setattr(distributions, "invert", invert)
        for _ in range(rounds):
            loop.run_round()
        news = [tuple(request.token_ids[start:].tolist()) for request, start in zip(requests, starts, strict=True)]
        rows = [extend(truth, {new: 1.0}, length) for truth, new in zip(truths, news, strict=True)]
        for key, mass in joint_distribution(rows).items():
            joint[key] = joint.get(key, 0.0) + path.probability * mass
    monkeypatch.setattr(distributions, "invert", honest_invert)
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-5)
    return total_variation(joint, product_of(truths, length)), set(lengths)


def product_of(distributions, length):
    return joint_distribution([extend(distribution, {(): 1.0}, length) for distribution in distributions])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "policy", [FullBlock(), Scheduler(SLOPE, trees=False, skip=False), Scheduler(CLIFF, trees=False, skip=False)]
)
def test_a_round_of_two_rows_has_the_joint_distribution_of_both_targets(monkeypatch, make_target, policy):
    distance, lengths = enumerate_rounds(monkeypatch, *make_pair(make_target, gamma=GAMMA), policy)
    assert distance < 5e-6
    if policy != FullBlock():
        assert len(lengths) > 1, "the budget must depend on what was drafted"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=4)], ids=["chain", "tree"])
def test_rounds_have_the_targets_distribution_when_the_draft_sees_two_tokens(monkeypatch, make_target, policy):
    target, draft = make_pair(make_target, gamma=GAMMA)
    draft.config.draft_window = 2
    assert enumerate_rounds(monkeypatch, target, draft, policy, prompts=PROMPTS[:1], rounds=2)[0] < 5e-6


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:the draft .* NaN or infinite")
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(SLOPE, trees=False, skip=False)])
def test_a_round_has_the_joint_distribution_when_the_draft_overflows_after_some_tokens(
    monkeypatch, make_target, policy
):
    target, draft = make_pair(make_target, gamma=GAMMA)
    with torch.no_grad():
        draft.markov_head.markov_w1.weight[1] = torch.nan
    distance, lengths = enumerate_rounds(monkeypatch, target, draft, policy)
    assert distance < 5e-6 and any(2 in pair for pair in lengths) and any(1 in pair for pair in lengths)


@pytest.mark.slow
def test_that_enumeration_catches_a_scheduler_that_looks_ahead(monkeypatch, make_target):
    distances = []
    for scheduler in (GlobalScheduler(STEP, accept_bias=True), EliminationScheduler(STEP, accept_bias=True)):
        pair = make_pair(make_target, gamma=GAMMA, seed=5)
        distances.append(enumerate_rounds(monkeypatch, *pair, scheduler)[0])
    assert max(distances) > 0.01


def sampled_pairs(target, draft, calls, sequences=16):
    """Draw two tokens after each of two prompts, many rows in one batch, and count them by neighbouring rows."""
    counts = {}
    torch.manual_seed(5)
    for _ in range(calls):
        output = target.generate(
            **padded(PROMPTS), assistant_model=draft, do_sample=True, top_k=0, max_new_tokens=2, pad_token_id=0,
            num_return_sequences=sequences,
        )[:, 5:].tolist()  # fmt: skip
        for first, second in zip(output[:sequences], output[sequences:], strict=True):
            key = (tuple(first), tuple(second))
            counts[key] = counts.get(key, 0) + 1
    return counts


def joint_truth(target):
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    return product_of([TargetDistribution(target, LogitsProcessorList(), prompt) for prompt in prompts], 2)


@pytest.fixture
def pair(make_target):
    target, draft = make_pair(make_target, gamma=3, seed=5)
    wide = ThroughputTable(tuple(range(1, 129)), tuple(1.0 / (1.0 + 0.05 * max(0, n - 40)) for n in range(1, 129)))
    draft.decoding = DecodingOptions(policy=Scheduler(wide, trees=False, skip=False))
    return target, draft


def test_generate_draws_neighbours_from_their_joint_distribution(target, draft):
    assert chi_square_p_value(sampled_pairs(target, draft, calls=70), joint_truth(target)) > 1e-3


@pytest.mark.parametrize("used_again_by", ["a row", "the next block"])
def test_noise_used_twice_is_caught(target, draft, monkeypatch, used_again_by):
    honest = drafter_module.block_noise

    def again(seed, request_ids, blocks, block_size, device):
        if used_again_by == "a row":
            request_ids = [request % 16 for request in request_ids]
        else:
            blocks = [0] * len(blocks)
        return honest(seed, request_ids, blocks, block_size, device)

    monkeypatch.setattr(drafter_module, "block_noise", again)
    assert chi_square_p_value(sampled_pairs(target, draft, calls=40), joint_truth(target)) < 1e-6
