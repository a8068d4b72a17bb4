"""Processors on whole blocks: the same scores as one by one, and the same distribution as without fusing."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_dspark.decoding import logits_processing
from hf_dspark.decoding.logits_processing import BlockProcessor, DraftProcessor, Prefix, Truncation
from tests.rows import GREEDY, padded

VOCAB = 400
CHAINS = {
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top_k": [TopKLogitsWarper(9)],
    "top_p": [TopPLogitsWarper(0.8)],
    "min_p": [MinPLogitsWarper(0.1)],
    "all_four": [TemperatureLogitsWarper(0.8), TopKLogitsWarper(50), TopPLogitsWarper(0.95), MinPLogitsWarper(0.05)],
    "cool_top_p": [TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.3)],
    "flat_top_p": [TemperatureLogitsWarper(50.0), TopPLogitsWarper(0.99)],
    "tiny_top_p": [TopPLogitsWarper(0.0)],
    "top_k_beyond_the_vocabulary": [TopKLogitsWarper(1000)],
    "another_order": [TopPLogitsWarper(0.8), TopKLogitsWarper(9)],
    "typical_between": [TemperatureLogitsWarper(0.8), TypicalLogitsWarper(0.7), TopKLogitsWarper(9)],
    "suppressed": [SuppressTokensLogitsProcessor([1, 2, 3]), TopKLogitsWarper(9)],
    "keeps_two": [TopPLogitsWarper(0.1, min_tokens_to_keep=2)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.8), TopKLogitsWarper(20)],
}


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch):
    monkeypatch.setattr(logits_processing, "TOP_P_CANDIDATES", 40)


def prefixes(count):
    return [torch.randint(0, VOCAB, (1, 3 + index)) for index in range(count)]


def one_by_one(processors, ids, logits):
    rows = [processors(prefix, logits[index : index + 1].float().clone()) for index, prefix in enumerate(ids)]
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_block_distribution_is_the_distribution_of_the_processors_one_by_one(chain, dtype):
    processors, ids = LogitsProcessorList(chain), prefixes(6)
    logits = torch.randn(6, VOCAB).mul(3).to(dtype)
    raw = logits.clone()
    scores = BlockProcessor(processors, VOCAB)(logits, None, [Prefix(prefix, processors) for prefix in ids]).sure()
    expected = one_by_one(processors, ids, logits)
    torch.testing.assert_close(scores.distribution().dense(VOCAB).probs, expected.softmax(-1), atol=3e-7, rtol=1e-5)
    assert torch.equal(scores.dense(VOCAB) > -torch.inf, expected > -torch.inf)
    assert scores.best()[1].tolist() == expected.argmax(-1).tolist()
    assert torch.equal(logits, raw), "the target's logits are not to be changed"


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_candidates_are_processed_as_if_all_other_tokens_were_impossible(chain):
    processors, ids = LogitsProcessorList(chain), prefixes(4)
    candidates = torch.stack([torch.randperm(VOCAB)[:30] for _ in range(4)])
    logits = torch.randn(4, 30).mul(3)
    full = torch.full((4, VOCAB), -torch.inf).scatter(-1, candidates, logits)
    scores = BlockProcessor(processors, VOCAB)(logits, candidates, [Prefix(prefix, processors) for prefix in ids])
    expected = one_by_one(processors, ids, full)
    torch.testing.assert_close(scores.distribution().dense(VOCAB).probs, expected.softmax(-1), atol=3e-7, rtol=1e-5)


def test_tokens_tied_with_the_last_one_of_top_k_are_kept_save_by_drafts():
    logits = torch.zeros(1, VOCAB)
    logits[0, :5] = 2.0
    logits[0, 5:20] = 1.0
    processors = LogitsProcessorList([TopKLogitsWarper(8)])
    scores = BlockProcessor(processors, VOCAB)(logits).sure()
    assert (scores.dense(VOCAB)[0] > -torch.inf).nonzero()[:, 0].tolist() == list(range(20))
    assert DraftProcessor(processors, VOCAB)(logits).values.shape == (1, 8)


TIED = {
    "tenths": (torch.zeros(10), 0.9),
    "half": (torch.zeros(4), 0.5),
    "best": (torch.tensor([1.0, 5.0, 5.0, 0.0, 5.0]), 1e-6),
    "none": (torch.tensor([1.0, 5.0, 5.0, 0.0, 5.0]), 0.0),
    "almost_none": (torch.tensor([1.0, 5.0, 5.0, 0.0, 5.0]), 1e-9),
    "after_a_better_one": (torch.tensor([2.0, 9.0, 2.0, 8.0, 2.0, 2.0, 1.0]), 0.999),
    "all": (torch.zeros(7), 1.0),
    "more_than_candidates": (torch.zeros(VOCAB), 0.5),
    "at_the_last_candidate": (torch.cat([torch.full((39,), 3.0), torch.full((VOCAB - 39,), 1.0)]), 0.55),
}


@pytest.mark.parametrize("top_k", [None, 6, VOCAB])
@pytest.mark.parametrize(("scores", "top_p"), TIED.values(), ids=TIED)
def test_top_p_keeps_the_tied_tokens_that_transformers_keeps(scores, top_p, top_k):
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, torch.randperm(VOCAB)[: len(scores)]] = scores
    processors = LogitsProcessorList([TopPLogitsWarper(top_p)])
    if top_k is not None:
        processors.insert(0, TopKLogitsWarper(top_k))
    expected = processors(torch.zeros(1, 0, dtype=torch.long), logits.clone())
    assert torch.equal(BlockProcessor(processors, VOCAB)(logits).sure().dense(VOCAB), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [None, 20])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.6, 0.9, 0.95])
def test_top_p_keeps_the_same_tokens_in_half_precision(top_p, top_k, dtype):
    """Of 400 tokens many are equal in half precision; of 256 rows some have ties where the mass is reached."""
    logits = (torch.randn(256, VOCAB) * 3).to(dtype)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopPLogitsWarper(top_p)])
    if top_k is not None:
        processors.insert(1, TopKLogitsWarper(top_k))
    expected = processors(torch.zeros(256, 0, dtype=torch.long), logits.float())
    scores = BlockProcessor(processors, VOCAB)(logits).sure()
    assert torch.equal(scores.dense(VOCAB), expected)
    assert scores.best()[1].tolist() == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("ties", [True, False], ids=["more_ties_than_candidates", "flat_distribution"])
def test_distributions_of_too_many_candidates_fall_back_to_the_processors(ties):
    logits = torch.zeros(2, VOCAB) if ties else torch.randn(2, VOCAB) * 0.01
    assert (Truncation(top_k=3) if ties else Truncation(top_p=0.9))(logits).doubt
    processors = LogitsProcessorList([TopKLogitsWarper(3) if ties else TopPLogitsWarper(0.9)])
    scores = BlockProcessor(processors, VOCAB)(logits).sure()
    expected = processors(torch.zeros(2, 1, dtype=torch.long), logits.clone())
    torch.testing.assert_close(scores.distribution().probs, expected.softmax(-1))


def test_only_processors_that_read_prefixes_are_called_position_by_position():
    calls = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids, scores):
            calls.append(scores.shape[0])
            return scores

    class Temperature(TemperatureLogitsWarper):
        """A subclass may do anything: it is no built-in."""

        def __call__(self, input_ids, scores):
            calls.append(-scores.shape[0])
            return scores

    ids, processors = prefixes(5), LogitsProcessorList([Watch(), Temperature(0.5)])
    BlockProcessor(processors, VOCAB)(torch.randn(5, VOCAB), None, [Prefix(prefix, processors) for prefix in ids])
    assert calls == [1, -1] * 5


def test_nothing_is_copied_without_processors():
    logits = torch.randn(3, VOCAB, dtype=torch.bfloat16)
    assert BlockProcessor(LogitsProcessorList(), VOCAB)(logits).values is logits


# ---- what users write


def test_a_processor_may_set_itself_up_in_its_first_call(target, draft, prompts):
    class MovesAMask(LogitsProcessor):
        def __init__(self):
            self.mask = None

        def __call__(self, input_ids, scores):
            if self.mask is None:
                self.mask = -torch.arange(scores.shape[-1]).float() / 30
            self.mask = self.mask.to(scores.device, copy=True)
            return scores + self.mask

    batch = padded(prompts)
    plain, drafted = (
        target.generate(**batch, **GREEDY, **options, logits_processor=LogitsProcessorList([MovesAMask()]))
        for options in ({}, {"assistant_model": draft})
    )
    assert torch.equal(plain, drafted)


def test_a_processor_may_use_the_global_generator_if_its_result_does_not_depend_on_chance(target, draft, prompts):
    """So may another thread, while the processor is at work."""

    class Seeds(LogitsProcessor):
        def __call__(self, input_ids, scores):
            torch.manual_seed(int(input_ids[0, -1]))
            return scores + torch.randn(scores.shape[-1])

    batch, options = padded(prompts[:1]), GREEDY | {"logits_processor": LogitsProcessorList([Seeds()])}
    assert torch.equal(target.generate(**batch, assistant_model=draft, **options), target.generate(**batch, **options))
