"""`check_target`: does a target decode packed rows in a slot cache as it decodes each row alone?"""

from contextlib import nullcontext

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..cpu import fast_linears
from ..models.auto import require_target
from ..models.slot_cache import SlotCache, SlotLayout
from .int8_outliers import outliers_of_each
from .slot_attention import PackedTarget
from .support import TargetSupport

# Largest difference of logits, as a part of the largest logit.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
HALF_PRECISION_TOLERANCE = 0.05
FOUR_BIT_TOLERANCE = 5e-3  # with fp4, one row and several differ by 2e-3 on some CPUs, even in float32
LONGEST_WINDOW = 1024


@torch.no_grad()
def check_target(target: PreTrainedModel, seed: int = 0) -> float:
    """Compare the logits of rows decoded together with those of each row alone.

    Three passes, as in decoding: prompts, blocks of different lengths, and other blocks after a rollback. Windows up
    to 1024 tokens are crossed. It takes seconds: run it once for an architecture that is new to you.

    Args:
        target (`PreTrainedModel`): The causal LM.
        seed (`int`): Of the token ids.

    Returns:
        The largest difference of two logits, as a part of the largest logit.

    Raises:
        ValueError: If the target keeps a recurrent state or cannot attend to a slot cache, or the difference is more
            than rounding.

    Example:

    ```python
    print(check_target(target))  # such as 3e-07
    ```
    """
    require_target(target)
    support = TargetSupport.of(target)
    if support.state_obstacle is not None:
        raise ValueError(support.state_obstacle)
    if support.slot_obstacle is not None:
        reason = support.slot_obstacle
        raise ValueError(f"{reason}: generate() uses transformers' own loop for it, one sequence at a time")
    window = support.longest_window
    longest = 16 + (window if window <= LONGEST_WINDOW else 0)
    generator = torch.Generator().manual_seed(seed)
    lengths = (longest, 10, longest // 2)
    size, device = support.text.vocab_size, support.input_device
    rows = [torch.randint(0, size, (n,), generator=generator).to(device) for n in lengths]
    with outliers_of_each(()) if support.has_outliers else nullcontext():
        worst, largest = _worst_difference(support, rows)
    difference = worst / largest
    tolerance = TOLERANCES.get(target.dtype, HALF_PRECISION_TOLERANCE)
    if getattr(target, "is_loaded_in_4bit", False):
        tolerance = max(tolerance, FOUR_BIT_TOLERANCE)
    if not difference <= tolerance:  # NaN fails, too
        raise ValueError(
            f"{type(target).__name__} decodes packed rows differently from single ones: logits differ by "
            f"{difference:.2%} of the largest one, rounding explains {tolerance:.2%}. Set "
            "draft.decoding = DecodingOptions(use_transformers_loop=True), and please report the architecture."
        )
    return difference


def _worst_difference(support: TargetSupport, rows: list[torch.Tensor]) -> tuple[float, float]:
    """Return the largest difference between logits of packed rows and of each row alone, and the largest logit."""
    prompts = [length - 7 for length in map(len, rows)]
    alone = [_decoded(support, row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    packed, cache, worst = PackedTarget(support), SlotCache(len(rows)), 0.0
    rolled_back = [prompts[0] + 1, *prompts[1:]]
    with fast_linears(*support.leaf_modules):
        for starts, counts in (([0, 0, 0], prompts), (prompts, [4, 1, 2]), (rolled_back, [6, 7, 5])):
            layout = SlotLayout(tuple(starts), tuple(counts), is_prefill=starts == [0, 0, 0])
            spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
            tokens = torch.cat([row[span] for row, span in zip(rows, spans, strict=True)])
            expected = torch.cat([logits[span] for logits, span in zip(alone, spans, strict=True)])
            positions = layout.position_ids(tokens.device)
            output = packed(cache, layout, input_ids=tokens[None], position_ids=positions)
            worst = max(worst, float((output.logits[0] - expected).abs().max()))
    return worst, float(max(whole.abs().max() for whole in alone))


def _decoded(support: TargetSupport, row: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Return the logits of a row as plain decoding has them, `[n, V]`: its prompt at once, then token by token."""
    cache, logits = DynamicCache(config=support.text), []
    positions = torch.arange(len(row), device=row.device)
    for start, end in ((0, prompt_length), *((place, place + 1) for place in range(prompt_length, len(row)))):
        place = {support.cache_argument: cache, "position_ids": positions[None, start:end]}
        logits.append(support.target(row[None, start:end], use_cache=True, **place).logits[0])
    return torch.cat(logits)
