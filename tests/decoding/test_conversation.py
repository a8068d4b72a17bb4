"""Caches of an earlier turn: recognised, continued, and refused where they would be wrong."""

import copy
import pickle

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, StoppingCriteria

from hf_dspark import DecodingOptions, FullBlock
from hf_dspark.models.slot_cache import SlotCache
from tests.rows import EOS, GREEDY, alone, assert_rows, padded

NEXT = [[9, 33], [4, 4, 50]]


@pytest.fixture
def first_turn(target, draft, prompts):
    """Answer some of the prompts; return the cache, and each conversation so far with what comes next."""

    def decode(rows=1, **options):
        batch = padded(prompts[:rows])
        output = target.generate(**batch, assistant_model=draft, return_dict_in_generate=True, **(GREEDY | options))
        said = output.sequences[:, batch["input_ids"].shape[1] :].tolist()
        return output.past_key_values, [prompts[row] + said[row] + NEXT[row % 2] for row in range(rows)]

    return decode


@pytest.fixture
def goes_on_as_alone(target, draft):
    """Decode whole conversations with a cache, and compare each row with itself alone; return the output."""

    def decode(whole, cache):
        batch, options = padded(whole), GREEDY | {"eos_token_id": None}
        output = target.generate(**batch, past_key_values=cache, assistant_model=draft, **options)
        assert_rows(output, batch["input_ids"].shape[1], [alone(target, row, eos_token_id=None) for row in whole])
        return output

    return decode


@pytest.fixture
def goes_on(target, draft):
    """Decode with a cache; the mask covers `whole`, if that is longer than what is given."""

    def decode(ids, cache, whole=None):
        ids = torch.tensor(ids)
        mask = torch.ones_like(ids if whole is None else torch.tensor(whole))
        options = GREEDY | {"past_key_values": cache, "return_dict_in_generate": True}
        return target.generate(ids, attention_mask=mask, assistant_model=draft, **options)

    return decode


@pytest.mark.parametrize("rows", [1, 4])
def test_a_returned_cache_continues_the_conversation(first_turn, target, draft, prompts, rows):
    cache, whole = first_turn(rows, eos_token_id=None)
    assert isinstance(cache, SlotCache) and cache.get_seq_length() >= max(map(len, prompts[:rows]))
    batch, cached, seen = padded(whole), list(cache.lengths), []
    options = GREEDY | {"eos_token_id": None, "assistant_model": draft}
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        second = target.generate(**batch, past_key_values=cache, **options)
    finally:
        handle.remove()
    assert seen[0] == sum(map(len, whole)) - sum(cached)  # nothing is fed twice
    expected = [alone(target, prompt, eos_token_id=None) for prompt in whole]
    assert_rows(second, batch["input_ids"].shape[1], expected)
    assert target.generate(**batch, **options).tolist() == second.tolist()


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24.0"), reason="it has its older name only")
def test_a_turn_goes_on_by_the_newer_name_of_the_cache(first_turn, target, draft):
    cache, (whole,) = first_turn()
    output = target.generate(**padded([whole]), cache=cache, assistant_model=draft, **GREEDY)
    assert output[0, len(whole) :].tolist() == alone(target, whole)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.enable_grad, torch.inference_mode)])
@pytest.mark.parametrize("new_tokens", [1, 2, 3, 5, 8, 13])
def test_a_turn_goes_on_outside_of_the_mode_of_the_one_before(first_turn, goes_on_as_alone, modes, new_tokens):
    first, second = modes
    with first():
        cache, whole = first_turn(2, eos_token_id=None, max_new_tokens=new_tokens)
    with second():
        goes_on_as_alone(whole, cache)


def test_a_turn_goes_on_after_the_draft_was_cast(first_turn, goes_on_as_alone, draft):
    cache, whole = first_turn(2, eos_token_id=None)
    draft.double()
    try:
        goes_on_as_alone(whole, cache)
    finally:
        draft.float()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_goes_on_as_the_cache_does(first_turn, goes_on_as_alone, draft, duplicate):
    cache, whole = first_turn(2, eos_token_id=None)
    draft.decoding = DecodingOptions(policy=FullBlock())  # which learns nothing meanwhile
    goes_on_as_alone(whole, duplicate(cache))
    num_rounds = draft.last_stats.rounds
    goes_on_as_alone(whole, cache)
    assert duplicate is not copy.deepcopy or draft.last_stats.rounds == num_rounds


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_another_type_is_continued_as_plain_decoding_does(target, draft, prompts, rows, dtype):
    batch = padded(prompts[:rows])

    def cache():
        filled = DynamicCache(config=target.config)
        with torch.no_grad():
            target(batch["input_ids"][:, :3], attention_mask=batch["attention_mask"][:, :3], past_key_values=filled)
        for layer in filled.layers:
            layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
        return filled

    plain = target.generate(**batch, past_key_values=cache(), **GREEDY)
    assert torch.equal(target.generate(**batch, past_key_values=cache(), assistant_model=draft, **GREEDY), plain)


