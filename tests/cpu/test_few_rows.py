"""Products of few rows: the numbers of `F.linear`, by another way where that one is slow, and only there."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from hf_dspark import check_target
from hf_dspark.cpu import copies as packed_weights
from hf_dspark.cpu import few_rows
from hf_dspark.cpu.few_rows import (
    AMD,
    GAINS,
    INTEL,
    MAX_ROWS,
    TRANSPOSED_GAINS,
    FewRowsLinear,
    Gain,
    apply_to_few_rows,
    few_rows_linear,
    large_linears,
    multiplies_bfloat16,
    multiplying_few_rows,
    transposed_linear,
)
from hf_dspark.cpu.int8_copy import can_multiply

GAIN_UNCACHED, PACKED_GAIN_UNCACHED = few_rows._gain.__wrapped__, few_rows.packed_gain.__wrapped__
TRANSPOSED_GAIN_UNCACHED, INT8_GAIN_UNCACHED = few_rows._transposed_gain.__wrapped__, few_rows.int8_gain.__wrapped__
pytestmark = pytest.mark.skipif(not few_rows._has_both(), reason="PyTorch knows one way")


@pytest.fixture(autouse=True)
def small_and_single_rows_gain(monkeypatch):
    """The same on every machine."""
    gains = {torch.float32: GAINS[AMD, "AVX2", torch.float32]}
    monkeypatch.setattr(few_rows, "_gain", gains.get)
    monkeypatch.setattr(few_rows, "_transposed_gain", lambda dtype: None)
    for module in (few_rows, packed_weights):
        monkeypatch.setattr(module, "packed_gain", lambda dtype: None)


@pytest.fixture
def products(monkeypatch):
    """The rows of every product that oneDNN was asked for."""
    asked, original = [], torch.ops.mkldnn._linear_pointwise

    def recorded(rows, *rest):
        asked.append(rows.shape[:-1].numel())
        return original(rows, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", SimpleNamespace(default=recorded))
    return asked


def linear(out: int = 1024, inputs: int = 1024, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, out, bias=bias)


@pytest.mark.parametrize("shape", [(1,), (8,), (2, 4), (1, MAX_ROWS), (MAX_ROWS + 1,), (0,)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_numbers_are_those_of_linear(shape, bias):
    layer, rows = linear(bias=bias), torch.randn(*shape, 1024)
    torch.testing.assert_close(few_rows_linear(rows, layer.weight, layer.bias), layer(rows), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_need_not_lie_side_by_side(products):
    layer, rows = linear(), torch.randn(1024, 8).t()
    torch.testing.assert_close(few_rows_linear(rows, layer.weight, layer.bias), layer(rows), atol=1e-5, rtol=1e-5)
    assert products == [8]


@torch.no_grad()
def test_few_rows_of_a_large_matrix_go_the_other_way(products):
    layer = linear()
    for count in (1, 8, MAX_ROWS, MAX_ROWS + 1):
        few_rows_linear(torch.randn(count, 1024), layer.weight)
    assert products == [1, 8, MAX_ROWS]


@torch.no_grad()
def test_single_rows_and_smaller_matrices_stay_where_mkl_is_as_fast(products, monkeypatch):
    monkeypatch.setattr(few_rows, "_gain", lambda dtype: GAINS[INTEL, "AVX512", dtype])
    for count in (1, 3, 4, MAX_ROWS):
        few_rows_linear(torch.randn(count, 1024), linear().weight)
        few_rows_linear(torch.randn(count, 1024), linear(2048, 1024).weight)
    assert products == [4, MAX_ROWS]


@torch.no_grad()
@pytest.mark.parametrize("gain", GAINS.values())
def test_each_kind_of_cpu_has_its_least_matrix(products, monkeypatch, gain):
    monkeypatch.setattr(few_rows, "_gain", lambda dtype: gain)
    for weights in (gain.least_weights, gain.least_weights - 64):
        few_rows_linear(torch.randn(8, 64), torch.randn(weights // 64, 64))
    assert products == [8]


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "maker"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "", AMD),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", "", INTEL),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "", None),
        (None, "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", INTEL),
        (None, "arm", None),
    ],
)
def test_the_maker_is_read_where_the_system_says_it(monkeypatch, cpuinfo, processor, maker):
    def read_text(path):
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(few_rows.Path, "read_text", read_text)
    monkeypatch.setattr(few_rows.platform, "processor", lambda: processor)
    assert few_rows._cpu()[0] == maker


@pytest.mark.parametrize(
    ("flags", "used", "units"), [("avx512f amx_bf16", "AVX512", "AMX"), ("avx512f amx_bf16", "AVX2", "AVX2"),
                                 ("avx512f avx512_bf16", "AVX512", "AVX512")],
)  # fmt: skip
def test_amx_is_known_where_pytorch_may_use_it(monkeypatch, flags, used, units):
    cpuinfo = f"vendor_id\t: GenuineIntel\nflags\t\t: fpu {flags}\n"
    monkeypatch.setattr(few_rows.Path, "read_text", lambda path: cpuinfo)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    monkeypatch.setattr(few_rows, "multiplies_bfloat16", lambda: True)
    assert few_rows._cpu() == (INTEL, units)
    gain = TRANSPOSED_GAINS[INTEL, "AMX", torch.bfloat16] if units == "AMX" else None
    assert TRANSPOSED_GAIN_UNCACHED(torch.bfloat16) == gain
    assert (GAIN_UNCACHED(torch.float32) is not None) == (units != "AVX2")
    monkeypatch.setattr(few_rows, "multiplies_bfloat16", lambda: False)  # oneDNN may be kept from it
    assert TRANSPOSED_GAIN_UNCACHED(torch.bfloat16) is None


@pytest.mark.parametrize(("maker", "is_known"), [(AMD, True), (None, False)])
def test_an_unknown_maker_keeps_what_pytorch_does(monkeypatch, maker, is_known):
    monkeypatch.setattr(few_rows, "_cpu", lambda: (maker, "AVX512"))
    assert (GAIN_UNCACHED(torch.float32) is not None) == is_known
    assert (PACKED_GAIN_UNCACHED(torch.bfloat16) is not None) == is_known
    assert (INT8_GAIN_UNCACHED(torch.bfloat16) is not None) == (is_known and can_multiply())
    for gain in (GAIN_UNCACHED, TRANSPOSED_GAIN_UNCACHED, PACKED_GAIN_UNCACHED, INT8_GAIN_UNCACHED):
        assert gain(torch.float16) is None
    monkeypatch.setattr(few_rows, "can_multiply", lambda: False)
    assert INT8_GAIN_UNCACHED(torch.bfloat16) is None


# ---- exchanged factors


@pytest.mark.parametrize("shape", [(), (1,), (8,), (1, 1), (2, 4), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 1e-2, marks=pytest.mark.skipif(
        not multiplies_bfloat16(), reason="oneDNN multiplies no bfloat16 here"))],
)  # fmt: skip
@torch.no_grad()
def test_exchanged_factors_give_the_numbers_of_linear(shape, bias, dtype, error):
    layer = linear(96, 64, bias).to(dtype)
    rows = torch.randn(*shape, 64).to(dtype)
    product = transposed_linear(rows, layer.weight, layer.bias)
    torch.testing.assert_close(product, layer(rows), atol=error, rtol=error)
    assert product.is_contiguous()
    apart = torch.randn(64, 8).to(dtype).t()
    torch.testing.assert_close(
        transposed_linear(apart, layer.weight, layer.bias), layer(apart), atol=error, rtol=error
    )


@pytest.mark.skipif(not multiplies_bfloat16(), reason="oneDNN multiplies no bfloat16 here")
@torch.no_grad()
def test_product_and_bias_are_added_before_rounding():
    layer, rows = linear(96, 64, bias=False).bfloat16(), torch.randn(8, 64).bfloat16()
    products = layer(rows)
    exact = rows.double() @ layer.weight.double().T - products[0].double()
    for count in (1, 8):
        found = transposed_linear(rows[:count], layer.weight, -products[0])[0]
        assert (found - exact[0]).abs().mean() < 0.1 * exact[0].abs().mean()  # rounded twice, it would be all zeros


@pytest.fixture
def exchanged(monkeypatch):
    """The rows of every product whose factors were exchanged, where two to four rows gain by it."""
    asked, original = [], few_rows.transposed_linear

    def recorded(rows, *rest):
        asked.append(rows.shape[:-1].numel())
        return original(rows, *rest)

    monkeypatch.setattr(few_rows, "transposed_linear", recorded)
    monkeypatch.setattr(few_rows, "_transposed_gain", {torch.float32: Gain(2, 2**16, most_rows=4)}.get)
    return asked


@torch.no_grad()
def test_factors_are_exchanged_where_that_gains(exchanged, products):
    layer = linear(256, 256)
    for count in range(1, 6):
        rows = torch.randn(count, 256)
        torch.testing.assert_close(few_rows_linear(rows, layer.weight), F.linear(rows, layer.weight))
        few_rows_linear(rows[:, :255], linear(256, 255).weight)  # too small
        few_rows_linear(rows.bfloat16(), layer.weight.bfloat16())
    assert exchanged == [2, 3, 4] and products == []
    assert large_linears(nn.Sequential(layer, linear(256, 255))) == [layer]


def test_generation_with_exchanged_factors_writes_what_plain_decoding_writes(wide_pair, exchanged, monkeypatch):
    monkeypatch.setattr(few_rows, "_transposed_gain", {torch.float32: Gain(1, 2**16)}.get)
    target, draft = wide_pair
    ids = torch.arange(10)[None] + 5
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)
    assert exchanged == []
    assert torch.equal(plain, target.generate(ids, assistant_model=draft, **options))
    assert len(exchanged) > draft.last_stats.rounds


# ---- rows of a matrix


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 5, 3)], ids=str)
def test_products_with_some_rows_are_those_of_the_whole_matrix(monkeypatch, shape):
    weight, vectors = torch.randn(40, 16), torch.randn(*shape[:-1], 16)
    ids = torch.randint(0, 40, shape)
    expected = (vectors @ weight.T).gather(-1, ids)
    for entries in (few_rows.GATHERED_AT_A_TIME, 2 * 3 * 16, 1):  # at once, two by two, one by one
        monkeypatch.setattr(few_rows, "GATHERED_AT_A_TIME", entries)
        torch.testing.assert_close(few_rows.products_with_rows(weight, ids, vectors), expected)


def test_gradients_small_matrices_other_dtypes_and_autocast_do_not(products, monkeypatch):
    layer, rows = linear(), torch.randn(8, 1024)
    assert few_rows_linear(rows, layer.weight).requires_grad
    with torch.no_grad():
        assert linear(512, 512).weight.numel() < GAINS[AMD, "AVX2", torch.float32].least_weights
        few_rows_linear(rows[:, :512], linear(512, 512).weight)
        few_rows_linear(rows.double(), layer.weight.double())
        few_rows_linear(rows.bfloat16(), layer.weight.bfloat16())
        few_rows_linear(rows, layer.weight.t())
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        few_rows_linear(rows, layer.weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert few_rows_linear(rows, layer.weight).dtype == torch.bfloat16
    assert products == []


@torch.no_grad()
def test_layers_change_while_entered_and_are_then_as_before(products):
    model, rows = nn.Sequential(linear(), nn.ReLU(), linear(16, 1024)), torch.randn(8, 1024)
    before = model(rows)
    linears = large_linears(model)
    assert linears == [model[0]]
    with multiplying_few_rows(linears):
        torch.testing.assert_close(model(rows), before, atol=1e-5, rtol=1e-5)
        with multiplying_few_rows(linears):
            model(rows)
        model(rows)
    assert products == [8, 8, 8]
    assert torch.equal(model(rows), before) and products == [8, 8, 8]


@torch.no_grad()
def test_an_error_leaves_layers_as_before():
    layer = linear()
    with pytest.raises(RuntimeError, match="shapes|size"), multiplying_few_rows([layer]):
        layer(torch.randn(8, 3))
    assert "forward" not in vars(layer)


@torch.no_grad()
def test_what_others_put_around_a_layer_stays(products):
    layer, rows = linear(), torch.randn(8, 1024)
    layer.forward = lambda rows: rows + 1  # as accelerate's hooks do
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    with multiplying_few_rows([layer]):
        assert torch.equal(layer(rows), (rows + 1) * 2)
    assert torch.equal(layer.forward(rows), rows + 1) and products == []


def test_layers_without_weight_and_of_other_classes_are_not_changed():
    compressed = linear()
    del compressed.weight
    assert large_linears(compressed) == []

    class Quantised(nn.Linear):
        pass

    assert large_linears(Quantised(1024, 1024)) == []
    assert large_linears(linear().to(torch.float16)) == []


@torch.no_grad()
def test_what_onednn_would_misread_stays_with_linear(products):
    weight, rows = linear().weight, torch.randn(8, 1024)
    for bias in (torch.randn(1).expand(1024), torch.randn(2048)[::2], torch.randn(1)):
        assert torch.equal(few_rows_linear(rows, weight, bias), F.linear(rows, weight, bias))
    sparse = nn.Parameter(weight.to_sparse_csr(), requires_grad=False)
    assert torch.equal(few_rows_linear(rows, sparse), F.linear(rows, sparse))
    assert products == []


@torch.no_grad()
def test_a_compiled_layer_is_compiled_once_for_all_rounds():
    model, rows, counter = nn.Sequential(linear(), linear()), torch.randn(8, 1024), CompileCounter()
    compiled, linears = torch.compile(model, backend=counter), large_linears(model)
    for _ in range(3):
        with multiplying_few_rows(linears):
            compiled(rows)
    assert counter.frame_count == 1


def test_a_lent_head_is_multiplied_so_without_gradients_alone(products):
    head, rows = linear(), torch.randn(8, 1024)
    assert apply_to_few_rows(head, rows).requires_grad and products == []
    with torch.no_grad():
        apply_to_few_rows(head, rows)
    assert products == [8] and "forward" not in vars(head)


def test_training_through_a_draft_layer_is_that_of_a_plain_one():
    plain = linear()
    ours = FewRowsLinear(1024, 1024)
    ours.load_state_dict(plain.state_dict())
    rows = torch.randn(8, 1024)
    for layer in (plain, ours):
        layer(rows).square().sum().backward()
    assert torch.equal(plain.weight.grad, ours.weight.grad)


def test_a_compiled_layer_keeps_to_linear():
    layer, rows = FewRowsLinear(1024, 1024), torch.randn(8, 1024)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(rows), F.linear(rows, layer.weight, layer.bias))


@pytest.mark.parametrize("transformers_loop", [False, True])
def test_generation_takes_the_other_way_and_writes_what_plain_decoding_writes(
    wide_pair, products, monkeypatch, transformers_loop
):
    target, draft = wide_pair
    options = dataclasses.replace(draft.decoding, use_transformers_loop=transformers_loop)
    monkeypatch.setattr(draft, "decoding", options)
    ids = torch.arange(10)[None] + 5
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    assert products == []
    drafted = target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=draft)
    assert torch.equal(plain, drafted)
    large = 3 * 3 + 1  # gate, up and down of three layers, and the head
    assert len(products) >= (1 if transformers_loop else large) * draft.last_stats.rounds
    assert not any("forward" in vars(module) for module in target.modules())


def test_checking_a_target_runs_the_passes_that_decoding_runs(wide_pair, products):
    check_target(wide_pair[0])
    assert len(products) == 3 * (3 * 3 + 1)  # three packed passes; single rows are multiplied as by plain decoding


def test_sampling_stays_the_same_with_either_product(wide_pair, monkeypatch):
    """The coins are the same, and the laws but for rounding: so are the tokens, round for round."""
    target, draft = wide_pair
    ids = torch.arange(10)[None] + 5
    outputs = []
    for most in (MAX_ROWS, 0):
        monkeypatch.setattr(few_rows, "MAX_ROWS", most)
        torch.manual_seed(3)
        outputs.append(target.generate(ids, max_new_tokens=32, do_sample=True, assistant_model=draft))
    assert torch.equal(*outputs)
