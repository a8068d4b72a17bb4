"""Exact distributions of decoding rounds by enumeration, and the distances between distributions."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from benchmarks.policy_baselines import linear_cost
from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.decoding.logits_processing import DraftProcessor
from hf_dspark.decoding.request import Request, StopRule
from hf_dspark.decoding.tree_drafting import Chains
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sampling import drafts, verification
from hf_dspark.sampling.distributions import TokenDistribution
from hf_dspark.sampling.drafts import DraftBlock
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.targets.feature_capture import FeatureCapture
from hf_dspark.targets.support import TargetSupport
from tests.features import new_context
from tests.samplers import ChainSampler

VOCAB = 3
PROMPT = torch.tensor([[0, 1, 2, 1, 0]])
IMPOSSIBLE = 1e-20  # below, a probability stands in for none
ROUNDING = 2e-6  # total variation that float32 logits may leave
# One bucket of two tokens, a cliff, then a slow rise.
CLIFF = ThroughputTable((1, 2, 3, 4, 5), (1.0, 1.0, 0.5, 0.48, 0.47))
# Costs that make schedulers cut: every token a little and the fifth a lot; a steep slope.
TABLE = ThroughputTable(tuple(range(1, 9)), tuple(1 / (1 + 0.1 * b + (b > 4)) for b in range(1, 9)))
STEEP = linear_cost(0.2, 1.0, 0.1)
HEADS = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "hidden_only_confidence": {"confidence_head_with_markov": False},
    "draft_top_k": {"draft_top_k": 2},
    "headless": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "fill_in": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "pruned": {"draft_vocab_size": 2},
    "dflash2": {"markov_head_type": "selector", "draft_top_k": 2, "conv_kernel_size": 2, "conv_group_size": 4},
    "domino": {"markov_head_type": "domino", "markov_start": 1, "confidence_head_with_markov": False},
    "domino_fill_in": {"markov_head_type": "domino", "markov_state_size": 3, "sample_from_anchor": False}
    | {"confidence_head_with_markov": False},
    "v4": {"num_experts": 3, "hc_mult": 2},
}


class EnumeratingSampler(ChainSampler):
    """Returns given tokens with the distribution that the real sampler would have drawn them from."""

    def __init__(self, tokens, processors, lacks_head=False):
        super().__init__()
        request = Request(0, PROMPT[0], 99, processors, StopRule(StoppingCriteriaList()))
        self.tokens = tokens
        self.real = Chains([request], DraftProcessor(processors, VOCAB), torch.zeros(1, len(tokens)), lacks_head)

    def draw(self, logits, candidate_ids):
        self.real.token_ids = self.token_ids
        _, distribution = self.real.draw(logits, candidate_ids)
        return torch.tensor([self.tokens[len(self.token_ids)]]), distribution

    def finish(self, confidence_logits=None):
        return super().finish(self.real.expected_logits() if self.real.lacks_head else confidence_logits)


def make_pair(make_target, gamma=2, seed=0, depth=2, **overrides):
    sizes = {"vocab_size": VOCAB} | ({} if depth is None else {"num_hidden_layers": depth})
    target = make_target(seed=seed, pad_token_id=None, **sizes)
    torch.manual_seed(seed + 1)
    options = {"num_hidden_layers": 1, "block_size": gamma, "markov_rank": 4, "mask_token_id": 2} | overrides
    config = DSparkConfig.from_target(target.config, **options)
    draft = DSparkDraftModel(config).eval()
    with torch.no_grad():
        for parameter in draft.parameters():  # far from the target, so that rejections matter
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.6)
        if config.draft_vocab_size is not None:
            draft.d2t.copy_(torch.tensor([0, 1]))  # tokens 0 and 2
        if config.enable_confidence_head and config.confidence_head_with_markov:
            # c_k is high after tokens 0 and 2 and low after token 1, so a threshold of 0.5 cuts there.
            wanted = torch.tensor([2.0, -2.0, 2.0])
            draft.confidence_head.proj.weight.zero_()
            solution = torch.linalg.lstsq(draft.markov_head.markov_w1.weight, wanted[:, None]).solution
            draft.confidence_head.proj.weight[0, -config.markov_rank :] = solution[:, 0]
            draft.confidence_head.proj.bias.zero_()
    return target, draft.bind(target)


class Paths:
    """Walks through every sequence of random decisions, depth first, with its probability."""

    def __init__(self):
        self.chosen, self.open = [], []

    def __iter__(self):
        while True:
            self.depth, self.probability = 0, 1.0
            yield self
            while self.open and not self.open[-1]:
                self.open.pop(), self.chosen.pop()
            if not self.open:
                return
            self.chosen[-1] = self.open[-1].pop()

    def choose(self, probs):
        """Return an outcome; each has its turn."""
        probs = [float(prob) for prob in probs]
        if self.depth == len(self.chosen):
            possible = [index for index, prob in enumerate(probs) if prob > IMPOSSIBLE]
            self.chosen.append(possible.pop())
            self.open.append(possible)
        index = self.chosen[self.depth]
        self.depth += 1
        self.probability *= probs[index] / sum(probs)
        return index


def decide_trees(monkeypatch, paths):
    """Let every draw of a node and every uniform of its test come from `paths`."""

    def invert(cumulative, removed, point):
        probs = np.diff(cumulative, prepend=0.0)
        for start, size in removed:
            starts = np.abs(cumulative - probs - start) + np.abs(probs - size)
            probs[starts.argmin()] = 0.0
        return paths.choose(probs)

    def accepts(uniform, ratio):
        ratio = min(1.0, max(0.0, ratio))
        return paths.choose([1.0 - ratio, ratio]) == 1

    monkeypatch.setattr(drafts, "invert_without", invert)
    monkeypatch.setattr(verification, "accepts", accepts)


def decide_longest(paths, chances):
    """Let `paths` decide which prefixes are accepted, the longest first: for `verification.longest_accepted`."""
    found = torch.zeros(len(chances), dtype=torch.long)
    for row, chance in enumerate(chances.double().nan_to_num(0.0).clamp(0.0, 1.0).tolist()):
        for count in range(len(chance), 0, -1):
            if paths.choose([1.0 - chance[count - 1], chance[count - 1]]) == 1:
                found[row] = count
                break
    return found


def outcomes(block, length, target_distribution):
    """Yield how many tokens of a block of one row are accepted, with what probability, and the distribution of the
    next one."""
    paths, drawn_from, first = Paths(), [], torch.zeros(1, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            verification, "draw_if_any", lambda distribution, _: drawn_from.append(distribution.probs[0]) or first
        )
        patch.setattr(
            verification, "longest_accepted", lambda chances, accept_uniforms: decide_longest(paths, chances)
        )
        for path in paths:
            found = verification.verify_chains(block, torch.tensor([length]), target_distribution, None, None)
            yield int(found.num_accepted), path.probability, (drawn_from[-1] / drawn_from[-1].sum()).tolist()


class TargetDistribution:
    """The target's processed distribution after the prompt and a prefix; each prefix is computed once."""

    def __init__(self, target, processors, prompt=PROMPT):
        self.target, self.processors, self.prompt, self.known = target, processors, prompt, {}

    def __call__(self, prefix):
        if prefix not in self.known:
            ids = torch.cat([self.prompt, torch.tensor([list(prefix)], dtype=torch.long)], dim=1)
            with torch.no_grad():
                scores = self.processors(ids, self.target(ids).logits[:, -1].float())
            self.known[prefix] = scores.softmax(-1)[0].double()
        return self.known[prefix]


