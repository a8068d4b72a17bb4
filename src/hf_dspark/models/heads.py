"""The sequential heads of a draft: what a block's previous tokens add to its logits, and how likely each slot is."""

import torch
import torch.nn.functional as F
from torch import nn

from ..sampling.distributions import largest
from .borrowing import plain_weight
from .configuration_dspark import MARKOV_HEAD_TYPES, DSparkConfig

State = torch.Tensor | None


class VanillaMarkovHead(nn.Module):
    """B(x_{k-1}, ·) = W_1[x_{k-1}] W_2. DSpark Eq. 5."""

    names_successors = True  # whether `draft_top_k` takes the tokens with the largest biases among its candidates
    has_state = False
    # Whether the slot of an anchor that predicts nothing moves the state on (speculators).
    reads_anchor_slot = True

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def transition(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Turn W_1[x_{k-1}], h_k and s_{k-1} (`None` for the first slot) into the r-vector of slot k, and s_k."""
        return embedding, None

    def bias(self, transitions: torch.Tensor, candidate_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the bias `[..., V]` of r-vectors `[..., r]`, or `[..., n]` for candidates `[..., n]`."""
        if candidate_ids is None:
            return self.markov_w2(transitions)
        if plain_weight(self.markov_w2) is None:  # packed, so that rows cannot be looked up
            return self.markov_w2(transitions).gather(-1, candidate_ids)
        return (F.embedding(candidate_ids, self.markov_w2.weight) * transitions[..., None, :]).sum(dim=-1)

    def added_to(
        self, scores: torch.Tensor, transitions: torch.Tensor, candidate_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return scores `[F, V]`, or `[F, n]` of candidates, with the bias of r-vectors `[F, r]`."""
        if candidate_ids is None and scores.device.type != "cpu":  # there, linear layers are faster
            weight = self.markov_w2.weight
            if type(self.markov_w2) is nn.Linear and scores.dtype == transitions.dtype == weight.dtype:
                return torch.addmm(scores, transitions, weight.t())
        return scores.float() + self.bias(transitions, candidate_ids)

    def teacher_forced(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the r-vectors `[..., γ, r]` along W_1 of given previous tokens, `[..., γ, r]`."""
        outputs, state = [], None
        for slot in range(embedding.shape[-2]):
            output, state = self.transition(embedding[..., slot, :], hidden[..., slot, :], state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)


class GatedMarkovHead(VanillaMarkovHead):
    """The Markov embedding gated, entry by entry, by h_k and itself."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def transition(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, None


class RNNHead(VanillaMarkovHead):
    """A recurrent state over the block's prefix. DSpark Eq. 6."""

    has_state = True

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def transition(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


class SelectorHead(VanillaMarkovHead):
    """The Markov embedding times a projection of h_k, entry by entry: the path selector of DFlash 2."""

    names_successors = False  # it chooses among the best base logits

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.hidden_proj = nn.Linear(config.hidden_size, config.markov_rank, bias=False)

    def transition(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        return embedding * self.hidden_proj(hidden), None


class DominoHead(VanillaMarkovHead):
    """A GRU over the target's embedding rows of the block's previous tokens, and an MLP that reads h_k and its state.

    It has no W_1: its embedding of x_{k-1} is the target's, which the draft borrows. Domino.
    """

    names_successors = False  # its bias depends on h_k and on all tokens of the block
    has_state = True
    reads_anchor_slot = False

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        size = config.markov_state_size
        self.markov_w1 = None
        self.input_proj = nn.Linear(config.hidden_size, 3 * size, bias=False)
        self.state_proj = nn.Linear(size, 3 * size, bias=False)
        self.joint_proj = nn.Linear(config.hidden_size + size, config.markov_rank, bias=False)

    def transition(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        if state is None:
            state = embedding.new_zeros(*embedding.shape[:-1], self.state_proj.in_features)
        reset, update, candidate = self.input_proj(embedding).chunk(3, dim=-1)
        state_reset, state_update, state_candidate = self.state_proj(state).chunk(3, dim=-1)
        update = torch.sigmoid(update + state_update)
        candidate = torch.tanh(candidate + torch.sigmoid(reset + state_reset) * state_candidate)
        state = update * state + (1 - update) * candidate
        return F.silu(self.joint_proj(torch.cat([hidden, state], dim=-1))), state


_KINDS = VanillaMarkovHead, GatedMarkovHead, RNNHead, SelectorHead, DominoHead
MARKOV_HEADS = dict(zip(MARKOV_HEAD_TYPES, _KINDS, strict=True))


class Successors:
    """The `count` tokens with the largest Markov bias after each token, which `draft_top_k` looks up here.

    A row of W_1 W_2 is computed when its token is first met, at the cost of one slot over the whole vocabulary; on an
    accelerator, where asking for a row would wait for the device each time, all are computed at once. Heads that also
    read h_k or a state get zeros in their place.
    """

    ROWS_AT_A_TIME = 256

    def __init__(self, head: VanillaMarkovHead, hidden_size: int, count: int) -> None:
        self._head, self._hidden_size, self._versions = head, hidden_size, _versions_of(head)
        first = head.markov_w1.weight
        with torch.inference_mode(False):  # rows are written later, in or out of inference mode
            self._table = torch.full((len(first), count), -1, dtype=torch.int32, device=first.device)
        self._is_complete = first.device.type != "cpu"
        if self._is_complete:
            self._compute(torch.arange(len(first), device=first.device))

    def is_current(self) -> bool:
        return self._versions == _versions_of(self._head)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the successors `[B, count]` of tokens `[B]`, as ids of the draft's logits."""
        if not self._is_complete and bool((missing := self._table[token_ids, 0] < 0).any()):
            self._compute(token_ids[missing].unique())
        return self._table[token_ids].long()

    @torch.no_grad()
    def _compute(self, token_ids: torch.Tensor) -> None:
        for some in token_ids.split(self.ROWS_AT_A_TIME):
            embedding = self._head.markov_w1(some)
            transition, _ = self._head.transition(embedding, embedding.new_zeros(len(some), self._hidden_size), None)
            best = largest(self._head.bias(transition), self._table.shape[1])[1]
            self._table[some] = best.to(torch.int32)


def _versions_of(module: nn.Module) -> list[tuple[int, int]]:
    """Return where weights are and how often they were written to; those of inference mode do not count."""
    return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in module.parameters()]


def with_successors(best_ids: torch.Tensor, successor_ids: torch.Tensor) -> torch.Tensor:
    """Return distinct candidates `[B, k]`: successors `[B, n]`, and the first of the best `[B, k]` not among them."""
    repeated = (best_ids[:, :, None] == successor_ids[:, None]).any(dim=-1)
    num_others = best_ids.shape[1] - successor_ids.shape[1]
    others = repeated.to(torch.uint8).argsort(dim=-1, stable=True)[:, :num_others]
    return torch.cat([best_ids.gather(-1, others), successor_ids], dim=-1)


class ConfidenceHead(nn.Module):
    """Logit of c_k, the conditional acceptance of slot k, from h_k and W_1[x_{k-1}]. DSpark Eq. 7."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        size = config.hidden_size + self.with_markov * config.markov_rank
        self.proj = nn.Linear(size, 1, bias=not config.v4_heads)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        features = torch.cat([hidden, embedding.to(hidden.dtype)], dim=-1) if self.with_markov else hidden
        return self.proj(features)[..., 0]
