"""Faster small-batch matrix products on a CPU, and norms in fewer calls, by one context manager."""

from .linears import fast_linears
from .small_batch_gemm import in_graphs

__all__ = ["fast_linears", "in_graphs"]
