"""The target's states: its features and head input, the same whatever stands beside a document."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from hf_dspark.training.rows import collate, join_documents
from hf_dspark.training.target_states import require_separable_documents, target_states

CPU = torch.device("cpu")


def test_target_states_are_the_targets_features_and_head_input(target):
    input_ids = torch.randint(1, 48, (2, 9))
    states = target_states(target, [-1, 2], input_ids, torch.ones_like(input_ids), CPU, torch.float32)
    assert not states.features.requires_grad and not states.last_hidden.requires_grad
    output = target(input_ids, output_hidden_states=True)
    assert torch.equal(states.features, torch.cat([output.hidden_states[0], output.hidden_states[3]], dim=-1))
    torch.testing.assert_close(target.lm_head(states.last_hidden), output.logits)


def test_target_states_of_a_row_do_not_depend_on_its_padding(target):
    input_ids, attention_mask = torch.randint(1, 48, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    attention_mask[1, 6:] = 0
    padded = target_states(target, [0, 2], input_ids, attention_mask, CPU, torch.float32)
    alone = target_states(target, [0, 2], input_ids[1:, :6], attention_mask[1:, :6], CPU, torch.float32)
    torch.testing.assert_close(padded.features[1:, :6], alone.features, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded.last_hidden[1:, :6], alone.last_hidden, atol=1e-5, rtol=1e-5)


def documents(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": torch.randint(0, 48, (n,)).tolist(), "loss_mask": [1] * n} for n in lengths]


@pytest.mark.parametrize("family", [Qwen3Config, LlamaConfig, Gemma3TextConfig])
def test_the_target_keeps_packed_documents_apart(family):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = family(vocab_size=48, num_key_value_heads=2, head_dim=8, sliding_window=6, **sizes)
    target = AutoModelForCausalLM.from_config(config).eval()
    rows = [join_documents(documents(9, 7)), join_documents(documents(4, 3, 8))]
    batch = collate(rows, 0)
    inputs = batch["input_ids"], batch["attention_mask"]
    packed = target_states(target, [0, 1], *inputs, CPU, torch.float32, batch["position_ids"])
    for row, start, end in ((0, 0, 9), (0, 9, 16), (1, 0, 4), (1, 4, 7), (1, 7, 15)):
        ids = batch["input_ids"][row : row + 1, start:end]
        alone = target_states(target, [0, 1], ids, torch.ones_like(ids), CPU, torch.float32)
        torch.testing.assert_close(packed.features[row, start:end], alone.features[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.last_hidden[row, start:end], alone.last_hidden[0], atol=1e-5, rtol=1e-5)
    require_separable_documents(target, [0, 1])


def test_a_target_that_mixes_packed_documents_is_refused(target, monkeypatch):
    decoder = target.get_decoder()
    forward = decoder.forward
    # As a target does that knows nothing of positions that start again.
    monkeypatch.setattr(decoder, "forward", lambda position_ids=None, **kwargs: forward(**kwargs))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM does not keep the documents of a packed row apart"):
        require_separable_documents(target, [0, 2])
