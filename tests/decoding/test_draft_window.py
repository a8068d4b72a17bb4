"""What a draft sees of a long context: the last tokens before the anchor, at their positions. The rest is dropped."""

import pytest
import torch

from hf_dspark import DecodingOptions, FullBlock, Policy, Scheduler, generate_many, profile_throughput
from hf_dspark.decoding.drafter import USUAL_WINDOW, Drafter
from hf_dspark.decoding.prefixes import PrefixMemory
from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.models.slot_cache import SlotCache
from tests.decoding.test_eagle3_trees import SHAPES, AnyTree
from tests.features import new_context, select_features
from tests.models.test_modeling_dspark import LAYOUTS, ForcedSampler, close
from tests.models.test_modeling_eagle3 import make_eagle3
from tests.rows import GREEDY, alone, assert_as_alone, assert_rows, padded

WINDOW = 8
POLICIES = {"chains": FullBlock(), "trees": Scheduler(num_nodes=12)}
OPTIONS = DecodingOptions(policy=FullBlock(), draft_window=WINDOW, prompt_lookup=False)


@pytest.fixture(scope="module")
def long_prompts(reference):
    first, second, third = reference["prompts"][:3]
    return [(first * 9)[:60], second[:3], (third * 9)[:21]]


def scores_of(sampler):
    found = sampler.scores
    return torch.stack([found[key] for key in sorted(found)] if isinstance(found, dict) else found)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", [*LAYOUTS, "eagle3", "eagle3_trees"])
@torch.no_grad()
def test_rounds_read_what_a_fresh_cache_of_the_last_tokens_reads(make_target, make_draft, kind, rows):
    target = make_target()
    draft = make_eagle3(target) if kind not in LAYOUTS else make_draft(target, **LAYOUTS[kind])
    features, ids = torch.randn(rows, 100, 64), torch.randint(0, 47, (rows, 101))
    cache, everything = SlotCache(rows), SlotCache(rows)
    cache.window, ends = WINDOW, [0] * rows
    for turn in range(22):
        before, tokens = ends, torch.randint(0, 20, (rows, 4)) * 2
        ends = [end + 1 + (turn + 3 * row) % (7 - row) for row, end in enumerate(ends)]
        scores = []
        firsts = {cache: before, everything: before, SlotCache(rows): [max(0, end - WINDOW) for end in ends]}
        for each, starts in firsts.items():
            stretches = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
            for row, stretch in enumerate(stretches):
                each.make_room(row, stretch.stop - stretch.start, stretch.stop)
            new = torch.cat([features[row, stretch] for row, stretch in enumerate(stretches)])
            committed = torch.cat([ids[row, part.start + 1 : part.stop + 1] for row, part in enumerate(stretches)])
            sampler = AnyTree(rows, SHAPES) if kind == "eagle3_trees" else ForcedSampler(tokens)
            counts = [part.stop - part.start for part in stretches]
            draft.draft_block(new_context(ids[torch.arange(rows), ends], new, each, counts, committed), sampler)
            scores.append(scores_of(sampler))
        close(scores[0], scores[2])
        assert max(cache.lengths) <= 2 * WINDOW
        assert [sum(part) for part in zip(cache.offsets, cache.lengths, strict=True)] == ends
    assert min(ends) > 3 * WINDOW and (scores[0] - scores[1]).abs().max() > 1e-3
    size = cache.stores[0, "keys"].shape[2]
    assert size == 64 < everything.stores[0, "keys"].shape[2]
    for row, (offset, length) in enumerate(zip(cache.offsets, cache.lengths, strict=True)):
        kept = everything.stores[0, "keys"][row, :, offset : offset + length]
        close(cache.stores[0, "keys"][row, :, :length], kept)  # rotated by their positions


# ---- generate()


