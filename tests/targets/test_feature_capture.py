"""Hooks see exactly what `output_hidden_states` reports, on every architecture, and leave no trace."""

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
)

from hf_dspark.targets.feature_capture import FeatureCapture
from hf_dspark.targets.support import TargetSupport
from tests.features import select_features

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "llama": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=48, n_embd=32, n_layer=5, n_head=4, n_positions=64, initializer_range=0.2),
    "gemma2": Gemma2Config(**SIZES, head_dim=8),
    "opt": OPTConfig(**SIZES, ffn_dim=40, word_embed_proj_dim=32, init_std=0.2),
}
CPU = torch.device("cpu")


def num_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target_layer_ids", [[0, 2, 3], [-1, 1], [3, -1, 0]], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_capture_equals_the_reported_hidden_states(family, target_layer_ids):
    target = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    input_ids = torch.randint(1, 48, (2, 7))
    with FeatureCapture(TargetSupport.of(target), target_layer_ids) as capture:
        output = target(input_ids, output_hidden_states=True)
        features = capture.take(CPU, torch.float32)
    assert features.shape == (2, 7, 32 * len(target_layer_ids))
    assert torch.equal(features, select_features(output.hidden_states, target_layer_ids))


@torch.no_grad()
def test_capture_changes_no_output_and_holds_the_latest_pass_only(target):
    first, second = torch.randint(1, 48, (1, 7)), torch.randint(1, 48, (1, 4))
    plain = target(first)
    with FeatureCapture(TargetSupport.of(target), [1]) as capture:
        captured = target(first)
        output = target(second, output_hidden_states=True)
        assert torch.equal(capture.take(CPU, torch.float32), output.hidden_states[2])
    assert torch.equal(captured.logits, plain.logits) and captured.hidden_states is None


@torch.no_grad()
def test_take_casts_and_refuses_to_return_the_same_pass_twice(target):
    with FeatureCapture(TargetSupport.of(target), [1, 2]) as capture:
        with pytest.raises(RuntimeError, match=r"layers \[1, 2\]"):
            capture.take(CPU, torch.float32)
        target(torch.randint(1, 48, (1, 7)))
        assert capture.take(CPU, torch.bfloat16).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match=r"layers \[1, 2\]"):
            capture.take(CPU, torch.float32)


@pytest.mark.parametrize("rows", [1, 2, 4])
@torch.no_grad()
def test_streams_are_averaged_into_one_vector_for_each_position(rows):
    facts = {"laurel_rank": 8, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0, "head_dim": 8}
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
    facts |= {"layer_types": types, "activation_sparsity_pattern": None, "vocab_size_per_layer_input": 48}
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3n_text", **(SIZES | facts))).eval()
    seen = []
    target.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    with FeatureCapture(TargetSupport.of(target), [-1, 1]) as capture:
        target(torch.randint(1, 48, (rows, 7)))
        features = capture.take(CPU, torch.float32)
    assert features.shape == (rows, 7, 64) and seen[0].shape == (4, rows, 7, 32)
    assert torch.equal(features[..., 32:], seen[0].mean(dim=0))


@torch.no_grad()
def test_features_that_are_not_one_vector_for_each_position_are_refused(target):
    handle = target.model.layers[3].register_forward_hook(lambda module, args, output: output[:, -1:])
    with FeatureCapture(TargetSupport.of(target), [1, 3]) as capture:
        target(torch.randint(1, 48, (1, 7)))
        with pytest.raises(ValueError, match=r"layer 3 of Qwen3ForCausalLM .* \[1, 1, 32\].* \[1, 7, 32\]"):
            capture.take(CPU, torch.float32)
    handle.remove()


def test_hooks_live_exactly_as_long_as_the_capture_is_entered_whatever_ends_it(target):
    before, capture = num_hooks(target), FeatureCapture(TargetSupport.of(target), [-1, 0, 2])
    assert num_hooks(target) == before
    with pytest.raises(KeyError), capture:
        assert num_hooks(target) == before + 4  # the taps, and one that counts positions
        raise KeyError("user code")
    assert num_hooks(target) == before


def test_hooks_of_others_stay(target):
    calls = []
    target.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with FeatureCapture(TargetSupport.of(target), [0]):
        pass
    target(torch.tensor([[1, 2]]))
    assert calls == [1]


@torch.no_grad()
def test_two_captures_do_not_disturb_each_other(target):
    input_ids = torch.randint(1, 48, (1, 7))
    with FeatureCapture(TargetSupport.of(target), [0]) as outer:
        with FeatureCapture(TargetSupport.of(target), [2]) as inner:
            output = target(input_ids, output_hidden_states=True)
            assert torch.equal(inner.take(CPU, torch.float32), output.hidden_states[3])
        assert torch.equal(outer.take(CPU, torch.float32), output.hidden_states[1])


def test_decoder_layers_are_the_decoders_own_or_refused(target):
    assert TargetSupport.of(target).layers is target.model.layers
    other = copy.deepcopy(target)
    other.config.num_hidden_layers = 9
    with pytest.raises(ValueError, match="no list of 9 decoder layers found in Qwen3Model"):
        FeatureCapture(TargetSupport.of(other), [0])
