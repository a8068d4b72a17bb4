"""Products of few rows: the numbers of `F.linear`, by another way where that one is slow, and only there."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_dspark.cpu import small_batch_gemm
from hf_dspark.cpu.small_batch_gemm import (
    AMD,
    GAINS,
    INTEL,
    MAX_ROWS,
    Gain,
    PackedWeight,
    multiplies_bfloat16,
    small_batch_linear,
    swapped_linear,
)
from tests.cpu.conftest import each_dtype, gain_of_this_cpu, linear

pytestmark = pytest.mark.skipif(not small_batch_gemm.has_both(), reason="PyTorch knows one way")


@pytest.mark.one_in(5)
@each_dtype
@pytest.mark.parametrize("shape", [(1,), (8,), (2, 4), (1, MAX_ROWS), (MAX_ROWS + 1,), (0,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", ["onednn", "swapped", "packed"])
@torch.no_grad()
def test_the_numbers_are_those_of_linear(gains, shape, bias, dtype, way):
    gains(**{way: Gain(1, 2**16)})
    layer, tolerance = linear(512, 256, bias).to(dtype), 1e-5 if dtype == torch.float32 else 2e-2
    packed = PackedWeight(layer.weight) if way == "packed" else None
    apart = torch.randn(256, 8).to(dtype).t()  # rows that do not lie side by side
    for rows in (torch.randn(*shape, 256).to(dtype), apart):
        product = small_batch_linear(rows, layer.weight, layer.bias, packed)
        torch.testing.assert_close(product, layer(rows), atol=tolerance, rtol=tolerance)
        assert rows is apart or product.is_contiguous()


@torch.no_grad()
def test_each_product_takes_the_way_that_gains(gains, products):
    gains(onednn=Gain(4, 2**15), swapped=Gain(2, 2**16, most_rows=3), packed=Gain(3, 2**16))
    layer, small = linear(), linear(128, 256)
    for packed, count, expected in (
        (None, 1, "linear"), (None, 2, "swapped"), (None, 4, "onednn"), (None, MAX_ROWS + 1, "linear"),
        (PackedWeight(layer.weight), 2, "swapped"), (PackedWeight(layer.weight), 3, "packed"),
    ):  # fmt: skip
        small_batch_linear(torch.randn(count, 256), layer.weight, None, packed)
        assert (products.pop() if products else "linear") == expected
    small_batch_linear(torch.randn(3, 256), small.weight)
    small_batch_linear(torch.randn(4, 256), small.weight)
    assert products == ["onednn"]


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: setattr(weight, "data", weight.data.clone()),
        lambda weight: setattr(weight, "data", weight.data.t()),
        lambda weight: setattr(weight, "data", weight.data.double()),
    ],
)
@torch.no_grad()
def test_a_packed_weight_is_not_used_once_its_weight_has_changed(gains, products, change):
    gains(packed=Gain(1, 2**16))
    layer = linear(bias=False)
    packed = PackedWeight(layer.weight)
    change(layer.weight)
    rows = torch.randn(8, 256, dtype=layer.weight.dtype)
    assert torch.equal(small_batch_linear(rows, layer.weight, None, packed), layer(rows))
    assert products == []


@pytest.mark.skipif(not multiplies_bfloat16(), reason="oneDNN multiplies no bfloat16 here")
@torch.no_grad()
def test_product_and_bias_are_added_before_rounding():
    layer, rows = linear(96, 64, bias=False).bfloat16(), torch.randn(8, 64).bfloat16()
    products = layer(rows)
    exact = rows.double() @ layer.weight.double().T - products[0].double()
    for count in (1, 8):
        found = swapped_linear(rows[:count], layer.weight, -products[0])[0]
        assert (found - exact[0]).abs().mean() < 0.1 * exact[0].abs().mean()  # rounded twice, it would be all zeros


def test_what_onednn_does_not_know_stays_with_linear(gains, products, monkeypatch):
    gains(onednn=Gain(1, 2**16))
    layer, rows = linear(), torch.randn(8, 256)
    assert small_batch_linear(rows, layer.weight).requires_grad
    with torch.no_grad():
        small_batch_linear(rows.double(), layer.weight.double())
        small_batch_linear(rows, layer.weight.t())
        for bias in (torch.randn(1).expand(256), torch.randn(512)[::2], torch.randn(1)):
            assert torch.equal(small_batch_linear(rows, layer.weight, bias), F.linear(rows, layer.weight, bias))
        sparse = nn.Parameter(layer.weight.to_sparse_csr(), requires_grad=False)
        assert torch.equal(small_batch_linear(rows, sparse), F.linear(rows, sparse))
        with torch.autocast("cpu", torch.bfloat16):
            assert small_batch_linear(rows, layer.weight).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="shapes|size"):
            small_batch_linear(rows[:, :3], layer.weight)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        small_batch_linear(rows, layer.weight)
    assert products == []


# ---- which CPU this is


@pytest.mark.parametrize(
    ("cpuinfo", "used", "kind"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t: fpu avx2", "AVX2", (AMD, "AVX2")),
        ("vendor_id\t: GenuineIntel\nflags\t: avx512f amx_bf16", "AVX512", (INTEL, "AMX")),
        ("vendor_id\t: GenuineIntel\nflags\t: avx512f amx_bf16", "AVX2", (INTEL, "AVX2")),  # PyTorch may not use it
        ("CPU implementer\t: 0x41", "DEFAULT", (None, "DEFAULT")),
        (FileNotFoundError, "AVX512", (INTEL, "AVX512")),  # not Linux
    ],
)
def test_maker_and_units_are_read_where_the_system_says_them(monkeypatch, cpuinfo, used, kind):
    monkeypatch.setattr(small_batch_gemm.Path, "read_text", Mock(side_effect=[cpuinfo]))
    monkeypatch.setattr(
        small_batch_gemm.platform, "processor", lambda: "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel"
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    assert small_batch_gemm.cpu_kind() == kind


@pytest.mark.parametrize("kind", [(AMD, "AVX512"), (INTEL, "AMX"), (None, "AVX512")])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_gains_are_those_of_this_kind_of_cpu(monkeypatch, kind, bfloat16):
    monkeypatch.setattr(small_batch_gemm, "cpu_kind", lambda: kind)
    monkeypatch.setattr(small_batch_gemm, "multiplies_bfloat16", lambda: bfloat16)
    gain_of = gain_of_this_cpu.__wrapped__
    for way in ("onednn", "swapped", "packed"):
        assert gain_of(way, torch.float32) == GAINS.get((way, *kind, torch.float32))
        assert gain_of(way, torch.bfloat16) == (GAINS.get((way, *kind, torch.bfloat16)) if bfloat16 else None)
        assert gain_of(way, torch.float16) is None
