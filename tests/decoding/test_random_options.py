"""Random options of `generate()`, drawn together: with a draft the tokens are those of plain decoding."""

import os
from typing import Any

import torch
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tests.rows import padded

VOCABULARY = 64
tokens = st.integers(1, VOCABULARY - 1)
rows = st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=4)


class LowersMultiples(LogitsProcessor):
    """A processor of the user's: it reads the whole prefix."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        lowered = (input_ids.sum(dim=-1, keepdim=True) + torch.arange(scores.shape[-1])) % 5 == 0
        return torch.where(lowered, scores - 2.0, scores)


class StopsAfterTwoOf(StoppingCriteria):
    """A criterion of the user's: it counts a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        return (input_ids == self.token).sum(dim=-1) >= 2


def every_second_token(batch: int, ids: torch.LongTensor) -> list[int]:
    return list(range(1 + int(ids.sum()) % 2, VOCABULARY, 2))


# Each strategy is one option, absent or drawn.
OPTIONS: dict[str, st.SearchStrategy] = {
    "max_new_tokens": st.integers(1, 24),
    "min_new_tokens": st.integers(1, 6),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "no_repeat_ngram_size": st.integers(2, 4),
    "suppress_tokens": st.lists(tokens, min_size=1, max_size=4),
    "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=3),
    "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=3),
    "sequence_bias": st.dictionaries(st.tuples(tokens), st.sampled_from([-3.0, 2.0]), min_size=1, max_size=3),
    "exponential_decay_length_penalty": st.tuples(st.integers(1, 8), st.sampled_from([1.05, 1.3])),
    "forced_eos_token_id": tokens,
    "eos_token_id": st.lists(tokens, min_size=1, max_size=4, unique=True),
    "prefix_allowed_tokens_fn": st.just(every_second_token),
    "logits_processor": st.builds(lambda: LogitsProcessorList([LowersMultiples()])),
    "stopping_criteria": st.builds(lambda token: StoppingCriteriaList([StopsAfterTwoOf(token)]), tokens),
    "prefill_chunk_size": st.integers(1, 5),
    "renormalize_logits": st.just(True),
    # one allowed token makes sampling a function of the prompt
    "do_sample": st.just(True),
}
DRAFTING: dict[str, st.SearchStrategy] = {
    "num_assistant_tokens": st.integers(1, 9),
    "assistant_confidence_threshold": st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
}


@settings(
    max_examples=int(os.environ.get("HF_DSPARK_EXAMPLES", "60")),
    deadline=None,
    derandomize="HF_DSPARK_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    prompts=rows,
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    cuts=st.fixed_dictionaries({}, optional=DRAFTING),
)
def test_any_options_give_the_tokens_of_plain_decoding(target, draft, prompts, options, cuts):
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    if options["do_sample"]:
        options["top_k"] = 1
    note(f"{options=} {cuts=}")

    def decode(**assistant: Any) -> torch.Tensor:
        return target.generate(**padded(prompts), **options, **assistant)

    try:
        plain = decode()
    except (ValueError, RuntimeError):  # options that leave no token
        reject()
    assert torch.equal(plain, decode(assistant_model=draft, **cuts))