def each_block(target, draft, processors):
    """Yield every possible path of a block after the prompt, with the block that the draft makes of it."""
    with FeatureCapture(TargetSupport.of(target), draft.config.target_layer_ids) as capture, torch.no_grad():
        target(PROMPT[:, :-1])
        features = capture.take(draft.device, draft.dtype)
    ids = PROMPT[0, 1 - draft.reads_own_tokens :]
    for path in itertools.product(range(VOCAB), repeat=draft.config.block_size):
        sampler = EnumeratingSampler(path, processors, not draft.config.enable_confidence_head)
        yield path, draft.draft_block(new_context(PROMPT[:, -1], features, SlotCache(), committed_ids=ids), sampler)


def planned_length(policy, block):
    max_lengths = torch.tensor([block.token_ids.shape[1]])
    confidence = None if block.confidence_logits is None else block.confidence_logits.sigmoid()
    return int(policy.plan_verify(confidence, max_lengths, Load())[0])


def output_distribution(target_distribution, draft, policy, claimed_distribution=None, cut=None):
    """Enumerate one round, then continue with the target alone: the distribution of the first γ+1 tokens.

    `claimed_distribution` replaces the draft distribution in the ratio test, `cut` the length: both for negative
    controls.
    """
    gamma = draft.config.block_size
    distribution = {}
    for path, block in each_block(target_distribution.target, draft, target_distribution.processors):
        drawn_from = block.distribution.dense(VOCAB).probs[0].double()
        path_probability = drawn_from.gather(1, torch.tensor(path)[:, None]).prod().item()
        if path_probability == 0.0:
            continue
        length = planned_length(policy, block)
        length = length if cut is None else cut(path, length)
        draft_probs = drawn_from if claimed_distribution is None else claimed_distribution(block)
        judged = DraftBlock(torch.tensor([path]), TokenDistribution(draft_probs[None]), None)
        after_prefixes = torch.full((1, len(path) + 1, VOCAB), torch.nan, dtype=torch.double)  # none after the length
        for slot in range(length + 1):
            after_prefixes[0, slot] = target_distribution(path[:slot])
        for count, chance, next_distribution in outcomes(judged, length, TokenDistribution(after_prefixes)):
            for token, prob in enumerate(next_distribution):
                sequence = (*path[:count], token)
                distribution[sequence] = distribution.get(sequence, 0.0) + path_probability * chance * prob
    return extend(target_distribution, distribution, gamma + 1)


