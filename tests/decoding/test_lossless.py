"""The product: output law = target law. Exact enumeration of whole rounds, and chi-square tests of `generate()`
itself.

Each positive statement has a negative control: the same measurement on a rule that is known to be lossy.
"""

import itertools

import pytest
import scipy.stats
import torch
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dspark import (
    AdaptiveDrafting,
    ConfidenceThreshold,
    DSparkConfig,
    DSparkDraftModel,
    FullBlock,
    LaggedScheduler,
    PrefixScheduler,
    SLOLimit,
)
from hf_dspark.decoding import drafter as candidate_generator
from hf_dspark.decoding.drafter import ProcessedSampler
from hf_dspark.decoding.processing import BlockProcessor
from hf_dspark.decoding.request import Request, StopRule
from hf_dspark.maths.costs import Load, ThroughputTable
from hf_dspark.maths.policies import EarlyStopScheduler, GlobalScheduler
from hf_dspark.maths.sampling import DraftBlock, TokenLaw, acceptance_probability, residual_distribution, verify_block
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.targets.feature_capture import FeatureCapture

VOCAB = 3
PROMPT = torch.tensor([[0, 1, 2, 1, 0]])
ROUNDING = 2e-6  # total variation that float32 logits may leave


class EnumeratingSampler:
    """Returns given tokens with the law that the real sampler would have drawn them from."""

    def __init__(self, tokens, processors):
        self.tokens, self.processors = tokens, processors

    def __call__(self, logits, candidate_ids, drafted_ids):
        ids, rule = torch.cat([PROMPT[0], torch.zeros(4).long()]), StopRule(StoppingCriteriaList())
        request = Request(0, ids, PROMPT.shape[1], 99, self.processors, rule)
        uniform = torch.zeros(1, len(self.tokens))
        sampler = ProcessedSampler(BlockProcessor(self.processors, VOCAB), [request], uniform, VOCAB)
        _, law = sampler(logits, candidate_ids, drafted_ids)
        return torch.tensor([self.tokens[drafted_ids.shape[1]]]), law


def make_pair(make_target, gamma=2, seed=0, **overrides):
    target = make_target(vocab_size=VOCAB, seed=seed, pad_token_id=None)
    torch.manual_seed(seed + 1)
    config = DSparkConfig.from_target(
        target.config, num_hidden_layers=1, block_size=gamma, markov_rank=4, mask_token_id=2, **overrides
    )
    draft = DSparkDraftModel(config).eval()
    with torch.no_grad():
        for parameter in draft.parameters():  # far from the target, so that rejections matter
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.6)
        if config.draft_vocab_size is not None:
            draft.d2t.copy_(torch.tensor([0, 1]))  # tokens 0 and 2
        if config.confidence_head_with_markov:
            # c_k is high behind tokens 0 and 2 and low behind token 1, so a threshold of 0.5 cuts behind it.
            wanted = torch.tensor([2.0, -2.0, 2.0])
            draft.confidence_head.proj.weight.zero_()
            solution = torch.linalg.lstsq(draft.markov_head.markov_w1.weight, wanted[:, None]).solution
            draft.confidence_head.proj.weight[0, -config.markov_rank :] = solution[:, 0]
            draft.confidence_head.proj.bias.zero_()
    return target, draft.bind(target)


class TargetLaw:
    """The target's processed law after the prompt and a prefix; each prefix is computed once."""

    def __init__(self, target, processors, prompt=PROMPT):
        self.target, self.processors, self.prompt, self.known = target, processors, prompt, {}

    def __call__(self, prefix):
        if prefix not in self.known:
            ids = torch.cat([self.prompt, torch.tensor([list(prefix)], dtype=torch.long)], dim=1)
            with torch.no_grad():
                scores = self.processors(ids, self.target(ids).logits[:, -1].float())
            self.known[prefix] = scores.softmax(-1)[0].double()
        return self.known[prefix]


def planned_length(policy, block):
    max_lengths = torch.tensor([block.token_ids.shape[1]])
    confidence = None if block.confidence_logits is None else block.confidence_logits.sigmoid()
    return int(policy.plan_verify(confidence, max_lengths, Load())[0])


