"""Batches through `generate()`: each row as if it were alone, and everything a call may ask for besides tokens."""

import copy
import json
import string

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_dspark import FullBlock, Policy, decode_with
from hf_dspark.decoding import install
from hf_dspark.models.slot_cache import SlotCache

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
EOS = 62


@pytest.fixture(scope="module")
def prompts(fixtures):
    rows = json.loads((fixtures / "deepspec" / "trained" / "generation.json").read_text())["prompts"]
    return [*rows, rows[0][:3], rows[3][4:9]]


@pytest.fixture(autouse=True)
def _full_blocks(pair):
    pair[1].policy = FullBlock()
    yield
    pair[1].policy, pair[1].use_transformers_loop = None, False


def padded(prompts, pad=0):
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def alone(target, prompt, **options):
    """Return what plain `generate()` adds to a single prompt."""
    ids = torch.tensor([prompt])
    return target.generate(ids, attention_mask=torch.ones_like(ids), **(GREEDY | options))[0, len(prompt) :].tolist()


def assert_rows(output, width, expected, pad=0):
    """Check that every row is what was expected, and padding behind it."""
    for row, tokens in zip(output[:, width:].tolist(), expected, strict=True):
        assert row[: len(tokens)] == tokens
        assert set(row[len(tokens) :]) <= {pad}


# --- rows ----------------------------------------------------------------------------------------------------------


