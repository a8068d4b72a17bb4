"""Rough products by int8 copies: who is largest in a row they tell as the matrix does, but for a few in the middle."""

import platform
from pathlib import Path

import pytest
import torch

from hf_dspark.cpu import int8_copy
from hf_dspark.cpu.int8_copy import Int8Copy, can_multiply

# Not `can_multiply()`: if that were wrong, nothing here would say so.
pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN serves x86")
# Sums of 16 bits overflow where AVX-512 comes without VNNI; `few_rows.INT8_GAINS` knows no such CPU.
flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
as_exact_as_8_bits = pytest.mark.skipif("avx512f" in flags and "avx512_vnni" not in flags, reason="sums overflow")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def standardised(rows: torch.Tensor) -> torch.Tensor:
    """Take each row's own factor out."""
    return rows.float() / rows.float().norm(dim=-1, keepdim=True)


def matrix(rows: int = 4100, size: int = 256) -> torch.Tensor:
    scales = torch.rand(rows, 1) + 0.1  # rows that are shorter are rounded as finely as the others
    return torch.randn(rows, size) * scales


@as_exact_as_8_bits
@each_dtype
@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 7, 256), (200, 256)], ids=str)
def test_products_are_right_up_to_each_rows_factor_and_a_hundredth(shape, dtype):
    weight, input = matrix().to(dtype), torch.randn(shape).to(dtype)
    rough, exact = Int8Copy(weight).rough_product(input), input.float() @ weight.float().T
    assert rough.shape == exact.shape and rough.dtype == torch.bfloat16
    assert (standardised(rough) - standardised(exact)).norm(dim=-1).max() < 0.02


@as_exact_as_8_bits
def test_the_largest_are_among_four_times_as_many_of_the_rough_ones():
    weight, input = matrix(20_000), torch.randn(16, 256)
    largest = (input @ weight.T).topk(16).indices
    candidates = Int8Copy(weight).rough_product(input).topk(64).indices
    assert (largest[:, :, None] == candidates[:, None]).any(dim=-1).all()


def test_a_row_is_multiplied_as_if_it_were_alone():
    copy, input = Int8Copy(matrix()), torch.randn(5, 256)
    input[3] *= 1000.0
    together = copy.rough_product(input)
    for row in range(5):
        assert torch.equal(copy.rough_product(input[row : row + 1])[0], together[row])


def test_entries_that_tower_above_the_others_cost_accuracy_and_no_more():
    weight, input = matrix(), torch.randn(4, 256)
    input[:, 7] = 40.0
    error = standardised(Int8Copy(weight).rough_product(input)) - standardised(input @ weight.T)
    assert error.norm(dim=-1).max() < 0.1


def test_rows_of_zeros_stay_zeros():
    weight, input = matrix(), torch.randn(3, 256)
    weight[5], input[1] = 0.0, 0.0
    rough = Int8Copy(weight).rough_product(input)
    assert (rough[:, 5] == 0).all() and (rough[1] == 0).all() and rough.isfinite().all()


def test_a_matrix_is_rounded_part_by_part_as_if_at_once(monkeypatch):
    weight, input = matrix(), torch.randn(3, 256)
    by_parts = Int8Copy(weight).rough_product(input)
    monkeypatch.setattr(int8_copy, "ENTRIES_AT_A_TIME", weight.numel())
    assert torch.equal(Int8Copy(weight).rough_product(input), by_parts)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError])
def test_a_pytorch_without_these_operators_is_known_before_they_are_needed(monkeypatch, error):
    def other(*arguments):
        raise error("no such operator, or no such arguments")

    assert can_multiply.__wrapped__()
    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", other)
    assert not can_multiply.__wrapped__()
