"""What happens to the stateful families of the installed transformers: drafted in batches, or refused and why.

python benchmarks/families.py --output benchmarks/results/families.json

Each family that keeps a recurrent state is a tiny target with random weights, of its own code (`tests/hybrids.py`).
Rows of a ragged batch are decoded greedily in float32, with an untrained draft and without. A family is right if all
rows are those of plain `generate()`, each prompt alone.
"""

import sys
from typing import Any

import torch
import transformers
from bench import ROOT, decode, main

from hf_dspark import DSparkConfig, DSparkDraftModel

sys.path.insert(0, str(ROOT))
from tests.hybrids import AROUND, REFUSED, TEXT, build, known, stateful_families  # noqa: E402

LENGTHS = (3, 11, 6)


def decoded(family: str, new_tokens: int) -> dict[str, Any]:
    """Return how many rows of a batch are those of plain decoding, or why the family is refused."""
    target = build(family)
    torch.manual_seed(0)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    prompts = [torch.randint(3, 90, (length,)).tolist() for length in LENGTHS]
    try:
        config = DSparkConfig.from_target(target, num_hidden_layers=1, block_size=4, markov_rank=8)
        found = decode(target, prompts, assistant=DSparkDraftModel(config).eval(), **options).token_ids
    except ValueError as refusal:
        return {"family": family, "refused": str(refusal)}
    alone = [decode(target, [prompt], **options).token_ids[0] for prompt in prompts]
    same = sum(row == own for row, own in zip(found, alone, strict=True))
    return {"family": family, "rows": len(prompts), "identical": same}


def families(new_tokens: int = 24) -> dict[str, Any]:
    """Decode the stateful families, and ask the others."""
    transformers.logging.set_verbosity_error()
    cells = []
    for family in sorted({*TEXT, *AROUND, *REFUSED} - {"glm5_next_text"}):
        absent = {"family": family, "refused": f"not in transformers {transformers.__version__}"}
        cells.append(decoded(family, new_tokens) if known(family) else absent)
        print(f"{family:24}", cells[-1].get("refused") or f"{cells[-1]['identical']} of {len(LENGTHS)} rows identical")
    stateful = {cell["family"].removesuffix("_text") for cell in cells}
    print("stateful, without a tiny target:", ", ".join(sorted(set(stateful_families()) - stateful)) or "none")
    return {"families": cells}


if __name__ == "__main__":
    main(__doc__, families)