def extend(target_distribution, distribution, length, vocab=VOCAB):
    """Continue every sequence with the target's own distribution."""
    complete = {}
    for sequence, probability in distribution.items():
        missing = length - len(sequence)
        for tail in itertools.product(range(vocab), repeat=missing):
            mass = probability
            for index in range(missing):
                mass *= float(target_distribution(sequence + tail[:index])[tail[index]])
            complete[sequence + tail] = complete.get(sequence + tail, 0.0) + mass
    return complete


def joint_distribution(distributions):
    """Return the distribution of independent rows together."""
    outcomes = (
        zip(*each, strict=True)
        for each in itertools.product(*(distribution.items() for distribution in distributions))
    )
    return {sequences: math.prod(masses) for sequences, masses in outcomes}


def distribution_of_call(target, length, processors=(), eos=None, prompt=PROMPT):
    """Return the distribution of what `generate()` adds to the prompt: `length` tokens, or up to an end among them."""
    whole = extend(TargetDistribution(target, LogitsProcessorList(processors), prompt), {(): 1.0}, length)
    distribution = {}
    for sequence, mass in whole.items():
        key = up_to_end(sequence, eos)
        distribution[key] = distribution.get(key, 0.0) + mass
    return distribution


def up_to_end(sequence, eos=None):
    return sequence[: sequence.index(eos) + 1] if eos in sequence else sequence


def total_variation(first, second):
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys())


def distribution_of_drafts(target, draft):
    """Return the distribution of a block's tokens along the first path."""
    _, block = next(each_block(target, draft, LogitsProcessorList()))
    return block.distribution.dense(VOCAB).probs[0].double()


def distance_from_target(target, draft, policy, processors=(), **kwargs):
    """Return the total variation between the distribution of a round and the target's own."""
    truth = TargetDistribution(target, LogitsProcessorList(processors))
    distribution = output_distribution(truth, draft, policy, **kwargs)
    return total_variation(distribution, extend(truth, {(): 1.0}, draft.config.block_size + 1))


def chi_square_p_value(counts, distribution):
    """P-value with rare outcomes pooled (expected counts of at least 5)."""
    total = sum(counts.values())
    common = {key: mass for key, mass in distribution.items() if mass * total >= 5}
    observed = [counts.get(key, 0) for key in common]
    expected = [mass * total for mass in common.values()]
    rest = total - sum(expected)
    if rest > 1e-6 * total:
        observed, expected = [*observed, total - sum(observed)], [*expected, rest]
    rounded = total / sum(expected)  # the distribution of float32 logits may sum to a little more or less
    return scipy.stats.chisquare(observed, [rounded * count for count in expected]).pvalue


def claim_flat_drafts(monkeypatch):
    """Let drafts be tested against a distribution that they were not drawn from."""
    honest = Chains.draw

    def flattened(self, *arguments):
        token_ids, distribution = honest(self, *arguments)
        return token_ids, TokenDistribution(torch.full_like(distribution.probs, 1 / VOCAB))

    monkeypatch.setattr(Chains, "draw", flattened)


def p_value_of_samples(target, draft, calls=5, rows=200, length=6, processors=(), **options):
    """Return the p-value of the first tokens that calls with a draft draw; `processors` are those of the options."""
    torch.manual_seed(7)
    counts = Counter()
    for _ in range(calls):
        output = target.generate(
            PROMPT, attention_mask=torch.ones_like(PROMPT), assistant_model=draft, do_sample=True, top_k=0,
            max_new_tokens=length + 1, pad_token_id=0, eos_token_id=None, num_return_sequences=rows, **options,
        )  # fmt: skip
        counts.update(tuple(row[PROMPT.shape[1] :][:length]) for row in output.tolist())
    return chi_square_p_value(counts, distribution_of_call(target, length, processors))
