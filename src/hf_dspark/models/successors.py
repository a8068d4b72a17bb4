"""Which tokens a Markov head favours behind each token: the rows of W_1 W_2, reduced to where they are largest.

Drafting among candidates reads no whole vocabulary, so it cannot see whom the Markov bias would lift: it looks them up
here. Knows nothing of sampling; whom it names is a guess that decides speed alone.
"""

import torch

from ..maths.sampling import largest
from .heads import VanillaMarkovHead

# Rows of W_1 W_2 that exist at a time while the whole table is filled.
ROWS_AT_A_TIME = 256


class Successors:
    """The tokens with the largest Markov bias behind each token.

    A row is computed when its token is met for the first time, which costs what a slot over the whole vocabulary
    costs; later it is only read.

    Args:
        head ([`VanillaMarkovHead`]): Of any kind. Heads that also read h_k, or a state, are asked with zeros in their
            place.
        hidden_size (`int`): d.
        count (`int`): Tokens per row.
    """

    def __init__(self, head: VanillaMarkovHead, hidden_size: int, count: int) -> None:
        self._head, self._hidden_size = head, hidden_size
        device = head.markov_w1.weight.device
        with torch.inference_mode(False):  # rows are written later, in or out of inference mode
            shape = head.markov_w1.num_embeddings, count
            self._table = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._is_complete = False

    @property
    def num_known(self) -> int:
        """Rows computed so far."""
        return int((self._table[:, 0] >= 0).sum())

    def fill(self) -> None:
        """Compute all rows now. On accelerators, asking whether a row is there would wait for the device each time."""
        for token_ids in torch.arange(len(self._table), device=self._table.device).split(ROWS_AT_A_TIME):
            self._compute(token_ids)
        self._is_complete = True

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the successors `[B, count]` of tokens `[B]`, as ids of the draft's logits."""
        rows = self._table[token_ids]
        if not self._is_complete and bool((rows[:, 0] < 0).any()):
            self._compute(token_ids[rows[:, 0] < 0].unique())
            rows = self._table[token_ids]
        return rows.long()

    @torch.no_grad()
    def _compute(self, token_ids: torch.Tensor) -> None:
        embedding = self._head.markov_w1(token_ids)
        transition, _ = self._head.transition(embedding, embedding.new_zeros(len(token_ids), self._hidden_size), None)
        best = largest(self._head.bias(transition), self._table.shape[1])[1]
        self._table[token_ids] = best.to(torch.int32)


def with_successors(best_ids: torch.Tensor, successor_ids: torch.Tensor) -> torch.Tensor:
    """Return distinct candidates `[B, k]`: the successors, and the first of the best that are not among them.

    Args:
        best_ids (`torch.LongTensor` of shape `[B, k]`): Distinct, the best first.
        successor_ids (`torch.LongTensor` of shape `[B, n]`): Distinct, n <= k.
    """
    repeated = (best_ids[:, :, None] == successor_ids[:, None]).any(dim=-1)
    num_others = best_ids.shape[1] - successor_ids.shape[1]
    others = repeated.to(torch.uint8).argsort(dim=-1, stable=True)[:, :num_others]
    return torch.cat([best_ids.gather(-1, others), successor_ids], dim=-1)
