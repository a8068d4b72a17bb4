"""One sequence that is being decoded, and where it ends. Knows nothing of models, caches or batches."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from .processing import Prefix


class StopRule:
    """Tells at which token a request ends.

    Lengths and end-of-sequence ids are looked up; the time is asked for once a round; any other criterion is called
    behind every committed token in turn, as plain decoding would, and never on a token behind the end.

    Args:
        criteria (`StoppingCriteriaList`): Of the call.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        eos = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
        self._eos_token_ids = {int(token) for ids in eos for token in ids.flatten()}
        self._times = [criterion for criterion in criteria if isinstance(criterion, MaxTimeCriteria)]
        known = (EosTokenCriteria, MaxTimeCriteria, MaxLengthCriteria)
        self._others = [criterion for criterion in criteria if not isinstance(criterion, known)]

    def ends_within(self, token_ids: torch.Tensor) -> bool:
        """Tell whether a token ends its sequence."""
        return not self._eos_token_ids.isdisjoint(token_ids.tolist())

    def guard(self, wrap: Callable) -> None:
        """Replace every custom criterion by what `wrap` makes of it."""
        self._others = [wrap(criterion) for criterion in self._others]

    def cut(self, request: "Request", new_tokens: Sequence[int], scores: Sequence[torch.Tensor]) -> tuple[int, bool]:
        """Return how many of the tokens just noted behind a request stay, and whether it ends there.

        Args:
            request ([`Request`]): Its `length` does not count the new tokens yet.
            new_tokens (`Sequence[int]`): In `request.token_ids` already.
            scores (`Sequence[torch.Tensor]`): Processed scores `[V]` of all its tokens, if they are kept.
        """
        for count, token in enumerate(new_tokens, start=1):
            length = request.length + count
            ends = token in self._eos_token_ids or length >= request.max_length
            if self._others:
                ends |= self._any_other(request, length, scores[: len(scores) - len(new_tokens) + count])
            if ends:
                return count, True
        prefix = request.token_ids[None, : request.length + len(new_tokens)]
        return len(new_tokens), any(bool(torch.as_tensor(time(prefix, None)).all()) for time in self._times)

    def ends(self, request: "Request", scores: Sequence[torch.Tensor]) -> bool:
        """Tell whether a request ends at the token it has just got.

        Args:
            request ([`Request`]): Its `length` counts the token.
            scores (`Sequence[torch.Tensor]`): As for `cut`.
        """
        before = dataclasses.replace(request, length=request.length - 1)
        return self.cut(before, request.token_ids[request.length - 1 : request.length].tolist(), scores)[1]

    def _any_other(self, request: "Request", length: int, scores: Sequence[torch.Tensor]) -> bool:
        prefix = request.token_ids[None, :length]
        kept = tuple(score[None] for score in scores) if scores else None
        # Each is called, as transformers does: a criterion may count its calls.
        answers = [bool(torch.as_tensor(criterion(prefix, kept)).all()) for criterion in self._others]
        return any(answers)


@dataclass
class Request:
    """One sequence that is being decoded.

    Attributes:
        id (`int`): Key of its noise, distinct among all requests of a call.
        token_ids (`torch.LongTensor` of shape `[capacity]`): Prompt and committed tokens, then room that grows.
        length (`int`): Committed tokens; the last one is the anchor.
        max_length (`int`): Tokens at which it ends.
        processors (`LogitsProcessorList`): As for this sequence alone.
        stop_rule ([`StopRule`]): Tells where it ends.
        hidden_prompt (`int`): Prompt positions that have no id in `token_ids`.
        earlier_ids (`torch.LongTensor` of shape `[hidden_prompt]`, *optional*): Their ids, if known.
        blocks (`int`): Blocks drawn so far: the counter of its noise.
        features (`list[torch.Tensor]`): Tapped target layers of committed tokens that the draft has not seen,
            `[n, m*d]` each; the anchor excluded.
        ended (`bool`): Whether its last token is there.
    """

    id: int
    token_ids: torch.Tensor
    length: int
    max_length: int
    processors: LogitsProcessorList
    stop_rule: StopRule
    hidden_prompt: int = 0
    earlier_ids: torch.Tensor | None = None
    blocks: int = 0
    features: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False

    @property
    def anchor(self) -> torch.Tensor:
        """x_0, `[1]`."""
        return self.token_ids[self.length - 1 : self.length]

    @property
    def anchor_position(self) -> int:
        """Position of the anchor, which is the number of committed slots in the target's cache."""
        return self.hidden_prompt + self.length - 1

    def make_room(self, count: int) -> None:
        """Let so many tokens fit behind the committed ones."""
        if self.length + count > len(self.token_ids):
            grown = self.token_ids.new_zeros(2 * (self.length + count))
            grown[: self.length] = self.token_ids[: self.length]
            self.token_ids = grown

    def last_ids(self, count: int) -> torch.Tensor:
        """Return the last committed tokens, the anchor included, `[count]`; 0 where nobody knows the id."""
        hidden = count - self.length
        if hidden <= 0:
            return self.token_ids[self.length - count : self.length]
        earlier = self.token_ids.new_zeros(hidden) if self.earlier_ids is None else self.earlier_ids[-hidden:]
        return torch.cat([earlier.to(self.token_ids.device), self.token_ids[: self.length]])

    def prefix(self, drafted: int = 0) -> Prefix | None:
        """Return what stands before a position behind `drafted` tokens of the block, which are noted already.

        `None` if the sequence ends before that position.
        """
        if self.length + drafted >= max(self.max_length, self.length + 1):
            return None
        if drafted and self.stop_rule.ends_within(self.token_ids[self.length : self.length + drafted]):
            return None
        return Prefix(self.token_ids[None, : self.length + drafted], self.processors)
