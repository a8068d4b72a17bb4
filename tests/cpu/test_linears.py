"""`fast_linears`: which layers it routes, how it leaves them, and that generation writes what it wrote without."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from hf_dspark import check_target
from hf_dspark.cpu import fast_linears, in_graphs, small_batch_gemm
from hf_dspark.cpu.small_batch_gemm import Gain
from tests.cpu.conftest import each_dtype, linear, packs

pytestmark = pytest.mark.skipif(not packs(torch.float32), reason="PyTorch or this CPU cannot pack")
SMALL = Gain(1, 2**16)
IDS = torch.arange(10)[None] + 5
OPTIONS = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(autouse=True)
def both_gain(gains):
    gains(onednn=SMALL, packed=SMALL)


@pytest.fixture
def packings(monkeypatch):
    """The shape of every matrix that was packed."""
    done, original = [], small_batch_gemm.packed_weight
    monkeypatch.setattr(
        small_batch_gemm, "packed_weight", lambda weight: done.append(tuple(weight.shape)) or original(weight)
    )
    return done


def is_untouched(*models: nn.Module) -> bool:
    return not any("forward" in vars(module) for model in models for module in model.modules())


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_large_layers_are_routed_while_entered_and_are_then_as_before(products, packed):
    model, rows = nn.Sequential(linear(), nn.ReLU(), linear(255, 256)), torch.randn(8, 256)
    before, state = model(rows), {id(module): dict(vars(module)) for module in model.modules()}
    with fast_linears(model, packed=packed):
        torch.testing.assert_close(model(rows), before, atol=1e-5, rtol=1e-5)
    assert products == ["packed" if packed else "onednn"]
    assert torch.equal(model(rows), before) and len(products) == 1
    assert state == {id(module): vars(module) for module in model.modules()}


@torch.no_grad()
def test_layers_that_gain_nothing_by_so_many_rows_are_left_alone_and_all_are_restored(gains, products):
    gains(onednn=Gain(2, 2**16, most_rows=4))
    model, rows = nn.Sequential(linear(), linear(255, 256)), torch.randn(8, 256)
    linears = fast_linears(model)
    for num_rows, routed in ((1, 0), (2, 1), (4, 1), (5, 0)):
        with linears.of_rows(num_rows):
            assert sum("forward" in vars(layer) for layer in model) == routed
            model(rows[:num_rows])
    assert products == ["onednn", "onednn"] and is_untouched(model)
    linears.of_rows(2).__enter__()
    linears.restore()
    assert is_untouched(model)


@torch.no_grad()
def test_nested_entries_change_nothing_of_the_outer_one(products, packings):
    layer, other, rows = linear(), linear(), torch.randn(8, 256)
    with fast_linears(layer, packed=True):
        for packed in (False, True):
            with fast_linears(layer, other, packed=packed):
                layer(rows), other(rows)
            layer(rows), other(rows)
    assert products == ["packed", "onednn", "packed", "packed", "packed", "packed"]
    assert len(packings) == 2 and is_untouched(layer, other)
    fast = fast_linears(layer)
    with fast, fast:
        pass
    with fast:
        assert not is_untouched(layer)
    assert is_untouched(layer)


@torch.no_grad()
def test_an_error_leaves_layers_as_before(monkeypatch):
    layer = linear()
    with pytest.raises(RuntimeError, match="shapes|size"), fast_linears(layer, packed=True):
        layer(torch.randn(8, 3))
    assert is_untouched(layer)
    monkeypatch.setattr(small_batch_gemm, "packed_weight", Mock(side_effect=RuntimeError("can't allocate memory")))
    with pytest.raises(RuntimeError, match="allocate"), fast_linears(layer, packed=True):
        pass
    assert is_untouched(layer)


@torch.no_grad()
def test_what_others_put_in_place_of_forward_stays(products):
    layer, rows = linear(), torch.randn(8, 256)
    layer.forward = lambda rows: rows + 1  # as accelerate's hooks do
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    hooked, hook = linear(), lambda rows: rows + 3
    with fast_linears(layer, hooked, packed=True):
        assert torch.equal(layer(rows), (rows + 1) * 2)
        hooked.forward = hook  # while it is entered
    assert torch.equal(layer.forward(rows), rows + 1) and products == []
    assert vars(hooked)["forward"] is hook


def test_layers_of_other_kinds_are_not_routed(packings):
    compressed, weighted = linear(), linear()
    del compressed.weight
    nn.utils.parametrizations.weight_norm(weighted)
    quantised = type("Quantised", (nn.Linear,), {})(256, 256)
    others = [compressed, weighted, quantised, linear().half(), linear().to("meta")]
    with fast_linears(*others, packed=True):
        assert is_untouched(*others)
    assert packings == []


@torch.no_grad()
def test_packed_weights_are_of_the_weights_on_entry_made_once_for_each_and_freed(packings):
    first, tied = linear(bias=False), linear(bias=False)
    tied.weight = first.weight
    rows, freed = torch.randn(8, 256), []
    with fast_linears(first, tied, packed=True):
        freed.append(weakref.ref(vars(first)["forward"].__func__.keywords["packed"]))
        before = first(rows)
        first.weight.data.neg_()  # leaves no trace
        assert torch.equal(tied(rows), before)
    gc.collect()
    assert packings == [(256, 256)] and freed[0]() is None
    with fast_linears(first, tied, packed=True):
        torch.testing.assert_close(first(rows), -before)


def test_gradients_and_compiled_graphs_keep_to_linear(products):
    layer, rows, counter = linear(), torch.randn(8, 256), CompileCounter()
    model = nn.Sequential(layer, linear())
    compiled, fast, gradients = torch.compile(model, backend=counter), fast_linears(model), []
    for context in (fast, nullcontext()):
        with context:
            gradients += torch.autograd.grad(layer(rows).square().sum(), layer.weight)
    assert torch.equal(*gradients)
    with torch.no_grad():
        for context in (fast, fast_linears(model)) * 3:
            with context:
                compiled(rows)
    assert counter.frame_count == 1 and products == []


@torch.no_grad()
def test_graphs_that_ask_for_it_multiply_as_all_else_does(products, monkeypatch):
    monkeypatch.setattr(in_graphs, "wanted", True)
    layer, counter = linear(), CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for num_rows in (8, 5, 200):
        rows = torch.randn(num_rows, 256)
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        with fast_linears(layer):
            torch.testing.assert_close(compiled(rows), layer(rows))
    assert products == ["onednn"] * 4 and counter.frame_count == 1  # 200 rows are too many


@torch.no_grad()
def test_threads_may_enter_and_leave_in_any_order():
    layer, rows = linear(), torch.randn(8, 256)
    expected = layer(rows)

    def multiply(packed):
        for _ in range(20):
            with fast_linears(layer, packed=packed), torch.no_grad():
                torch.testing.assert_close(layer(rows), expected, atol=1e-5, rtol=0)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(multiply, (True, False, True)))
    assert is_untouched(layer)


# ---- in `generate()`


@each_dtype
def test_plain_and_drafted_generation_multiply_by_packed_weights_when_asked(wide_pair, products, packings, dtype):
    target, draft = (copy.deepcopy(model).to(dtype) for model in wide_pair)
    plain = target.generate(IDS, **OPTIONS)
    assert products == []
    with fast_linears(target, draft, packed=True):
        assert len(packings) == 3 * 3 + 1 + 3 + 1  # MLPs and the head of the target, MLP and W_2 of the draft
        fast = target.generate(IDS, **OPTIONS)
        assert set(products) == {"packed"} and len(products) >= 24 * (3 * 3 + 1)
        products.clear()
        drafted = target.generate(IDS, assistant_model=draft, **OPTIONS)
        assert set(products) == {"packed"}
    assert len(products) >= draft.last_stats.rounds * (3 * 3 + 1 + 3 + 1)
    assert is_untouched(target, draft)
    if dtype == torch.float32:  # a random target's best tokens are too near to each other for bfloat16
        assert torch.equal(fast, plain) and torch.equal(drafted, plain)


@pytest.mark.parametrize("way", ["onednn", "swapped"])
def test_drafted_generation_is_routed_unasked_and_writes_what_plain_decoding_writes(wide_pair, gains, products, way):
    gains(**{way: SMALL})
    target, draft = wide_pair
    plain = target.generate(IDS, **OPTIONS)
    assert products == []
    assert torch.equal(plain, target.generate(IDS, assistant_model=draft, **OPTIONS))
    assert products.count(way) >= draft.last_stats.rounds * (3 * 3 + 1)
    assert is_untouched(target, draft)
    products.clear()
    gains(onednn=Gain(1, 2**20))
    check_target(target)  # runs the passes that decoding runs
    assert len(products) == 3 * (3 * 3 + 1)  # three packed passes; single rows are multiplied as by plain decoding


@pytest.mark.slow
def test_sampling_stays_the_same_with_either_product(wide_pair, gains):
    """The accept_uniforms are the same, and the distributions but for rounding: so are the tokens, round for round."""
    target, draft = wide_pair
    outputs = []
    for gain in (SMALL, None):
        gains(onednn=gain)
        torch.manual_seed(3)
        outputs.append(target.generate(IDS, max_new_tokens=32, do_sample=True, assistant_model=draft))
    assert torch.equal(*outputs)
