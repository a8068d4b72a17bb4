"""Muon for the weight matrices and AdamW for the rest, behind one `torch.optim.Optimizer` that `Trainer` can
schedule and resume.

Small models trained for minutes converge in clearly fewer steps with Muon. Knows nothing of the models it optimises.
"""

from typing import Any

import torch

# Newton-Schulz coefficients of Muon (Keller Jordan, 2024).
A, B, C = 3.4445, -4.7750, 2.0315


# On CPUs without bfloat16 units, products in bfloat16 take ten times as long as in float32; with them, a third.
WORKING_DTYPE = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def orthogonalised(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix, roughly: all singular values near 1."""
    matrix = update if update.shape[0] <= update.shape[1] else update.T
    matrix = (matrix / matrix.norm().clamp_min(1e-7)).to(WORKING_DTYPE)
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = A * matrix + (B * gram + C * gram @ gram) @ matrix
    return (matrix if update.shape[0] <= update.shape[1] else matrix.T).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, rescaled to the RMS of an AdamW update; decoupled weight decay."""

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                average = state.setdefault("momentum", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalised(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)


class MuonWithAdamW(torch.optim.Optimizer):
    """Optimise hidden weight matrices with Muon; embeddings, heads, norms and biases with AdamW.

    Args:
        named_parameters (iterable of `(str, torch.nn.Parameter)`): The trainable parameters with their names.
        lr (`float`): Shared learning rate; Muon's update is rescaled to the RMS of an AdamW update.
        weight_decay (`float`): Decoupled weight decay of the matrices; the rest is not decayed.
        lookup_tables (`tuple[str, ...]`): Name fragments of matrices that are lookup tables or logit projections,
            where orthogonal updates make no sense.
    """

    def __init__(self, named_parameters, lr: float, weight_decay: float, lookup_tables: tuple[str, ...] = ("embed",)):
        named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        is_matrix = {name: p.ndim == 2 and not any(table in name for table in lookup_tables) for name, p in named}
        matrices = [p for name, p in named if is_matrix[name]]
        rest = [p for name, p in named if not is_matrix[name]]
        super().__init__([p for _, p in named], {"lr": lr})
        self.muon = Muon(matrices, lr=lr, weight_decay=weight_decay)
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._share_param_groups()

    def _share_param_groups(self) -> None:
        # The scheduler writes into these dictionaries; both optimizers must read the same ones.
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self._share_param_groups()
