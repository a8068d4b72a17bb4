"""The distribution of `generate()` with a draft is the target's own: many samples through the public API against the
exact distribution.

Exact enumeration of single rounds is in `test_lossless`. Here nothing is replaced: policies learn, rows share budgets,
noise is the call's own. Of right cases, chi-square fails one in 10,000 by chance; seeds are fixed.
"""

from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    FullBlock,
    Policy,
    Scheduler,
    ThroughputTable,
    attach,
    generate_many,
)
from hf_dspark.decoding import drafter as drafter_module
from tests.distributions import (
    PROMPT,
    VOCAB,
    chi_square_p_value,
    distribution_of_call,
    make_pair,
    up_to_end,
)
from tests.rows import EverySecond, padded

pytestmark = pytest.mark.slow

# Sequences are one token longer than what is counted, so that the first block is drafted whole.
ROWS, LENGTH, TOLERANCE = 250, 4, 1e-4
SAMPLES = 6_000
# Of a batch of ROWS rows: a token costs what a doubtful draft does not bring, and every 128th a step.
JAGGED = ThroughputTable(tuple(range(1, 1025)), tuple(1 / (1 + 0.0085 * n + 0.3 * (n // 128)) for n in range(1, 1025)))
COSTLY = ThroughputTable(tuple(range(1, 1025)), tuple(1 / (1 + 0.004 * n) for n in range(1, 1025)), drafting=0.35)
POLICIES = {
    "full": FullBlock(),
    "every_second": EverySecond(),
    "threshold": ConfidenceThreshold(0.5),
    "cumulative": ConfidenceThreshold(0.7, cumulative=True),
    "hull_and_fill": Scheduler(JAGGED, trees=False, skip=False),
    "lagged": Scheduler(JAGGED, lag=1, skip=False),
    "adaptive": Scheduler(COSTLY, trees=False),
    "limit": Scheduler(JAGGED, trees=False, skip=False, tpot_seconds=1.5),
}
# Of drafts with confidences of their own, and of those without. `test_lossless` enumerates the others.
HEADS = {
    "vanilla": {},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
}
MATRIX = {f"{head}-{name}": (head, policy) for head in HEADS for name, policy in POLICIES.items()}


def make(make_target, head="vanilla", policy=None):
    """Return a target of three tokens and a draft that is far from it, with its policy."""
    target, draft = make_pair(make_target, gamma=3, seed=5, depth=4, **HEADS[head])
    draft.decoding = DecodingOptions(policy=policy or FullBlock())
    return target, draft


@pytest.fixture
def pair(make_target):
    return make(make_target)


def calls(target, draft, count=SAMPLES, rows=ROWS, prompt=PROMPT, seed=7, **options):
    """Yield the new tokens of `rows` rows, `[rows, n]`, call after call."""
    if seed is not None:
        torch.manual_seed(seed)
    options = {
        "do_sample": True, "top_k": 0, "max_new_tokens": LENGTH + 1, "pad_token_id": 0, "num_return_sequences": rows,
        "attention_mask": torch.ones_like(prompt),
    } | ({} if draft is None else {"assistant_model": draft}) | options  # fmt: skip
    for _ in range(count // rows):
        yield target.generate(prompt, **options)[:, prompt.shape[1] :]


def counted(samples, eos=None):
    return Counter(up_to_end(tuple(row[:LENGTH]), eos) for tokens in samples for row in tokens.tolist())


@pytest.mark.parametrize(("head", "policy"), MATRIX.values(), ids=MATRIX)
def test_samples_have_the_targets_distribution_under_every_policy_and_head(make_target, head, policy):
    target, draft = make(make_target, head, policy)
    counts = counted(calls(target, draft, seed=list(MATRIX.values()).index((head, policy))))
    assert chi_square_p_value(counts, distribution_of_call(target, LENGTH)) > TOLERANCE
    if policy != FullBlock():
        assert lengths_of(target, draft, policy) != lengths_of(target, draft, FullBlock()), "it must decide something"


def lengths_of(target, draft, policy):
    lengths = []
    observer = lambda outcome: lengths.extend(outcome.lengths.tolist())  # noqa: E731
    draft.decoding = DecodingOptions(policy, observer=observer)
    counted(calls(target, draft, count=2 * ROWS))
    return Counter(lengths)


class LooksAhead(Policy):
    """Verifies blocks whose second confidence is high, which tells what the first token is."""

    requires_confidence, accept_bias = True, True

    def is_causal(self, confidence_reads_tokens):
        return False

    def plan_verify(self, confidence, max_lengths, load):
        return torch.where(confidence[:, min(1, confidence.shape[1] - 1)] > 0.5, max_lengths, 0)


def test_samples_catch_a_policy_that_looks_ahead(make_target):
    target, draft = make(make_target, policy=LooksAhead())
    p_value = chi_square_p_value(counted(calls(target, draft)), distribution_of_call(target, LENGTH))
    assert p_value < 1e-9


# ---- doors and options


class Alternates(LogitsProcessor):
    """A processor of the user's: it reads the sum of the prefix."""

    def __call__(self, input_ids, scores):
        favoured = input_ids.sum(dim=-1, keepdim=True) % VOCAB
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], 1.5))


def unlike_the_last(batch, ids):
    return [token for token in range(VOCAB) if token != int(ids[-1])]


OPTIONS = {
    "repetition_penalty": ({"repetition_penalty": 1.8}, [RepetitionPenaltyLogitsProcessor(1.8)]),
    "no_repeat_ngram": ({"no_repeat_ngram_size": 3}, [NoRepeatNGramLogitsProcessor(3)]),
    "custom": ({"logits_processor": LogitsProcessorList([Alternates()])}, [Alternates()]),
    "constraint": (
        {"prefix_allowed_tokens_fn": unlike_the_last},
        [PrefixConstrainedLogitsProcessor(unlike_the_last, 1)],
    ),
    "suppressed": ({"suppress_tokens": [1]}, [SuppressTokensLogitsProcessor([1])]),
    "truncated": (
        {"temperature": 0.7, "top_k": 2, "top_p": 0.9},
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(2), TopPLogitsWarper(0.9)],
    ),
    "several": (
        {"repetition_penalty": 1.4, "temperature": 1.3, "min_p": 0.2},
        [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(1.3), MinPLogitsWarper(0.2)],
    ),
    "end": ({"eos_token_id": 1}, []),
    "end_and_policy": ({"eos_token_id": 2, "assistant_confidence_threshold": 0.5}, []),
}


@pytest.mark.parametrize(("options", "processors"), OPTIONS.values(), ids=OPTIONS)
def test_samples_have_the_targets_distribution_under_every_option(pair, options, processors):
    target, draft = pair
    eos = options.get("eos_token_id")
    counts = counted(calls(target, draft, count=SAMPLES // 2, **options), eos)
    assert chi_square_p_value(counts, distribution_of_call(target, LENGTH, processors, eos)) > TOLERANCE


@pytest.mark.parametrize("rows", [1, ROWS])
def test_samples_have_the_targets_distribution_with_attached_prompt_lookup(make_target, rows):
    target, _ = make(make_target)
    with attach(target, "ngram") as attached:
        attached.draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=4))
        counts = counted(calls(target, None, count=400 if rows == 1 else SAMPLES, rows=rows))
    assert chi_square_p_value(counts, distribution_of_call(target, LENGTH)) > TOLERANCE
    stats = attached.draft.last_stats
    assert 0 < sum(stats.accepted) < sum(stats.proposed) and attached.num_plain == 0


def test_samples_have_the_targets_distribution_in_transformers_loop(pair):
    target, draft = pair
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.5), use_transformers_loop=True)
    counts = counted(calls(target, draft, count=400, rows=1))
    assert chi_square_p_value(counts, distribution_of_call(target, LENGTH)) > TOLERANCE


