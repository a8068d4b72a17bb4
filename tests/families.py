"""What happens to every causal LM of the installed transformers: decoded as without a draft, or refused and why.

python -m tests.families --output benchmarks/results/families.json

Tiny targets with random weights (`hybrids.py`) decode one row and a ragged batch, against plain `generate()`.
Drafts are made right in most places, so that rows accept different numbers of tokens. The manual's table is made of
the result: `table(result)`.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_dspark import DSparkConfig, DSparkDraftModel, PromptLookup

from .hybrids import build_any
from .rigged import rig

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from bench import decode, main  # noqa: E402

SMALL = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8}
DRAFTS = {
    "draft": lambda target: DSparkDraftModel(DSparkConfig.from_target(target, **SMALL)).eval(),
    "prompt lookup": PromptLookup,
}
PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5], [8, 9, 10], [11, 12, 13, 11, 12]]
# What a refusal says, and how the table says it.
REASONS = {
    "attention masks of its own": "attention masks of its own",
    "are not attention": "layers with an indexer",
    "read a row token by token": "layers that read a row token by token, and cannot follow branches",
    "read the padding": "its recurrent layers read padding in plain decoding",
    "forgets tokens of a prompt": "its cache forgets what its masks show",
    "keeps a state": "a state that cannot be kept row by row",
    "no cache of keys": "no cache of keys and values that could be cut back",
    "tokens of its own": "tokens of its own before each prompt",
    "values for a token": "an embedding of another width than its layers",
    "no list of": "layers that are not in one list",
    "attention of its own": "attention of its own, which cannot read a slot cache",
    "gave features of shape": "layers whose output is not one vector for each position",
}


def decoded(target: PreTrainedModel, name: str, prompts: list[list[int]], alone: list[Any], options: dict) -> str:
    answers = [torch.tensor(prompt + row) for prompt, row in zip(PROMPTS, alone, strict=True)]
    try:
        draft = DRAFTS[name](target)
        with pytest.MonkeyPatch.context() as patch:
            if draft.drafts_blocks:
                rig(patch, answers)
            found = decode(target, prompts, assistant=draft, **options).token_ids
    except ValueError as refusal:
        return f"refused: {' '.join(str(refusal).split())[:200]}"
    except Exception as error:  # whatever a family raises: the sweep goes on
        return f"ERROR: {type(error).__name__}: {error}"
    return "identical" if found == alone[: len(found)] else "DIFFERENT"


def of_type(model_type: str, new_tokens: int = 12) -> dict[str, str]:
    """Return what happens to one type of models, by draft and number of rows."""
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    try:
        target = build_any(model_type)
        alone = [decode(target, [prompt], **options).token_ids[0] for prompt in PROMPTS]
    except Exception as error:  # no tiny target, or none that decodes at all
        return {"family": model_type, "not tried": str(error)[:200]}
    cases = [(name, rows) for name in DRAFTS for rows in (1, len(PROMPTS))]
    found = {f"{name}, rows: {rows}": decoded(target, name, PROMPTS[:rows], alone, options) for name, rows in cases}
    return {"family": model_type} | found


def outcome(cell: dict[str, str]) -> str:
    """Say in one phrase what happens to a type."""
    if "not tried" in cell:
        return f"not tried: {cell['not tried']}"
    one, several, lookup, _ = [*cell.values()][1:]
    wrong = [each for each in cell.values() if each.startswith(("ERROR", "DIFFERENT"))]
    if wrong:
        return wrong[0]
    reason = next((said for each in (one, several, lookup) for words, said in REASONS.items() if words in each), "")
    if one.startswith("refused"):
        return f"refused with a draft: {reason}" if lookup == "identical" else f"refused: {reason}"
    if several.startswith("refused"):
        return f"one sequence at a time: {reason}"
    return "decoded, rows and batches" + (f"; no prompt lookup: {reason}" if lookup.startswith("refused") else "")


def table(result: dict[str, Any]) -> str:
    """Return the manual's table of all types, by what happens to them."""
    types = defaultdict(list)
    for cell in result["families"]:
        types[outcome(cell)].append(f"`{cell['family']}`")
    lines = [f"| {what} | {len(found)}: {', '.join(found)} |" for what, found in sorted(types.items())]
    return "\n".join(
        ["| what happens | types of models |", "|---|---|", *(re.sub(r"\s+", " ", each) for each in lines)]
    )


def families(new_tokens: int = 12) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    cells = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        cells.append(of_type(model_type, new_tokens))
        print(f"{model_type:30} {outcome(cells[-1])[:150]}", flush=True)
    return {"families": cells}


if __name__ == "__main__":
    main(__doc__, families)
