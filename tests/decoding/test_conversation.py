"""Caches of an earlier turn: recognised, continued, and refused where they would be wrong."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_dspark.models.slot_cache import SlotCache
from tests.rows import EOS, GREEDY, alone, assert_rows, padded

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


def test_the_returned_cache_is_a_slot_cache(pair, prompts):
    output = first_turn(pair, prompts)
    assert isinstance(output.past_key_values, SlotCache)
    assert output.past_key_values.get_seq_length() >= max(map(len, prompts))


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


def test_a_cache_of_unknown_tokens_is_continued_with_new_ones_only(pair, prompts):
    target, draft = pair
    embeds = target.get_input_embeddings()(torch.tensor(prompts[:1])).detach()
    output = target.generate(inputs_embeds=embeds, assistant_model=draft, return_dict_in_generate=True, **GREEDY)
    said, cache = prompts[0] + output.sequences[0].tolist(), output.past_key_values
    whole = torch.tensor([said + NEXT[0]])
    with pytest.raises(ValueError, match="are not known"):
        target.generate(whole, past_key_values=cache, assistant_model=draft, **GREEDY)
    new = whole[:, cache.get_seq_length() :]
    second = target.generate(
        new, attention_mask=torch.ones_like(whole), past_key_values=cache, assistant_model=draft, **GREEDY
    )
    assert second[0, new.shape[1] :].tolist() == alone(target, whole[0].tolist())


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
