"""What differs between versions of transformers is found, or named when it is not there."""

import warnings

import pytest
import torch
import transformers
from torch import nn

from hf_dspark.targets import transformers_api
from hf_dspark.targets.transformers_api import ATTENDS, cache_argument, output_cache_name, pop_cache, warn_if_untested


class Named(nn.Module):
    def forward(self, input_ids, past_key_values=None, **kwargs): ...


class Wrapper(nn.Module):
    def forward(self, *args, **kwargs): ...


class Unknown(nn.Module):
    def forward(self, input_ids, kv_store=None): ...


@pytest.fixture(autouse=True)
def asked_anew():
    warn_if_untested.cache_clear()
    yield
    warn_if_untested.cache_clear()


def test_a_config_keeps_how_it_attends_under_the_name_that_is_written(make_target):
    config = make_target().config
    vars(config)[ATTENDS] = "eager"
    assert config._attn_implementation == "eager"
    config._attn_implementation = "sdpa"
    assert vars(config)[ATTENDS] == "sdpa"


def test_cache_argument_is_the_one_that_forward_takes(make_target):
    assert cache_argument(Named()) == "past_key_values"
    assert cache_argument(Wrapper()) == cache_argument(make_target()) == output_cache_name()


def test_cache_argument_says_version_and_names_when_none_is_known():
    with pytest.raises(RuntimeError, match=f"{transformers.__version__}: Unknown.forward has none of cache, past_key"):
        cache_argument(Unknown())


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_pop_cache_finds_it_under_any_name(name):
    cache = object()
    kwargs = {name: cache, "use_cache": True}
    assert pop_cache(kwargs) is cache and kwargs == {"use_cache": True}
    assert pop_cache(kwargs) is None


def test_a_later_minor_version_gives_one_warning_at_first_use(monkeypatch, make_target, make_draft):
    target = make_target()
    call = {"assistant_model": make_draft(target), "do_sample": False, "max_new_tokens": 4}
    monkeypatch.setattr(transformers_api.transformers, "__version__", "5.97.1")
    prompt = torch.tensor([[5, 9, 30]])
    with pytest.warns(UserWarning, match=r"tested up to transformers 5\.24, this is 5\.97\.1"):
        target.generate(prompt, **call)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        target.generate(prompt, **call)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.3", "5.24.0.dev0"])
def test_tested_versions_give_no_warning(monkeypatch, version):
    monkeypatch.setattr(transformers_api.transformers, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()
