"""`DSparkTrainer`: transformers' `Trainer` with the target in process and the three DSpark losses.

Knows nothing of generation. One step reads top to bottom in [`DSparkTrainer.compute_loss`].
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from .data import BlockCollator, cut_blocks, label_hidden, sample_anchors, target_states
from .losses import BlockLosses, block_losses, expected_tau
from .modeling_dspark import DSparkDraftModel


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """Arguments of [`DSparkTrainer`]; those of `TrainingArguments` keep their meaning.

    Args:
        num_anchors (`int`): Blocks per row and step at most.
        cross_entropy_weight, l1_weight, confidence_weight (`float`): Weights of the three losses (DSpark Eq. 12).
        position_decay (`float`, *optional*): Slots after which a loss weighs 1/e; `None` weighs all slots alike.
    """

    num_anchors: int = field(default=64, metadata={"help": "Blocks per row and step at most."})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy (Eq. 9)."})
    l1_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance to the target's law (Eq. 10)."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence loss (Eq. 11)."})
    position_decay: float | None = field(
        default=4.0, metadata={"help": "Slots after which a loss weighs 1/e; None weighs all slots alike."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # The rows' own columns are needed; the model's forward takes blocks.
        self.remove_unused_columns = False
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {self.num_anchors}")
        if self.position_decay is not None and self.position_decay <= 0:
            raise ValueError(f"position_decay must be positive or None, got {self.position_decay}")


class DSparkTrainer(Trainer):
    """Trains a draft on rows of `input_ids` and `loss_mask` (see [`~data.tokenize_prompt_completion`]).

    Args:
        model ([`DSparkDraftModel`]): The draft; only its own parameters are trained.
        target (`PreTrainedModel`): The frozen target, in process.
        args ([`DSparkTrainingArguments`]): Run facts.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; gives the padding token.
        kwargs: As for `Trainer`.

    Raises:
        ValueError: If draft and target do not fit.

    DSpark Section 3.3.
    """

    def __init__(
        self,
        model: DSparkDraftModel,
        target: PreTrainedModel,
        args: DSparkTrainingArguments,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        self.target = target.eval().requires_grad_(False)
        model.bind(target)
        pad_token_id = getattr(processing_class, "pad_token_id", None)
        kwargs.setdefault("data_collator", BlockCollator(pad_token_id or 0))
        super().__init__(model=model, args=args, processing_class=processing_class, **kwargs)
        # The loss is a mean over this batch's slots; Trainer divides it by the accumulation steps.
        self.model_accepts_loss_kwargs = False
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One training step: features, anchors, blocks, losses."""
        draft = self.accelerator.unwrap_model(model)
        states = target_states(
            self.target, draft.config.target_layer_ids, inputs["input_ids"], inputs["attention_mask"],
            draft.device, draft.dtype,
        )  # fmt: skip
        positions, anchor_mask = sample_anchors(inputs["loss_mask"], self.args.num_anchors)
        blocks = cut_blocks(inputs["input_ids"], inputs["loss_mask"], positions, anchor_mask, draft.config.block_size)
        output = model(inputs["input_ids"], states.features, positions, anchor_mask, blocks.labels)
        with torch.no_grad():
            target_logits = draft.base_logits(label_hidden(states.last_hidden, blocks))
        losses = block_losses(
            output.draft_logits, target_logits, blocks.labels, blocks.supervised, output.confidence_logits,
            self.args.cross_entropy_weight, self.args.l1_weight, self.args.confidence_weight, self.args.position_decay,
        )  # fmt: skip
        self._record(losses, blocks.supervised, "train" if model.training else "eval")
        return (losses.total, {"loss": losses.total}) if return_outputs else losses.total

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Evaluation needs the loss and the metrics, no predictions."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate with the same anchors each time, leaving the training's random state alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed)
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the mean of what the steps since the last report recorded."""
        split = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        prefix = "eval_" if split == "eval" else ""
        means = {f"{prefix}{name}": sum(values) / len(values) for name, values in self._metrics[split].items()}
        self._metrics[split].clear()
        logs.update(means)  # in place: evaluate() returns this dictionary, and the best model is chosen from it
        super().log(logs, start_time)

    def _record(self, losses: BlockLosses, supervised: torch.Tensor, split: str) -> None:
        metrics = {
            "cross_entropy": losses.cross_entropy.mean.item(),
            "l1": losses.l1.mean.item(),
            "tau": expected_tau(losses.acceptance, supervised).item(),
        }
        if losses.confidence is not None:
            metrics["confidence_loss"] = losses.confidence.mean.item()
        counts = supervised.flatten(0, -2).sum(dim=0)
        sums = (losses.acceptance * supervised).flatten(0, -2).sum(dim=0)
        for slot, (total, count) in enumerate(zip(sums.tolist(), counts.tolist(), strict=True), start=1):
            if count > 0:
                metrics[f"acceptance_{slot}"] = total / count
        for name, value in metrics.items():
            self._metrics[split][name].append(value)
