"""Time and memory of a training step: anchor-bounded blocks and chunked losses, against the dense objective.

python benchmarks/training_step.py --output benchmarks/results/training_step.json

Dense is how DeepSpec's objective reads when written down plainly: one attention mask over all tokens and all blocks,
the logits of all slots at once, autograd through the losses. Same weights, same blocks; gradients are compared.
Memory is that of a fresh process: its peak during one step over what it held before (Linux).
"""

import statistics
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from bench import growth_of_peak, in_process, main, rotated, synchronize, timed
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.models.losses import DENOMINATOR_EPSILON, LossWeights
from hf_dspark.training.blocks import cut_blocks, label_hidden, sample_anchors

BLOCK_SIZE = 7


def dense_loss(draft, input_ids, features, hidden_of_labels, blocks, weights: LossWeights) -> torch.Tensor:
    """The objective on the logits of all slots at once. DSpark Eq. 9-12."""
    layout, labels = blocks.layout, blocks.labels
    slots, confidence_logits = draft.teacher_forced(input_ids, features, layout, labels)
    draft_logits = slots.compute(*slots.inputs).float()
    with torch.no_grad():
        target_probs = draft.base_logits(hidden_of_labels).float().softmax(dim=-1)
    cross_entropy = F.cross_entropy(draft_logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    distance = (draft_logits.softmax(dim=-1) - target_probs).abs().sum(dim=-1)
    acceptance = (1 - distance.detach() / 2).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
    losses = weights.cross_entropy_weight * cross_entropy + weights.l1_weight * distance
    losses = losses + weights.confidence_weight * bce
    return (losses * blocks.weights).sum() / (blocks.weights.sum() + DENOMINATOR_EPSILON)


class Setting:
    """A draft of two layers, one row of tokens with random target states, and its blocks."""

    def __init__(self, vocab_size: int, hidden_size: int, length: int, num_anchors: int, device: str) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=4, head_dim=hidden_size // 8,
        )  # fmt: skip
        self.target = Qwen3ForCausalLM(config).requires_grad_(False).to(device)
        draft_config = DSparkConfig.from_target(config, num_hidden_layers=2, block_size=BLOCK_SIZE)
        self.draft = DSparkDraftModel(draft_config).to(device).bind(self.target)
        torch.nn.init.normal_(self.draft.markov_head.markov_w2.weight, std=0.1)
        width = len(self.draft.config.target_layer_ids) * hidden_size
        self.input_ids = torch.randint(0, vocab_size, (1, length)).to(device)
        self.features = torch.randn(1, length, width).to(device)
        last_hidden, mask = torch.randn(1, length, hidden_size), torch.ones(1, length, dtype=torch.bool)
        positions = torch.arange(length)[None]
        anchors, real = sample_anchors(mask, positions, num_anchors)
        layout = BlockLayout(anchors.to(device), real.to(device), positions.to(device), BLOCK_SIZE)
        decay = LossWeights().position_decay
        self.blocks = cut_blocks(self.input_ids, mask.to(device), layout, position_decay=decay)
        self.hidden_of_labels = label_hidden(last_hidden.to(device), self.blocks)

    def step(self, variant: str) -> dict[str, torch.Tensor]:
        """Return all gradients."""
        self.draft.zero_grad()
        inputs = self.input_ids, self.features, self.hidden_of_labels, self.blocks
        if variant == "dense":
            with mock.patch("hf_dspark.models.block_attention.CHUNK_ROWS", 10**9):
                dense_loss(self.draft, *inputs, LossWeights()).backward()
        else:
            self.draft(*inputs).loss.backward()
        synchronize(self.input_ids.device)
        return {name: parameter.grad.clone() for name, parameter in self.draft.named_parameters()}


def training_step(
    vocab_size: int = 32_000,
    hidden_size: int = 512,
    length: int = 1024,
    num_anchors: int = 256,
    steps: int = 7,
    device: str = "cpu",
    rehearse: bool = False,
    only: Literal["bounded", "dense"] | None = None,
) -> dict[str, Any]:
    """Both objectives, in turns; `only` one of them once, for its memory."""
    if rehearse:
        vocab_size, hidden_size, length, num_anchors, steps = 200, 64, 64, 8, 2
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "length": length, "num_anchors": num_anchors}
    setting = Setting(**sizes, device=device)
    if only is not None:
        return {"growth": growth_of_peak(lambda: setting.step(only), device)[0] / 2**20}
    bounded, dense = setting.step("bounded"), setting.step("dense")
    difference = max(float((bounded[name] - each).norm() / each.norm()) for name, each in dense.items())
    seconds: dict[str, list[float]] = {"bounded": [], "dense": []}
    for turn in range(steps):
        for variant in rotated(list(seconds), turn):
            seconds[variant].append(timed(lambda variant=variant: setting.step(variant), device)[0])
    medians = {variant: statistics.median(values) for variant, values in seconds.items()}
    words = [word for name, value in {**sizes, "device": device}.items() for word in (f"--{name}", value)]
    growth = {variant: in_process(__file__, "--only", variant, *words)["growth"] for variant in seconds}
    return {
        "setting": sizes,
        "seconds": medians,
        "time_ratio": round(medians["bounded"] / medians["dense"], 3),
        "memory_growth_mib": {variant: round(value) for variant, value in growth.items()},
        "memory_ratio": round(growth["bounded"] / growth["dense"], 3),
        "largest_relative_gradient_difference": difference,
    }


if __name__ == "__main__":
    main(__doc__, training_step)
