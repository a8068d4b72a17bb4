"""A target's embedding and LM head on their own, in memory and in a file: what training needs of an absent target."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from ..models.borrowing import ask, lm_head_of, plain_weight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ScaledEmbedding(nn.Embedding):
    """An embedding that scales its rows inside, as Gemma's; `embed_scale` says so to the draft."""

    embed_scale: float = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale


class BorrowedModules:
    """Frozen copies of `embedding`, which scales its rows if the target's does, and of `lm_head`; `dtype` is the
    target's. A tied head shares the embedding's weight."""

    def __init__(self, tensors: dict[str, torch.Tensor], scale: float | None, dtype: torch.dtype) -> None:
        self._tensors, self._scale, self.dtype = tensors, scale, dtype
        weight, bias = tensors.get("lm_head", tensors["embedding"]), tensors.get("lm_head_bias")
        kind = nn.Embedding if scale is None else ScaledEmbedding
        self.embedding = kind.from_pretrained(tensors["embedding"], freeze=True)
        if scale is not None:
            self.embedding.embed_scale = scale
        self.lm_head = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta").requires_grad_(False)
        self.lm_head.weight = nn.Parameter(weight, False) if "lm_head" in tensors else self.embedding.weight
        if bias is not None:
            self.lm_head.bias = nn.Parameter(bias, False)

    @classmethod
    @torch.no_grad()
    def copy_of(cls, target: PreTrainedModel) -> "BorrowedModules":
        """Copy both to the CPU, wherever the target keeps them; a `ValueError` if the copies answer differently.

        Weights that are not plain, such as quantised ones, are found by asking the modules: for every token's row, and
        for the logits of every unit vector.
        """
        from accelerate.utils import align_module_device  # slow to import

        text = target.config.get_text_config(decoder=True)
        embedding, head = target.get_input_embeddings(), lm_head_of(target)
        with align_module_device(embedding):
            scale = getattr(embedding, "embed_scale", None)
            is_known = scale is not None or type(embedding) is nn.Embedding
            weight = _copied(plain_weight(embedding)) if is_known else None
        if weight is None:  # its answers are scaled already
            weight = torch.cat([ask(embedding, ids) for ids in torch.arange(text.vocab_size).split(4096)])
            scale = None if scale is None else 1.0
        if isinstance(scale, torch.Tensor):
            scale = scale.to(weight.dtype).item()  # a product with a tensor is rounded to the weight's type first
        tensors = {"embedding": weight}

        with align_module_device(head):
            weight, bias = (_copied(part) for part in (plain_weight(head), getattr(head, "bias", None)))
        if weight is None:
            units = torch.eye(text.hidden_size, dtype=target.dtype)
            offset = 0 if bias is None else ask(head, torch.zeros_like(units[:1]))
            weight = torch.cat([ask(head, some) - offset for some in units.split(256)]).T.contiguous()
        if weight.dtype != tensors["embedding"].dtype or not torch.equal(weight, tensors["embedding"]):
            tensors["lm_head"] = weight
        if bias is not None:
            tensors["lm_head_bias"] = bias

        copy = cls(tensors, scale, target.dtype)
        if not copy._answers_like(embedding, head, text.vocab_size, text.hidden_size):
            raise ValueError(
                f"the embedding ({type(embedding).__name__}) or LM head ({type(head).__name__}) of "
                f"{type(target).__name__} is no plain matrix of {text.vocab_size} x {text.hidden_size} values and "
                "cannot be stored: train with the target in process, without a feature cache"
            )
        return copy

    def _answers_like(self, embedding: nn.Module, head: nn.Module, vocab_size: int, size: int) -> bool:
        if {self.embedding.weight.shape, self.lm_head.weight.shape} != {(vocab_size, size)}:
            return False
        ids = torch.arange(0, vocab_size, max(1, vocab_size // 64))
        hidden = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        logits = ask(head, hidden).float()
        error = (self.lm_head(hidden.to(self.lm_head.weight.dtype)).float() - logits).norm() / logits.norm()
        # Kernels for 8-bit weights round their inputs too.
        return torch.equal(self.embedding(ids), ask(embedding, ids)) and bool(error < 0.05)

    def save(self, path: str | Path) -> None:
        metadata = {"dtype": str(self.dtype).removeprefix("torch.")}
        if self._scale is not None:
            metadata["embed_scale"] = repr(self._scale)
        save_file(self._tensors, path, metadata)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "BorrowedModules":
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        scale = float(metadata["embed_scale"]) if "embed_scale" in metadata else None
        return cls(tensors, scale, DTYPES[metadata["dtype"]])


def _copied(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.detach().to("cpu", copy=True).contiguous()
