"""Policies decide whether to draft, and how many tokens of the drafted blocks to verify.

A policy sees confidences, never drafted tokens. It is *causal*, hence lossless, when admitting draft token k depends
only on what was known before x_k was drawn; c_k is, c_{k+1} is not if the confidence head reads x_k. Policies that
are not causal say so in `is_causal` and are refused when drafts are sampled.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch

from ..files import plain_json, shortened
from .costs import Load, ThroughputTable
from .learning import Experience
from .prompt_lookup import MatchAcceptance
from .ranking import survival
from .rounds import RoundOutcome
from .tree_plans import SiblingAcceptance, TreePlan


class Policy:
    """Decides, round by round, whether to draft and how much to verify. Subclass it, and say what it does otherwise:
    this one drafts always and verifies everything.

    Attributes:
        requires_confidence (`bool`): Whether `plan_verify` needs confidences. A draft without a confidence head then
            gives what follows from its distributions, known before the draw.
        accept_bias (`bool`): Whether the user lets a policy that is not causal run on sampled drafts, as an
            experiment.
        draws_tails (`bool`): Whether `plan_draft` may answer `"tail"`: what that takes is kept then.
        most_nodes (`int`): Nodes of a request's tree at most; 0 if it never plans trees.
        matches (`Sequence[MatchAcceptance | None]`): How often prompt lookup was right in all requests, within
            themselves and in earlier answers; `None` where each request begins anew.

    Example:

    ```python
    class AtMostFour(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            return max_lengths.clamp(max=4)

    draft.decoding = DecodingOptions(policy=AtMostFour())
    ```
    """

    requires_confidence: bool = False
    accept_bias: bool = False
    draws_tails: bool = False
    most_nodes: int = 0
    matches: Sequence[MatchAcceptance | None] = (None, None)

    def is_causal(self, confidence_reads_tokens: bool) -> bool:
        """Tell whether sampled drafts keep the target's distribution.

        Args:
            confidence_reads_tokens (`bool`): Whether c_k depends on x_{k-1} (`config.confidence_head_with_markov`).
        """
        return True

    def fresh(self) -> "Policy":
        """Return the same policy without memory of earlier rounds, a dataclass made anew from its fields and any other
        object copied: each `generate()` call works with its own."""
        return dataclasses.replace(self) if dataclasses.is_dataclass(self) else copy.deepcopy(self)

    def new_key(self) -> int:
        """Return a number below 2^63 to change a sampled call's seed by: another one for each call of a policy that
        remembers earlier ones. A seed may return, and its noise must not: what it remembers was drawn by that."""
        return 0

    def plan_draft(self, load: Load) -> bool | Literal["tail"]:
        """Tell whether to draft at all this round; asked before anything is drawn.

        `"tail"`, where `load.tails` has some, draws anew in the slots that the last blocks have left, after the true
        tokens: less is accepted, but the draft's backbone does not run.
        """
        return True

    def limit_lengths(self, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        """Return upper bounds of what `plan_verify` will return, `[R]`: longer blocks need not be drafted.

        Args:
            max_lengths, load: As for `plan_verify`.
        """
        return max_lengths

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        """Return the verification lengths l, `[R]`, 0 <= l <= max_lengths.

        Args:
            confidence (`torch.FloatTensor` of shape `[R, γ]`, *optional*): c_k, the calibrated conditional
                acceptances.
            max_lengths (`torch.LongTensor` of shape `[R]`): Draft tokens that exist or may be sent, at most γ.
            load ([`Load`]): The rows, and what shares their forward pass.
        """
        return max_lengths.clone()

    def expected_siblings(self, known: SiblingAcceptance) -> SiblingAcceptance:
        """Return what to expect of the nodes of trees, given what the draft's config says of it."""
        return known

    def plan_tree(
        self, siblings: SiblingAcceptance, load: Load, matches: Sequence[Sequence[float]] = ()
    ) -> TreePlan | None:
        """Return how the round's trees are shaped; `None` if chains are drafted, of which `plan_verify` decides. In
        rounds without the draft, what prompt lookup has found makes the trees.

        Args:
            siblings ([`SiblingAcceptance`]): What to expect of nodes.
            load ([`Load`]): As for `plan_verify`.
            matches (`Sequence[Sequence[float]]`): Of each request, how probable each token is that prompt lookup has
                found, if those before it are right.
        """
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain JSON data: its class and its arguments, a table of costs by its name.

        Of a policy that is no dataclass, the attributes that are numbers or text.
        """
        values = {name: value for name, value in vars(self).items() if isinstance(value, (str, int, float))}
        if dataclasses.is_dataclass(self):
            values = {part.name: getattr(self, part.name) for part in dataclasses.fields(self) if part.init}
        costs = ThroughputTable | Experience
        named = {name: each.name if isinstance(each, costs) else each for name, each in values.items()}
        return {"name": type(self).__name__, **plain_json(named)}


def require_types(holder: Any, **kinds: Any) -> None:
    """Raise a `TypeError` for an attribute of another kind."""
    for name, kind in kinds.items():
        if not isinstance(value := getattr(holder, name), kind):
            needed = getattr(kind, "__name__", kind)
            raise TypeError(f"{name} of {type(holder).__name__} must be {needed}, got {shortened(value)}")


@dataclass(frozen=True)
class FullBlock(Policy):
    """Verify every drafted token.

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=FullBlock())  # whatever was measured
    ```
    """


@dataclass(frozen=True)
class ConfidenceThreshold(Policy):
    """Stop before the first slot whose confidence is below a threshold.

    Args:
        threshold (`float`): In [0, 1]. 0 verifies every token.
        cumulative (`bool`): Compare the survival (the product of the confidences so far) instead of c_k.

    Raises:
        ValueError: If the threshold is outside [0, 1].

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.6))
    ```

    DSpark Section 4.3.3.
    """

    requires_confidence = True
    threshold: float
    cumulative: bool = False

    def __post_init__(self) -> None:
        require_types(self, threshold=Real, cumulative=bool)
        if not (math.isfinite(self.threshold) and 0.0 <= self.threshold <= 1.0):
            raise ValueError(f"assistant_confidence_threshold must lie in [0, 1], got {self.threshold}")

    def plan_verify(self, confidence: torch.Tensor | None, max_lengths: torch.Tensor, load: Load) -> torch.Tensor:
        score = survival(confidence) if self.cumulative else confidence.cpu()
        run = (score >= self.threshold).long().cumprod(dim=-1).sum(dim=-1)
        return torch.minimum(run, max_lengths)
