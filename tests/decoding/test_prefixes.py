"""Beginnings of prompts are computed once: later prompts are answered as if they had been read anew."""

import pytest
import torch

from hf_dspark import DecodingOptions, FullBlock, generate_many
from hf_dspark.decoding import prefixes as module
from hf_dspark.decoding.many import OwnPrompt
from hf_dspark.decoding.prefixes import PrefixMemory
from hf_dspark.models.prompt_lookup import PromptLookup
from tests.hybrids import HAVE_PROTOCOL, build, build_any, make_own_draft
from tests.rows import alone

GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "progress": False}
ATTENTION = ["qwen3", "gemma3_text", "deepseek_v3"]
later = pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
RECURRENT = [pytest.param(kind, marks=later) for kind in ("qwen3_5_text", "mamba", "lfm2", "falcon_h1")]


def pair_of(kind):
    target = build_any(kind)
    draft = make_own_draft(target)
    draft.decoding = DecodingOptions(policy=FullBlock())
    return target, draft


def words(length, seed):
    return torch.randint(5, 40, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def asks():
    """Decode prompts one after the other, with one memory; each answer is what the prompt gives alone."""

    def ask(target, draft, memory, prompts, batch_size=1, **options):
        answers, reused, before = {}, [], memory.num_reused
        for done in generate_many(target, draft, iter(prompts), None, batch_size, prefixes=memory, **GREEDY | options):
            assert done.error is None
            answers[done.index] = done.token_ids.tolist()
            reused.append(memory.num_reused - before - sum(reused))
        expected = [alone(target, prompt, max_new_tokens=12, eos_token_id=None) for prompt in prompts]
        assert [answers[index] for index in range(len(prompts))] == expected
        return reused

    return ask


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [*ATTENTION, *RECURRENT])
def test_a_later_turn_reads_only_what_is_new(asks, kind):
    target, draft = pair_of(kind)
    memory, said = PrefixMemory(2**30), words(40, 0)
    for turn in range(3):
        before = len(said) if turn else 0
        said = said + alone(target, said, max_new_tokens=12, eos_token_id=None) if turn else said
        said = said + words(5, 1 + turn) if turn else said
        (reused,) = asks(target, draft, memory, [said])
        # All that was committed, but for its last token, and where states can go back one more.
        assert reused >= (before + 10 if turn else 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["qwen3", *RECURRENT[:2]])
def test_prompts_that_share_a_beginning_read_it_once(asks, kind):
    target, draft = pair_of(kind)
    beginning = words(50, 0)
    prompts = [beginning + words(9 + seed, 1 + seed) for seed in range(4)]
    reused = asks(target, draft, PrefixMemory(2**30), prompts)
    known = 49 if kind == "qwen3" else 50
    assert reused[0] == 0 and reused[2:] == [known, known]
    assert reused[1] == (known if kind == "qwen3" else 0)  # a recurrent target's states between are kept from now on


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["qwen3", RECURRENT[0]])
@pytest.mark.parametrize("batch_size", [2, 5])
def test_rows_of_a_batch_go_on_from_beginnings_of_their_own(asks, kind, batch_size):
    target, draft = pair_of(kind)
    beginnings = [words(length, length) for length in (33, 40, 64)]
    prompts = [beginnings[place % 3] + words(3 + place, 100 + place) for place in range(12)] + [words(6, 7)]
    asks(target, draft, memory := PrefixMemory(2**30), prompts, batch_size)
    assert memory.num_reused > 100


@pytest.mark.parametrize("max_bytes", [2**30, 0])
def test_a_sequence_that_is_still_being_decoded_lends_its_beginning(max_bytes):
    target, draft = pair_of("qwen3")
    memory, beginning = PrefixMemory(max_bytes), words(50, 0)
    lengths = {"long": 40, "short": 2, "late": 5}
    texts = {"long": beginning + [7], "short": words(9, 1), "late": beginning + [8, 9]}
    prompts = [OwnPrompt(texts[name], {"max_new_tokens": lengths[name]}) for name in lengths]
    done = {each.index: each for each in generate_many(target, draft, prompts, None, 2, prefixes=memory, **GREEDY)}
    assert list(done) == [1, 2, 0] and memory.num_reused == (49 if max_bytes else 0)
    for index, name in enumerate(lengths):
        expected = alone(target, texts[name], max_new_tokens=lengths[name], eos_token_id=None)
        assert done[index].token_ids.tolist() == expected


def test_a_beginning_that_is_not_the_same_would_change_answers(asks, monkeypatch):
    """The control: what is reused reaches the answer."""
    target, draft = pair_of("qwen3")
    monkeypatch.setattr(module, "num_equal", lambda known, token_ids: len(token_ids) - 1)
    with pytest.raises(AssertionError):
        asks(target, draft, PrefixMemory(2**30), [words(40, seed) for seed in range(4)])