def output_law(target, draft, policy, processors, claimed_law=None, cut=None):
    """Enumerate one round, then continue with the target alone: the law of the first γ+1 tokens.

    `claimed_law` replaces the draft law in the ratio test, `cut` the length: both for negative controls.
    """
    gamma = draft.config.block_size
    with FeatureCapture(target, draft.config.target_layer_ids) as capture, torch.no_grad():
        target(PROMPT[:, :-1])
        features = capture.take(draft.device, draft.dtype)
    law, target_law = {}, TargetLaw(target, processors)
    for path in itertools.product(range(VOCAB), repeat=gamma):
        sampler = EnumeratingSampler(path, processors)
        block = draft.draft_block(PROMPT[:, -1], features, SlotCache(), sampler, committed_ids=PROMPT[0, 1:])
        drawn_from = block.law.dense(VOCAB).probs[0].double()
        path_probability = drawn_from.gather(1, torch.tensor(path)[:, None]).prod().item()
        if path_probability == 0.0:
            continue
        length = planned_length(policy, block)
        length = length if cut is None else cut(path, length)
        draft_probs = drawn_from if claimed_law is None else claimed_law(block)
        reached = path_probability
        for slot in range(length + 1):
            after_prefix = target_law(path[:slot])
            if slot == length:
                next_law, stop = after_prefix, 1.0
            else:
                token = path[slot]
                accept = acceptance_probability(after_prefix[token], draft_probs[slot][token]).item()
                next_law, stop = residual_distribution(after_prefix, draft_probs[slot]), 1.0 - accept
            for token in range(VOCAB):
                sequence = (*path[:slot], token)
                law[sequence] = law.get(sequence, 0.0) + reached * stop * next_law[token].item()
            reached *= 1.0 - stop
    return extend(target_law, law, gamma + 1)


def extend(target_law, law, length):
    """Continue every sequence with the target's own law."""
    complete = {}
    for sequence, probability in law.items():
        missing = length - len(sequence)
        for tail in itertools.product(range(VOCAB), repeat=missing):
            mass = probability
            for index in range(missing):
                mass *= target_law(sequence + tail[:index])[tail[index]].item()
            complete[sequence + tail] = complete.get(sequence + tail, 0.0) + mass
    return complete


def total_variation(first, second):
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys())


PROCESSORS = {
    "none": [],
    "temperature_top_p": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)],
    "top_k": [TopKLogitsWarper(2)],
}
HEADS = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "hidden_only_confidence": {"confidence_head_with_markov": False},
    "draft_top_k": {"draft_top_k": 2},
    "fill_in": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "pruned": {"draft_vocab_size": 2},
}


# One bucket of two tokens, a cliff, then a slow rise.
CLIFF = ThroughputTable((1, 2, 3, 4, 5), (1.0, 1.0, 0.5, 0.48, 0.47))
SLOW_DRAFT = ThroughputTable((1, 2, 3, 4, 5), (0.7, 0.7, 0.45, 0.42, 0.4), drafting=0.9)


@pytest.mark.parametrize(
    "policy",
    [FullBlock(), ConfidenceThreshold(0.5), EarlyStopScheduler(CLIFF), PrefixScheduler(CLIFF)],
    ids=["full", "threshold", "algorithm_one", "hull_and_fill"],
)
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_round_leaves_the_target_law_unchanged(make_target, head, processors, policy):
    target, draft = make_pair(make_target, **head)
    processors = LogitsProcessorList(processors)
    law = output_law(target, draft, policy, processors)
    assert total_variation(law, extend(TargetLaw(target, processors), {(): 1.0}, 3)) < ROUNDING


def test_round_leaves_the_target_law_unchanged_at_gamma_three(make_target):
    target, draft = make_pair(make_target, gamma=3, seed=3)
    processors = LogitsProcessorList()
    law = output_law(target, draft, ConfidenceThreshold(0.4), processors)
    assert total_variation(law, extend(TargetLaw(target, processors), {(): 1.0}, 4)) < ROUNDING


def test_threshold_really_cuts_in_the_enumerated_rounds(make_target):
    target, draft = make_pair(make_target)
    lengths = set()
    with FeatureCapture(target, draft.config.target_layer_ids) as capture, torch.no_grad():
        target(PROMPT[:, :-1])
        features = capture.take(draft.device, draft.dtype)
    for path in itertools.product(range(VOCAB), repeat=2):
        sampler = EnumeratingSampler(path, LogitsProcessorList())
        block = draft.draft_block(PROMPT[:, -1], features, SlotCache(), sampler)
        lengths.add(planned_length(ConfidenceThreshold(0.5), block))
    assert lengths == {1, 2}


def test_cutting_behind_a_drafted_eos_is_lossless(make_target):
    target, draft = make_pair(make_target)
    processors, eos = LogitsProcessorList(), 1

    def behind_eos(path, length):
        return min([length] + [slot + 1 for slot, token in enumerate(path) if token == eos])

    law = output_law(target, draft, FullBlock(), processors, cut=behind_eos)
    assert total_variation(law, extend(TargetLaw(target, processors), {(): 1.0}, 3)) < ROUNDING


