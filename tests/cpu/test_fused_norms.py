"""RMS norms as one operator: the same bits as the six that models spell out, or none."""

import importlib
import pkgutil
from contextlib import nullcontext

import pytest
import torch
import transformers.models
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from hf_dspark import fast_linears
from hf_dspark.cpu.fused_norms import fused_forward
from hf_dspark.models.layers import DSparkRMSNorm

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZE = 48


def norm(kind: type[nn.Module], dtype: torch.dtype = torch.float32, **more) -> nn.Module:
    """A norm with weights that are not all alike."""
    made = kind(SIZE, **more).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return made


def states(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 5, 3, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def num_operators(call) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.cpu_parent is None for event in profile.events())


class Centered(nn.Module):
    """Ends as those that are meant, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(SIZE)), 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states - states.mean(-1, keepdim=True)
        return self.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)


class CenteredRMSNorm(Centered):
    pass


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm])
@each_dtype
@torch.no_grad()
def test_norms_of_all_ways_to_scale_run_as_one_operator_with_the_same_bits(kind, dtype):
    module, many = norm(kind, dtype), states(dtype)
    given = [many, many.transpose(1, 2), many[..., :1, :], states(dtype).mul(1e4), torch.zeros_like(many)]
    before, own = [module(each) for each in given], num_operators(lambda: module(many))
    with fast_linears(module):
        assert all(torch.equal(module(each), result) for each, result in zip(given, before, strict=True))
        assert num_operators(lambda: module(many)) < own
    assert "forward" not in vars(module) and num_operators(lambda: module(many)) == own


@pytest.mark.slow
@each_dtype
@torch.no_grad()
def test_every_norm_of_transformers_keeps_its_bits_and_nearly_all_gain(dtype):
    gaining, others = 0, []
    for package in pkgutil.iter_modules(transformers.models.__path__):
        try:
            module = importlib.import_module(f"transformers.models.{package.name}.modeling_{package.name}")
        except ImportError:  # of a tokenizer alone, or what needs other libraries
            continue
        for name, kind in vars(module).items():
            is_own = isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__
            if not is_own or not name.endswith("RMSNorm") or issubclass(kind, nn.RMSNorm):
                continue
            try:
                made = norm(kind, dtype)
                before = made(states(dtype))
            except (TypeError, AttributeError, RuntimeError):  # other arguments
                continue
            gaining += fused_forward(made) is not None
            others += [name] if fused_forward(made) is None else []
            with fast_linears(made):
                assert torch.equal(made(states(dtype)), before), name
    assert gaining > 100 and len(others) < gaining / 15, others


@pytest.mark.parametrize(
    "module",
    [
        CenteredRMSNorm(),
        GatedRMSNorm(SIZE),
        Centered(),
        DSparkRMSNorm(SIZE, 1e-6),
        nn.RMSNorm(SIZE),
        nn.LayerNorm(SIZE),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_such_norm_or_is_fused_already_is_left_alone(module):
    assert fused_forward(module) is None
    with fast_linears(module):
        assert "forward" not in vars(module)


@torch.no_grad()
def test_a_norm_whose_forward_was_replaced_keeps_it():
    module = norm(LlamaRMSNorm)
    module.forward = lambda states: states + 1
    with fast_linears(module):
        assert torch.equal(module(states(torch.float32)), states(torch.float32) + 1)
    assert "forward" in vars(module)


@pytest.mark.parametrize("context", [nullcontext(), torch.autocast("cpu", torch.bfloat16)], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_input_of_another_type_and_autocast_give_what_the_norm_gives(context, dtype):
    module = norm(LlamaRMSNorm, torch.bfloat16)
    with context:
        before = module(states(dtype))
        with fast_linears(module):
            after = module(states(dtype))
    assert after.dtype == before.dtype and torch.equal(after, before)


@torch.no_grad()
def test_a_norm_that_changes_its_type_is_looked_at_again():
    module = norm(LlamaRMSNorm)
    first = fused_forward(module)
    assert fused_forward(module) is first
    assert fused_forward(module.to(torch.bfloat16)) not in (first, None)
    with fast_linears(module):
        assert torch.equal(module(states(torch.bfloat16)), LlamaRMSNorm.forward(module, states(torch.bfloat16)))
