"""Options of decoding with a draft: one object, which the draft carries and a call may bring."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from ..files import shortened
from .policies import Policy, require_types
from .prompt_lookup import AnswerMemory
from .rounds import RoundOutcome


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode with a draft: `draft.decoding` holds for `generate()`, other functions take one for a call.

    Args:
        policy ([`Policy`], *optional*): Whether to draft and how much of a block is verified. Default: [`Scheduler`]
            with what earlier rounds have taught; then samples depend on the clock, not on a seed alone.
        trees (`bool`, *optional*): Whether the default policy drafts trees. Default: where earlier rounds have shown
            that they pay, and the target can verify them.
        prompt_lookup (`bool`): Whether trees also get a branch of what followed an earlier match of the text's end.
        answers ([`AnswerMemory`], *optional*): Earlier answers, which prompt lookup searches, too, and the coming ones
            join. Default: none, but see [`attach`].
        other_tokens (`int` or `Callable`): Tokens per step that the rest of the engine adds to the target's forward
            pass, or a function that returns them.
        domain (`str`, *optional*): Whose calibration, and whose earlier rounds, count. Default: the sampling regime's.
        observer (`Callable`, *optional*): Is called with the [`RoundOutcome`] of each round.
        use_transformers_loop (`bool`): Whether transformers' own assisted loop verifies and commits, one sequence at
            a time; for comparison.
        compile (`bool` or `"auto"`): Whether the passes of a round run as compiled graphs; `"auto"`: on a GPU. The
            first rounds wait for the compiler. What cannot be compiled runs as without it, which a warning says once.
        draft_window (`int` or `"auto"`, *optional*): How many tokens before the anchor the draft sees and keeps;
            `None`: all. `"auto"`: as its config says, else 4096. Ordinary assistants see all.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If `other_tokens` or `draft_window` is no number of tokens, `trees` is given beside a policy, or
            `compile` is text other than `"auto"`.

    Example:

    ```python
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.5), other_tokens=64)
    output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
    draft.decoding = DecodingOptions()  # the defaults again
    ```
    """

    policy: Policy | None = None
    trees: bool | None = None
    prompt_lookup: bool = True
    answers: AnswerMemory | None = None
    other_tokens: int | Callable[[], int] = 0
    domain: str | None = None
    observer: Callable[[RoundOutcome], None] | None = None
    use_transformers_loop: bool = False
    compile: bool | Literal["auto"] = False
    draft_window: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.policy, type):
            raise TypeError(f"policy must be a policy, got the class {self.policy.__name__}: call it")
        if not isinstance(self.policy, Policy | None):
            raise TypeError(
                f"policy must be a hf_dspark.Policy, got {shortened(self.policy)}: pass FullBlock(), "
                "ConfidenceThreshold(0.5), Scheduler(cost), one of your own, or None for the default"
            )
        if self.trees is not None and self.policy is not None:
            raise ValueError(
                f"trees={self.trees} chooses the default policy, got policy={shortened(self.policy)}, too: drop one"
            )
        if isinstance(self.compile, str) and self.compile != "auto":
            raise ValueError(f"compile must be True, False or 'auto', got {shortened(self.compile)}")
        window = self.draft_window
        if window not in (None, "auto") and (type(window) is not int or window < 1):
            raise ValueError(
                f"draft_window must be a number of tokens, 1 or more, 'auto', or None for all, got {shortened(window)}"
            )
        flags = {"compile": bool | str, "prompt_lookup": bool, "use_transformers_loop": bool, "trees": bool | None}
        require_types(self, **flags, domain=str | None, answers=AnswerMemory | None, observer=Callable | None)
        if not callable(self.other_tokens):
            self.tokens_of_others()

    def tokens_of_others(self) -> int:
        """Return what the rest of the engine adds to the coming pass."""
        tokens = self.other_tokens() if callable(self.other_tokens) else self.other_tokens
        if not (isinstance(tokens, Real) and math.isfinite(tokens) and tokens >= 0):
            raise ValueError(f"other_tokens must be a number of tokens, 0 or more, got {tokens!r}")
        return int(tokens)