@pytest.fixture
def hidden(monkeypatch):
    """Holds h of each round. With a small window, it is compared with that of a fresh read of the last tokens."""
    seen, read, read_block = [], Drafter._read, DraftModel.read_block

    def watched_read(drafter, requests, *args):
        before, drafts = len(seen), read(drafter, requests, *args)
        for row, request in enumerate(requests if drafter.window == WINDOW else ()):
            close(seen[before][row], read_anew(drafter.support.target, drafter.draft, request.token_ids))
        return drafts

    def read_anew(target, draft, ids):
        states = target(ids[None, :-1], output_hidden_states=True).hidden_states
        features, cache = select_features(states, draft.config.target_layer_ids)[0, -WINDOW:], SlotCache()
        cache.make_room(0, len(features), len(ids) - 1)
        return read_block(draft, new_context(ids[-1:], features, cache, [len(features)], ids[-len(features) :]))[0]

    monkeypatch.setattr(Drafter, "_read", watched_read)
    monkeypatch.setattr(DraftModel, "read_block", lambda *args: seen.append(read_block(*args)) or seen[-1])
    return seen


@pytest.fixture(params=["dspark", pytest.param("eagle3", marks=pytest.mark.slow)])
def either(request, pair):
    return pair[1] if request.param == "dspark" else make_eagle3(pair[0], target_layer_ids=[0, 1])


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_see_the_last_tokens_alone_and_decode_the_same(target, either, long_prompts, hidden, policy, rows):
    options = {"policy": POLICIES[policy], "prompt_lookup": False}
    either.decoding = DecodingOptions(draft_window=WINDOW, **options)
    assert_as_alone(target, either, long_prompts[:rows], eos_token_id=None)
    with_window = [*hidden]
    hidden.clear()
    either.decoding = DecodingOptions(draft_window=None, **options)
    assert_as_alone(target, either, long_prompts[:rows], eos_token_id=None)
    assert (hidden[0] - with_window[0]).abs().max() > 1e-3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_window_larger_than_the_context_changes_nothing(target, either, long_prompts, hidden, rows):
    batch, found = padded(long_prompts[:rows]), []
    for window in (100, None):
        either.decoding = DecodingOptions(policy=FullBlock(), draft_window=window)
        target.generate(**batch, assistant_model=either, **GREEDY | {"eos_token_id": None})
        found.append([*hidden])
        hidden.clear()
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


@pytest.mark.slow
def test_a_queue_and_transformers_loop_see_the_last_tokens_alone(target, draft, long_prompts, hidden):
    options = GREEDY | {"eos_token_id": None, "max_new_tokens": 30}
    queue = long_prompts * 2
    for done in generate_many(target, draft, queue, batch_size=2, decoding=OPTIONS, progress=False, **options):
        assert done.token_ids.tolist() == alone(target, queue[done.index], **options)
    count = len(hidden)
    draft.decoding = DecodingOptions(policy=FullBlock(), draft_window=WINDOW, use_transformers_loop=True)
    assert_as_alone(target, draft, long_prompts[:1], **options)
    assert len(hidden) > count > 10


def test_rounds_that_are_measured_see_the_last_tokens_alone(target, draft, hidden):
    draft.decoding = OPTIONS
    profile_throughput(target, draft, (1, 2), (6, 30), repetitions=1, cache=False)
    assert len(hidden) > 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunk", [None, 7])
def test_the_cache_of_a_conversation_stays_small_and_goes_on(target, draft, long_prompts, hidden, chunk):
    draft.decoding, said, cache = OPTIONS, long_prompts, None
    options = GREEDY | {"eos_token_id": None, "prefill_chunk_size": chunk, "return_dict_in_generate": True}
    for turn in range(3):
        batch = padded(said)
        output = target.generate(**batch, past_key_values=cache, assistant_model=draft, **options)
        width = batch["input_ids"].shape[1]
        assert_rows(output.sequences, width, [alone(target, row, eos_token_id=None) for row in said])
        cache = output.past_key_values
        context = cache.conversation.draft_cache
        assert max(context.lengths) <= 2 * WINDOW and max(cache.lengths) > 74 + 24 * turn
        assert context.stores[0, "keys"].shape[2] <= 2 * WINDOW + draft.config.num_slots
        assert all(sum(map(len, waiting)) <= WINDOW for waiting in cache.conversation.waiting_features)
        new = said[0][: 4 + 8 * turn]
        said = [[*row, *answer, *new] for row, answer in zip(said, output.sequences[:, width:].tolist(), strict=True)]
    edited = [row[: 50 + 5 * place] + [9, 33] for place, row in enumerate(said)]  # before what is kept
    batch, draft.decoding = padded(edited), DecodingOptions(policy=FullBlock(), draft_window=WINDOW - 1)
    again = target.generate(**batch, past_key_values=cache, assistant_model=draft, **options).sequences
    expected = [alone(target, row, eos_token_id=None) for row in edited]
    assert_rows(again, batch["input_ids"].shape[1], expected)


