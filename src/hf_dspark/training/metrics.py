"""Metrics of training and evaluation, as sums over blocks that add up over batches and processes."""

import math
from typing import Any

import torch

from ..models.losses import DENOMINATOR_EPSILON, BlockLosses, LossWeights
from ..scheduling.calibration import NUM_BINS

TERMS = ("cross_entropy", "l1", "soft_cross_entropy", "confidence")


class BlockMetrics:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.reset()

    def reset(self) -> None:
        gamma = self._block_size
        shapes = {
            "losses": (1 + len(TERMS),),  # the weights, then the terms
            "seen": (len(TERMS),),
            "slots": (2, gamma),  # reached and accepted
            "bins": (3, gamma, NUM_BINS),  # count, predicted and expected survival
        }
        self._sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    @torch.no_grad()
    def add(self, losses: BlockLosses, supervised: torch.Tensor) -> None:
        """Add the blocks of a batch; `supervised [B, N, γ]` tells the slots that count. Waits for no accelerator."""
        device = supervised.device
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have nothing wider
        self._sums = sums = {name: value.to(device, wide) for name, value in self._sums.items()}
        terms = [getattr(losses, name) for name in TERMS]
        nothing = torch.zeros_like(losses.weight_sum)
        sums["losses"] += torch.stack([losses.weight_sum, *(nothing if term is None else term for term in terms)])
        sums["seen"] += torch.tensor([float(term is not None) for term in terms], device=device)
        supervised, acceptance = supervised.flatten(0, 1), losses.acceptance.flatten(0, 1).to(wide)
        survival = (acceptance * supervised).cumprod(dim=-1)
        before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=-1) * supervised
        sums["slots"] += torch.stack([before.sum(dim=0), survival.sum(dim=0)])
        if losses.confidence_logits is None:
            return
        # A loss that is no number is reported elsewhere.
        predicted = losses.confidence_logits.flatten(0, 1).to(wide).nan_to_num().sigmoid().cumprod(dim=-1)
        slots = torch.arange(self._block_size, device=device).expand_as(predicted)
        bins = slots * NUM_BINS + (predicted * NUM_BINS).long().clamp_max(NUM_BINS - 1)
        values = torch.stack([torch.ones_like(predicted), predicted, survival])[:, supervised]
        sums["bins"].flatten(1).index_add_(1, bins[supervised], values)

    def reduced(self, accelerator: Any, weights: LossWeights) -> dict[str, float]:
        """Return the means over the blocks of all processes since the last report; empty when there is none.

        They are `loss` and its terms, `tau` (expected tokens per round, bonus included), `acceptance_k` (of slot k,
        where all before it were accepted), and with a confidence head `confidence_ece` (of the survival, mean over the
        slots).
        """
        device = accelerator.device
        sums = {name: accelerator.reduce(value.to(device), "sum").cpu() for name, value in self._sums.items()}
        self.reset()
        weight_sum, *terms = sums["losses"].tolist()
        if weight_sum == 0:
            return {}
        means = {
            name: term / (weight_sum + DENOMINATOR_EPSILON)
            for name, term, seen in zip(TERMS, terms, sums["seen"].tolist(), strict=True)
            if seen
        }
        values = {"loss": sum(getattr(weights, f"{name}_weight") * mean for name, mean in means.items())}
        values |= {"confidence_loss" if name == "confidence" else name: mean for name, mean in means.items()}
        reached, accepted = sums["slots"]
        values["tau"] = 1.0 + (accepted.sum() / reached[0]).item()  # every block reaches its first slot
        rates = (accepted / reached).tolist()
        values |= {f"acceptance_{slot}": rate for slot, rate in enumerate(rates, start=1) if not math.isnan(rate)}
        if "confidence" in means:
            count, predicted, survival = sums["bins"]
            used = count.sum(dim=-1) > 0
            ece = (predicted - survival).abs().sum(dim=-1)[used] / count.sum(dim=-1)[used]
            values["confidence_ece"] = ece.mean().item()
        return values
