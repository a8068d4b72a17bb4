"""Time and memory of a training step: anchor-bounded blocks and chunked losses, against the dense objective.

python benchmarks/training_step.py --output benchmarks/results/training_step.json

Dense is how DeepSpec's objective reads when written down plainly: one attention mask over all tokens and all blocks,
the logits of all slots at once, autograd through the losses. Same weights, same blocks; gradients are compared.
Memory is that of a fresh process: its peak during one step over what it held before (Linux).
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from pair import provenance_of, synchronize, write_result
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.models.block_attention import BlockLayout, visible_to_blocks
from hf_dspark.models.losses import DENOMINATOR_EPSILON, LossWeights
from hf_dspark.models.modeling_draft import AnchoredBlocks
from hf_dspark.training.blocks import cut_blocks, label_hidden, sample_anchors

REHEARSAL = {"vocab_size": 200, "hidden_size": 64, "length": 64, "num_anchors": 8, "steps": 2}


def attend_densely(query, key, value, layout, window, scaling, dropout=0.0, sinks=None):
    """Attention over all context and all blocks, under one mask."""
    index = [torch.arange(size, device=query.device) for size in (len(query), 1, query.shape[2], key.shape[2])]
    batch, head, row, column = torch.meshgrid(*index, indexing="ij")
    mask = visible_to_blocks(layout, window)(batch, head, row, column)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


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
    """A draft, one row of tokens with random target states, and its blocks."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=options.vocab_size, hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size,
            num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=options.hidden_size // 8,
        )  # fmt: skip
        device = options.device
        self.target = Qwen3ForCausalLM(config).requires_grad_(False).to(device)
        self.draft = (
            DSparkDraftModel(
                DSparkConfig.from_target(config, num_hidden_layers=options.num_layers, block_size=options.block_size)
            )
            .to(device)
            .bind(self.target)
        )
        torch.nn.init.normal_(self.draft.markov_head.markov_w2.weight, std=0.1)
        length, width = options.length, len(self.draft.config.target_layer_ids) * options.hidden_size
        self.input_ids = torch.randint(0, options.vocab_size, (1, length))
        self.features, last_hidden = torch.randn(1, length, width), torch.randn(1, length, options.hidden_size)
        mask, positions = torch.ones(1, length, dtype=torch.bool), torch.arange(length)[None]
        anchors, real = sample_anchors(mask, positions, options.num_anchors)
        self.features, last_hidden, self.input_ids, mask, positions, anchors, real = (
            each.to(device) for each in (self.features, last_hidden, self.input_ids, mask, positions, anchors, real)
        )
        layout = BlockLayout(anchors, real, positions, options.block_size)
        self.blocks = cut_blocks(self.input_ids, mask, layout, position_decay=LossWeights().position_decay)
        self.hidden_of_labels = label_hidden(last_hidden, self.blocks)

    def step(self, variant: str) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss and all gradients."""
        blocks = self.blocks
        self.draft.zero_grad()
        if variant == "dense":
            with mock.patch("hf_dspark.models.modeling_dspark.attend_blocks", attend_densely):
                loss = dense_loss(
                    self.draft, self.input_ids, self.features, self.hidden_of_labels, blocks, LossWeights()
                )
                loss.backward()
        else:
            layout = BlockLayout(  # without what the last step left in it
                blocks.layout.anchor_positions, blocks.layout.anchor_mask, blocks.layout.position_ids,
                blocks.layout.block_size,
            )  # fmt: skip
            blocks = AnchoredBlocks(layout, blocks.labels, blocks.weights)
            loss = self.draft(self.input_ids, self.features, self.hidden_of_labels, blocks).loss
            loss.backward()
        synchronize(loss.device)
        return loss.item(), {name: p.grad.clone() for name, p in self.draft.named_parameters()}


def memory_growth(variant: str, arguments: list[str]) -> float:
    """Return by how many MiB the peak of a fresh process grows in its first step, on its device."""
    command = [sys.executable, __file__, "--only", variant, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def resident(field: str) -> float:
    """Return a field of this process's status in MiB: VmRSS now, VmHWM at its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def growth_of_peak(device: str, step: Callable[[], object]) -> float:
    """Return by how many MiB the peak of this process exceeds what it held before a step."""
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    held = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step()
    return resident("VmHWM") - held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--num_anchors", type=int, default=256)
    parser.add_argument("--block_size", type=int, default=7)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rehearse", action="store_true", help=f"tries the script: {REHEARSAL}")
    parser.add_argument("--only", choices=("bounded", "dense"), help="one step, and print its memory")
    parser.add_argument("--output", help="result file")
    options = parser.parse_args()
    origin = provenance_of(parser, options, options.device)
    if options.rehearse:
        vars(options).update(REHEARSAL)
    setting = Setting(options)
    if options.only:
        print(growth_of_peak(options.device, lambda: setting.step(options.only)))
        return
    gradients = {variant: setting.step(variant)[1] for variant in ("bounded", "dense")}
    difference = max(
        ((gradients["bounded"][name] - dense).norm() / dense.norm()).item()
        for name, dense in gradients["dense"].items()
    )
    seconds: dict[str, list[float]] = {"bounded": [], "dense": []}
    for _ in range(options.steps):
        for variant, times in seconds.items():
            started = time.perf_counter()
            setting.step(variant)
            times.append(time.perf_counter() - started)
    arguments = [word for word in sys.argv[1:] if not word.startswith("--output") and not word.endswith(".json")]
    growth = {variant: memory_growth(variant, arguments) for variant in seconds}
    medians = {variant: statistics.median(times) for variant, times in seconds.items()}
    result = {
        "provenance": origin,
        "setting": {name: value for name, value in vars(options).items() if name not in ("only", "output")},
        "seconds": {variant: [round(value, 3) for value in times] for variant, times in seconds.items()},
        "time_ratio": round(medians["bounded"] / medians["dense"], 3),
        "memory_growth_mib": {variant: round(value) for variant, value in growth.items()},
        "memory_ratio": round(growth["bounded"] / growth["dense"], 3),
        "largest_relative_gradient_difference": difference,
    }
    write_result(options.output, result)


if __name__ == "__main__":
    main()