class Rarely(Policy):
    """Drafts in two of twelve rounds: features wait meanwhile, and the window cuts them."""

    def __init__(self):
        self.rounds = 0

    def plan_draft(self, load):
        self.rounds += 1
        return self.rounds % 12 in (2, 3)


def edited_turns(target, draft, said, cut):
    options = GREEDY | {"eos_token_id": None, "max_new_tokens": 30}
    first = target.generate(**padded(said), assistant_model=draft, return_dict_in_generate=True, **options)
    answers = first.sequences[:, -30:].tolist()
    batch = padded([[*row, *answer][: len(row) + cut] + [9, 33] for row, answer in zip(said, answers, strict=True)])
    draft.decoding = OPTIONS
    target.generate(**batch, past_key_values=first.past_key_values, assistant_model=draft, **options)


def prompts_that_begin_alike(target, draft, said, cut):
    """The second is read in two parts, and departs from what the first one's answer went on with."""
    options = GREEDY | {"eos_token_id": None, "max_new_tokens": 30}
    prefixes, whole = PrefixMemory(2**24), [*said[0], *alone(target, said[0], **options)]
    for prompt in (said[0], whole[: len(said[0]) + cut] + [9, 33], whole):
        many = generate_many(target, draft, [prompt], None, 1, False, prefixes=prefixes, **options)
        assert next(many).error is None
        draft.decoding = OPTIONS
    assert prefixes.num_reused > 60


@pytest.mark.one_in(7)
@pytest.mark.parametrize("cut", [2, 11, 16, 25, 29])
@pytest.mark.parametrize("door", [edited_turns, prompts_that_begin_alike])
def test_what_waits_is_read_at_its_place_whatever_was_cut_off(target, draft, long_prompts, monkeypatch, door, cut):
    read, seen = Drafter._read, []

    def watched(drafter, requests, *args):
        for row, request in enumerate(requests):
            states = target(request.token_ids[None, :-1], output_hidden_states=True).hidden_states
            waiting, cache = torch.cat(request.features), drafter.cache
            close(waiting, select_features(states, draft.config.target_layer_ids)[0, -len(waiting) :])
            assert cache.offsets[row] + cache.lengths[row] + len(waiting) == request.anchor_position
        seen.append(len(requests))
        return read(drafter, requests, *args)

    monkeypatch.setattr(Drafter, "_read", watched)
    draft.decoding = DecodingOptions(policy=Rarely(), draft_window=WINDOW, prompt_lookup=False)
    door(target, draft, long_prompts, cut)
    assert len(seen) > 8


@pytest.mark.parametrize(
    ("option", "of_config", "expected"),
    [("auto", None, USUAL_WINDOW), ("auto", 8, 8), (None, 8, None), (5, 8, 5), (5, None, 5)],
)
def test_the_option_comes_before_the_config(target, draft, monkeypatch, option, of_config, expected):
    monkeypatch.setattr(draft.config, "draft_window", of_config)
    found, make_room = [], Drafter.make_room
    monkeypatch.setattr(Drafter, "make_room", lambda self, *args: found.append(self.window) or make_room(self, *args))
    draft.decoding = DecodingOptions(draft_window=option)
    target.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=3)
    assert set(found) == {expected}
