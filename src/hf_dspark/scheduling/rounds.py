"""Record decoding rounds: policies learn from the record, and every statistic is computed from it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..sampling.drafts import Drafts, DraftTrees
from .calibration import CalibrationRounds

LARGEST_CONFIDENCE = 1 - 1e-6  # in float32, a confidence of a large logit is 1


@dataclass(frozen=True)
class RoundOutcome:
    """One round: what `Policy.observe` and `DecodingOptions.observer` get; rows as in the round's [`Load`]."""

    request_ids: Sequence[int]
    # Calibrated c_k, [R, γ], NaN below a tree; `None` if nothing was drafted or no head predicts it.
    confidence: torch.Tensor | None
    lengths: torch.Tensor  # draft tokens verified, [R]; of trees, all nodes
    num_accepted: torch.Tensor  # draft tokens accepted, without the bonus token, [R]
    seconds: float  # duration of the round
    drafted: bool = True  # whether the draft ran
    is_tail: bool = False  # whether it drew anew in slots of the block before, without its backbone
    drafts: Drafts | None = None  # what was verified
    paths: Sequence[Sequence[int]] | None = None  # accepted nodes of trees, [R]
    target_logits: torch.Tensor | None = None  # processed, after the anchor and each verified token, [R, 1+l, V]
    num_committed: Sequence[int] = ()  # tokens gained, up to the request's end, [R]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # in the target's pass, until it is known what was accepted


@dataclass(frozen=True)
class RoundSeconds:
    """Host time of one round for all its requests. Work queued on an accelerator counts for what waits for it."""

    num_requests: int  # that it served
    draft: float
    verify: float  # in the target's verification pass
    total: float

    @property
    def rest(self) -> float:
        return self.total - self.draft - self.verify


