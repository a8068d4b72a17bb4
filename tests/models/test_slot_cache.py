"""Slots: what is written is read back, whatever the rows' lengths; stale slots are never seen."""

import pytest
import torch
from transformers import DynamicCache

from hf_dspark.models.slot_cache import RowState, SlotCache, SlotLayout


def write(cache, layout, keys):
    with cache.writing(layout):
        return cache.update(keys, -keys, 0)


def kept(cache, row, layer=0):
    """Return the committed keys and values of a row."""
    return tuple(cache.stores[layer, name][row, :, : cache.lengths[row]] for name in ("keys", "values"))


def test_layout_brings_packed_tokens_into_rows_and_back():
    layout = SlotLayout(starts=(5, 0, 2), counts=(2, 4, 1))
    packed = torch.randn(1, 3, 7, 2)
    rows = layout.to_rows(packed)
    assert rows.shape == (3, 3, 4, 2)
    assert torch.equal(rows[0, :, :2], packed[0, :, :2]) and not rows[0, :, 2:].any()
    assert torch.equal(rows[1], packed[0, :, 2:6]) and torch.equal(rows[2, :, :1], packed[0, :, 6:])
    assert torch.equal(layout.to_packed(rows), packed.transpose(1, 2))
    assert layout.position_ids(packed.device).tolist() == [[5, 6, 0, 1, 2, 3, 2]]
    assert (layout.first_tokens, layout.end, layout.width) == ((0, 2, 6), 7, 4)
    for counts in ((3, 3), (3,), (1, 1, 1)):  # a reshape
        layout, packed = SlotLayout((0,) * len(counts), counts), torch.randn(1, 2, sum(counts), 4)
        assert torch.equal(layout.to_packed(layout.to_rows(packed)), packed.transpose(1, 2))


def test_rows_of_different_lengths_keep_their_content_while_the_cache_grows():
    """Rounds of ragged blocks, each with two more slots that are rolled back by never being counted."""
    cache, truth = SlotCache(3), [torch.empty(2, 0, 4) for _ in range(3)]
    capacities = set()
    for turn in range(60):
        counts = tuple(3 + (turn + row) % 4 for row in range(3))
        layout = SlotLayout(cache.lengths, counts)
        states = torch.randn(1, 2, sum(counts), 4)
        keys, values = write(cache, layout, states)
        for row, part in enumerate(states[0].split(counts, dim=1)):
            truth[row] = torch.cat([truth[row], part], dim=1)
            length = truth[row].shape[1]
            assert torch.equal(keys[row, :, :length], truth[row]) and torch.equal(values[row, :, :length], -truth[row])
            truth[row] = truth[row][:, : length - 2]
            cache.commit(row, length - 2 - cache.lengths[row])
        capacities.add(cache.stores[0, "keys"].shape[2])
    assert 2 <= len(capacities) <= 6, "capacity must grow geometrically"
    assert max(capacities) < 1.5 * max(cache.lengths)


def test_growth_stops_at_the_limit():
    cache = SlotCache(1, limit=100)
    write(cache, SlotLayout((0,), (60,)), torch.randn(1, 1, 60, 2))
    write(cache, SlotLayout((60,), (35,)), torch.randn(1, 1, 35, 2))
    assert cache.stores[0, "keys"].shape[2] == 100


def test_rows_move_swap_and_resize():
    cache = SlotCache(3)
    states = torch.randn(1, 2, 9, 4)
    write(cache, SlotLayout((0, 0, 0), (2, 3, 4)), states)
    for row, length in enumerate((2, 3, 4)):
        cache.commit(row, length)
    first, second, third = states[0].split((2, 3, 4), dim=1)
    cache.swap_rows(0, 2)
    assert cache.lengths == (4, 3, 2)
    assert torch.equal(kept(cache, 0)[0], third) and torch.equal(kept(cache, 2)[0], first)
    cache.move_row(0, 1)
    assert cache.lengths == (0, 4, 2) and torch.equal(kept(cache, 1)[1], -third)
    cache.resize(2)
    assert cache.num_rows == 2 and torch.equal(kept(cache, 1)[0], third)


def test_a_cleared_row_holds_nothing_of_the_sequence_before():
    cache = SlotCache(2)
    states = torch.randn(1, 2, 7, 4)
    write(cache, SlotLayout((0, 0), (5, 2)), states.masked_fill(torch.arange(7)[:, None] == 4, torch.nan))
    cache.commit(0, 5)
    cache.commit(1, 2)
    cache.row_states[0]["layer"] = RowState(position=5)
    cache.move_row(1, 0)  # what lies behind the shorter row is overwritten, too
    assert not cache.stores[0, "keys"].isnan().any()
    cache.clear(1)
    assert not cache.stores[0, "keys"][1].any() and torch.equal(kept(cache, 0)[0], states[0, :, 5:])
    cache.row_states[1]["layer"] = RowState(position=5)
    cache.clear(1)
    assert cache.lengths == (2, 0) and not cache.row_states[1]


def test_recurrent_states_go_with_their_rows_and_cannot_go_back():
    cache = SlotCache(3)
    for row in range(3):
        cache.commit(row, 9)
        cache.row_states[row]["layer"] = RowState(position=4 + row, num_waiting=2)
    positions = lambda: [states["layer"].position if states else None for states in cache.row_states]  # noqa: E731
    assert [cache.reachable(0, length) for length in (3, 4, 6, 7)] == [0, 4, 6, 0]
    cache.swap_rows(0, 2)
    assert positions() == [6, 5, 4]
    cache.move_row(0, 1)
    assert positions() == [None, 6, 4]
    cache.truncate(1, 8)
    assert positions() == [None, 6, 4]
    with pytest.raises(ValueError, match="recurrent states of a SlotCache"):
        cache.to_dynamic_cache()
    cache.truncate(1, 0)
    cache.resize(2)
    assert positions() == [None, None] and cache.reachable(1, 0) == 0
    cache.row_states[0]["layer"] = RowState()
    cache.reset()
    assert positions() == [None, None]


def test_writing_outside_of_a_pass_says_what_to_do():
    with pytest.raises(ValueError, match="to_dynamic_cache"):
        SlotCache().update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)


@pytest.mark.parametrize("name", ["crop", "reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_editing_a_cache_says_what_to_do(name):
    with pytest.raises(NotImplementedError, match="to_dynamic_cache"):
        getattr(SlotCache(), name)(1)


def test_a_dynamic_cache_goes_in_and_comes_out(target):
    ids = torch.randint(0, 48, (2, 9))
    given = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids, past_key_values=given)
    cache = SlotCache(2)
    cache.take_row(given, 1, torch.tensor([2, 3, 4, 5, 6, 7, 8]))
    assert cache.lengths == (0, 7)
    assert torch.equal(kept(cache, 1, layer=3)[0], given.layers[3].keys[1, :, 2:])
    cache.columns = [torch.arange(0), torch.arange(2, 9)]
    back = cache.to_dynamic_cache()
    assert back.get_seq_length() == 9
    assert torch.equal(back.layers[3].values[1, :, 2:], given.layers[3].values[1, :, 2:])


def test_an_allocator_that_fails_is_a_memory_error_that_says_what_to_do(monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(torch.Tensor, "new_zeros", full)
    with pytest.raises(MemoryError, match="64 tokens in 8 sequences: use a smaller batch"):
        write(SlotCache(8), SlotLayout((0,) * 8, (64,) * 8), torch.randn(1, 2, 512, 4))
