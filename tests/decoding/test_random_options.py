"""Random options of `generate()`, drawn together: with a draft the tokens are those of plain decoding."""

import copy
import os
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkingConfig,
)

from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    FullBlock,
    Scheduler,
    decode_with,
    generate_many,
)
from tests.distributions import STEEP, TABLE
from tests.rows import EverySecond, padded

VOCABULARY = 64
tokens = st.integers(1, VOCABULARY - 1)
rows = st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=4)


class LowersMultiples(LogitsProcessor):
    """A processor of the user's: it reads the whole prefix."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        lowered = (input_ids.sum(dim=-1, keepdim=True) + torch.arange(scores.shape[-1])) % 5 == 0
        return torch.where(lowered, scores - 2.0, scores)


class LowersGenerated(LogitsProcessor):
    """A processor of the user's: it finds out the length of the prompt, padding included, and reads row by row."""

    prompt_length: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        generated = input_ids[:, self.prompt_length :]
        return scores - torch.stack([row.bincount(minlength=scores.shape[-1]) for row in generated])


class StopsAfterTwoOf(StoppingCriteria):
    """A criterion of the user's: it counts a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        return (input_ids == self.token).sum(dim=-1) >= 2


def every_second_token(batch: int, ids: torch.LongTensor) -> list[int]:
    return list(range(1 + (batch + int(ids.sum())) % 2, VOCABULARY, 2))


PROCESSORS = [
    LowersMultiples,
    LowersGenerated,
    lambda: RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=4),
    lambda: TopKLogitsWarper(5),
    lambda: TopPLogitsWarper(0.6),
]
# Each strategy is one option, absent or drawn.
OPTIONS: dict[str, st.SearchStrategy] = {
    "max_new_tokens": st.integers(1, 24),
    "min_new_tokens": st.integers(1, 6),
    "min_length": st.integers(1, 20),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "encoder_repetition_penalty": st.sampled_from([0.8, 1.3]),
    "no_repeat_ngram_size": st.integers(2, 4),
    "encoder_no_repeat_ngram_size": st.integers(2, 4),
    "suppress_tokens": st.lists(tokens, min_size=1, max_size=4),
    "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=3),
    "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=3),
    "sequence_bias": st.dictionaries(st.tuples(tokens), st.sampled_from([-3.0, 2.0]), min_size=1, max_size=3),
    "exponential_decay_length_penalty": st.tuples(st.integers(1, 8), st.sampled_from([1.05, 1.3])),
    "forced_eos_token_id": tokens,
    "eos_token_id": st.lists(tokens, min_size=1, max_size=4, unique=True),
    "prefix_allowed_tokens_fn": st.just(every_second_token),
    "logits_processor": st.lists(st.sampled_from(PROCESSORS), min_size=1, max_size=2),
    "stopping_criteria": st.builds(lambda token: StoppingCriteriaList([StopsAfterTwoOf(token)]), tokens),
    "watermarking_config": st.builds(WatermarkingConfig, bias=st.just(1.0)),
    "prefill_chunk_size": st.integers(1, 5),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
    # one allowed token makes sampling a function of the prompt
    "do_sample": st.just(True),
    "num_return_sequences": st.just(2),
    "typical_p": st.sampled_from([0.5, 0.9]),
    "min_p": st.sampled_from([0.05, 0.5]),
}
OF_SAMPLING = ("num_return_sequences", "typical_p", "min_p")
DRAFTING: dict[str, st.SearchStrategy] = {
    "num_assistant_tokens": st.integers(1, 9),
    "assistant_confidence_threshold": st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
}
POLICIES = [
    None,
    FullBlock(),
    ConfidenceThreshold(0.5),
    ConfidenceThreshold(0.4, cumulative=True),
    Scheduler(TABLE, trees=False, skip=False),
    Scheduler(TABLE, lag=2, skip=False),
    Scheduler(STEEP, trees=False),
    Scheduler(TABLE, trees=False, skip=False, tpot_seconds=1.4),
    EverySecond(),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def pairs(pair):
    """Target and draft by the dtypes of both."""
    of = {dtype: [copy.deepcopy(model).to(dtype) for model in pair] for dtype in DTYPES}
    return {(first, second): (of[first][0], of[second][1]) for first in DTYPES for second in DTYPES}


DRAWN: dict[str, st.SearchStrategy] = {
    "prompts": rows,
    "options": st.fixed_dictionaries({}, optional=OPTIONS),
    "cuts": st.fixed_dictionaries({}, optional=DRAFTING),
    "policy": st.sampled_from(POLICIES),
    "dtypes": st.tuples(st.sampled_from(DTYPES[:1] * 2 + DTYPES), st.sampled_from(DTYPES)),
    "door": st.sampled_from(["assistant_model", "custom_generate", "generate_many", "transformers"]),
    "given_as": st.sampled_from(["ids", "ids", "embeddings", "a cache", "a second turn"]),
}


@pytest.mark.filterwarnings(
    "ignore:Unfeasible length", "ignore:Passing .* with .inputs_embeds.", "error:the draft .* NaN"
)
@pytest.mark.parametrize("number", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_any_options_give_the_tokens_of_plain_decoding(pairs, number):
    own = os.environ.get("HF_DSPARK_EXAMPLES")
    options = {"max_examples": int(own or number), "derandomize": own is None}
    settings(**options, deadline=None, suppress_health_check=[HealthCheck.too_slow])(given(**DRAWN)(check))(pairs)


def check(pairs, prompts, options, cuts, policy, dtypes, door, given_as):
    target, draft = pairs[dtypes]
    note(f"{door=} {given_as=} {dtypes=} {policy=} {options=} {cuts=}")
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    if dtypes[0] != torch.float32:
        options["do_sample"] = False  # the one allowed token may be another by rounding
    if options["do_sample"]:
        options["top_k"] = 1
    kept = {name: value for name, value in options.items() if options["do_sample"] or name not in OF_SAMPLING}
    if Version(transformers.__version__) < Version("5.19"):  # gives a prompt's text to one of its sequences alone
        kept.pop("num_return_sequences" if "encoder_repetition_penalty" in kept else "", None)
    if door == "transformers":  # refuses what it would get wrong
        prompts = prompts[:1]
        kept = {name: each for name, each in kept.items() if name not in ("stopping_criteria", "num_return_sequences")}
    if door in ("generate_many", "transformers"):
        given_as = "ids"
    draft.decoding = DecodingOptions(policy=policy, use_transformers_loop=door == "transformers")

    def fresh() -> dict[str, Any]:
        """Options with processors of their own, which have seen nothing yet."""
        makers = kept.get("logits_processor", ())
        return kept | {"logits_processor": LogitsProcessorList(make() for make in makers)}

    def plainly(**inputs: Any) -> Any:
        asked = fresh() | {"prefill_chunk_size": None}  # transformers 5.17 reads padded prompts wrongly in chunks
        try:
            return target.generate(**inputs, **asked, return_dict_in_generate=True, output_scores=True)
        except (ValueError, RuntimeError, IndexError):  # options that leave no token, or that do not fit the inputs
            reject()

    if door == "generate_many":
        if "num_return_sequences" in kept:
            reject()
        batches = [padded([prompt]) for prompt in prompts]
        expected = [plainly(**batch) for batch in batches]
        found = generate_many(target, draft, prompts, batch_size=2, progress=False, **fresh(), **cuts)
        for each in found:
            assert each.error is None, each.error
            one = expected[each.index]
            assert_same(one, torch.cat([batches[each.index]["input_ids"][0], each.token_ids])[None], dtypes[0])
        return

    inputs = padded(prompts)
    if given_as == "a second turn":
        first = target.generate(
            **inputs, assistant_model=draft, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True,
        )  # fmt: skip
        more = first.sequences[:, -2:].flip(1) % (VOCABULARY - 1) + 1
        ids = torch.cat([first.sequences, more], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), 6, dtype=torch.long)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
    if given_as == "embeddings":
        inputs["inputs_embeds"] = target.get_input_embeddings()(inputs.pop("input_ids"))
    expected = plainly(**inputs)
    if given_as == "a second turn" and "num_return_sequences" not in kept:
        inputs["past_key_values"] = first.past_key_values
    if given_as == "a cache":
        inputs["past_key_values"] = DynamicCache(config=target.config)
    assistant = {"custom_generate": decode_with(draft)} if door == "custom_generate" else {"assistant_model": draft}
    try:
        found = target.generate(**inputs, **fresh(), **assistant, **cuts)
    except RuntimeError:
        if door != "transformers":
            raise
        reject()  # that loop draws a token after an accepted end, too, where options may have left none
    assert_same(expected, found, dtypes[0])


def assert_same(expected: Any, output: torch.Tensor, dtype: torch.dtype) -> None:
    """In float32 all tokens are the same. In half precision a row may go another way where two scores differ by no
    more than rounding: blocks are computed in other products than single tokens."""
    plain = expected.sequences
    if dtype == torch.float32 or plain.shape == output.shape and torch.equal(plain, output):
        assert torch.equal(plain, output)
        return
    width = plain.shape[1] - len(expected.scores)
    for row, (wanted, found) in enumerate(zip(plain[:, width:].tolist(), output[:, width:].tolist(), strict=True)):
        for scores, first, second in zip(expected.scores, wanted, found, strict=False):
            if first != second:
                assert abs(float(scores[row, first] - scores[row, second])) < 0.3
                break