class EndsAfterTwo(StoppingCriteria):
    """Stops behind the second token it is asked about; counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 2)


OPTIONS = {
    "default": {},
    "eos_list": {"eos_token_id": [EOS, 11, 17]},
    "no_eos": {"eos_token_id": None},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 3},
    "min_new_tokens": {"min_new_tokens": 30},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3]},
    "bad_words": {"bad_words_ids": [[5], [7, 8]]},
    "forced_eos": {"forced_eos_token_id": EOS, "max_new_tokens": 9},
    "encoder_penalty": {"encoder_repetition_penalty": 1.4},
    "encoder_ngram": {"encoder_no_repeat_ngram_size": 2},
    "begin_suppress": {"begin_suppress_tokens": [26, 42, 29]},
    "decay": {"exponential_decay_length_penalty": (4, 1.5)},
    "one_token": {"max_new_tokens": 1},
    "chunked_prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_row_is_what_its_prompt_gives_alone(pair, prompts, options):
    target, draft = pair
    batch = padded(prompts)
    output = target.generate(**batch, assistant_model=draft, **(GREEDY | options))
    plain = {key: value for key, value in options.items() if key != "prefill_chunk_size"}
    assert_rows(output, batch["input_ids"].shape[1], [alone(target, prompt, **plain) for prompt in prompts])


def test_constraints_are_asked_about_the_right_row(pair, prompts):
    target, draft = pair
    batch = padded(prompts[:3])

    def allowed(row, ids):
        return [10 + row, 20 + row]

    output = target.generate(**batch, assistant_model=draft, prefix_allowed_tokens_fn=allowed, **GREEDY)
    for row, tokens in enumerate(output[:, batch["input_ids"].shape[1] :].tolist()):
        assert set(tokens) <= {10 + row, 20 + row}


def test_custom_processors_see_each_row_without_padding(pair, prompts):
    target, draft = pair

    class Echo(LogitsProcessor):
        """Favours a token that depends on the first one of the sequence and its length."""

        def __call__(self, input_ids, scores):
            favoured = (input_ids[:, :1] * 7 + input_ids.shape[1]) % scores.shape[-1]
            return scores.scatter(1, favoured, 30.0)

    batch, extra = padded(prompts), {"logits_processor": LogitsProcessorList([Echo()])}
    output = target.generate(**batch, assistant_model=draft, **GREEDY, **extra)
    assert_rows(output, batch["input_ids"].shape[1], [alone(target, prompt, **extra) for prompt in prompts])


def test_max_length_counts_padding_as_plain_generate_does(pair, prompts):
    target, draft = pair
    batch, options = padded(prompts), {"max_length": 30, "max_new_tokens": None, "do_sample": False, "pad_token_id": 0}
    output = target.generate(**batch, assistant_model=draft, **options)
    assert output.shape == target.generate(**batch, **options).shape


def test_ended_rows_leave_the_batch(pair, prompts):
    """The later rounds are about fewer rows: padding is never decoded."""
    target, draft = pair
    seen = []
    draft.observer = lambda outcome: seen.append(outcome.request_ids)
    try:
        batch = padded(prompts)
        output = target.generate(**batch, assistant_model=draft, **(GREEDY | {"eos_token_id": [EOS, 11, 17, 42]}))
    finally:
        draft.observer = None
    lengths = [len(alone(target, prompt, eos_token_id=[EOS, 11, 17, 42])) for prompt in prompts]
    assert len(set(lengths)) > 1 and output.shape[1] == batch["input_ids"].shape[1] + max(lengths)
    assert sum(map(len, seen)) < len(prompts) * len(seen)
    assert set(seen[-1]) <= {row for row, length in enumerate(lengths) if length > 1}


def test_rows_share_one_verification_budget(pair, prompts):
    target, draft = pair

    class FiveInAll(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            lengths = torch.zeros_like(max_lengths)
            for slot in range(5):
                row = slot % len(lengths)
                lengths[row] = min(int(lengths[row]) + 1, int(max_lengths[row]))
            return lengths

    seen = []
    draft.policy, draft.observer = FiveInAll(), seen.append
    try:
        batch = padded(prompts)
        output = target.generate(**batch, assistant_model=draft, **GREEDY)
    finally:
        draft.observer = None
    assert_rows(output, batch["input_ids"].shape[1], [alone(target, prompt) for prompt in prompts])
    assert max(int(outcome.lengths.sum()) for outcome in seen) == 5
    ragged = next(outcome for outcome in seen if len(set(outcome.lengths.tolist())) > 1)
    assert ragged.target_logits.shape[:2] == (len(ragged.lengths), 1 + int(ragged.lengths.max()))


def test_several_sequences_per_prompt_differ_and_keep_to_their_prompt(pair, prompts):
    target, draft = pair
    batch = padded(prompts[:2])
    torch.manual_seed(3)
    output = target.generate(
        **batch, assistant_model=draft, do_sample=True, top_k=0, temperature=3.0, num_return_sequences=3,
        max_new_tokens=12, pad_token_id=0,
    )  # fmt: skip
    width = batch["input_ids"].shape[1]
    assert output[:, :width].tolist() == batch["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in output[:, width:].tolist()}) == 6


def test_a_seed_decides_what_is_sampled(pair, prompts):
    target, draft = pair
    batch, outputs = padded(prompts), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(
            target.generate(**batch, assistant_model=draft, do_sample=True, max_new_tokens=12, pad_token_id=0).tolist()
        )
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("rows", [1, 6])
def test_bfloat16_rows_are_within_rounding_of_the_teacher_forced_maximum(pair, prompts, rows):
    target, draft = copy.deepcopy(pair[0]).bfloat16(), copy.deepcopy(pair[1]).bfloat16()
    batch = padded(prompts[:rows])
    output = target.generate(**batch, assistant_model=draft, **(GREEDY | {"eos_token_id": None}))
    width = batch["input_ids"].shape[1]
    for prompt, row in zip(prompts, output[:, width:].tolist(), strict=False):
        ids = torch.tensor([prompt + row])
        with torch.no_grad():
            logits = target(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # One unit in the last place of a bfloat16 logit below 32.
        assert (logits.amax(dim=1) - chosen).max() <= 0.125


# --- stops -----------------------------------------------------------------------------------------------------------


def test_custom_criteria_cut_at_the_exact_token_of_each_row(pair, prompts):
    target, draft = pair
    batch = padded(prompts)
    criteria = StoppingCriteriaList([EndsAfterTwo()])
    output = target.generate(**batch, assistant_model=draft, stopping_criteria=criteria, **GREEDY)
    assert_rows(output, batch["input_ids"].shape[1], [alone(target, prompt)[:2] for prompt in prompts])
    # Never asked about a token behind the end.
    assert criteria[0].calls == 2


def test_criteria_get_the_scores_they_would_get_from_plain_generate(pair, prompts):
    target, draft = pair

    class Watcher(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append((input_ids.shape, len(scores), scores[-1].shape))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    seen = []
    for assistant in ({}, {"assistant_model": draft}):
        watcher = Watcher()
        target.generate(
            torch.tensor(prompts[:1]), stopping_criteria=StoppingCriteriaList([watcher]), output_scores=True,
            return_dict_in_generate=True, **GREEDY, **assistant,
        )  # fmt: skip
        seen.append(watcher.seen)
    assert seen[0] == seen[1]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models

    letters = string.ascii_letters + string.digits + ".,"
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="a", eos_token=".")


def test_stop_strings_cut_each_row_at_the_exact_token(pair, prompts, tokenizer):
    target, draft = pair
    batch = padded(prompts)
    stop = {"stop_strings": ["Q", "Ld"], "tokenizer": tokenizer}
    output = target.generate(**batch, assistant_model=draft, **GREEDY, **stop)
    expected = [alone(target, prompt, **stop) for prompt in prompts]
    assert min(map(len, expected)) < 40
    assert_rows(output, batch["input_ids"].shape[1], expected)


# --- what comes back -------------------------------------------------------------------------------------------------


def test_scores_logits_and_hidden_states_of_a_batch_are_those_of_each_row(pair, prompts):
    target, draft = pair
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    batch, options = padded(prompts), GREEDY | {"repetition_penalty": 1.2}
    together = target.generate(**batch, assistant_model=draft, **options, **ask)
    width = batch["input_ids"].shape[1]
    for row, prompt in enumerate(prompts):
        single = target.generate(torch.tensor([prompt]), **options, **ask)
        for step in range(len(single.scores)):
            torch.testing.assert_close(together.scores[step][row], single.scores[step][0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(together.logits[step][row], single.logits[step][0], atol=1e-4, rtol=1e-4)
            for ours, theirs in zip(together.hidden_states[step], single.hidden_states[step], strict=True):
                torch.testing.assert_close(ours[row, -theirs.shape[1] :], theirs[0], atol=1e-4, rtol=1e-4)
                assert ours.shape[1] == (width if step == 0 else 1)


def test_truncated_scores_are_those_of_the_warpers(pair, prompts):
    target, draft = pair
    ids = torch.tensor(prompts[:1])
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 12}
    output = target.generate(
        ids, assistant_model=draft, do_sample=True, temperature=0.7, top_k=9, top_p=0.8, pad_token_id=0, **ask
    )
    for scores, logits in zip(output.scores, output.logits, strict=True):
        law = (logits / 0.7).softmax(-1)
        kept = scores[0] > -torch.inf
        assert 1 <= kept.sum() <= 9 and law[0][kept].min() >= law[0][~kept].max()
        torch.testing.assert_close(scores[0][kept], logits[0][kept] / 0.7)


def test_attentions_are_left_to_transformers_loop(pair, prompts):
    target, draft = pair
    eager = copy.deepcopy(target)
    eager.set_attn_implementation("eager")
    ask = {"return_dict_in_generate": True, "output_attentions": True}
    assert eager.generate(torch.tensor(prompts[:1]), assistant_model=draft, **GREEDY, **ask).attentions
    with pytest.raises(ValueError, match="output_attentions"):
        eager.generate(**padded(prompts), assistant_model=draft, **GREEDY, **ask)


# --- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [False, True])
def test_left_padded_embeddings_are_decoded_like_their_ids(pair, prompts, with_ids):
    target, draft = pair
    batch = padded(prompts)
    embeds = target.get_input_embeddings()(batch["input_ids"]).detach()
    ids = {"input_ids": batch["input_ids"]} if with_ids else {}
    output = target.generate(
        inputs_embeds=embeds, attention_mask=batch["attention_mask"], assistant_model=draft, **GREEDY, **ids
    )
    width = batch["input_ids"].shape[1] if with_ids else 0
    assert_rows(output, width, [alone(target, prompt) for prompt in prompts])


# --- caches of an earlier turn ---------------------------------------------------------------------------------------


NEXT = [[9, 33], [4, 4, 50]]


def first_turn(pair, prompts, **options):
    target, draft = pair
    return target.generate(
        **padded(prompts), assistant_model=draft, return_dict_in_generate=True, **(GREEDY | options)
    )  # fmt: skip


def conversation(prompts, output, rows):
    """Return the whole conversation of each row so far, without padding, and what comes next."""
    width = max(map(len, prompts))
    said = [prompt + output.sequences[row, width:].tolist() for row, prompt in enumerate(prompts)]
    return [before + NEXT[row % 2] for row, before in zip(range(rows), said, strict=True)]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_returned_cache_continues_the_conversation(pair, prompts, rows):
    target, draft = pair
    output = first_turn(pair, prompts[:rows], eos_token_id=None)
    whole = conversation(prompts[:rows], output, rows)
    batch, cached = padded(whole), list(output.past_key_values.lengths)
    seen = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        second = target.generate(
            **batch, past_key_values=output.past_key_values, assistant_model=draft, **(GREEDY | {"eos_token_id": None})
        )
    finally:
        handle.remove()
    assert seen[0] == sum(map(len, whole)) - sum(cached)  # nothing is fed twice
    expected = [alone(target, prompt, eos_token_id=None) for prompt in whole]
    assert_rows(second, batch["input_ids"].shape[1], expected)
    fresh = target.generate(**batch, assistant_model=draft, **(GREEDY | {"eos_token_id": None}))
    assert fresh.tolist() == second.tolist()


def test_the_draft_knows_the_earlier_turns(pair, prompts):
    """With the cache and without it the same blocks are drafted and accepted."""
    target, draft = pair
    output = first_turn(pair, prompts[:3])
    batch = padded(conversation(prompts[:3], output, 3))
    accepted = []
    for cache in ({"past_key_values": output.past_key_values}, {}):
        target.generate(**batch, assistant_model=draft, **GREEDY, **cache)
        accepted.append(draft.last_stats.accepted)
    assert accepted[0] == accepted[1]


def test_an_edited_conversation_keeps_what_is_still_true(pair, prompts):
    target, draft = pair
    output = first_turn(pair, prompts[:1])
    said = output.sequences[0].tolist()
    edited = said[: len(said) // 2] + [1, 2, 3, 4] * 10
    second = target.generate(
        torch.tensor([edited]), past_key_values=output.past_key_values, assistant_model=draft, **GREEDY
    )
    assert second[0, len(edited) :].tolist() == alone(target, edited)


def test_new_tokens_alone_continue_a_cache_when_the_mask_covers_everything(pair, prompts):
    target, draft = pair
    output = first_turn(pair, prompts[:1])
    whole = output.sequences[0].tolist() + NEXT[0]
    new = torch.tensor([whole[output.past_key_values.get_seq_length() :]])
    mask = torch.ones(1, len(whole), dtype=torch.long)
    second = target.generate(
        new, attention_mask=mask, past_key_values=output.past_key_values, assistant_model=draft, **GREEDY
    )
    assert second[0, new.shape[1] :].tolist() == alone(target, whole)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_dynamic_cache_of_plain_generate_is_continued_and_filled(pair, prompts, rows):
    target, draft = pair
    batch, cache = padded(prompts[:rows]), DynamicCache(config=target.config)
    options = GREEDY | {"eos_token_id": None, "max_new_tokens": 10}
    first = target.generate(**batch, past_key_values=cache, **options)
    longer = torch.cat([first, torch.tensor([[9, 33]] * rows)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(rows, 12, dtype=torch.long)], dim=1)
    expected = target.generate(longer, attention_mask=mask, **options)
    reference = copy.deepcopy(cache)
    ours = target.generate(longer, attention_mask=mask, past_key_values=cache, assistant_model=draft, **options)
    assert ours.tolist() == expected.tolist()
    target.generate(longer, attention_mask=mask, past_key_values=reference, **options)
    assert cache.get_seq_length() == reference.get_seq_length()
    real = torch.cat([mask, torch.ones(rows, 9, dtype=torch.long)], dim=1).bool()
    for ours_layer, plain_layer in zip(cache.layers, reference.layers, strict=True):
        difference = (ours_layer.keys - plain_layer.keys).abs().amax(dim=(1, 3))
        assert difference[real].max() < 1e-4


def test_a_slot_cache_becomes_a_dynamic_one_for_plain_generate(pair, prompts):
    target, _ = pair
    output = first_turn(pair, prompts[:1])
    whole = output.sequences[0].tolist() + NEXT[0]
    cache = output.past_key_values.to_dynamic_cache()
    second = target.generate(torch.tensor([whole]), past_key_values=cache, **GREEDY)
    assert second[0, len(whole) :].tolist() == alone(target, whole)


def test_a_slot_cache_in_plain_generate_says_what_to_do(pair, prompts):
    target, _ = pair
    output = first_turn(pair, prompts[:1])
    whole = torch.tensor([output.sequences[0].tolist() + NEXT[0]])
    with pytest.raises(ValueError, match="to_dynamic_cache"):
        target.generate(whole, past_key_values=output.past_key_values, **GREEDY)


def test_a_cache_survives_an_interrupted_turn(pair, prompts):
    target, draft = pair
    output = first_turn(pair, prompts[:2])
    batch = padded(conversation(prompts[:2], output, 2))

    class Interrupts(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise KeyboardInterrupt

    again = {"past_key_values": output.past_key_values, "assistant_model": draft, **GREEDY}
    with pytest.raises(KeyboardInterrupt):
        target.generate(**batch, stopping_criteria=StoppingCriteriaList([Interrupts()]), **again)
    assert target.generate(**batch, **again).tolist() == target.generate(**batch, **GREEDY).tolist()


# --- the other door --------------------------------------------------------------------------------------------------


def test_decode_with_is_the_same_without_the_wraps(pair, prompts, monkeypatch):
    target, draft = pair
    batch = padded(prompts)
    expected = target.generate(**batch, assistant_model=draft, **GREEDY)
    for name in install.WRAPPED_PARAMETERS:
        method = getattr(install.GenerationMixin, name)
        monkeypatch.setattr(install.GenerationMixin, name, getattr(method, "__wrapped__", method))
    assert target.generate(**batch, custom_generate=decode_with(draft), **GREEDY).tolist() == expected.tolist()


def test_decode_with_needs_a_draft(pair):
    with pytest.raises(TypeError, match="DSparkDraftModel"):
        decode_with(pair[0])


# --- refused before any work -----------------------------------------------------------------------------------------


def test_empty_rows_are_refused_by_number(pair, prompts):
    target, draft = pair
    batch = padded(prompts[:3])
    batch["attention_mask"][1] = 0
    batch["attention_mask"][1, -1] = 1
    batch["attention_mask"][2] = 0
    with pytest.raises(ValueError, match=r"empty in rows \[2\]"):
        target.generate(**batch, assistant_model=draft, **GREEDY)


def test_right_padding_is_refused(pair, prompts):
    target, draft = pair
    batch = padded(prompts)
    flipped = {name: value.flip(1) for name, value in batch.items()}
    with pytest.raises(ValueError, match="padding_side"):
        target.generate(**flipped, assistant_model=draft, **GREEDY)


def test_a_missing_padding_token_is_refused_when_rows_may_end_apart(pair, prompts, tokenizer):
    target, draft = pair
    options = {"assistant_model": draft, "do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    target = copy.deepcopy(target)
    target.generation_config.pad_token_id = target.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="pad_token_id"):
        target.generate(**padded(prompts), stop_strings=["Q"], tokenizer=tokenizer, **options)
    assert target.generate(**padded(prompts), **options).shape[0] == len(prompts)


def test_prompts_longer_than_the_context_are_refused(pair):
    target, draft = pair
    length = target.config.max_position_embeddings + 1
    with pytest.raises(ValueError, match=f"prompt of {length} tokens does not fit"):
        target.generate(torch.ones(1, length, dtype=torch.long), assistant_model=draft, **GREEDY)


def test_streamers_of_a_batch_are_refused(pair, prompts):
    from transformers.generation.streamers import BaseStreamer

    class Quiet(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            pass

    target, draft = pair
    with pytest.raises(ValueError, match="streamer takes one sequence"):
        target.generate(**padded(prompts), assistant_model=draft, streamer=Quiet(), **GREEDY)


def test_transformers_loop_refuses_batches_and_says_why_it_was_needed(pair, prompts):
    target, draft = pair
    draft.use_transformers_loop = True
    with pytest.raises(ValueError, match="6 sequences cannot be decoded together: draft.use_transformers_loop"):
        target.generate(**padded(prompts), assistant_model=draft, **GREEDY)


def test_a_cache_of_another_batch_is_refused(pair, prompts):
    target, draft = pair
    output = first_turn(pair, prompts[:2])
    with pytest.raises(ValueError, match="holds 2 sequences, the prompts are 3"):
        target.generate(**padded(prompts[:3]), past_key_values=output.past_key_values, assistant_model=draft, **GREEDY)


def test_a_dynamic_cache_of_another_batch_is_refused(pair, prompts):
    target, draft = pair
    cache = DynamicCache(config=target.config)
    first = target.generate(**padded(prompts[:3]), past_key_values=cache, **GREEDY)
    longer = torch.cat([first, torch.tensor([[9, 33]] * 3)], dim=1)[:2]
    with pytest.raises(ValueError, match="holds 3 sequences, the prompts are 2"):
        target.generate(longer, past_key_values=cache, assistant_model=draft, **GREEDY)


def test_a_dynamic_cache_longer_than_the_prompt_is_refused(pair, prompts):
    target, draft = pair
    cache = DynamicCache(config=target.config)
    target.generate(torch.tensor(prompts[:1]), past_key_values=cache, **GREEDY)
    with pytest.raises(
        ValueError, match=rf"holds {cache.get_seq_length()} columns, the prompts have {len(prompts[0])}"
    ):
        target.generate(torch.tensor(prompts[:1]), past_key_values=cache, assistant_model=draft, **GREEDY)


def test_ids_that_contradict_the_cache_are_refused(pair, prompts):
    target, draft = pair
    output = first_turn(pair, prompts[:1])
    with pytest.raises(ValueError, match="only the first 0 are the same"):
        target.generate(
            torch.tensor([[50, 51, 52]]), past_key_values=output.past_key_values, assistant_model=draft, **GREEDY
        )


def test_a_full_memory_names_a_batch_that_fits(pair, prompts, monkeypatch):
    target, draft = pair
    honest, budget = torch.Tensor.new_zeros, [400_000]

    def scarce(self, *shape, **kwargs):
        result = honest(self, *shape, **kwargs)
        if result.dim() == 4:
            budget[0] -= result.nbytes
            if budget[0] < 0:
                raise torch.OutOfMemoryError("out of memory")
        return result

    monkeypatch.setattr(torch.Tensor, "new_zeros", scarce)
    with pytest.raises(MemoryError, match="for 6 sequences: a batch of [1-5] fits"):
        target.generate(**padded(prompts), assistant_model=draft, **GREEDY)


def test_generation_leaves_the_targets_attention_as_it_was(pair, prompts):
    target, draft = pair
    before = target.config._attn_implementation
    target.generate(**padded(prompts), assistant_model=draft, **GREEDY)
    assert target.config._attn_implementation == before
    with pytest.raises(ValueError):
        target.generate(**padded(prompts), assistant_model=draft, num_assistant_tokens=0, **GREEDY)
    assert target.config._attn_implementation == before


def test_the_returned_cache_is_a_slot_cache(pair, prompts):
    output = first_turn(pair, prompts)
    assert isinstance(output.past_key_values, SlotCache)
    assert output.past_key_values.get_seq_length() >= max(map(len, prompts))


# --- found by reading ------------------------------------------------------------------------------------------------


def test_nucleus_sampling_may_need_the_whole_vocabulary_at_some_slots(pair, prompts, monkeypatch):
    target, draft = pair
    monkeypatch.setattr("hf_dspark.decoding.processing.TOP_P_CANDIDATES", 6)
    output = target.generate(
        **padded(prompts), assistant_model=draft, do_sample=True, top_k=0, top_p=0.9, temperature=1.5,
        max_new_tokens=12, pad_token_id=0,
    )  # fmt: skip
    assert output.shape[0] == len(prompts) and draft.last_stats.rounds > 0


def test_processors_are_asked_only_about_prefixes_that_plain_decoding_visits(pair, prompts):
    """Nothing behind an end-of-sequence token, nothing beyond the last length: a trie has no answer there."""
    target, draft = pair

    def allowed(row, ids):
        generated = ids[len(prompts[0]) :].tolist()
        assert len(generated) < 12 and EOS not in generated, "plain decoding never asks"
        return [EOS] if len(generated) == 4 else [26, 42]

    options = GREEDY | {"max_new_tokens": 12, "prefix_allowed_tokens_fn": allowed}
    ids = torch.tensor(prompts[:1])
    for extra in ({}, {"eos_token_id": None, "max_new_tokens": 4}):
        plain = target.generate(ids, **(options | extra))
        assert target.generate(ids, assistant_model=draft, **(options | extra)).tolist() == plain.tolist()


def test_conversations_of_ragged_answers_go_on_in_one_dynamic_cache(pair, prompts):
    """Rows that ended early leave holes in the mask of the next turn, three turns long."""
    target, draft = pair
    batch, cache = padded(prompts[:3]), DynamicCache(config=target.config)
    ids, mask, options = batch["input_ids"], batch["attention_mask"], GREEDY | {"eos_token_id": [EOS, 42, 11]}
    for turn in range(3):
        output = target.generate(ids, attention_mask=mask, past_key_values=cache, assistant_model=draft, **options)
        said = output[:, ids.shape[1] :]
        expected = [alone(target, row[keep.bool()].tolist(), **options) for row, keep in zip(ids, mask, strict=True)]
        assert_rows(output, ids.shape[1], expected)
        lengths = torch.tensor([len(row) for row in expected])
        kept = (torch.arange(said.shape[1]) < lengths[:, None]).long()
        assert turn > 0 or not kept.all(), "the answers must be ragged"
        new = torch.tensor([[9, 33 + turn]] * 3)
        ids, mask = torch.cat([output, new], dim=1), torch.cat([mask, kept, torch.ones_like(new)], dim=1)


def test_lengths_count_holes_in_the_mask_as_padding(pair, prompts):
    target, draft = pair
    ids = torch.tensor([[*prompts[0], 0, 0, 0, 9, 33]])
    mask = torch.tensor([[1] * len(prompts[0]) + [0, 0, 0, 1, 1]])
    options = GREEDY | {"max_new_tokens": 9, "min_new_tokens": 9, "forced_eos_token_id": EOS}
    output = target.generate(ids, attention_mask=mask, assistant_model=draft, **options)
    assert output[0, ids.shape[1] :].tolist() == alone(target, [*prompts[0], 9, 33], **options)


def test_a_cache_of_unknown_tokens_is_continued_with_new_ones_only(pair, prompts):
    target, draft = pair
    embeds = target.get_input_embeddings()(torch.tensor(prompts[:1])).detach()
    output = target.generate(inputs_embeds=embeds, assistant_model=draft, return_dict_in_generate=True, **GREEDY)
    said, cache = prompts[0] + output.sequences[0].tolist(), output.past_key_values
    whole = torch.tensor([said + NEXT[0]])
    with pytest.raises(ValueError, match="nobody knows which tokens"):
        target.generate(whole, past_key_values=cache, assistant_model=draft, **GREEDY)
    new = whole[:, cache.get_seq_length() :]
    second = target.generate(
        new, attention_mask=torch.ones_like(whole), past_key_values=cache, assistant_model=draft, **GREEDY
    )
    assert second[0, new.shape[1] :].tolist() == alone(target, whole[0].tolist())


def test_whole_and_new_turns_may_alternate(pair, prompts):
    target, draft = pair
    output = first_turn(pair, prompts[:1])
    said = output.sequences[0].tolist()
    for turn in range(3):
        said += NEXT[turn % 2]
        whole, cache = torch.tensor([said]), output.past_key_values
        given = whole[:, cache.get_seq_length() :] if turn == 0 else whole
        output = target.generate(
            given, attention_mask=torch.ones_like(whole), past_key_values=cache, assistant_model=draft,
            return_dict_in_generate=True, **GREEDY,
        )  # fmt: skip
        expected = alone(target, said)
        assert output.sequences[0, given.shape[1] :].tolist() == expected
        said += expected


def test_positions_of_the_users_own_are_left_to_transformers_loop(pair, prompts):
    target, draft = pair
    ids = torch.tensor(prompts[:1])
    shifted = torch.arange(ids.shape[1])[None] + 50
    plain = target.generate(ids, position_ids=shifted, **GREEDY)
    assert target.generate(ids, position_ids=shifted, assistant_model=draft, **GREEDY).tolist() == plain.tolist()
    batch = padded(prompts)
    positions = torch.arange(batch["input_ids"].shape[1]).expand(len(prompts), -1) + 50
    with pytest.raises(ValueError, match="position_ids"):
        target.generate(**batch, position_ids=positions, assistant_model=draft, **GREEDY)


def test_prompts_of_several_sequences_keep_their_own_ngrams(pair, prompts):
    target, draft = pair
    options = {"encoder_no_repeat_ngram_size": 2, "num_return_sequences": 2, "do_sample": True, "max_new_tokens": 20}
    output = target.generate(**padded(prompts[:2]), assistant_model=draft, pad_token_id=0, **options)
    width = max(map(len, prompts[:2]))
    for row, tokens in enumerate(output[:, width:].tolist()):
        prompt = prompts[row // 2]
        assert not set(zip(prompt, prompt[1:], strict=False)) & set(zip(tokens, tokens[1:], strict=False)) - {(0, 0)}


def test_processors_that_know_rows_are_refused(pair, prompts):
    target, draft = pair

    class Rows(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores + torch.zeros(3, scores.shape[-1])

    with pytest.raises(ValueError, match="Rows returned 3 rows"):
        target.generate(
            **padded(prompts[:3]), assistant_model=draft, logits_processor=LogitsProcessorList([Rows()]), **GREEDY
        )


def test_criteria_that_cannot_be_copied_are_shared(pair, prompts):
    import threading

    class Button(StoppingCriteria):
        def __init__(self):
            self.pressed = threading.Event()

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), self.pressed.is_set())

    target, draft = pair
    button = Button()
    button.pressed.set()
    output = target.generate(
        **padded(prompts), assistant_model=draft, stopping_criteria=StoppingCriteriaList([button]), **GREEDY
    )
    assert output.shape[1] == max(map(len, prompts)) + 1


def test_offloaded_caches_are_refused(pair, prompts):
    target, draft = pair
    cache = DynamicCache(config=target.config)
    target.generate(torch.tensor(prompts[:1]), past_key_values=cache, **GREEDY)
    cache.offloading = True
    longer = torch.tensor([prompts[0] * 12])
    with pytest.raises(ValueError, match="cannot continue a DynamicCache"):
        target.generate(longer, past_key_values=cache, assistant_model=draft, **GREEDY)


def test_two_threads_take_turns_on_one_target(pair, prompts):
    import threading

    target, draft = pair
    drafts, results = [draft, copy.deepcopy(draft)], {}

    def work(index):
        ids = torch.tensor([prompts[index]])
        results[index] = target.generate(ids, assistant_model=drafts[index], **GREEDY)[0, ids.shape[1] :].tolist()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: alone(target, prompts[index]) for index in range(2)}
    assert target.config._attn_implementation == "sdpa"


def test_the_draft_reads_on_while_nothing_is_drafted(pair, prompts, monkeypatch):
    class Never(Policy):
        def plan_draft(self, load):
            return load.context_tokens > 40

        def plan_verify(self, confidence, max_lengths, load):
            return max_lengths.clone()

    target, draft = pair
    monkeypatch.setattr("hf_dspark.decoding.drafter.WAITING_AT_MOST", 8)
    waiting, drafted = [], []
    honest = draft.read_block

    def read_block(anchors, features, cache, num_features, committed_ids=None):
        waiting.append(max(num_features))
        return honest(anchors, features, cache, num_features, committed_ids)

    monkeypatch.setattr(draft, "read_block", read_block)
    draft.policy, draft.observer = Never(), lambda outcome: drafted.append((outcome.drafted, outcome.block))
    ids = torch.tensor(prompts[:1])
    try:
        output = target.generate(ids, assistant_model=draft, **(GREEDY | {"max_new_tokens": 70, "eos_token_id": None}))
        late, longest_wait = next(block for was, block in drafted if was), max(waiting)
        draft.policy, drafted = FullBlock(), []
        times = draft.last_stats.seconds_of_entries()
        idle = [time.draft for time, proposed in zip(times, draft.last_stats.proposed, strict=True) if not proposed]
        assert 0 in idle and any(idle)  # reading on is the draft's time, too
        draft.observer = lambda outcome: drafted.append(outcome.block)
        target.generate(output[:, : 41 - 1], assistant_model=draft, **(GREEDY | {"max_new_tokens": 3}))
    finally:
        draft.observer = None
    assert longest_wait <= 9
    assert output[0, ids.shape[1] :].tolist() == alone(target, prompts[0], max_new_tokens=70, eos_token_id=None)
    assert drafted[0].token_ids.tolist() == late.token_ids.tolist()
