"""What happens to every causal LM of the installed transformers: decoded as without a draft, or refused and why.

python benchmarks/families.py --output benchmarks/results/families.json

Tiny targets with random weights (`tests/hybrids.py`) decode one row and a ragged batch, against plain `generate()`.
"""

import sys
from typing import Any

import transformers
from bench import ROOT, decode, main
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_dspark import DSparkConfig, DSparkDraftModel, PromptLookup

sys.path.insert(0, str(ROOT))
from tests.hybrids import build_any  # noqa: E402

SMALL = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8}
DRAFTS = {
    "draft": lambda target: DSparkDraftModel(DSparkConfig.from_target(target, **SMALL)).eval(),
    "prompt lookup": PromptLookup,
}


def decoded(target: PreTrainedModel, name: str, prompts: list[list[int]], alone: list[Any], options: dict) -> str:
    try:
        found = decode(target, prompts, assistant=DRAFTS[name](target), **options).token_ids
    except ValueError as refusal:
        return f"refused: {refusal}"
    except Exception as error:  # whatever a family raises: the sweep goes on
        return f"ERROR: {type(error).__name__}: {error}"
    return "identical" if found == alone[: len(found)] else "DIFFERENT"


def families(new_tokens: int = 12) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    options, cells = {"max_new_tokens": new_tokens, "do_sample": False}, []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        prompts = [[3, 4, 5, 6, 7, 3, 4, 5], [8, 9, 10], [11, 12, 13, 11, 12]]
        try:
            target = build_any(family)
            alone = [decode(target, [prompt], **options).token_ids[0] for prompt in prompts]
        except Exception as error:  # no tiny target, or none that decodes at all
            cells.append({"family": family, "not tried": f"{type(error).__name__}: {error}"[:200]})
            continue
        cells.append({"family": family})
        for name in DRAFTS:
            for rows in (1, len(prompts)):
                cells[-1][f"{name}, rows: {rows}"] = decoded(target, name, prompts[:rows], alone, options)
        print(*(f"{result.splitlines()[0][:40]:40}" for result in cells[-1].values()))
    print("not tried:", ", ".join(cell["family"] for cell in cells if "not tried" in cell))
    return {"families": cells}


if __name__ == "__main__":
    main(__doc__, families)
