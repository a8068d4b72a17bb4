"""Which tokens of a greedy answer are the target's best up to rounding: a promise that holds in every data type.

Identical answers are promised in float32 alone: a pass over several tokens rounds differently from a pass over one.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.call import effective_config
from ..decoding.logits_processing import BlockProcessor, Prefix
from ..targets.int8_outliers import outliers_of_each
from ..targets.support import TargetSupport

# Units in the last place of the largest logit by which passes of different shapes were seen to differ near the best
# token, in 36 random layers: 8 where sums are kept in float32 and results are rounded, 102 where nothing is wider.
ULPS, ULPS_OF_FLOAT32 = 8, 128
ENDING = ("stopping_criteria", "tokenizer")  # options that end an answer, and choose no token


def tolerance_of(dtype: torch.dtype) -> str:
    """Return in words how far below the best score a token may lie."""
    return f"{_ulps(dtype)} units in the last place of {str(dtype).removeprefix('torch.')} at the largest logit"


@torch.no_grad()
def count_best(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    plain_ids: Sequence[int],
    **generate_kwargs: Any,
) -> int:
    """Return how many tokens of a greedy answer are the target's best, up to rounding.

    One plain pass of the target over prompt and answer gives the scores of every position, which are processed as
    `generate()` does. A token counts if its score is at most `tolerance_of(target.dtype)` below the best one. So a
    tie that breaks differently counts, and a wrong token does not.

    `plain_ids` were decoded without the draft. If one answer is only the beginning of the other, one of them ended
    wrongly, and one token less counts. `generate_kwargs` are those of `generate()`.

    A token x counts if max(s) - s_x <= ULPS * ulp(max |logit|), s being the processed scores.
    """
    options = {name: value for name, value in generate_kwargs.items() if name not in ENDING}
    options["stop_strings"] = None  # of a configuration, too: they would need a tokenizer
    support, start = TargetSupport.of(target), len(prompt_ids)
    ids = torch.tensor([[*prompt_ids, *answer_ids]], device=support.input_device)
    prompt, prepare = ids[:, :start], lambda target, input_ids, **prepared: prepared  # decodes nothing
    prepared = target.generate(prompt, attention_mask=torch.ones_like(prompt), custom_generate=prepare, **options)
    kept = {"logits_to_keep": len(answer_ids) + 1} if "logits_to_keep" in prepared else {}
    counts = (start, *[1] * len(answer_ids))  # LLM.int8 reads a prompt as a whole, and decodes token by token
    with outliers_of_each(counts) if support.has_outliers else nullcontext():
        logits = target(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **kept).logits
    logits = logits[0, -len(answer_ids) - 1 : -1]
    least, most = logits.aminmax(dim=-1)
    dtype = max(logits.dtype, target.dtype, key=lambda each: torch.finfo(each).eps)
    power_of_two = torch.exp2(torch.frexp(torch.maximum(most, -least).float()).exponent - 1.0)
    tolerance = _ulps(dtype) * torch.finfo(dtype).eps * power_of_two

    processors = prepared["logits_processor"]
    processor = BlockProcessor(processors, logits.shape[-1])
    places = range(start, ids.shape[1]) if processor.reads_prefixes else ()
    prefixes = [Prefix(ids[:, :place], processors) for place in places]
    scores = processor(logits, None, prefixes).sure().dense(logits.shape[-1])
    chosen = scores.gather(-1, ids[0, start:, None].to(scores.device))[:, 0]
    num_best = int((scores.amax(dim=-1) - chosen <= tolerance).sum())
    is_timed = effective_config(target, options).max_time is not None
    shorter, longer = sorted((list(answer_ids), list(plain_ids)), key=len)
    is_cut = len(shorter) < len(longer) and longer[: len(shorter)] == shorter and not is_timed
    return num_best - is_cut


def _ulps(dtype: torch.dtype) -> int:
    return ULPS if torch.finfo(dtype).bits < 32 else ULPS_OF_FLOAT32
