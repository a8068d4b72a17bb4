"""What cannot be decoded with a draft is refused by name, before any work."""

import copy
import functools
import threading
import warnings

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    EncoderDecoderCache,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.policy_baselines import EliminationScheduler, GlobalScheduler
from hf_dspark import (
    ConfidenceThreshold,
    DecodingOptions,
    DSparkConfig,
    DSparkDraftModel,
    decode_with,
    generate_many,
)
from hf_dspark.decoding.user_objects import copy_of
from tests.distributions import TABLE
from tests.rows import GREEDY, Notes, alone, assert_no_hooks, assert_same_tokens, padded

SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16, "pad_token_id": 0}


class Counter(LogitsProcessor):
    """Allows a token more with every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[-1])


class Halve(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores / 2


class Rows(LogitsProcessor):
    """Knows that there are three rows."""

    def __call__(self, input_ids, scores):
        return scores + torch.zeros(3, scores.shape[-1])


class BansByRow(LogitsProcessor):
    """Legal in plain `generate()`: each row has a banned token of its own."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[torch.arange(len(scores)), 5 + torch.arange(len(scores))] = -torch.inf
        return scores


class Three(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if len(scores) != 3:
            raise RuntimeError("needs three rows")
        return scores


class AgainstTheMean(LogitsProcessor):
    """Looks at all rows of a batch."""

    def __call__(self, input_ids, scores):
        return scores - scores.mean(dim=0, keepdim=True)


class LengthOf(LogitsProcessor):
    """Lowers what was generated after a prompt: it holds the prompt's length, padding included, or finds it out."""

    def __init__(self, prompt_length=None):
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores):
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        return scores - 4.0 * by_row(input_ids[:, self.prompt_length :], scores.shape[-1])


class RaisesPresent(LogitsProcessor):
    """Reads its rows one after the other; padding is a token to it."""

    def __call__(self, input_ids, scores):
        return scores + by_row(input_ids, scores.shape[-1])


def by_row(input_ids, vocab_size):
    """Return how often each token stands in each row."""
    return torch.stack([row.bincount(minlength=vocab_size) for row in input_ids])


class Writes(LogitsProcessor):
    def __call__(self, input_ids, scores):
        input_ids[:] = 3
        return scores


class Returns(LogitsProcessor):
    def __init__(self, make):
        self.make = make

    def __call__(self, input_ids, scores):
        return self.make(scores)


class ForgetsSome(DynamicCache):
    def update(self, keys, values, layer_idx, *args, **kwargs):
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        return keys, values * 0.5


class WithModel(LogitsProcessor):
    """A processor or criterion that holds something large."""

    def __init__(self, held):
        self.held, self.calls = held, []

    def __call__(self, input_ids, scores, **kwargs):
        return scores


def favour(calls, input_ids, scores):
    """Favour another token with every call from the fourth on; who calls it keeps their number somewhere."""
    calls[0] += 1
    return scores + 20 * (torch.arange(scores.shape[-1]) == calls[0] * 7) * (calls[0] > 3)


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = torch.zeros(9999)[5000:]  # in the middle, which no text of it shows

    def __call__(self, input_ids, scores):
        return favour(self.calls, input_ids, scores)


class Holds(LogitsProcessor):
    def __init__(self, held):
        self.held = held

    def __call__(self, input_ids, scores):
        return self.held(input_ids, scores)


def in_closure():
    calls, lock = [0], threading.Lock()  # which no copy has
    return lambda input_ids, scores: lock and favour(calls, input_ids, scores)


class InStep(LogitsProcessor):
    length = None

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1), "one step after the other"
        self.length = input_ids.shape[1]
        return scores


global_calls = [0]


def in_attribute():
    def process(input_ids, scores):
        return favour(process.calls, input_ids, scores)

    process.calls = [0]
    return process


STATES = {
    "slots": Slots,
    "nested": lambda: Holds(Slots()),
    "method": lambda: Slots().__call__,
    "partial": lambda: functools.partial(favour, [0]),
    "iterator": lambda: functools.partial(lambda it, *rest: favour([next(it)], *rest), iter(range(99))),
    "closure": in_closure,
    "attribute": in_attribute,
    "global": lambda: lambda ids, scores: favour(global_calls, ids, scores),
}


