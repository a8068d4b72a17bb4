"""Experts and hyper-connections: the numbers of transformers' DeepSeek-V4, training, decoding, saving and loading."""

import pytest
import torch
from safetensors.torch import load_file

from hf_dspark import DSparkConfig, DSparkDraftModel, FullBlock, Scheduler
from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.models.losses import LossWeights
from hf_dspark.models.modeling_draft import AnchoredBlocks
from tests.rows import assert_as_alone

KINDS = {
    "experts": {"num_experts": 4, "moe_intermediate_size": 5},  # which grouped products do not take
    "streams": {"hc_mult": 3},
    "v4": {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "hc_mult": 2}
    | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
    "attention": {"q_lora_rank": 8, "o_lora_rank": 6, "o_groups": 2, "num_key_value_heads": 1, "v4_heads": True}
    | dict.fromkeys(("attention_k_eq_v", "attention_sinks", "rope_interleaved"), True)
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "hc_mult": 2},
}
PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5, 11], [11, 4, 8, 8, 25, 13, 17, 31, 22, 6, 5, 39]]


@pytest.fixture(params=KINDS)
def draft(request, target, make_draft):
    return make_draft(target, **KINDS[request.param])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_every_parameter(draft, checkpointing):
    draft.train()
    if checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})
    ids, anchors = torch.randint(0, 48, (2, 20)), torch.tensor([[2, 7, 12], [4, 9, 15]])
    layout = BlockLayout(anchors, torch.ones_like(anchors).bool(), torch.arange(20).expand(2, -1), 4)
    labels = torch.stack([ids.gather(1, anchors + k) for k in range(1, 5)], dim=-1)
    blocks = AnchoredBlocks(layout, labels, torch.ones(labels.shape))
    draft(ids, torch.randn(2, 20, 64), torch.randn(2, 3, 4, 32), blocks, LossWeights()).loss.backward()
    missing = [name for name, each in draft.named_parameters() if each.grad is None or not each.grad.abs().max() > 0]
    assert missing == []


@pytest.mark.one_in(5)
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=6)], ids=["chain", "tree"])
def test_greedy_rows_are_those_of_plain_decoding(target, draft, policy):
    draft.decoding = type(draft.decoding)(policy=policy)
    assert_as_alone(target, draft, PROMPTS, max_new_tokens=16)
    assert sum(draft.last_stats.proposed) > 0


@pytest.mark.one_in(3)
def test_a_draft_survives_saving_and_loading(target, draft, tmp_path):
    draft.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    saved, state = load_file(tmp_path / "model.safetensors"), loaded.state_dict()
    assert loaded.config.to_diff_dict() == draft.config.to_diff_dict() and state.keys() == saved.keys()
    assert all(torch.equal(state[name], draft.state_dict()[name]) for name in saved)
    assert_as_alone(target, loaded.bind(target), PROMPTS[:1], max_new_tokens=8)


def test_an_untrained_draft_starts_as_transformers_does(target):
    torch.manual_seed(0)
    config = DSparkConfig.from_target(target, **KINDS["v4"] | {"num_hidden_layers": 2, "block_size": 4})
    draft = DSparkDraftModel(config)
    for layer in draft.layers:
        for part in (layer.attn_hc, layer.ffn_hc):
            assert part.scale.eq(1).all() and part.base.eq(0).all() and 0.01 < part.fn.std() < 0.4
        for weight in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            assert 0.01 < weight.std() < 0.4 and weight.isfinite().all()
    assert draft.hc_head.hc_scale.eq(1).all() and draft.hc_head.hc_base.eq(0).all()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"num_experts": -1}, r"num_experts must lie in \[0, 4096\]"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, r"num_experts_per_tok must lie in \[1, 2\]"),
        ({"num_experts": 2, "moe_intermediate_size": 0}, "moe_intermediate_size must lie in"),
        ({"q_lora_rank": 8}, "num_key_value_heads must be 1 with q_lora_rank"),
        (KINDS["attention"] | {"o_groups": 3}, "o_groups must divide 4 attention heads"),
        ({"hc_mult": 65}, r"hc_mult must lie in \[0, 64\]"),
        ({"hc_mult": 2, "sandwich_norms": True}, "sandwich_norms must be False with hyper-connections"),
    ],
)
def test_impossible_sizes_are_refused(target, facts, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_target(target, **facts)
