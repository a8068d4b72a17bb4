"""More prompts than rows: each as if alone, results as they finish, failures alone."""

import warnings
from functools import partial

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from hf_dspark import generate_many
from hf_dspark.decoding.loop import DecodingLoop
from tests import rows

GREEDY = rows.GREEDY | {"max_new_tokens": 24, "progress": False}


alone = partial(rows.alone, max_new_tokens=24)


@pytest.fixture(scope="module")
def prompts(reference):
    rows = reference["prompts"]
    return [row[start : start + 3 + 2 * start] for row in rows for start in range(3)]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_every_prompt_is_decoded_as_if_alone(pair, prompts, batch_size):
    target, draft = pair
    options = {"eos_token_id": [62, 42, 11]}
    results = list(generate_many(target, draft, prompts, batch_size=batch_size, **GREEDY, **options))
    assert sorted(result.index for result in results) == list(range(len(prompts)))
    for result in results:
        assert result.error is None and result.prompt == prompts[result.index]
        assert result.token_ids.tolist() == alone(target, prompts[result.index], **options)
    if batch_size > 1:
        assert [result.index for result in results] != sorted(result.index for result in results)


def test_the_batch_stays_full_while_the_queue_lasts(pair, prompts, monkeypatch):
    target, draft = pair
    sizes, honest = [], DecodingLoop.run_round

    def run_round(self):
        sizes.append(len(self.requests))
        return honest(self)

    monkeypatch.setattr(DecodingLoop, "run_round", run_round)
    list(generate_many(target, draft, prompts, batch_size=4, eos_token_id=[62, 42, 11], **GREEDY))
    assert max(sizes) == 4 and sorted(sizes, reverse=True) == sizes


def test_prompts_are_read_as_they_are_needed(pair, prompts):
    target, draft = pair
    read = []

    def endless():
        index = 0
        while True:
            read.append(index)
            yield prompts[index % len(prompts)]
            index += 1

    results = generate_many(target, draft, endless(), batch_size=2, **GREEDY)
    assert {next(results).index, next(results).index} <= {0, 1, 2}
    assert len(read) <= 5
    results.close()


class FailsOn(LogitsProcessor):
    def __init__(self, first):
        self.first = first

    def __call__(self, input_ids, scores):
        if input_ids[0, 0] == self.first and input_ids.shape[1] > 8:
            raise ZeroDivisionError("a bug of the user's")
        return scores


def test_failing_prompts_fail_alone(pair, prompts):
    """An empty prompt, one of unknown tokens, and one whose processor raises in the middle."""
    target, draft = pair
    mixed = [prompts[1], [], prompts[0], [999], prompts[2]]
    extra = {"logits_processor": LogitsProcessorList([FailsOn(prompts[0][0])]), "eos_token_id": None}
    assert prompts[1][0] != prompts[0][0] != prompts[2][0]
    results = {result.index: result for result in generate_many(target, draft, mixed, batch_size=5, **GREEDY, **extra)}
    assert isinstance(results[1].error, ValueError) and "empty" in str(results[1].error)
    assert isinstance(results[2].error, ZeroDivisionError)
    kept = results[2].token_ids.tolist()
    assert kept == alone(target, prompts[0], eos_token_id=None)[: len(kept)]
    assert isinstance(results[3].error, ValueError) and "999" in str(results[3].error)
    for index in (0, 4):
        assert results[index].error is None
        assert results[index].token_ids.tolist() == alone(target, mixed[index], eos_token_id=None)