# How many prompts, options, and words of the refusal.
REFUSED = {
    "beams": (1, {"num_beams": 2}, "num_beams"),
    "no_cache": (1, {"use_cache": False}, "use_cache"),
    "static_cache_name": (1, {"cache_implementation": "static"}, "dynamic cache"),
    "stateful_processor": (1, {"logits_processor": LogitsProcessorList([Counter()])}, "Counter keeps state"),
    "processor_in_step": (1, {"logits_processor": [InStep()]}, "InStep fails when it is tried .*one step after"),
    "cfg": (1, {"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
    "threshold_above_one": (1, {"assistant_confidence_threshold": 1.5}, r"\[0, 1\]"),
    "threshold_negative": (1, {"assistant_confidence_threshold": -0.1}, r"\[0, 1\]"),
    "no_drafts": (1, {"num_assistant_tokens": 0}, "num_assistant_tokens"),
    "half_a_draft": (1, {"num_assistant_tokens": 2.5}, "num_assistant_tokens must be a number of tokens.*got 2.5"),
    "a_word_of_drafts": (1, {"num_assistant_tokens": "5"}, "num_assistant_tokens must be a number of tokens.*got '5'"),
    "no_chunk": (1, {"prefill_chunk_size": 0}, "prefill_chunk_size must be a number of tokens, at least 1, got 0"),
    "a_chunk_below": (3, {"prefill_chunk_size": -1}, "prefill_chunk_size must be a number of tokens.*got -1"),
    "half_a_chunk": (1, {"prefill_chunk_size": 2.5}, "prefill_chunk_size must be a number of tokens.*got 2.5"),
    "schedule": (1, {"num_assistant_tokens_schedule": "heuristic"}, "num_assistant_tokens_schedule='heuristic'"),
    "prompt_lookup": (1, {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens asks for other drafts"),
    "mtp": (1, {"use_mtp": True}, "use_mtp"),
    "early_exit": (1, {"assistant_early_exit": 2}, "assistant_early_exit asks for other drafts"),
    "uncopied_processor": (
        1,
        {"logits_processor": [WithModel(threading.Lock())]},
        "WithModel cannot be copied .*: give it a __deepcopy__",
    ),
    "empty_prompt": (1, {"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None}, None),
    "streamer_of_a_batch": (6, {"streamer": Notes()}, "streamer takes one sequence"),
    "processor_that_knows_rows": (3, {"logits_processor": [Rows()]}, "Rows treats rows differently.*returned 3 rows"),
    "processor_by_row": (3, {"logits_processor": [BansByRow()]}, "BansByRow treats rows differently.*row 1 alone"),
    "processor_of_all_rows": (3, {"logits_processor": [AgainstTheMean()]}, "AgainstTheMean treats rows differently"),
    "processor_that_writes_tokens": (1, {"logits_processor": [Writes()]}, "Writes writes into input_ids"),
    "processor_of_some_scores": (1, {"logits_processor": [Returns(lambda each: each[:, :9])]}, r"\(1, 64\), got .*9"),
    "processor_of_a_list": (1, {"logits_processor": [Returns(lambda each: each.tolist())]}, "got None"),
    "no_prompts": (2, {"input_ids": torch.zeros(0, 4, dtype=torch.long), "attention_mask": None}, "no prompts"),
    "processor_of_the_batch_size": (3, {"logits_processor": [Three()]}, "Three treats rows differently.*needs three"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("rows", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_option_is_refused_by_name(target, draft, prompts, rows, options, message):
    before = target.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        target.generate(assistant_model=draft, **(GREEDY | padded(prompts[:rows]) | options))
    assert target.config._attn_implementation == before
    assert_no_hooks(target)


@pytest.mark.parametrize("part", ["layer", "config"])
def test_layers_and_configs_may_be_replaced_between_calls(make_target, make_draft, part):
    target, ids = make_target(), torch.arange(12).view(2, 6)
    draft = make_draft(target)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6}
    assert_same_tokens(target, draft, ids, **options)
    if part == "layer":
        target.model.layers[2] = copy.deepcopy(target.model.layers[1])
        target.model.layers[2].self_attn.layer_idx = 2
    else:
        target.model.config = target.config = copy.deepcopy(target.config)
    assert_same_tokens(target, draft, ids, **options)


def test_stateless_custom_processor_is_accepted(target, draft, prompt_ids):
    assert_same_tokens(target, draft, prompt_ids[0], logits_processor=LogitsProcessorList([Halve()]))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_state_is_found_wherever_it_is_kept_and_is_as_it_was(target, draft, prompt_ids, make):
    outputs = []
    for assistant in (None, draft, None):
        global_calls[0] = 0
        options = GREEDY | {"inputs": prompt_ids[0], "logits_processor": [make()]}
        if assistant is not None:
            with pytest.raises(ValueError, match="keeps state between calls"):
                target.generate(assistant_model=assistant, **options)
        outputs.append(target.generate(**options))  # after the refusal, too
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_processor_is_tried_on_tokens_that_it_allows_alone(target, draft, prompt_ids):
    ids = prompt_ids[0]
    answer = target.generate(ids, **GREEDY)[0].tolist()
    allowed = {tuple(answer[:length]): answer[length] for length in range(ids.shape[1], len(answer))}

    def follow(input_ids, scores):
        token = allowed[tuple(input_ids[0].tolist())]  # fails at any other prefix
        return scores.masked_fill(torch.arange(scores.shape[-1]) != token, -torch.inf)

    assert_same_tokens(target, draft, ids, logits_processor=[follow])


def test_processors_that_treat_rows_differently_are_refused_by_every_door(target, draft, prompts):
    processors = {"logits_processor": LogitsProcessorList([BansByRow()])}
    with pytest.raises(ValueError, match="BansByRow treats rows differently"):
        target.generate(**padded(prompts[:3]), custom_generate=decode_with(draft), **GREEDY, **processors)
    with pytest.raises(ValueError, match="BansByRow treats rows differently"):
        sampled = SAMPLED | processors | {"num_return_sequences": 2}
        target.generate(**padded(prompts[:1]), assistant_model=draft, **sampled)
    # Of one row there is no other.
    found = generate_many(target, draft, prompts[:3], progress=False, **GREEDY, **processors)
    for completion in found:
        assert completion.token_ids.tolist() == alone(target, prompts[completion.index], **processors)


HELD = 12  # columns of the padded prompts
OF_ROWS = {
    "padded_length_held": lambda: {"logits_processor": [LengthOf(HELD)]},
    "padded_length_found_out": lambda: {"logits_processor": [LengthOf()]},
    "padding_read": lambda: {"logits_processor": [RaisesPresent()]},
    "padded_length_held_by_a_penalty": lambda: {
        "logits_processor": [RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=HELD)]
    },
    "penalty_of_some_padding": lambda: {
        "logits_processor": [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=4)]
    },
    "padded_length_held_by_a_constraint": lambda: {
        "prefix_allowed_tokens_fn": lambda batch, ids: [t for t in range(64) if t not in ids[HELD:].tolist()]
    },
    "constraint_by_row": lambda: {"prefix_allowed_tokens_fn": lambda batch, ids: range(20 * batch, 20 * batch + 20)},
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("make", OF_ROWS.values(), ids=OF_ROWS)
def test_processors_of_padded_rows_see_what_plain_generate_shows_them(target, draft, prompts, make):
    batch = padded([prompts[1], [15], (prompts[2] * HELD)[:HELD]])
    assert batch["input_ids"].shape[1] == HELD
    plain = target.generate(**batch, **GREEDY, **make())
    assert torch.equal(target.generate(**batch, assistant_model=draft, **GREEDY, **make()), plain)


@pytest.mark.parametrize("rows", [1, 6])
def test_right_padding_is_refused(target, draft, prompts, rows):
    batch = padded([*prompts[1:rows], [0, *prompts[0]]])
    batch["attention_mask"][batch["input_ids"] == 0] = 0
    flipped = {name: value.flip(1) for name, value in batch.items()}
    with pytest.raises(ValueError, match="padding_side"):
        target.generate(**flipped, assistant_model=draft, **GREEDY)


def test_caches_that_cannot_be_continued_are_refused(target, draft, prompts):
    static = StaticCache(config=target.config, max_cache_len=128)
    with pytest.raises(ValueError, match=r"[Ss]tatic"):
        target.generate(torch.tensor(prompts[:1]), past_key_values=static, assistant_model=draft, **GREEDY)
    offloaded = DynamicCache(config=target.config)
    target.generate(torch.tensor(prompts[:1]), past_key_values=offloaded, **GREEDY)
    offloaded.offloading = True
    longer = torch.tensor([prompts[0] * 12])
    with pytest.raises(ValueError, match="cannot continue a DynamicCache"):
        target.generate(longer, past_key_values=offloaded, assistant_model=draft, **GREEDY)
    with pytest.raises(ValueError, match="cannot continue a ForgetsSome"):
        target.generate(longer, past_key_values=ForgetsSome(), assistant_model=draft, **GREEDY)
    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(ValueError, match="cannot continue a EncoderDecoderCache of EncoderDecoderCache"):
        target.generate(longer, past_key_values=pair, assistant_model=draft, **GREEDY)


@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_of_a_shorter_integer_type_become_what_plain_decoding_makes_of_them(target, draft, prompts, rows):
    batch = padded(prompts[:rows])
    batch["input_ids"] = batch["input_ids"].int()
    plain = target.generate(**batch, **GREEDY)
    ours = target.generate(**batch, assistant_model=draft, **GREEDY)
    assert ours.dtype == plain.dtype and torch.equal(ours, plain)


def flat_attention(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query * 0.1, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("name", ["flat", "sdpa"])
def test_attention_of_the_users_own_is_not_replaced(make_target, make_draft, prompts, monkeypatch, name):
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)
    monkeypatch.setitem(AttentionInterface._global_mapping, name, flat_attention)
    target = make_target(attn_implementation=name)
    draft, ids = make_draft(target), torch.tensor([prompts[0]]) % 48
    plain = target.generate(ids, **GREEDY)
    with pytest.warns(UserWarning, match=f"attends by '{name}', which was registered by somebody else"):
        assert torch.equal(target.generate(ids, assistant_model=draft, **GREEDY), plain)
    with pytest.raises(ValueError, match="cannot be decoded together: .*registered by somebody else"):
        target.generate(ids.expand(2, -1), assistant_model=draft, **GREEDY)


@pytest.mark.parametrize("step", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
def test_steps_of_the_users_own_are_taken_in_transformers_loop(make_target, make_draft, prompts, step):
    def changed(self, *args, **kwargs):
        inputs = getattr(Qwen3ForCausalLM, step)(self, *args, **kwargs)
        return inputs | ({"input_ids": (inputs["input_ids"] + 1) % 48} if "input_ids" in inputs else {})

    target = make_target()
    usual = target.generate(ids := torch.tensor([prompts[0]]) % 48, **GREEDY)
    target.__class__ = type("Changed", (Qwen3ForCausalLM,), {step: changed})
    plain = target.generate(ids, **GREEDY)
    assert torch.equal(plain, usual) == (step != "prepare_inputs_for_generation")
    with pytest.warns(UserWarning, match=f"Changed has a method {step} of its own"):
        assert torch.equal(target.generate(ids, assistant_model=make_draft(target), **GREEDY), plain)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_the_users_own_are_named_in_a_warning(make_target, make_draft, prompts, register):
    target, batch = make_target(), padded([[token % 48 for token in row] for row in prompts[:2]])
    draft = make_draft(target)
    target.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**batch, assistant_model=draft, **GREEDY)
    getattr(target.model.layers[1], register)(lambda module, args, *output: (output or args)[0] * 1.01)
    plain = target.generate(**batch, **GREEDY)
    with pytest.warns(UserWarning, match="hooks around modules of Qwen3ForCausalLM see drafted tokens") as told:
        assert torch.equal(target.generate(**batch, assistant_model=draft, **GREEDY), plain)
    assert len(told) == 1


@pytest.mark.parametrize("limit", [{"max_new_tokens": 5.0}, {"max_new_tokens": None, "max_length": 15.5}])
def test_lengths_may_be_floats_as_in_plain_decoding(target, draft, prompts, limit):
    plain = target.generate(**padded(prompts[:2]), **(GREEDY | limit))
    assert torch.equal(target.generate(**padded(prompts[:2]), assistant_model=draft, **(GREEDY | limit)), plain)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "processor",
    [EncoderRepetitionPenaltyLogitsProcessor, lambda _, ids: EncoderNoRepeatNGramLogitsProcessor(1, ids)],
    ids=["penalty", "no_repeat"],
)
@pytest.mark.parametrize("texts", [1, 3])
def test_a_users_processor_of_other_texts_keeps_them(target, draft, prompts, processor, texts):
    batch = padded(prompts[:3])
    width = batch["input_ids"].shape[1]
    usual = target.generate(**batch, **GREEDY)[:, width:]
    others = usual[:texts]  # what would be said

    def options(own):
        return GREEDY | {"logits_processor": LogitsProcessorList([processor(0.2, own)])}

    # Row by row: releases before 5.19 process the first row alone where several share a text.
    plain = [
        target.generate(torch.tensor([prompt]), **options(others[[row % texts]]))[0, len(prompt) :]
        for row, prompt in enumerate(prompts[:3])
    ]
    assert not torch.equal(torch.stack(plain), usual)
    assisted = target.generate(**batch, assistant_model=draft, **options(others))
    assert torch.equal(assisted[:, width:], torch.stack(plain))


def test_copies_of_users_objects_share_models():
    held = torch.nn.Linear(2, 2)
    copied = copy_of(WithModel(held))
    assert copied.held is held and copied.calls is not copied.held


def test_empty_rows_are_refused_by_number(target, draft, prompts):
    batch = padded(prompts[:3])
    batch["attention_mask"][1, :-1] = 0
    batch["attention_mask"][2] = 0
    with pytest.raises(ValueError, match=r"empty in rows \[2\]"):
        target.generate(**batch, assistant_model=draft, **GREEDY)


def test_rows_end_together_where_no_token_ends_them(target, draft, prompts, tokenizer):
    options = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None}
    target = copy.deepcopy(target)
    target.generation_config.pad_token_id = target.generation_config.eos_token_id = None
    for stop in ({}, {"stop_strings": ["Q"], "tokenizer": tokenizer}):
        plain = target.generate(**padded(prompts), **stop, **options)
        assert torch.equal(target.generate(**padded(prompts), **stop, assistant_model=draft, **options), plain)


def test_all_reasons_are_named_at_once(target, draft, prompts):
    flipped = {name: value.flip(1) for name, value in padded(prompts[:2]).items()}
    options = {"logits_processor": [Counter()], "max_new_tokens": 4, "use_cache": False, "use_mtp": True}
    for way in ({"assistant_model": draft}, {"custom_generate": decode_with(draft)}):
        with pytest.raises(ValueError, match="there are 4 reasons") as refusal:
            target.generate(**flipped, **way, **options)
        for word in ("use_cache", "use_mtp", "padding_side", "Counter"):
            assert word in str(refusal.value)


def test_prompts_longer_than_the_context_are_refused(target, draft):
    length = target.config.max_position_embeddings + 1
    with pytest.raises(ValueError, match=f"prompt of {length} tokens does not fit"):
        target.generate(torch.ones(1, length, dtype=torch.long), assistant_model=draft, **GREEDY)


@pytest.mark.parametrize("scheduler", [GlobalScheduler, EliminationScheduler])
def test_policies_that_look_ahead_are_refused_when_drafts_are_sampled(target, draft, prompt_ids, scheduler):
    for policy in (scheduler(TABLE), scheduler(TABLE, tpot_seconds=5.0)):
        draft.decoding = DecodingOptions(policy=policy)
        with pytest.raises(ValueError, match=r"not causal with this draft.*accept_bias"):
            target.generate(prompt_ids[0], assistant_model=draft, **SAMPLED)
    draft.decoding = DecodingOptions(policy=scheduler(TABLE, accept_bias=True))
    target.generate(prompt_ids[0], assistant_model=draft, **SAMPLED)


def test_global_search_is_welcome_when_the_head_reads_no_token(make_target, make_draft):
    target = make_target()
    draft = make_draft(target, confidence_head_with_markov=False)
    draft.decoding = DecodingOptions(policy=GlobalScheduler(TABLE))
    ids = torch.tensor([[5, 6, 7]])
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **SAMPLED)
    assert draft.last_stats.rounds > 0


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_without_a_confidence_head_are_cut_by_what_their_distributions_say(target, prompt_ids, how):
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, markov_rank=4, enable_confidence_head=False))
    seen = []
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.01), observer=seen.append)
    output = target.generate(prompt_ids[0], assistant_model=draft, **how)
    drafted = [outcome for outcome in seen if outcome.drafted]
    assert all(each.confidence.shape == each.drafts.token_ids.shape for each in drafted)
    assert drafted and all(bool(((0 < each.confidence) & (each.confidence < 1)).all()) for each in drafted)
    draft.decoding = DecodingOptions(policy=GlobalScheduler(TABLE))
    if how is GREEDY:
        assert torch.equal(output, target.generate(prompt_ids[0], **how))
        target.generate(prompt_ids[0], assistant_model=draft, **how)
    else:
        with pytest.raises(ValueError, match="not causal with this draft"):
            target.generate(prompt_ids[0], assistant_model=draft, **how)


def test_temperatures_set_by_hand_and_domains_are_checked(target, draft, prompt_ids):
    draft.config.sts_temperatures = {"default": [2.0]}
    with pytest.raises(ValueError, match=r"temperatures must be \d positive numbers, got .2.0."):
        target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
    draft.config.sts_temperatures, draft.decoding = None, DecodingOptions(domain="poems")
    with pytest.raises(ValueError, match="no calibration for the domain 'poems'"):
        target.generate(prompt_ids[0], assistant_model=draft, **GREEDY)
