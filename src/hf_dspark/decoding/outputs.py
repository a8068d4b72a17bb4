"""Record the scores, logits and hidden states of each generated token that a call asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..models.slot_cache import SlotLayout
from ..sampling.distributions import Scores
from .request import Call, Request


@dataclass(frozen=True)
class TargetOutput:
    """Output of one packed forward pass of the target."""

    layout: SlotLayout
    logits: torch.Tensor  # `[n, V]`, at the tokens where they were wanted
    features: torch.Tensor  # `[T, m*d]`, tapped layers
    hidden_states: tuple[torch.Tensor, ...] | None  # of all layers, `[T, d]` each

    def states_of(self, tokens: slice | list[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return the hidden states of some tokens one by one, by layer `[1, d]`; nothing if there are none."""
        if self.hidden_states is None:
            return []
        return list(zip(*(layer[tokens].split(1) for layer in self.hidden_states), strict=True))


@dataclass
class Recording:
    """Outputs of a call besides tokens: one entry per generated token of each request, by its id."""

    wants_scores: bool = False
    wants_logits: bool = False
    wants_hidden_states: bool = False
    wants_attentions: bool = False  # empty ones: whoever has weights is not decoded by our loop
    wants_rows: bool = False  # the caches' rows of requests that ended
    scores: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    # Of each pass, by layer, `[tokens, d]`; the prompt's first, then one entry per generated token.
    hidden_states: dict[int, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    _stacked: set[int] = field(default_factory=set)  # layers whose streams stand before the batch

    @classmethod
    def of(cls, call: Call) -> "Recording":
        config = call.generation_config
        wanted = (config.output_scores, config.output_logits, config.output_hidden_states, config.output_attentions)
        returned = bool(config.return_dict_in_generate)
        return cls(*(bool(returned and each) for each in wanted), returned or call.fills_users_cache)

    @property
    def wants_steps(self) -> bool:
        """Whether anything is kept of each generated token."""
        return self.wants_scores or self.wants_logits or self.wants_hidden_states

    def by_token(self, layers: Sequence[torch.Tensor], num_tokens: int) -> tuple[torch.Tensor, ...] | None:
        """Return the hidden states of a packed pass, by layer `[T, d]`, or `[T, streams, d]`; `None` if unwanted."""
        if not self.wants_hidden_states:
            return None
        # Gemma 3n stacks streams first, `[streams, 1, T, d]`; other layers and targets have the batch there.
        self._stacked = {
            number for number, layer in enumerate(layers) if layer.dim() == 4 and layer.shape[:2] != (1, num_tokens)
        }
        return tuple(
            layer[:, 0].transpose(0, 1) if number in self._stacked else layer[0] for number, layer in enumerate(layers)
        )

    def add_prompt(self, request_id: int, output: TargetOutput, tokens: slice) -> None:
        """Keep the hidden states of a stretch of a prompt; all stretches are one step."""
        if output.hidden_states is not None:
            states = tuple(layer[tokens] for layer in output.hidden_states)
            if request_id in self.hidden_states:
                before = self.hidden_states[request_id][0]
                states = tuple(torch.cat(pair) for pair in zip(before, states, strict=True))
            self.hidden_states[request_id] = [states]

    def add(
        self, request_id: int, logits: torch.Tensor, scores: Scores, states: Sequence[tuple[torch.Tensor, ...]] = ()
    ) -> None:
        """Keep what was computed of some generated tokens: logits `[n, V]`, scores of as many, and hidden states."""
        if self.wants_scores:
            self.scores.setdefault(request_id, []).extend(scores.dense(logits.shape[-1]))
        if self.wants_logits:
            self.logits.setdefault(request_id, []).extend(logits.float())
        if self.wants_hidden_states:
            self.hidden_states[request_id].extend(states)

    def drop(self, request_id: int, count: int) -> None:
        """Drop the last tokens, which stand after a request's end."""
        for kept in (self.scores, self.logits, self.hidden_states):
            if count and request_id in kept:
                del kept[request_id][-count:]

    def by_step(
        self, requests: Sequence[Request], columns: Sequence[torch.Tensor], width: int, num_tokens: int
    ) -> dict[str, Any]:
        """Return scores, logits and hidden states by step, as plain `generate()` does; zeros after a row's end, and
        where it has padding among the `width` columns of the first step, of which `columns` are its own."""
        steps: dict[str, Any] = {"scores": None, "logits": None, "hidden_states": None}
        for name, kept in (("scores", self.scores), ("logits", self.logits)):
            if kept:
                rows = [torch.stack(kept[request.id]) for request in requests]
                steps[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).unbind(dim=1)
        if self.wants_attentions:
            steps["attentions"] = ((),) * num_tokens
        if self.wants_hidden_states:
            rows = [self.hidden_states[request.id] for request in requests]
            first = _padded([row[0] for row in rows], columns, width, self._stacked)
            only = torch.zeros(1, dtype=torch.long, device="cpu")
            later = (
                _padded([row[step] if step < len(row) else None for row in rows], [only] * len(rows), 1, self._stacked)
                for step in range(1, max(map(len, rows)))
            )
            steps["hidden_states"] = (first, *later)
        return steps


def _padded(
    rows: Sequence[tuple[torch.Tensor, ...] | None], columns: Sequence[torch.Tensor], width: int, stacked: set[int]
) -> tuple[torch.Tensor, ...]:
    """Return one step's hidden states `[B, width, d]` of all layers, or `[streams, B, width, d]` where streams are
    stacked; zero where a row has nothing."""
    layers = []
    for layer, like in enumerate(next(row for row in rows if row is not None)):
        states = like.new_zeros(len(rows), width, *like.shape[1:])
        for index, (row, own) in enumerate(zip(rows, columns, strict=True)):
            if row is not None:
                states[index, own.to(states.device)] = row[layer]
        layers.append(states.permute(2, 0, 1, 3) if layer in stacked else states)
    return tuple(layers)
