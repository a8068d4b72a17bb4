"""Masks of any kind: the tokens of plain decoding or a refusal by name, and what leaves a call has plain's shape."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
)

from hf_dspark import DSparkConfig, DSparkDraftModel

from ..hybrids import HAVE_PROTOCOL, build

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
MASKS = {
    "one_hole": [[1] * 9, [1, 1, 1, 1, 0, 0, 0, 1, 1]],
    "holes_in_all_rows": [[1, 0, 1, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1, 1, 1]],
    "padding_and_hole": [[0, 0, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 0, 1]],
    "shared_padding": [[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1]],
}
PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 2.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[token, other] for token in range(2, 40) for other in range(2, 60)]},
    "sequence_bias": {"sequence_bias": [[[token, 7], 9.0] for token in range(2, 64)]},
    "min_length": {"min_length": 14},
    "min_new_tokens": {"min_new_tokens": 7},
    "decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "suppress": {"suppress_tokens": list(range(2, 30)), "begin_suppress_tokens": list(range(30, 50))},
    "forced": {"forced_eos_token_id": 9, "forced_bos_token_id": 8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.4},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [2 + (int(ids.sum()) + row) % 60, 3, 4]},
}
RECURRENT = ["lfm2", "qwen3_5_text", "mamba", "mamba2", "falcon_h1", "jamba"]


def drafted(target):
    for parameter in target.parameters():
        parameter.data.mul_(3)
    target.generation_config.pad_token_id, target.generation_config.eos_token_id = 0, None
    config = DSparkConfig.from_target(target.config, block_size=4, num_hidden_layers=1, markov_rank=4)
    return target.eval(), DSparkDraftModel(config).eval()


@pytest.fixture
def llama():
    return drafted(LlamaForCausalLM(LlamaConfig(**SIZES)))


@pytest.fixture
def ids():
    return torch.randint(2, 64, (2, 9))


@pytest.mark.parametrize("name", MASKS)
def test_attention_alone_decodes_any_mask_as_plain_generate(llama, ids, name):
    (target, draft), asked = llama, {"attention_mask": torch.tensor(MASKS[name]), "max_new_tokens": 12}
    assert torch.equal(target.generate(ids, **asked, assistant_model=draft), target.generate(ids, **asked))


@pytest.mark.one_in(15)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_see_masked_tokens_as_in_plain_generate(llama, ids, processor, mask):
    target, draft = llama
    ids[:, 5:7] = ids[:, :2]  # what repeats does so behind zeros, too
    asked = {"attention_mask": torch.tensor(MASKS[mask]), "max_new_tokens": 8, "eos_token_id": 5}
    asked |= {"return_dict_in_generate": True, "output_scores": True} | processor
    plain, ours = target.generate(ids, **asked), target.generate(ids, **asked, assistant_model=draft)
    assert torch.equal(ours.sequences, plain.sequences)
    ended = (plain.sequences[:, 9:] == 5).cumsum(dim=1).roll(1, dims=1).bool()
    for step, (own, theirs) in enumerate(zip(ours.scores, plain.scores, strict=True)):
        going = ~ended[:, step] if step else torch.tensor([True, True])
        torch.testing.assert_close(own[going], theirs[going], rtol=1e-3, atol=1e-3)


@pytest.mark.one_in(3)
@pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_targets_refuse_holes_by_name_and_decode_padding(family, ids):
    target, draft = drafted(build(family))
    for name, rows in MASKS.items():
        asked = {"attention_mask": torch.tensor(rows), "max_new_tokens": 6}
        if name == "shared_padding":
            assert torch.equal(target.generate(ids, **asked, assistant_model=draft), target.generate(ids, **asked))
            continue
        with pytest.raises(ValueError, match=r"zeros between ones in rows .* recurrent layers"):
            target.generate(ids, **asked, assistant_model=draft)


def test_sliding_windows_refuse_holes_that_they_would_count(ids):
    target, draft = drafted(MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=12)))
    asked = {"attention_mask": torch.tensor(MASKS["one_hole"]), "max_new_tokens": 3}
    assert torch.equal(target.generate(ids, **asked, assistant_model=draft), target.generate(ids, **asked))
    with pytest.raises(ValueError, match="windows of 12 tokens"):
        target.generate(ids, **asked | {"max_new_tokens": 12}, assistant_model=draft)


@pytest.mark.parametrize("hole", [[1] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1, 1]])
def test_transformers_loop_decodes_any_mask_as_plain_generate(ids, hole):
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4, eos_token_id=None, pad_token_id=0)
    target, draft = drafted(BloomForCausalLM(config))
    asked = {"attention_mask": torch.tensor([hole]), "max_new_tokens": 12}
    assert torch.equal(target.generate(ids[:1], **asked, assistant_model=draft), target.generate(ids[:1], **asked))


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 5), torch.ones(2, 11), torch.tensor([[0, 0] + [1] * 9] * 2), torch.tensor([[0] + [1] * 8])],
    ids=["narrow", "wide", "wide_and_padded", "one_row"],
)
def test_masks_of_another_shape_are_refused(llama, ids, mask):
    target, draft = llama
    named = rf"attention_mask has {len(mask)} rows of {mask.shape[1]} columns, the prompts have 2 of 9"
    cure = ": pass a row for each prompt" if len(mask) == 1 else ", and no cache"
    for options in ({}, {"do_sample": True, "num_return_sequences": 3}):
        with pytest.raises(ValueError, match=named + cure):
            target.generate(ids, attention_mask=mask.long(), max_new_tokens=4, assistant_model=draft, **options)


def test_masks_of_other_numbers_are_refused(llama, ids):
    target, draft = llama
    with pytest.raises(ValueError, match="other numbers than 0 and 1"):
        target.generate(ids, attention_mask=torch.full((2, 9), 2), max_new_tokens=4, assistant_model=draft)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MASKS)
def test_what_leaves_a_call_has_the_shape_that_plain_generate_gives(llama, ids, name):
    target, draft = llama
    mask = torch.tensor(MASKS[name])
    asked = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_hidden_states": True}
    asked |= {"output_scores": True, "output_logits": True}
    plain = target.generate(ids, attention_mask=mask, **asked)
    ours = target.generate(ids, attention_mask=mask, **asked, assistant_model=draft)
    for step, (theirs, own) in enumerate(zip(plain.hidden_states, ours.hidden_states, strict=True)):
        is_token = mask.bool() if step == 0 else torch.ones(2, 1, dtype=torch.bool)
        for layer, own_layer in zip(theirs, own, strict=True):
            assert own_layer.shape == layer.shape
            torch.testing.assert_close(own_layer[is_token], layer[is_token], rtol=1e-3, atol=1e-4)
    for kind in ("scores", "logits"):
        assert [step.shape for step in plain[kind]] == [step.shape for step in ours[kind]]
    cache = ours.past_key_values.to_dynamic_cache()
    assert cache.get_seq_length() == plain.past_key_values.get_seq_length()
    more = torch.cat([plain.sequences, ids[:, :3]], dim=1)
    turn_2 = {"attention_mask": torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1), "max_new_tokens": 8}
    expected = target.generate(more, **turn_2)
    assert torch.equal(target.generate(more, **turn_2, past_key_values=cache), expected)
    # The second turn with the draft, and the cache after it.
    second = {"past_key_values": ours.past_key_values, "return_dict_in_generate": True, "output_hidden_states": True}
    again = target.generate(more, **turn_2, **second, assistant_model=draft)
    assert torch.equal(again.sequences, expected)
    assert again.hidden_states[0][0].shape == (2, 4, 32)  # the last token of turn 1 was not cached
    assert again.past_key_values.to_dynamic_cache().get_seq_length() == expected.shape[1] - 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize(("num_rows", "typed"), [(1, 1), (2, 2), (2, 1)])
def test_types_of_tokens_are_read_in_prompts_and_go_on_after_them(ids, given, num_rows, typed):
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, eos_token_id=None, bos_token_id=None)
    target, draft = drafted(GPT2LMHeadModel(config))
    inputs = ids if given == "input_ids" else target.get_input_embeddings()(ids)
    asked = {given: inputs[:num_rows], "attention_mask": torch.tensor(MASKS["shared_padding"])[:num_rows]}
    asked |= {"token_type_ids": torch.randint(0, 5, (2, 9))[:typed], "max_new_tokens": 12}
    plain = target.generate(**asked)  # in chunks, transformers 5.17 reads padded prompts wrongly
    for chunk in (None, 4) if given == "input_ids" else (None,):
        assert torch.equal(target.generate(**asked, prefill_chunk_size=chunk, assistant_model=draft), plain)
    assert not torch.equal(target.generate(**asked | {"token_type_ids": None}), plain)
    asked["token_type_ids"] = asked["token_type_ids"][:, :2]
    with pytest.raises(ValueError, match="token_type_ids has the shape"):
        target.generate(**asked, assistant_model=draft)


@pytest.mark.parametrize("plain_first", [True, False])
def test_embeddings_of_everything_continue_a_cache(llama, ids, plain_first):
    (target, draft), mask = llama, torch.tensor(MASKS["padding_and_hole"])
    first = {} if plain_first else {"assistant_model": draft}
    asked = {"attention_mask": mask, "max_new_tokens": 6, "return_dict_in_generate": True}
    output = target.generate(ids, **asked, **first)
    whole = torch.cat([output.sequences, ids[:, :3]], dim=1)
    asked = {"attention_mask": torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1), "max_new_tokens": 8}
    expected = target.generate(whole, **asked)[:, 18:]
    asked |= {"inputs_embeds": target.get_input_embeddings()(whole), "assistant_model": draft}
    shorter = asked | {"inputs_embeds": asked["inputs_embeds"][:, -4:]}
    with pytest.raises(ValueError, match="embeddings that continue past_key_values are those of the whole"):
        target.generate(**shorter, past_key_values=output.past_key_values)
    assert torch.equal(target.generate(**asked, past_key_values=output.past_key_values), expected)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_attention_weights_that_nobody_gives_are_empty_as_in_plain_generate(llama, ids, num_rows):
    target, draft = llama
    asked = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_attentions": True}
    plain = target.generate(ids[:num_rows], **asked)
    ours = target.generate(ids[:num_rows], **asked, assistant_model=draft)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.attentions == plain.attentions == ((),) * 4
    target.set_attn_implementation("eager")
    weights = target.generate(ids[:1], **asked, assistant_model=draft).attentions
    assert weights[0][0].shape == (1, 4, 9, 9)


class DoneTracker(StoppingCriteria):
    """Knows how many rows there are, as lm-eval's MultiTokenEOSCriteria does; ends all when all have ended."""

    def __init__(self, num_rows, by_index=True):
        self.done, self.by_index = [False] * num_rows, by_index

    def __call__(self, input_ids, scores, **kwargs):
        for row in range(len(self.done) if self.by_index else len(input_ids)):
            self.done[row] = self.done[row] or int(input_ids[row, -1]) == 5
        return all(self.done)


