"""Packed copies of weights: the numbers of `F.linear`, of the weights as they are now, within the memory there is."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_dspark import FullBlock
from hf_dspark.cpu import copies as packed_weights
from hf_dspark.cpu import few_rows
from hf_dspark.cpu.copies import packed_weights_of
from hf_dspark.cpu.few_rows import (
    MAX_ROWS,
    FewRowsLinear,
    large_linears,
    multiplying_few_rows,
    rough_product,
    using_copies,
)
from hf_dspark.cpu.int8_copy import Int8Copy
from hf_dspark.decoding.loop import PACKING_PAYS_FROM
from hf_dspark.models import modeling_draft as draft_model

FREE_MEMORY = packed_weights.free_memory
PACKED_FROM = 2**16
DTYPES = (torch.float32, torch.bfloat16)


def packs(dtype: torch.dtype) -> bool:
    try:
        return packed_weights.packed_weight(torch.ones(64, 64, dtype=dtype)) is not None
    except (RuntimeError, AttributeError):
        return False


pytestmark = pytest.mark.skipif(not packs(torch.float32), reason="PyTorch or this CPU cannot pack")
each_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.skipif(not packs(d), reason="this CPU cannot")) for d in DTYPES]
)


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch):
    for module in (few_rows, packed_weights):
        monkeypatch.setattr(module, "packed_gain", dict.fromkeys(DTYPES, PACKED_FROM).get)
    monkeypatch.setattr(packed_weights, "int8_gain", lambda dtype: None)
    for gain in ("_gain", "_transposed_gain"):
        monkeypatch.setattr(few_rows, gain, lambda dtype: None)
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 2**30)
    monkeypatch.setattr(packed_weights, "_kept", weakref.WeakKeyDictionary())


@pytest.fixture
def packings(monkeypatch):
    """The shape of every matrix that was packed."""
    done, original = [], packed_weights.packed_weight

    def recorded(weight):
        done.append(tuple(weight.shape))
        return original(weight)

    monkeypatch.setattr(packed_weights, "packed_weight", recorded)
    return done


def linear(out: int = 256, inputs: int = 256, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, out, bias=bias)


@torch.no_grad()
def multiplied(layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with multiplying_few_rows(large_linears(layer)), using_copies(packed_weights_of(layer)):
        return layer(rows)


@each_dtype
@pytest.mark.parametrize("shape", [(1,), (8,), (2, 4), (1, MAX_ROWS), (MAX_ROWS + 1,), (0,)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_numbers_are_those_of_linear(shape, bias, dtype):
    layer, rows = linear(512, 256, bias).to(dtype), torch.randn(*shape, 256).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = F.linear(rows, layer.weight, layer.bias)
    torch.testing.assert_close(multiplied(layer, rows), expected, atol=tolerance, rtol=tolerance)


def test_a_matrix_is_packed_once_and_for_drafts_layers_too(packings):
    layers = nn.Sequential(linear(), FewRowsLinear(256, 256), linear(255, 256))
    for _ in range(3):
        multiplied(layers, torch.randn(8, 256))
    assert packings == [(256, 256), (256, 256)]  # the third is too small


@torch.no_grad()
def test_copies_are_used_only_where_they_were_asked_for(packings):
    layer, other, rows = FewRowsLinear(256, 256), FewRowsLinear(256, 256), torch.randn(8, 256)
    with using_copies(packed_weights_of(layer)):
        other(rows)
        with using_copies(None):
            layer(rows)
        assert packings == []
        layer(rows)
    layer(rows)
    assert packings == [(256, 256)]


def test_many_rows_alone_pack_nothing(packings):
    multiplied(linear(), torch.randn(MAX_ROWS + 1, 256))
    assert packings == []


def test_copies_take_half_of_what_is_free(packings, monkeypatch):
    layers, rows = nn.Sequential(linear(), linear(), linear()), torch.randn(8, 256)
    size = layers[0].weight.nbytes
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 4 * size - len(packings) * size)
    multiplied(layers, rows)
    assert len(packings) == 2
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 8 * size - len(packings) * size)
    multiplied(layers, rows)
    assert len(packings) == 3  # there is more room now


def test_copies_that_fill_their_share_stay_while_free_memory_goes_up_and_down(packings, monkeypatch):
    layers, rows = nn.Sequential(linear(), linear()), torch.randn(8, 256)
    size = layers[0].weight.nbytes
    for free in (4, 1.8, 1.2, 0.7, 1.6):  # the copies take 2
        monkeypatch.setattr(packed_weights, "free_memory", lambda free=free: int(free * size))
        multiplied(layers, rows)
        assert [packed_weights._kept[layers].num_bytes, len(packings)] == [2 * size, 2]
    monkeypatch.setattr(packed_weights, "free_memory", lambda: int(0.6 * size))
    multiplied(layers, rows)
    assert [packed_weights._kept[layers].num_bytes, len(packings)] == [0, 2]


def test_copies_go_when_memory_gets_short_or_onednn_is_switched_off(monkeypatch):
    layer, rows = linear(), torch.randn(8, 256)
    for name, value in (("free_memory", lambda: 0), ("enabled", False)):
        multiplied(layer, rows)
        part = packed_weights._kept[layer]
        assert part.num_bytes == layer.weight.nbytes
        with monkeypatch.context() as patch:
            patch.setattr(packed_weights if name == "free_memory" else torch.backends.mkldnn, name, value)
            torch.testing.assert_close(multiplied(layer, rows), layer(rows))
            assert part.num_bytes == 0


def test_without_memory_for_a_copy_the_matrix_serves(monkeypatch):
    def fail(weight):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(packed_weights, "packed_weight", fail)
    layer, rows = linear(), torch.randn(8, 256)
    assert torch.equal(multiplied(layer, rows), layer(rows))
    assert packed_weights._kept[layer].num_bytes == 0


def test_threads_pack_a_matrix_once(packings):
    layer, rows = FewRowsLinear(256, 256), torch.randn(8, 256)
    copies, barrier = packed_weights_of(layer), threading.Barrier(4)

    def multiply():
        barrier.wait()
        with torch.no_grad(), using_copies(copies):
            layer(rows)

    threads = [threading.Thread(target=multiply) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert packings == [(256, 256)]


@torch.no_grad()
def test_what_is_no_lasting_parameter_is_not_packed(packings):
    layer, rows = FewRowsLinear(256, 256), torch.randn(8, 256)
    nn.utils.parametrizations.weight_norm(layer)
    torch.testing.assert_close(multiplied(layer, rows), F.linear(rows, layer.weight, layer.bias))
    offloaded = FewRowsLinear(256, 256, device="meta")
    copies = packed_weights_of(offloaded)
    offloaded.weight, offloaded.bias = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256))
    with using_copies(copies):
        offloaded(rows)
    assert packings == []


def test_layers_can_be_moved_and_changed_in_kind():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer, rows = linear(), torch.randn(8, 256)
        multiplied(layer, rows)
        layer.to(torch.float64)
        torch.testing.assert_close(multiplied(layer, rows.double()), layer(rows.double()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def zeros_in_another_dtype(layer):
    layer.weight.data = torch.zeros_like(layer.weight.data, dtype=torch.float16)


def turned(layer):
    layer.weight.data = layer.weight.data.t()


@pytest.mark.parametrize("change", [zeros_in_another_dtype, turned])
def test_a_weight_of_another_kind_is_not_served_by_the_old_copy(change):
    layer = linear(bias=False)
    layer.weight.data.zero_()
    layer.weight.data[0, 1] = 1.0
    rows = torch.randn(8, 256)
    multiplied(layer, rows)
    change(layer)
    rows = rows.to(layer.weight.dtype)
    torch.testing.assert_close(multiplied(layer, rows), layer(rows))


@pytest.mark.parametrize(
    ("group", "limit", "free"),
    [
        ("0::/own/part", {"memory.max": 1000, "memory.current": 700, "memory.stat": "inactive_file 150"}, 450),
        ("0::/own/part", {"memory.max": 1000, "memory.current": 1200, "memory.stat": "inactive_file 0"}, 0),
        ("0::/own/part", {"memory.max": "max", "memory.current": 700, "memory.stat": "inactive_file 150"}, 8 * 1024),
        ("0::/", {}, 8 * 1024),
    ],
)
@pytest.mark.parametrize("where", ["own/part", "own", ""])
def test_memory_is_free_within_the_limits_of_all_groups(monkeypatch, tmp_path, group, limit, free, where):
    for name, text in limit.items():
        (tmp_path / where).mkdir(parents=True, exist_ok=True)
        (tmp_path / where / name).write_text(f"{text}\n")
    for name, text in (
        ("MEMORY_FILE", "MemTotal:  19 kB\nMemFree:  2 kB\nMemAvailable:  8 kB\n"),
        ("PROCESS_FILE", "Name:\tpython\nRssFile:\t0 kB\n"),
        ("GROUPS_FILE", f"{group}\n"),
    ):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(packed_weights, name, str(tmp_path / name))
    monkeypatch.setattr(packed_weights, "GROUPS_FOLDER", str(tmp_path))
    assert FREE_MEMORY() == free
    (tmp_path / "PROCESS_FILE").write_text("RssFile:\t3 kB\n")  # mapped weights are not free
    assert FREE_MEMORY() <= min(free, 5 * 1024)
    (tmp_path / "MEMORY_FILE").unlink()
    assert FREE_MEMORY() == 0


# ---- weights that change


def add_to(weight):
    weight += weight.flip(0)


def set_one(weight):
    weight[5, 3] += 1.0


def swap_rows(weight):
    weight[[5, 6]] = weight[[6, 5]]


def swap_columns(weight):
    weight[:, [4, 5, 6, 7, 0, 1, 2, 3]] = weight[:, :8].clone()


def negate_a_column(weight):
    weight[:, 3].neg_()


def negate_columns(weight):
    weight[:, :8].neg_()


def negate_every_other_column(weight):
    weight[:, 1::2].neg_()


def negate_two_columns(weight):
    weight[:, [3, 7]] = -weight[:, [3, 7]]


def negate(weight):
    weight.neg_()


def negate_two_of_one_row(weight):
    weight[5, [3, 7]] = -weight[5, [3, 7]]


CHANGES = [
    add_to, set_one, swap_rows, swap_columns, negate_a_column, negate_columns, negate_every_other_column,
    negate_two_columns, negate, negate_two_of_one_row,
]  # fmt: skip


@each_dtype
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_leaves_no_trace_is_seen(change, dtype, packings):
    layer, rows = linear(bias=False).to(dtype), torch.randn(8, 256).to(dtype)
    before, version = multiplied(layer, rows), layer.weight._version
    change(layer.weight.data)
    after = multiplied(layer, rows)
    assert layer.weight._version == version and len(packings) == 2
    torch.testing.assert_close(after, layer(rows), atol=2e-2, rtol=2e-2)
    assert not torch.allclose(after, before, atol=2e-2, rtol=2e-2)


@each_dtype
@pytest.mark.parametrize("same_sign", [True, False])
def test_signs_that_turn_in_two_words_of_a_row_never_vanish(dtype, same_sign):
    rows = torch.rand(2000, 16).to(dtype) + 0.5  # without a zero, whose sign would change little
    rows[:, 3] *= 1 if same_sign else -1
    turned = rows.clone()
    turned[:, [3, 7]] *= -1
    assert (packed_weights.row_sums(turned) != packed_weights.row_sums(rows)).all()


def test_one_changed_matrix_makes_all_copies_of_its_model_anew(packings):
    layers, other, rows = nn.Sequential(linear(), linear()), linear(), torch.randn(8, 256)
    for _ in range(2):
        multiplied(layers, rows), multiplied(other, rows)
    assert len(packings) == 3
    layers[0].weight.data.neg_()
    multiplied(layers, rows), multiplied(other, rows)
    assert len(packings) == 5


# ---- in `generate()`


@pytest.fixture
def own_pair(wide_pair):
    return copy.deepcopy(wide_pair)


OF_TARGET, OF_DRAFT = 3 * 3 + 1, 3 + 1  # gate, up and down of each layer; the head, once for both, and W_2
IDS = torch.arange(10)[None] + 5
CALL = {"max_new_tokens": PACKING_PAYS_FROM, "do_sample": False}


@each_dtype
def test_a_long_call_packs_each_matrix_once_and_a_short_one_none(own_pair, packings, dtype):
    target, draft = (model.to(dtype) for model in own_pair)
    target.generate(IDS, assistant_model=draft, max_new_tokens=PACKING_PAYS_FROM - 1)
    assert packings == []
    for _ in range(2):
        output = target.generate(IDS, assistant_model=draft, **CALL)
        assert output.shape[1] == 10 + PACKING_PAYS_FROM
        assert len(packings) == OF_TARGET + OF_DRAFT


def test_outputs_are_those_of_plain_decoding_also_after_the_weights_have_changed(own_pair):
    target, draft = own_pair
    first = target.generate(IDS, assistant_model=draft, **CALL)
    assert torch.equal(first, target.generate(IDS, **CALL))
    target.lm_head.weight.data.copy_(target.lm_head.weight.data.flip(0))
    second = target.generate(IDS, assistant_model=draft, **CALL)
    assert torch.equal(second, target.generate(IDS, **CALL)) and not torch.equal(second, first)


def test_without_looking_a_changed_weight_would_be_missed(own_pair, monkeypatch):
    target, draft = own_pair
    first = target.generate(IDS, assistant_model=draft, **CALL)
    monkeypatch.setattr(packed_weights._Matrix, "is_current", lambda self: True)
    target.lm_head.weight.data.copy_(target.lm_head.weight.data.flip(0))
    assert torch.equal(target.generate(IDS, assistant_model=draft, **CALL), first)
    assert not torch.equal(target.generate(IDS, **CALL), first)


def test_copies_serve_all_drafts_of_a_target_and_end_with_their_model(wide_pair, packings):
    target, draft = copy.deepcopy(wide_pair)
    other = copy.deepcopy(draft)
    target.generate(IDS, assistant_model=draft, **CALL)
    target.generate(IDS, assistant_model=other, **CALL)
    assert len(packings) == OF_TARGET + 2 * OF_DRAFT
    weight = weakref.ref(target.model.layers[0].mlp.up_proj.weight)
    del target
    gc.collect()
    assert set(packed_weights._kept) <= {draft, other}
    assert weight() is None


# ---- int8 copies


@pytest.fixture
def int8_gains(monkeypatch):
    """Every matrix that can be packed may have an int8 copy, too; the shapes of those that got one."""
    made = []

    class Recorded(Int8Copy):
        def __init__(self, weight):
            made.append(tuple(weight.shape))
            super().__init__(weight)

    monkeypatch.setattr(packed_weights, "int8_gain", dict.fromkeys(DTYPES, PACKED_FROM).get)
    monkeypatch.setattr(packed_weights, "Int8Copy", Recorded)
    return made


@torch.no_grad()
def test_an_int8_copy_is_made_once_beside_the_packed_one_and_counts(int8_gains, packings):
    layer, rows = linear(bias=False), torch.randn(8, 256)
    for _ in range(2):
        copies = packed_weights_of(layer)
        with using_copies(copies):
            rough_product(layer, rows)
            FewRowsLinear.forward(layer, rows)
    assert int8_gains == packings == [(256, 256)]
    assert copies.parts[0].num_bytes == 256 * 256 * (4 + 1)


@torch.no_grad()
def test_an_int8_copy_is_of_the_weights_as_they_are_now(int8_gains):
    layer, rows = linear(bias=False), torch.randn(8, 256)
    for _ in range(2):
        with using_copies(packed_weights_of(layer)):
            best = rough_product(layer, rows).argmax(dim=-1)
        assert torch.equal(best, layer(rows).argmax(dim=-1))
        layer.weight.data.neg_()
    assert len(int8_gains) == 2


@pytest.mark.parametrize("packed_gain", [None, 256 * 256 + 1])
@torch.no_grad()
def test_an_int8_copy_needs_no_packed_one(int8_gains, packings, monkeypatch, packed_gain):
    for module in (few_rows, packed_weights):
        monkeypatch.setattr(module, "packed_gain", lambda dtype: packed_gain)
    layer, rows = linear(bias=False), torch.randn(8, 256)
    with using_copies(packed_weights_of(layer)):
        assert rough_product(layer, rows) is not None
        FewRowsLinear.forward(layer, rows)
    assert int8_gains == [(256, 256)] and packings == []
    layer.weight.data.neg_()
    with using_copies(packed_weights_of(layer)):
        assert torch.equal(rough_product(layer, rows).argmax(dim=-1), layer(rows).argmax(dim=-1))


@torch.no_grad()
def test_there_is_no_int8_copy_without_gain_memory_or_copies_at_all(int8_gains, monkeypatch):
    layer, rows = linear(bias=False), torch.randn(8, 256)
    assert rough_product(layer, rows) is None
    with using_copies(packed_weights_of(linear(300, bias=False))):
        assert rough_product(layer, rows) is None  # another model's
    with monkeypatch.context() as without_memory, using_copies(packed_weights_of(layer)):
        without_memory.setattr(packed_weights, "free_memory", lambda: 0)
        assert rough_product(layer, rows) is None
    assert int8_gains == []
    with using_copies(packed_weights_of(layer)):  # there is memory again
        assert rough_product(layer, rows) is not None
    for least in (None, 256 * 256 + 1):
        monkeypatch.setattr(packed_weights, "int8_gain", lambda dtype, least=least: least)
        with using_copies(packed_weights_of(layer)):
            assert rough_product(layer, rows) is None


@torch.no_grad()
def test_a_layer_that_does_more_than_multiply_has_no_rough_product(int8_gains, monkeypatch):
    rows = torch.randn(8, 256)

    class Adapted(nn.Linear):
        pass

    hooked, patched = linear(bias=False), linear(bias=False)
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    patched.forward = lambda rows: rows + 1
    for layer in (linear(bias=True), Adapted(256, 256, bias=False), hooked, patched):
        with multiplying_few_rows(large_linears(layer)), using_copies(packed_weights_of(layer)):
            assert rough_product(layer, rows) is None
    layer = linear(bias=False)
    with multiplying_few_rows([layer]), using_copies(packed_weights_of(layer)):
        assert rough_product(layer, rows) is not None
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        assert rough_product(layer, rows) is None


@torch.no_grad()
def test_making_an_int8_copy_needs_room_for_two(int8_gains, monkeypatch):
    layer, rows = linear(bias=False), torch.randn(8, 256)
    for free, fits in ((4 * 256 * 256 - 2, False), (4 * 256 * 256, True)):
        monkeypatch.setattr(packed_weights, "free_memory", lambda free=free: free)
        with using_copies(packed_weights_of(layer)):
            assert (rough_product(layer, rows) is not None) == fits


@torch.no_grad()
def test_a_compiled_draft_asks_for_no_rough_product(int8_gains):
    layer, rows = linear(bias=False), torch.randn(8, 256)

    def product(rows):
        rough = rough_product(layer, rows)
        return layer(rows) if rough is None else rough

    with using_copies(packed_weights_of(layer)):
        assert torch.equal(torch.compile(product, backend="eager", fullgraph=True)(rows), layer(rows))
    assert int8_gains == []


@each_dtype
def test_drafting_among_candidates_chooses_them_by_an_int8_copy_of_the_head(own_pair, int8_gains, dtype):
    target, draft = (model.to(dtype) for model in own_pair)
    plain = target.generate(IDS, **CALL)
    for top_k, shapes in ((None, []), (8192 // 64, []), (32, [(8192, 128)])):  # too many candidates: no gain
        draft.config.draft_top_k = top_k
        drafted = target.generate(IDS, assistant_model=draft, **CALL)
        assert int8_gains == shapes
        if dtype == torch.float32:  # a random target's best tokens are too near to each other for bfloat16
            assert torch.equal(drafted, plain)


def test_whom_an_int8_copy_names_is_accepted_as_whom_the_head_names(pair, int8_gains, monkeypatch):
    """Outputs would be right with any candidates; that these are the right ones, acceptance tells."""
    target, draft = copy.deepcopy(pair)
    draft.config.draft_top_k, draft.policy = 4, FullBlock()
    for module in (few_rows, packed_weights):
        monkeypatch.setattr(module, "packed_gain", lambda dtype: 1)
    monkeypatch.setattr(draft_model, "TOKENS_PER_CANDIDATE", 1)

    def accepted(int8_gain):
        monkeypatch.setattr(packed_weights, "int8_gain", lambda dtype: int8_gain)
        target.generate(IDS % draft.config.vocab_size, assistant_model=draft, max_new_tokens=48, do_sample=False)
        return sum(draft.last_stats.accepted) / draft.last_stats.rounds

    by_the_head = accepted(None)
    assert accepted(1) == by_the_head > 1 and len(int8_gains) == 1
    of_other_tokens = Int8Copy(target.lm_head.weight.flip(0))
    monkeypatch.setattr(draft, "rough_logits", of_other_tokens.rough_product)
    assert accepted(None) < by_the_head / 2