@pytest.mark.parametrize("cache", [None, DynamicCache()], ids=["none", "empty"])
def test_a_mask_over_tokens_that_no_cache_holds_is_refused(goes_on, cache):
    with pytest.raises(
        ValueError, match="attention_mask has 1 rows of 5 columns, the prompts have 1 of 2, and no cache"
    ):
        goes_on([[7, 8]], cache, whole=[[3, 4, 5, 7, 8]])


def test_the_draft_knows_the_earlier_turns(first_turn, target, draft):
    """With the cache and without it the same blocks are drafted and accepted."""
    cache, whole = first_turn(3)
    accepted, draft.decoding = [], DecodingOptions(policy=FullBlock())
    for earlier in ({"past_key_values": cache}, {}):
        target.generate(**padded(whole), assistant_model=draft, **GREEDY, **earlier)
        accepted.append(draft.last_stats.accepted)
    assert accepted[0] == accepted[1]


def test_an_edited_conversation_keeps_what_is_still_true(first_turn, goes_on, target):
    cache, (said,) = first_turn()
    edited = said[: len(said) // 2] + [1, 2, 3, 4] * 10
    assert goes_on([edited], cache).sequences[0, len(edited) :].tolist() == alone(target, edited)


def test_whole_and_new_turns_may_alternate(first_turn, goes_on, target):
    """New tokens alone continue a cache when the mask covers everything."""
    cache, (said,) = first_turn()
    for turn in range(3):
        given = said[cache.get_seq_length() :] if turn == 0 else said
        output = goes_on([given], cache, whole=[said])
        expected = alone(target, said)
        assert output.sequences[0, len(given) :].tolist() == expected
        said, cache = said + expected + NEXT[(turn + 1) % 2], output.past_key_values


def test_a_cache_of_unknown_tokens_is_continued_with_new_ones_only(target, draft, prompts, goes_on):
    embeds = target.get_input_embeddings()(torch.tensor(prompts[:1])).detach()
    output = target.generate(inputs_embeds=embeds, assistant_model=draft, return_dict_in_generate=True, **GREEDY)
    whole, cache = prompts[0] + output.sequences[0].tolist() + NEXT[0], output.past_key_values
    with pytest.raises(ValueError, match="are not known"):
        goes_on([whole], cache)
    new = whole[cache.get_seq_length() :]
    assert goes_on([new], cache, whole=[whole]).sequences[0, len(new) :].tolist() == alone(target, whole)


def test_a_cache_survives_an_interrupted_turn(first_turn, target, draft):
    cache, whole = first_turn(2)

    class Interrupts(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise KeyboardInterrupt

    batch, again = padded(whole), {"past_key_values": cache, "assistant_model": draft, **GREEDY}
    with pytest.raises(KeyboardInterrupt):
        target.generate(**batch, stopping_criteria=[Interrupts()], **again)
    assert target.generate(**batch, **again).tolist() == target.generate(**batch, **GREEDY).tolist()


def test_conversations_of_ragged_answers_go_on_in_one_dynamic_cache(target, draft, prompts):
    """Rows that ended early leave holes in the mask of the next turn, three turns long."""
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


def test_a_refused_turn_leaves_the_cache_as_it_was(first_turn, target, draft):
    cache, said = first_turn(2)
    lengths = tuple(cache.lengths)
    edited = padded([[50, *said[0][1:6]], [50, 51, 52, 53, 54, 55]])  # of the second row nothing is the same
    with pytest.raises(ValueError, match="of sequence"):
        target.generate(**edited, past_key_values=cache, assistant_model=draft, **GREEDY)
    assert tuple(cache.lengths) == lengths
    batch = padded(said)
    output = target.generate(**batch, past_key_values=cache, assistant_model=draft, **GREEDY)
    assert_rows(output, batch["input_ids"].shape[1], [alone(target, whole) for whole in said])


def test_caches_that_contradict_the_prompts_are_refused(first_turn, target, draft, prompts):
    of_two, of_one = first_turn(2)[0], first_turn(1)[0]
    dynamic, dynamic_of_three = (DynamicCache(config=target.config) for _ in range(2))
    target.generate(torch.tensor(prompts[:1]), past_key_values=dynamic, **GREEDY)
    three = target.generate(**padded(prompts[:3]), past_key_values=dynamic_of_three, **GREEDY)
    longer = torch.cat([three, torch.tensor([[9, 33]] * 3)], dim=1)[:2]
    columns = rf"holds {dynamic.get_seq_length()} columns, the prompts have {len(prompts[0])}"
    for batch, cache, message in (
        (padded(prompts[:3]), of_two, "holds 2 sequences, the prompts are 3"),
        ({"input_ids": longer}, dynamic_of_three, "holds 3 sequences, the prompts are 2"),
        ({"input_ids": torch.tensor(prompts[:1])}, dynamic, columns),
        ({"input_ids": torch.tensor([[50, 51, 52]])}, of_one, "only the first 0 are the same"),
    ):
        with pytest.raises(ValueError, match=message):
            target.generate(**batch, past_key_values=cache, assistant_model=draft, **GREEDY)
