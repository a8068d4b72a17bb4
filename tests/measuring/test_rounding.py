"""Which greedy tokens are the target's best up to rounding, with wrong ones that must be found."""

import copy

import pytest
import torch
from transformers import GenerationConfig

from hf_dspark.measuring.rounding import count_best, tolerance_of

PROMPT = [5, 9, 7, 5, 6]
GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}


def decoded(target, draft=None, **options) -> list[int]:
    ids = torch.tensor([PROMPT])
    output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **GREEDY, **options)
    return output[0, len(PROMPT) :].tolist()


@pytest.fixture
def answers(pair):
    """The same prompt in a data type, with the draft and without it."""

    def of(dtype: torch.dtype, **options) -> tuple:
        target, draft = (copy.deepcopy(model).to(dtype) for model in pair)
        return target, decoded(target, draft, **options), decoded(target, **options)

    return of


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_drafted_tokens_are_the_targets_best_in_every_data_type(answers, dtype):
    target, drafted, plain = answers(dtype)
    assert count_best(target, PROMPT, drafted, plain, **GREEDY) == len(drafted) == 24
    assert count_best(target, PROMPT, plain, drafted, **GREEDY) == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_token_is_counted(answers, dtype):
    target, drafted, plain = answers(dtype)
    with torch.no_grad():
        best = target(torch.tensor([PROMPT + drafted])).logits[0, -2].float().sort(descending=True)
    gaps = (best.values[0] - best.values) / best.values.abs().max()
    wrong = int(best.indices[(gaps > 8 * torch.finfo(dtype).eps).nonzero()[0]])  # the nearest one beyond the tolerance
    assert count_best(target, PROMPT, [*drafted[:-1], wrong], plain, **GREEDY) == 23


def test_a_tie_that_breaks_differently_is_no_fault(answers):
    target, drafted, plain = answers(torch.bfloat16)
    with torch.no_grad():  # two tokens with the same scores everywhere
        for weight in (target.get_input_embeddings().weight, target.get_output_embeddings().weight):
            weight[47] = weight[drafted[0]]
    other = [47 if token == drafted[0] else token for token in decoded(target)]
    assert count_best(target, PROMPT, other, plain, **GREEDY) == 24


def test_an_answer_that_ends_where_plain_decoding_goes_on_lacks_a_token(answers):
    target, drafted, plain = answers(torch.float32)
    assert count_best(target, PROMPT, drafted[:9], plain, **GREEDY) == 8
    assert count_best(target, PROMPT, drafted, plain[:9], **GREEDY) == 23


def test_processed_scores_are_compared(answers):
    processing = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2}
    target, drafted, plain = answers(torch.float32, **processing)
    assert count_best(target, PROMPT, drafted, plain, **GREEDY, **processing) == 24
    assert count_best(target, PROMPT, drafted, plain, **GREEDY) < 20  # as if there were no processors


def test_stop_strings_do_not_matter(answers, chat_tokenizer):
    target, drafted, plain = answers(torch.float32)
    options = {"stop_strings": ["not much"], "tokenizer": chat_tokenizer}
    assert count_best(target, PROMPT, drafted, plain, **GREEDY, **options) == 24
    config = GenerationConfig(stop_strings=["not much"], max_new_tokens=24, do_sample=False)
    assert count_best(target, PROMPT, drafted, plain, generation_config=config) == 24


def test_tolerance_is_stated_in_units_of_the_data_type():
    assert tolerance_of(torch.bfloat16).startswith("8 units in the last place of bfloat16")
    assert tolerance_of(torch.float32).startswith("128 units in the last place of float32")
