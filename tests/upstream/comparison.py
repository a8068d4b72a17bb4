"""What a call with a draft returned, against what the same call returned without one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Of the largest value that is compared: rounding of another order of sums, by the target's precision.
ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Below it, the two best tokens of a step are the same to float rounding.
TIE = {torch.float64: 1e-6, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Expected:
    """A plain call's answer, and what the comparison needs to know of it."""

    result: Any  # sequences, or an output with them
    scores: Sequence[torch.Tensor]  # processed, of each step `[B, V]`; empty where they are not known
    prompt_length: int  # columns of `sequences` that are the prompt
    lengths: Sequence[int]  # tokens that each row generated, its end included
    is_sampled: bool
    dtype: torch.dtype

    @property
    def sequences(self) -> torch.Tensor:
        return sequences_of(self.result)

    def generated(self, row: int) -> torch.Tensor:
        return self.sequences[row, self.prompt_length : self.prompt_length + self.lengths[row]]


def sequences_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.sequences


def differences(expected: Expected, result: Any) -> tuple[list[str], int]:
    """Return what is different, and how many rows parted from plain where two tokens were equally good."""
    if type(result) is not type(expected.result):
        return [f"the call returned {type(result).__name__}, plain {type(expected.result).__name__}"], 0
    if expected.is_sampled:
        return list(_shapes(expected, result)), 0
    same, ties, found = list(expected.lengths), 0, []
    theirs, ours = expected.sequences, sequences_of(result)
    if len(theirs) != len(ours):
        return [f"{len(ours)} sequences, plain {len(theirs)}"], 0
    for row in range(len(theirs)):
        parted = _first_difference(theirs[row], ours[row])
        if parted is None:
            continue
        step = parted - expected.prompt_length
        if 0 <= step < len(expected.scores) and _is_tie(expected, row, step, ours[row]):
            same[row], ties = step + 1, ties + 1  # scores of this step are still comparable
        else:
            found.append(f"row {row} differs at generated token {step}: {ours[row].tolist()}, {theirs[row].tolist()}")
    if found or isinstance(result, torch.Tensor):
        return found, ties
    return [*_of_outputs(expected, result, same, ties)], ties


def _shapes(expected: Expected, result: Any) -> Iterator[str]:
    theirs, ours = expected.sequences, sequences_of(result)
    longest = max(expected.lengths)
    may_end = any(length < longest for length in expected.lengths) or ours.shape[1] != theirs.shape[1]
    if len(theirs) != len(ours) or not torch.equal(
        theirs[:, : expected.prompt_length], ours[:, : expected.prompt_length]
    ):
        yield "sampled sequences begin otherwise"
    if not isinstance(result, torch.Tensor) and not may_end:
        yield from _of_outputs(expected, result, [0] * len(theirs), 0)


def _first_difference(theirs: torch.Tensor, ours: torch.Tensor) -> int | None:
    shared = min(len(theirs), len(ours))
    wrong = (theirs[:shared] != ours[:shared]).nonzero()[:, 0]
    if len(wrong):
        return int(wrong[0])
    return None if len(theirs) == len(ours) else shared


def _is_tie(expected: Expected, row: int, step: int, ours: torch.Tensor) -> bool:
    scores, column = expected.scores[step][row].float(), expected.prompt_length + step
    if column >= min(len(ours), expected.sequences.shape[1]):
        return False
    pair = scores[[int(ours[column]), int(expected.sequences[row, column])]]
    largest = scores[scores.isfinite()].abs().amax()
    return bool(pair.isfinite().all()) and float((pair[0] - pair[1]).abs() / largest) <= TIE[expected.dtype]


def _of_outputs(expected: Expected, result: Any, same: Sequence[int], ties: int) -> Iterator[str]:
    """Compare all but the tokens; of values those before a row's end, or before it parted at a tie."""
    theirs = expected.result
    for name in ("scores", "logits"):
        yield from _of_steps(name, getattr(theirs, name), getattr(result, name), expected, same)
    for name in ("hidden_states", "attentions"):
        one, other = _structure(getattr(theirs, name)), _structure(getattr(result, name))
        if one != other and not ties:
            yield f"{name} have other shapes: {_shortest(one, other)}"
        elif one == other and name == "hidden_states" and theirs.hidden_states is not None:
            last = [[layer[:, -1] for layer in step] for step in theirs.hidden_states]
            ours = [[layer[:, -1] for layer in step] for step in result.hidden_states]
            for layer, (a, b) in enumerate(zip(zip(*last, strict=True), zip(*ours, strict=True), strict=True)):
                if a[0].dim() == 2:
                    yield from _of_steps(f"hidden states of layer {layer}", a, b, expected, same)
    one, other = cache_of(theirs), cache_of(result)
    if (one is None) != (other is None):
        yield f"the output holds {type(other).__name__} as its cache, plain's {type(one).__name__}"


def _of_steps(name: str, theirs: Any, ours: Any, expected: Expected, same: Sequence[int]) -> Iterator[str]:
    if theirs is None or ours is None:
        if theirs is not ours:
            yield f"{name}: {type(ours).__name__}, plain {type(theirs).__name__}"
        return
    if [step.shape for step in theirs] != [step.shape for step in ours]:
        if min(same) == max(expected.lengths):
            yield f"{name}: {len(ours)} of {tuple(ours[0].shape)}, plain {len(theirs)} of {tuple(theirs[0].shape)}"
        return
    for step, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        for row in (row for row, length in enumerate(same) if step < length):
            a, b = one[row].double(), other[row].double()
            finite = a.isfinite()
            if not torch.equal(finite, b.isfinite()) or not torch.equal(
                a[~finite].nan_to_num(), b[~finite].nan_to_num()
            ):
                yield f"{name} of step {step}, row {row}: other places are infinite"
                return
            largest = float(a[finite].abs().amax()) if finite.any() else 0.0
            gap = float((a - b)[finite].abs().amax()) if finite.any() else 0.0
            if gap > ROUNDING[expected.dtype] * largest + 1e-7:
                yield f"{name} of step {step}, row {row}: off by {gap:.2g} of {largest:.2g}"
                return


def _structure(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return tuple(map(_structure, value)) if isinstance(value, (tuple, list)) else type(value).__name__


def _shortest(one: Any, other: Any) -> str:
    """Show two structures where they first differ."""
    while isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        pair = next((pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]), None)
        if pair is None or not all(isinstance(part, tuple) for part in pair):
            break
        one, other = pair
    return f"{str(other)[:120]}, plain {str(one)[:120]}"


def cache_of(result: Any) -> Any:
    names = ("cache", "past_key_values", "cache_params")
    return next((cache for name in names if (cache := getattr(result, name, None)) is not None), None)