def test_samples_have_the_targets_distribution_with_a_draft_in_bfloat16(pair):
    target, draft = pair
    counts = counted(calls(target, draft.to(torch.bfloat16)))
    assert chi_square_p_value(counts, distribution_of_call(target, LENGTH)) > TOLERANCE


@pytest.mark.parametrize("eos", [None, 1])
def test_generate_many_draws_from_the_targets_distribution(make_target, eos):
    """Rows end at different times and are filled from the queue."""
    target, draft = make(make_target, policy=Scheduler(JAGGED, trees=False, skip=False))
    prompts = [PROMPT[0].tolist()] * 3000
    torch.manual_seed(3)
    found = generate_many(
        target, draft, prompts, batch_size=100, progress=False, do_sample=True, top_k=0, max_new_tokens=LENGTH + 1,
        eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip
    counts = Counter(tuple(each.token_ids.tolist()[:LENGTH]) for each in found)
    assert chi_square_p_value(counts, distribution_of_call(target, LENGTH, eos=eos)) > TOLERANCE


# ---- independence


def pairs_of(samples, pairing):
    """Return how often two samples came together: what round one drew in each."""
    samples = [tokens[:, 1:3].tolist() for tokens in samples]
    if pairing in ("calls", "seeds"):
        both = [zip(first, second, strict=True) for first, second in zip(samples[::2], samples[1::2], strict=True)]
    elif pairing == "neighbours":
        both = [zip(tokens[::2], tokens[1::2], strict=True) for tokens in samples]
    else:
        both = [zip(tokens[: ROWS // 2], tokens[ROWS // 2 :], strict=True) for tokens in samples]
    return Counter((*first, *second) for pairs in both for first, second in pairs)


def distribution_of_pairs(target):
    distribution = Counter()
    for sequence, mass in distribution_of_call(target, 3).items():
        distribution[sequence[1:]] += mass
    return {(*a, *b): p * q for a, p in distribution.items() for b, q in distribution.items()}


def with_seeds(target, draft, seeds):
    return [tokens for seed in seeds for tokens in calls(target, draft, count=ROWS, seed=seed)]


@pytest.mark.parametrize(
    "policy", [FullBlock(), Scheduler(JAGGED, trees=False, skip=False)], ids=["full", "hull_and_fill"]
)
def test_rows_calls_and_seeds_are_independent(make_target, policy):
    target, draft = make(make_target, policy=policy)
    distribution, samples = distribution_of_pairs(target), list(calls(target, draft))
    for pairing in ("neighbours", "halves", "calls"):
        assert chi_square_p_value(pairs_of(samples, pairing), distribution) > TOLERANCE, pairing
    samples = with_seeds(target, draft, range(SAMPLES // ROWS))
    assert chi_square_p_value(pairs_of(samples, "seeds"), distribution) > TOLERANCE


def test_samples_catch_calls_with_one_seed(pair):
    samples = with_seeds(*pair, [1] * 8)
    assert chi_square_p_value(pairs_of(samples, "seeds"), distribution_of_pairs(pair[0])) < 1e-9


def test_samples_catch_rows_that_share_noise(pair, monkeypatch):
    honest = drafter_module.block_noise

    def shared(seed, request_ids, *rest):
        return honest(seed, [request // 2 for request in request_ids], *rest)

    monkeypatch.setattr(drafter_module, "block_noise", shared)
    samples = list(calls(*pair, count=8 * ROWS))
    assert chi_square_p_value(pairs_of(samples, "neighbours"), distribution_of_pairs(pair[0])) < 1e-9


def test_rows_of_different_prompts_keep_their_own_distributions_under_a_shared_budget(make_target):
    target, draft = make(make_target, policy=Scheduler(JAGGED, trees=False, skip=False))
    prompts = [[0, 1, 2, 1, 0], [2, 2, 1]]
    batch = padded([prompts[0], prompts[1]])
    samples = list(
        calls(
            target,
            draft,
            prompt=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            num_return_sequences=ROWS // 2,
        )
    )
    for row, prompt in enumerate(prompts):
        counts = counted([tokens[row * (ROWS // 2) :][: ROWS // 2] for tokens in samples])
        distribution = distribution_of_call(target, LENGTH, prompt=torch.tensor([prompt]))
        assert chi_square_p_value(counts, distribution) > TOLERANCE