def test_enumeration_catches_a_cut_that_looks_at_its_own_token(make_target):
    target, draft = make_pair(make_target)
    processors, eos = LogitsProcessorList(), 1

    def before_eos(path, length):
        return min([length] + [slot for slot, token in enumerate(path) if token == eos])

    law = output_law(target, draft, FullBlock(), processors, cut=before_eos)
    assert total_variation(law, extend(TargetLaw(target, processors), {(): 1.0}, 3)) > 0.01


def test_enumeration_catches_a_scheduler_that_looks_ahead(make_target):
    """One token costs more than it brings, two bring more: x_1 is verified only if it promises a good x_2."""
    target, draft = make_pair(make_target, seed=7)
    cost, processors = ThroughputTable((1, 2, 3), (1.0, 0.4, 0.4)), LogitsProcessorList()
    truth = extend(TargetLaw(target, processors), {(): 1.0}, 3)
    looking_ahead = output_law(target, draft, GlobalScheduler(cost, accept_bias=True), processors)
    assert total_variation(looking_ahead, truth) > 0.05
    assert total_variation(output_law(target, draft, PrefixScheduler(cost), processors), truth) < ROUNDING


def naming_the_worst(draft, monkeypatch):
    """Let the worst of guesses name the candidates: the law that they are drawn from must be known all the same."""
    monkeypatch.setattr(draft, "rough_logits", lambda hidden: -draft.base_logits(hidden))


def law_of_drafts(target, draft, path=(0, 0)):
    with FeatureCapture(target, draft.config.target_layer_ids) as capture, torch.no_grad():
        target(PROMPT[:, :-1])
        features = capture.take(draft.device, draft.dtype)
    sampler = EnumeratingSampler(path, LogitsProcessorList())
    block = draft.draft_block(PROMPT[:, -1], features, SlotCache(), sampler, committed_ids=PROMPT[0, 1:])
    return block.law.dense(VOCAB).probs[0].double()


@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_round_leaves_the_target_law_unchanged_whoever_names_the_candidates(
    make_target, head, processors, monkeypatch
):
    target, draft = make_pair(make_target, draft_top_k=2, markov_head_type=head)
    processors = LogitsProcessorList(processors)
    of_the_best = law_of_drafts(target, draft)
    naming_the_worst(draft, monkeypatch)
    assert ((law_of_drafts(target, draft) > 0) != (of_the_best > 0)).any()
    law = output_law(target, draft, FullBlock(), processors)
    assert total_variation(law, extend(TargetLaw(target, processors), {(): 1.0}, 3)) < ROUNDING


def test_enumeration_catches_the_law_of_other_candidates(make_target, monkeypatch):
    target, draft = make_pair(make_target, draft_top_k=2)
    processors, of_the_best = LogitsProcessorList(), law_of_drafts(target, draft)
    naming_the_worst(draft, monkeypatch)
    law = output_law(target, draft, FullBlock(), processors, claimed_law=lambda block: of_the_best)
    assert total_variation(law, extend(TargetLaw(target, processors), {(): 1.0}, 3)) > 0.01


def test_enumeration_catches_a_test_against_the_wrong_draft_law(make_target):
    target, draft = make_pair(make_target, draft_top_k=2)
    processors = LogitsProcessorList()

    def flattened(block):
        return torch.full((2, VOCAB), 1.0 / VOCAB, dtype=torch.double)

    law = output_law(target, draft, FullBlock(), processors, claimed_law=flattened)
    assert total_variation(law, extend(TargetLaw(target, processors), {(): 1.0}, 3)) > 0.01


def test_appendix_a_example_of_a_look_ahead_scheduler_is_lossy_and_early_stop_is_not():
    """DSpark Appendix A: SPS = {1: 1, 2: .5, 3: .45}; c_2 reveals x_1, and a global search uses it to admit x_1."""
    target, drafts = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    steps_per_second, first = {1: 1.0, 2: 0.5, 3: 0.45}, 0.8

    def law_of_first_token(admits):
        law = torch.zeros(2)
        for token in range(2):
            if admits(0.9 if token == 0 else 0.0):
                accept = acceptance_probability(target[token], drafts[token])
                law[token] += drafts[token] * accept
                law += drafts[token] * (1 - accept) * residual_distribution(target, drafts)
            else:
                law += drafts[token] * target
        return law

    def global_search(second):
        survival = [first, first * second]
        throughput = [(1 + sum(survival[:length])) * steps_per_second[1 + length] for length in range(3)]
        return throughput.index(max(throughput)) >= 1

    def early_stop(second):
        return (1 + first) * steps_per_second[2] > steps_per_second[1]

    torch.testing.assert_close(law_of_first_token(global_search), torch.tensor([0.85, 0.15]))
    torch.testing.assert_close(law_of_first_token(early_stop), torch.tensor([0.7, 0.3]))