class AnyRow(StoppingCriteria):
    """One answer for all rows."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 7 == 2).any()


class Sixth(StoppingCriteria):
    """Counts its calls."""

    calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return self.calls >= 6


CRITERIA = {
    "entries": lambda rows: DoneTracker(rows), "any": lambda rows: AnyRow(), "calls": lambda rows: Sixth(),
    "entries_of_those_given": lambda rows: DoneTracker(rows, by_index=False),
}  # fmt: skip


@pytest.mark.one_in(7)
@pytest.mark.parametrize("eos", [None, 5, [9, 11, 20, 30]])
@pytest.mark.parametrize("make", CRITERIA.values(), ids=CRITERIA)
def test_criteria_of_a_whole_batch_are_asked_about_all_of_it_step_by_step(llama, ids, make, eos):
    target, draft = llama
    asked = {"max_new_tokens": 24, "eos_token_id": eos, "return_dict_in_generate": True, "output_logits": True}
    for rows in (1, 2):
        plain = target.generate(ids[:rows], stopping_criteria=[make(rows)], **asked)
        ours = target.generate(ids[:rows], stopping_criteria=[make(rows)], **asked, assistant_model=draft)
        assert torch.equal(ours.sequences, plain.sequences) and len(ours.logits) == len(plain.logits)
        more = torch.cat([plain.sequences, ids[:rows, :2]], dim=1)
        second = {"attention_mask": torch.ones_like(more), "max_new_tokens": 6, "eos_token_id": None}
        again = target.generate(more, **second, past_key_values=ours.past_key_values, assistant_model=draft)
        assert torch.equal(again, target.generate(more, **second))


def test_criteria_that_hold_as_many_things_by_chance_change_nothing(llama, ids):
    class AnyOf(StoppingCriteria):
        tokens = None

        def __call__(self, input_ids, scores, **kwargs):
            return torch.isin(input_ids[:, -1], torch.tensor(self.tokens))

    target, draft = llama
    criterion, asked = AnyOf(), {"max_new_tokens": 12, "eos_token_id": 1}  # else plain decoding goes on
    criterion.tokens = target.generate(ids, **asked)[:, 13].tolist()
    asked["stopping_criteria"] = [criterion]
    assert torch.equal(target.generate(ids, **asked, assistant_model=draft), target.generate(ids, **asked))