def test_a_failing_criterion_fails_alone(pair, prompts):
    target, draft = pair

    class Breaks(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 9 and input_ids[0, 0] == prompts[0][0]:
                raise KeyError("nothing there")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    extra = {"stopping_criteria": [Breaks()], "eos_token_id": None}
    results = {r.index: r for r in generate_many(target, draft, prompts[:3], batch_size=3, **GREEDY, **extra)}
    assert isinstance(results[0].error, KeyError)
    for index in (1, 2):
        assert results[index].token_ids.tolist() == alone(target, prompts[index], eos_token_id=None)


def test_errors_that_belong_to_no_prompt_are_raised(pair, prompts):
    target, draft = pair
    with pytest.raises(ValueError, match="batch_size"):
        generate_many(target, draft, prompts, batch_size=0)
    with pytest.raises(ValueError, match="attention_mask"):
        generate_many(target, draft, prompts, attention_mask=torch.ones(1, 1))
    with pytest.raises(ValueError, match="num_return_sequences"):
        generate_many(target, draft, prompts, num_return_sequences=2)


def test_sampling_draws_the_same_in_any_company(pair, prompts):
    """Noise is keyed by the prompt's number: neighbours change nothing, save rounding."""
    target, draft = pair
    options = {"do_sample": True, "max_new_tokens": 16, "pad_token_id": 0, "progress": False}
    results = []
    for batch_size in (1, 5):
        torch.manual_seed(4)
        many = generate_many(target, draft, prompts, batch_size=batch_size, **options)
        results.append({result.index: result.token_ids.tolist() for result in many})
    assert results[0] == results[1]


def test_when_memory_runs_out_the_youngest_wait(pair, prompts, monkeypatch):
    target, draft = pair
    honest = torch.Tensor.new_zeros

    def scarce(self, *shape, **kwargs):
        size = shape[0] if isinstance(shape[0], tuple) else shape
        if len(size) == 4 and size[0] > 2 and size[2] > 64:
            raise torch.OutOfMemoryError("out of memory")
        return honest(self, *shape, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_zeros", scarce)
    options = GREEDY | {"max_new_tokens": 70, "eos_token_id": None}
    with pytest.warns(UserWarning, match="out of memory: 2 sequences"):
        results = {
            result.index: result for result in generate_many(target, draft, prompts[:5], batch_size=5, **options)
        }
    for index in range(5):
        expected = alone(target, prompts[index], max_new_tokens=70, eos_token_id=None)
        assert results[index].error is None and results[index].token_ids.tolist() == expected


def test_a_prompt_that_fits_nowhere_fails_alone(pair, prompts, monkeypatch):
    target, draft = pair
    honest = torch.Tensor.new_zeros

    def scarce(self, *shape, **kwargs):
        size = shape[0] if isinstance(shape[0], tuple) else shape
        if len(size) == 4 and size[2] > 64:
            raise torch.OutOfMemoryError("out of memory")
        return honest(self, *shape, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_zeros", scarce)
    long = (prompts[0] * 40)[:80]
    with pytest.warns(UserWarning, match="out of memory"):
        mixed = [prompts[0], long, prompts[1]]
        results = {result.index: result for result in generate_many(target, draft, mixed, batch_size=3, **GREEDY)}
    assert isinstance(results[1].error, MemoryError)
    for index in (0, 2):
        assert results[index].token_ids.tolist() == alone(target, mixed[index])


def test_a_criterion_that_fails_at_once_leaves_its_neighbours_their_keys(pair, prompts):
    target, draft = pair

    class FailsAtOnce(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == len(prompts[0]) + 1 and input_ids[0, : len(prompts[0])].tolist() == prompts[0]:
                raise KeyError("at once")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    extra = {"stopping_criteria": [FailsAtOnce()], "eos_token_id": None}
    results = {r.index: r for r in generate_many(target, draft, prompts[:4], batch_size=4, **GREEDY, **extra)}
    assert isinstance(results[0].error, KeyError)
    for index in (1, 2, 3):
        assert results[index].token_ids.tolist() == alone(target, prompts[index], eos_token_id=None)


def test_the_target_is_the_callers_between_results(pair, prompts):
    target, draft = pair
    before = target(torch.tensor([prompts[0]])).logits
    for _ in generate_many(target, draft, prompts[:4], batch_size=2, **GREEDY):
        assert torch.equal(target(torch.tensor([prompts[0]])).logits, before)


def test_criteria_that_count_their_calls_count_for_each_prompt(pair, prompts):
    class EndsAfterTwo(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.calls += 1
            return torch.full((len(input_ids),), self.calls >= 2)

    target, draft = pair
    extra = {"stopping_criteria": [EndsAfterTwo()], "eos_token_id": None}
    for result in generate_many(target, draft, prompts[:5], batch_size=2, **GREEDY, **extra):
        assert len(result.token_ids) == 2


def test_stop_strings_work(pair, prompts, tokenizer):
    target, draft = pair
    stop = {"stop_strings": ["Q", "Ld"]}
    for result in generate_many(target, draft, prompts[:5], tokenizer, batch_size=2, **GREEDY, **stop):
        expected = alone(target, prompts[result.index], tokenizer=tokenizer, **stop)
        assert result.token_ids.tolist() == expected and result.text == tokenizer.decode(expected)
    with pytest.raises(ValueError, match="need a tokenizer"):
        generate_many(target, draft, prompts, **GREEDY, **stop)


def test_wrong_options_are_raised_once(pair, prompts):
    target, draft = pair
    for wrong in ({"max_new_token": 5}, {"num_beams": 2}, {"use_cache": False}):
        with pytest.raises(ValueError):
            generate_many(target, draft, prompts, **(GREEDY | wrong))
    with pytest.raises(TypeError, match="several"):
        generate_many(target, draft, "one prompt", **GREEDY)


def test_prompts_of_another_type_fail_alone_and_say_what_is_needed(pair, prompts):
    target, draft = pair
    mixed = [5, None, [1.5], [[1, 2], [3]], prompts[0], torch.tensor(prompts[1])]
    results = {r.index: r for r in generate_many(target, draft, mixed, batch_size=3, **GREEDY)}
    for index in range(4):
        assert isinstance(results[index].error, ValueError) and "must be" in str(results[index].error)
    assert results[4].error is None and results[5].token_ids.tolist() == alone(target, prompts[1])


def test_shortage_in_a_users_processor_is_nobodys_fault(pair):
    target, draft = pair
    prompts = [[3, 9, 12], [30, 7], [5, 5, 8, 41, 2], [17]]
    left = [1]

    def short_once(ids, scores):
        if len(ids[0]) > 12 and left:
            left.pop()
            raise torch.OutOfMemoryError("out of memory")
        return scores

    options = GREEDY | {"batch_size": 4}
    expected = {done.index: done.token_ids.tolist() for done in generate_many(target, draft, prompts, **options)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(
            generate_many(target, draft, prompts, **options, logits_processor=[StatelessProcessor(short_once)])
        )
    assert not left and all(done.error is None for done in found)
    assert {done.index: done.token_ids.tolist() for done in found} == expected


class StatelessProcessor(LogitsProcessor):
    def __init__(self, function):
        self.function = function

    def __deepcopy__(self, memo):
        return self

    def __call__(self, ids, scores):
        return self.function(ids, scores)