def test_verify_block_draws_from_the_target_law():
    generator = torch.Generator().manual_seed(0)
    draws, vocab = 40_000, 4
    target = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    draft = torch.tensor([0.1, 0.4, 0.3, 0.2])
    token_ids = torch.multinomial(draft.expand(draws, -1), 1, generator=generator)
    block = DraftBlock(token_ids, TokenLaw(draft.expand(draws, 1, vocab)), None)
    verified = verify_block(
        block, torch.ones(draws, dtype=torch.long), TokenLaw(target.repeat(draws, 1)), 2 * torch.arange(draws),
        torch.rand(draws, 1, generator=generator), torch.rand(draws, generator=generator),
    )  # fmt: skip
    first = torch.where(verified.num_accepted == 1, token_ids[:, 0], verified.next_token_ids)
    assert scipy.stats.chisquare(first.bincount(minlength=vocab), (target[0] * draws).numpy()).pvalue > 1e-3
    bonus = verified.next_token_ids[verified.num_accepted == 1]
    assert scipy.stats.chisquare(bonus.bincount(minlength=vocab), (target[1] * len(bonus)).numpy()).pvalue > 1e-3


def sampled_sequences(target, draft, num_draws, **options):
    """Draw the 4 tokens behind the prompt `num_draws` times through the real `generate()`."""
    torch.manual_seed(7)
    counts = {}
    for _ in range(num_draws):
        ids = target.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            assistant_model=draft,
            do_sample=True,
            top_k=0,
            max_new_tokens=4,
            pad_token_id=0,
            **options,
        )
        key = tuple(ids[0, PROMPT.shape[1] :].tolist())
        counts[key] = counts.get(key, 0) + 1
    return counts


def chi_square_p_value(counts, law):
    """P-value with rare outcomes pooled (expected counts of at least 5)."""
    total = sum(counts.values())
    common = {key: mass for key, mass in law.items() if mass * total >= 5}
    observed = [counts.get(key, 0) for key in common]
    expected = [mass * total for mass in common.values()]
    rest = total - sum(expected)
    if rest > 1e-6 * total:
        observed, expected = [*observed, total - sum(observed)], [*expected, rest]
    return scipy.stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize(
    "options", [{}, {"assistant_confidence_threshold": 0.5}, {"temperature": 0.7}], ids=["full", "threshold", "cool"]
)
def test_generate_samples_from_the_target_law(make_target, options):
    target, draft = make_pair(make_target, gamma=3, seed=5)
    processors = LogitsProcessorList([TemperatureLogitsWarper(options.get("temperature", 1.0))])
    counts = sampled_sequences(target, draft, num_draws=700, **options)
    assert chi_square_p_value(counts, extend(TargetLaw(target, processors), {(): 1.0}, 4)) > 1e-3


@pytest.mark.parametrize(
    "policy",
    [
        PrefixScheduler(CLIFF),
        LaggedScheduler(CLIFF, lag=1),
        AdaptiveDrafting(SLOLimit(FullBlock(), CLIFF, 1.3, mode="expected"), SLOW_DRAFT),
    ],
    ids=["hull_and_fill", "lagged", "adaptive_limited"],
)
def test_generate_samples_from_the_target_law_under_a_scheduler(make_target, policy):
    target, draft = make_pair(make_target, gamma=3, seed=5)
    proposed = {}
    for name, choice in (("full", FullBlock()), ("tested", policy)):
        draft.policy, proposed[name] = choice, []
        draft.observer = lambda outcome, lengths=proposed[name]: lengths.append(int(outcome.lengths[0]))
        sampled_sequences(target, draft, num_draws=30)
    assert sum(proposed["tested"]) < 0.9 * sum(proposed["full"])  # the policy really decides
    counts = sampled_sequences(target, draft, num_draws=700)
    assert chi_square_p_value(counts, extend(TargetLaw(target, LogitsProcessorList()), {(): 1.0}, 4)) > 1e-3


def test_chi_square_catches_drafts_tested_against_a_wrong_law(make_target, monkeypatch):
    target, draft = make_pair(make_target, gamma=3, seed=5)
    honest = candidate_generator.ProcessedSampler.__call__

    def flattened(self, *arguments):
        token_ids, law = honest(self, *arguments)
        return token_ids, TokenLaw(torch.full_like(law.probs, 1 / VOCAB))

    monkeypatch.setattr(candidate_generator.ProcessedSampler, "__call__", flattened)
    counts = sampled_sequences(target, draft, num_draws=700)
    assert chi_square_p_value(counts, extend(TargetLaw(target, LogitsProcessorList()), {(): 1.0}, 4)) < 1e-6
