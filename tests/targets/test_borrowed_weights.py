"""Embedding and LM head, borrowed and on their own: the target's own answers, whatever its weights look like."""

import pytest
import torch
from safetensors import safe_open
from torch import nn

from hf_dspark.targets.borrowed_weights import BorrowedModules
from tests.targets.test_model_types import make_pair

FAMILIES = {
    "qwen3": ({"tie_word_embeddings": False}, {"embedding", "lm_head"}),
    "llama": ({"tie_word_embeddings": True}, {"embedding"}),
    "gemma2": ({"head_dim": 8}, {"embedding"}),  # scales its rows, and caps its logits
    "gemma3_text": ({"head_dim": 8}, {"embedding"}),
    "granite": ({"embedding_multiplier": 3.0, "logits_scaling": 2.0}, {"embedding", "lm_head"}),
    "cohere": ({"logit_scale": 0.25}, {"embedding"}),
    "phi": ({}, {"embedding", "lm_head", "lm_head_bias"}),
}


def stored(target, folder) -> tuple[BorrowedModules, set[str]]:
    BorrowedModules.copy_of(target).save(folder / "target.safetensors")
    with safe_open(folder / "target.safetensors", framework="pt") as file:
        return BorrowedModules.load(folder / "target.safetensors"), set(file.keys())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_draft_embeds_and_scores_as_with_its_target(name, dtype, tmp_path):
    facts, tensors = FAMILIES[name]
    target, draft = (model.to(dtype) for model in make_pair(name, facts))
    bias = target.get_output_embeddings().bias
    if bias is not None:
        bias.normal_()
    ids = torch.arange(40)[None]
    output, hidden = target(ids, output_hidden_states=True), target.get_decoder()(ids).last_hidden_state
    draft.bind(target)
    rows, logits = draft.embed(ids), draft.base_logits(hidden)
    torch.testing.assert_close(rows, output.hidden_states[0])
    torch.testing.assert_close(logits, output.logits)
    borrowed, names = stored(target, tmp_path)
    assert names == tensors
    draft._borrowed = borrowed
    assert torch.equal(draft.embed(ids), rows) and torch.equal(draft.base_logits(hidden), logits)


def test_borrowed_modules_are_frozen_copies_that_share_a_tied_weight(make_target, tmp_path):
    target = make_target(tie_word_embeddings=True)
    copy = BorrowedModules.copy_of(target)
    before = copy.embedding.weight.clone()
    target.get_input_embeddings().weight.data.zero_()
    assert torch.equal(copy.embedding.weight, before) and copy.dtype == torch.float32
    assert copy.lm_head.weight is copy.embedding.weight and not copy.lm_head.weight.requires_grad
    copy.save(tmp_path / "x")
    again = BorrowedModules.load(tmp_path / "x")
    assert again.lm_head.weight is again.embedding.weight and not again.lm_head.weight.requires_grad


def test_offloaded_weights_are_read_and_left_offloaded(make_target, tmp_path):
    from accelerate import cpu_offload

    target, offloaded = make_target(), make_target()
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    copy, _ = stored(offloaded, tmp_path)
    assert torch.equal(copy.embedding.weight, target.get_input_embeddings().weight)
    assert torch.equal(copy.lm_head.weight, target.lm_head.weight)
    assert offloaded.lm_head.weight.is_meta


@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_quantised_head_is_dequantised(make_quantised, tmp_path, bits):
    target = make_quantised(bits, llm_int8_skip_modules=["none"])
    assert not target.lm_head.weight.is_floating_point()
    # In evaluation, bitsandbytes rounds 4-bit products to bfloat16 where the CPU has units for it.
    target.train(bits == 4)
    copy, _ = stored(target, tmp_path)
    hidden = torch.randn(8, 64)
    expected = target.lm_head(hidden)
    assert (copy.lm_head(hidden) - expected).norm() < (1e-5 if bits == 4 else 0.02) * expected.norm()


def test_head_that_is_no_matrix_is_refused(make_target):
    class Doubling(nn.Linear):
        def forward(self, input):
            return super().forward(input) * input.abs()[..., :1]

    target = make_target()
    target.lm_head = Doubling(32, 48, bias=False)
    with pytest.raises(ValueError, match=r"LM head \(Doubling\).*cannot be stored: train with the target in process"):
        BorrowedModules.copy_of(target)