def test_the_draft_knows_what_was_read_before(make_target, make_draft):
    target = make_target()
    draft = make_draft(target)
    draft.decoding = DecodingOptions(policy=FullBlock())
    prompt, accepted = words(48, 3), []
    for memory in (None, PrefixMemory(2**30)):
        for text in (prompt, prompt + words(4, 5)):
            list(generate_many(target, draft, [text], None, 1, prefixes=memory, **GREEDY))
        accepted.append((draft.last_stats.accepted, draft.last_stats.proposed))
    assert accepted[0] == accepted[1]


def test_another_draft_or_target_knows_nothing_of_it(asks):
    target, draft = pair_of("qwen3")
    memory, prompt = PrefixMemory(2**30), words(40, 0)
    asks(target, draft, memory, [prompt])
    assert asks(target, PromptLookup(target), memory, [prompt]) == [0]
    assert asks(*pair_of("qwen3"), memory, [prompt]) == [0]
    assert asks(target, draft, memory, [prompt]) == [39]


def test_memory_is_bounded_and_the_longest_unused_leaves_first(asks):
    target, draft = pair_of("qwen3")
    memory, first, second = PrefixMemory(2**30), words(40, 0), words(40, 1)
    asks(target, draft, memory, [first])
    memory.max_bytes = int(2.5 * memory.num_bytes)
    asks(target, draft, memory, [second, first, words(40, 2)])
    assert 0 < memory.num_bytes <= memory.max_bytes
    assert asks(target, draft, memory, [first, second]) == [39, 0]
    asks(target, draft, nothing := PrefixMemory(0), [first, first])
    assert nothing.num_bytes == nothing.num_reused == 0
    with pytest.raises(ValueError, match="max_bytes must be 0 or more, got -1"):
        PrefixMemory(-1)


def test_a_shortage_while_a_sequence_is_kept_costs_no_answer(asks, monkeypatch):
    target, draft = pair_of("qwen3")
    memory, honest, failed = PrefixMemory(2**30), module.SlotCache.copy_of_row, []

    def copy_of_row(cache, row):
        failed.append(row)
        if len(failed) == 2:
            raise RuntimeError("not enough memory: you tried to allocate 8 bytes")
        return honest(cache, row)

    monkeypatch.setattr(module.SlotCache, "copy_of_row", copy_of_row)
    asks(target, draft, memory, [words(40, seed) for seed in range(3)], batch_size=2)
    assert len(failed) > 2 and len(memory._rows) == 2


@later
def test_what_an_overflow_has_left_in_a_row_is_not_read(asks):
    """Of a recurrent target, prompts are read in two parts, in rows that others had before."""
    target, draft = pair_of("qwen3_5_text")
    beginning, honest = words(50, 0), module.DecodingLoop.read

    def read(loop, *args):
        for cache in (loop.cache, loop.drafter.cache):
            assert not any(store.isnan().any() for store in cache.stores.values())
        honest(loop, *args)
        reads.append(1)

    def spoil(loop, row, request):
        for cache in (loop.cache, loop.drafter.cache):
            for store in cache.stores.values():
                store[len(loop.requests) - 1 :, :, cache.lengths[row] :] = torch.nan

    reads, memory = [], PrefixMemory(2**30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.DecodingLoop, "read", read)
        keep = PrefixMemory.keep
        patch.setattr(PrefixMemory, "keep", lambda *args: (keep(*args), spoil(*args[1:])))
        asks(target, draft, memory, [beginning + words(9 + seed, 1 + seed) for seed in range(4)])
    assert reads


@later
def test_targets_whose_layers_write_into_what_they_keep_are_read_anew(asks):
    target = build("glm5_next")
    draft = make_own_draft(target)
    prompts = [words(50, 0) + words(9 + 3 * seed, 1 + seed) for seed in range(4)]
    asks(target, draft, memory := PrefixMemory(2**30), prompts, batch_size=3)
    assert memory.num_reused == 0


def test_longer_sequences_stand_for_their_beginnings(asks):
    target, draft = pair_of("qwen3")
    memory, said = PrefixMemory(2**30), words(40, 0)
    for _ in range(3):
        asks(target, draft, memory, [said])
        said = said + words(10, len(said))
    assert len(memory._rows) == 3  # answers differ from what was said
    asks(target, draft, memory, [said, said])
    assert len(memory._rows) == 4


@pytest.mark.filterwarnings("ignore:out of memory")
def test_a_shortage_gives_up_what_was_kept(asks, monkeypatch):
    target, draft = pair_of("qwen3")
    memory, own, failed = PrefixMemory(2**30), module.DecodingLoop.run_round, []
    asks(target, draft, memory, [words(40, 0)])

    def run_round(loop):
        if len(loop.requests) == 2 and not failed:
            failed.append(True)
            raise MemoryError("scarce")
        own(loop)

    monkeypatch.setattr(module.DecodingLoop, "run_round", run_round)
    kept = memory.num_bytes
    asks(target, draft, memory, [words(40, 1), words(40, 2)], batch_size=2)
    assert failed and memory.num_bytes < 2 * kept