@dataclass
class Rounds:
    """What happened in one `generate()` call, or in several: `draft.last_stats`.

    In a batch, each request of a round has its own entry in the lists, and counts as a round of its own. The first new
    token comes out of the prefill and belongs to no round.

    Attributes:
        request_ids (`list[int]`): The row of a `generate()` call, or the prompt's place in `generate_many`.
        proposed (`list[int]`): Draft tokens sent to verification; of a tree, all nodes.
        depths (`list[int]`): Draft tokens of the longest path that was sent; of a chain, all of them.
        accepted (`list[int]`): Draft tokens accepted, without the bonus token; an end-of-sequence token counts.
        committed (`list[int]`): Tokens gained: the accepted ones and the bonus token, up to the request's end.
        confidence (`list[torch.Tensor | None]`): Calibrated c_k of each token drafted in the round, `[n]`, n <= γ;
            `None` where nothing was drafted, a tree was, or the draft has no confidence head.
        seconds (`list[RoundSeconds]`): Of the whole round that the entry was part of.
        prefill_seconds (`float`): Host time until the first new token.
        first_round_at (`float`, *optional*): When the first round began, right after the first new token, by
            `time.perf_counter`.
        policy (`dict`, *optional*): Name and arguments of the policy that decided how much was drafted and verified.
        loop (`str`): Who verified: `hf_dspark`, `transformers` (its assisted loop), or the `caller` of a
            [`DSparkCandidateGenerator`].

    Example:

    ```python
    target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
    print(draft.last_stats.rounds, draft.last_stats.tau, draft.last_stats.accepted)
    ```
    """

    request_ids: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    confidence: list[torch.Tensor | None] = field(default_factory=list)
    seconds: list[RoundSeconds] = field(default_factory=list)
    prefill_seconds: float = 0.0
    first_round_at: float | None = None
    policy: dict[str, Any] | None = None
    loop: str = "hf_dspark"

    def add(self, outcome: RoundOutcome) -> None:
        """Append one entry per request of a round."""
        lengths, num_requests = outcome.lengths.tolist(), len(outcome.request_ids)
        self.request_ids += outcome.request_ids
        self.proposed += lengths
        self.depths += outcome.drafts.depths
        self.accepted += outcome.num_accepted.tolist()
        self.committed += outcome.num_committed
        has_none = isinstance(outcome.drafts, DraftTrees) or outcome.confidence is None
        self.confidence += [None] * num_requests if has_none else outcome.confidence.cpu().unbind()
        times = RoundSeconds(num_requests, outcome.draft_seconds, outcome.verify_seconds, outcome.seconds)
        self.seconds += [times] * num_requests

    @classmethod
    def joined(cls, parts: Iterable["Rounds"]) -> "Rounds":
        """Put the rounds of several calls one after the other; policy and loop are the first one's."""
        parts = list(parts)
        whole = cls(loop=parts[0].loop) if parts else cls()
        for part in parts:
            for name in ENTRIES:
                getattr(whole, name).extend(getattr(part, name))
            whole.prefill_seconds += part.prefill_seconds
            whole.policy = whole.policy or part.policy
        return whole

    def of_request(self, request_id: int) -> "Rounds":
        """Return the rounds of one request; a round's seconds stay those of all its requests."""
        places = [place for place, each in enumerate(self.request_ids) if each == request_id]
        entries = {name: [getattr(self, name)[place] for place in places] for name in ENTRIES}
        return dataclasses.replace(self, **entries)

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON file holds; `first_round_at` is not kept, a time of this process."""
        confidence = [None if each is None else each.tolist() for each in self.confidence]
        seconds = [list(dataclasses.astuple(each)) for each in self.seconds]
        kept = {name: getattr(self, name) for name in ("policy", "loop", "prefill_seconds", *ENTRIES)}
        return kept | {"confidence": confidence, "seconds": seconds}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> "Rounds":
        """Read what `to_dict` returned."""
        confidence = [None if each is None else torch.tensor(each) for each in kept["confidence"]]
        seconds = [RoundSeconds(*each) for each in kept["seconds"]]
        return cls(**(dict(kept) | {"confidence": confidence, "seconds": seconds}))

    def __repr__(self) -> str:
        return (
            f"Rounds(rounds={self.rounds}, tau={self.tau:.2f}, acceptance_rate={self.acceptance_rate:.2f}, "
            f"total_seconds={self.total_seconds:.3f})"
        )

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
        """Time of the rounds in the draft; a round of several requests counts once."""
        return sum(each.draft / each.num_requests for each in self.seconds)

    @property
    def verify_seconds(self) -> float:
        """Time of the rounds in the target's verification passes."""
        return sum(each.verify / each.num_requests for each in self.seconds)

    @property
    def rest_seconds(self) -> float:
        """Time of the rounds outside draft and verification."""
        return sum(each.rest / each.num_requests for each in self.seconds)

    @property
    def total_seconds(self) -> float:
        """Time of the rounds."""
        return sum(each.total / each.num_requests for each in self.seconds)

    def conditional_acceptance(self, block_size: int) -> list[float]:
        """Return, of each draft position 1..γ, the share accepted where all before it were; `nan` if never reached."""
        return [_share(self.accepted_at(place), self.reached(place)) for place in range(1, block_size + 1)]

    def reached(self, position: int) -> int:
        """Rounds that verified the token at a draft position (1..γ) after an accepted prefix."""
        pairs = zip(self.depths, self.accepted, strict=True)
        return sum(depth >= position and accepted >= position - 1 for depth, accepted in pairs)

    def accepted_at(self, position: int) -> int:
        """Rounds that accepted the token at a draft position (1..γ)."""
        return sum(length >= position for length in self.accepted)

    def confident_rounds(self) -> CalibrationRounds | None:
        """Return what confidences said beside what happened, to measure calibration; `None` without confidences."""
        entries = zip(self.confidence, self.proposed, self.accepted, strict=True)
        rounds = [entry for entry in entries if entry[0] is not None]
        if not rounds:
            return None
        confidence, proposed, accepted = zip(*rounds, strict=True)
        # Blocks end early where their sequence does.
        padded = torch.nn.utils.rnn.pad_sequence(confidence, batch_first=True, padding_value=0.5).double()
        logits, num_accepted = padded.logit(eps=1 - LARGEST_CONFIDENCE), torch.tensor(accepted)
        realised = (torch.arange(logits.shape[1]) < num_accepted[:, None]).double()
        return CalibrationRounds(logits, realised, num_accepted, torch.tensor(proposed))


# The lists with one entry per request and round.
ENTRIES = ("request_ids", "proposed", "depths", "accepted", "committed", "confidence", "seconds")


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
