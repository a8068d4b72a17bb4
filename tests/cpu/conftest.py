"""Gains that are the same on every machine, and what was multiplied how."""

import pytest
import torch
from torch import nn

from hf_dspark.cpu import small_batch_gemm

gain_of_this_cpu = small_batch_gemm.gain_of


def packs(dtype: torch.dtype) -> bool:
    try:
        return small_batch_gemm.packed_weight(torch.ones(64, 64, dtype=dtype)) is not None
    except (RuntimeError, AttributeError):
        return False


def where_packed(dtype: torch.dtype):
    return pytest.param(dtype, marks=pytest.mark.skipif(not packs(dtype), reason="this CPU cannot pack it"))


each_dtype = pytest.mark.parametrize("dtype", [where_packed(dtype) for dtype in (torch.float32, torch.bfloat16)])


def linear(out: int = 256, inputs: int = 256, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, out, bias=bias)


@pytest.fixture(autouse=True)
def gains(monkeypatch):
    """Set what gains, for float32 and bfloat16; nothing does unless it is set."""

    def set_gains(**by_way):
        served = (torch.float32, torch.bfloat16)
        monkeypatch.setattr(
            small_batch_gemm, "gain_of", lambda way, dtype: by_way.get(way) if dtype in served else None
        )

    set_gains()
    return set_gains


@pytest.fixture
def products(monkeypatch):
    """The way of every product that was not left to `F.linear`."""
    taken = []

    def record(way):
        multiply = getattr(small_batch_gemm, f"{way}_linear")

        def recorded(rows, weight, bias=None):
            taken.append("packed" if weight.is_mkldnn else way)
            return multiply(rows, weight, bias)

        monkeypatch.setattr(small_batch_gemm, f"{way}_linear", recorded)

    record("onednn")
    record("swapped")
    return taken
