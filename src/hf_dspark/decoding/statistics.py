"""What happened in a decoding call, round by round: the statistics that `draft.last_stats` holds."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..scheduling.policies import Policy


@dataclass(frozen=True)
class RoundSeconds:
    """Host time of one round for all its requests. Work queued on an accelerator counts for what waits for it."""

    num_requests: int  # that it served
    draft: float
    verify: float  # in the target's verification pass
    total: float


@dataclass
class RoundStatistics:
    """What happened in one `generate()` call, round by round.

    The first new token comes out of the prefill and belongs to no round. In a batch, each request of a round has its
    own entry in the lists, and counts as a round of its own; only `seconds` has one entry for the whole round.

    Attributes:
        proposed (`list[int]`): Draft tokens sent to verification; of a tree, all nodes.
        depths (`list[int]`): Draft tokens of the longest path that was sent; of a chain, all of them.
        accepted (`list[int]`): Draft tokens accepted, without the bonus token; an end-of-sequence token counts.
        committed (`list[int]`): Tokens gained: the accepted ones and the bonus token, up to the request's end.
        confidence (`list[torch.Tensor | None]`): Calibrated c_k of each token drafted in the round, `[n]`, n <= γ;
            `None` where nothing was drafted, a tree was, or the draft has no confidence head.
        request_ids (`list[int]`): The row of a `generate()` call, or the prompt's place in `generate_many`.
        seconds (`list[RoundSeconds]`): A round of R requests belongs to the next R entries of the other lists.
        prefill_seconds (`float`): Host time until the first new token.
        first_round_at (`float`, *optional*): When the first round began, right after the first new token, by
            `time.perf_counter`.
        policy ([`Policy`], *optional*): Decided how much was drafted and verified.

    Example:

    ```python
    target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
    print(draft.last_stats.rounds, draft.last_stats.tau, draft.last_stats.accepted)
    ```
    """

    proposed: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    confidence: list[torch.Tensor | None] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)
    seconds: list[RoundSeconds] = field(default_factory=list)
    prefill_seconds: float = 0.0
    first_round_at: float | None = None
    policy: Policy | None = None

    @classmethod
    def joined(cls, parts: Iterable["RoundStatistics"]) -> "RoundStatistics":
        """Put the rounds of several calls one after the other."""
        whole = cls()
        for part in parts:
            for name in ("proposed", "depths", "accepted", "committed", "confidence", "request_ids", "seconds"):
                getattr(whole, name).extend(getattr(part, name))
            whole.prefill_seconds += part.prefill_seconds
        return whole

    @property
    def rounds(self) -> int:
        """Number of verification rounds, summed over the requests."""
        return len(self.committed)

    @property
    def tau(self) -> float:
        """Mean tokens per round, bonus token included; `nan` before the first round."""
        return _share(sum(self.committed), self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens; `nan` when none was proposed."""
        return _share(sum(self.accepted), sum(self.proposed))

    @property
    def draft_seconds(self) -> float:
        """Time of the rounds in the draft."""
        return sum(part.draft for part in self.seconds)

    @property
    def verify_seconds(self) -> float:
        """Time of the rounds in the target's verification passes."""
        return sum(part.verify for part in self.seconds)

    @property
    def total_seconds(self) -> float:
        """Time of the rounds."""
        return sum(part.total for part in self.seconds)

    @property
    def rest_seconds(self) -> float:
        """Time of the rounds outside draft and verification."""
        return self.total_seconds - self.draft_seconds - self.verify_seconds

    def seconds_of_entries(self) -> list[RoundSeconds]:
        """Return the round that each entry was part of."""
        return [part for part in self.seconds for _ in range(part.num_requests)]

    def conditional_acceptance(self, block_size: int) -> list[float]:
        """Return, of each draft position 1..γ, the share accepted where all before it were; `nan` if never reached."""
        return [_share(self.accepted_at(place), self.reached(place)) for place in range(1, block_size + 1)]

    def survival(self, block_size: int) -> list[float]:
        """Return, of each draft position 1..γ, the share of rounds accepted up to it among those that proposed it."""
        return [_share(self.accepted_at(place), self.proposed_at(place)) for place in range(1, block_size + 1)]

    def proposed_at(self, position: int) -> int:
        """Rounds that sent a token at a draft position (1..γ) to verification."""
        return sum(depth >= position for depth in self.depths)

    def reached(self, position: int) -> int:
        """Rounds that verified the token at a draft position (1..γ) after an accepted prefix."""
        pairs = zip(self.depths, self.accepted, strict=True)
        return sum(depth >= position and accepted >= position - 1 for depth, accepted in pairs)

    def accepted_at(self, position: int) -> int:
        """Rounds that accepted the token at a draft position (1..γ)."""
        return sum(length >= position for length in self.accepted)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
