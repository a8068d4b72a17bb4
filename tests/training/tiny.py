"""Tiny pairs, rows and arguments, the same in every process and with every version of transformers."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel, DSparkTrainingArguments, Eagle3Config, Eagle3DraftModel
from hf_dspark.models.modeling_draft import DraftModel

# Each kind's options of the draft's config, and of the training.
KINDS = {
    "dspark": ({}, {}),
    "gated": ({"markov_head_type": "gated"}, {"position_decay": None, "gradient_accumulation_steps": 2}),
    "fill-in": ({"markov_head_type": "rnn", "sample_from_anchor": False}, {}),
    "pruned": ({"draft_vocab_size": 24}, {}),
    "dflash": (
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"cross_entropy_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0},
    ),
    "eagle3": ({}, {"cross_entropy_weight": 0.0, "l1_weight": 0.0, "soft_cross_entropy_weight": 1.0}),
    "mtp": (
        {"mtp": True, "target_layer_ids": [3], "norm_output": True},
        {"cross_entropy_weight": 0.0, "l1_weight": 0.0, "soft_cross_entropy_weight": 1.0},
    ),
    "v4": ({"num_experts": 4, "hc_mult": 2}, {}),
    "packed": ({}, {"packing": True, "max_length": 64, "num_anchors": 1000}),
}


def set_weights(model: PreTrainedModel, seed: int, std: float) -> None:
    """Draw every weight by name, so that no version's own initialisation counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + ("norm" in name))


def tiny_pair(kind: str = "dspark") -> tuple[PreTrainedModel, DraftModel]:
    """A target with random weights and a draft of a kind, not bound to it."""
    config = Qwen3Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=False,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    set_weights(target, 0, 0.2)
    return target, tiny_draft(config, kind)


def tiny_draft(target_config: PreTrainedConfig, kind: str) -> DraftModel:
    """A draft of a kind with random weights."""
    facts = {"block_size": 4, "target_layer_ids": [0, 2]} | KINDS[kind][0]
    if kind in ("eagle3", "mtp"):
        draft = Eagle3DraftModel(Eagle3Config.from_target(target_config, **facts))
    else:
        facts = {"num_hidden_layers": 2, "markov_rank": 6} | facts
        draft = DSparkDraftModel(DSparkConfig.from_target(target_config, **facts))
        if draft.config.draft_vocab_size is not None:
            draft.d2t.copy_(torch.arange(draft.config.draft_vocab_size))  # every second token
    set_weights(draft, 1, 0.25)
    return draft


def tiny_rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of 12 to 29 random tokens; all but the first three are supervised."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(12, 30, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(0, 48, (n,), generator=generator).tolist(), "loss_mask": [0] * 3 + [1] * (n - 3)}
        for n in lengths
    ]


def tiny_arguments(folder: str, kind: str = "dspark", **options) -> DSparkTrainingArguments:
    """Arguments of a run on a CPU, which logs every step and saves nothing."""
    facts = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 3e-3,
        "per_device_train_batch_size": 3, "max_steps": 6, "logging_steps": 1, "save_strategy": "no", "num_anchors": 5,
        "seed": 7, "lr_scheduler_type": "linear", "warmup_steps": 0,
    }  # fmt: skip
    return DSparkTrainingArguments(**facts | KINDS[kind][1] | options)
