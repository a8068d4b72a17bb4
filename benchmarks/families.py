"""What happens to the families of the installed transformers: drafted in batches, one by one, or refused and why.

python benchmarks/families.py --output benchmarks/results/families.json

Each family that keeps a recurrent state is a tiny target with random weights, of its own code (`tests/hybrids.py`).
Rows of a ragged batch are decoded greedily in float32, with an untrained draft and without. A family is right if all
rows are those of plain `generate()`, each prompt alone. The other families are only asked by which loop they would be
decoded: their default sizes are made without memory, and nothing is run.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from pair import provenance_of, write_result
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.targets.support import slot_cache_obstacle

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.hybrids import AROUND, REFUSED, TEXT, build, known, stateful_families

LENGTHS = (3, 11, 6)


def decoded(family: str, new_tokens: int) -> dict[str, Any]:
    """Return how many rows of a batch are those of plain decoding, or why the family is refused."""
    target = build(family)
    torch.manual_seed(0)
    try:
        config = DSparkConfig.from_target(target, num_hidden_layers=1, block_size=4, markov_rank=8)
        draft = DSparkDraftModel(config).eval()
        prompts = [torch.randint(3, 90, (length,)) for length in LENGTHS]
        width, options = max(LENGTHS), {"max_new_tokens": new_tokens, "do_sample": False}
        rows = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
        mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()
        found = target.generate(rows, attention_mask=mask, assistant_model=draft, **options)[:, width:]
    except ValueError as refusal:
        return {"family": family, "refused": str(refusal)}
    alone = [target.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), **options) for prompt in prompts]
    same = sum(torch.equal(row, own[0, -new_tokens:]) for row, own in zip(found, alone, strict=True))
    return {"family": family, "rows": len(prompts), "identical": same}


def loop_of(model_type: str, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return by which loop a family is decoded, as its classes and default configuration tell."""
    try:
        with torch.device("meta"):
            target = AutoModelForCausalLM.from_config(config_class())
        return {"family": model_type, "loop": slot_cache_obstacle(target) or "batches"}
    except Exception as error:  # defaults that no checkpoint has
        return {"family": model_type, "loop": f"not known: its default configuration gives no model ({error!r:.80})"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new_tokens", type=int, default=24)
    parser.add_argument("--output", help="write the result there, too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    tested = sorted({*TEXT, *AROUND, *REFUSED} - {"glm5_next_text"})
    cells = []
    for family in tested:
        if not known(family):
            cells.append({"family": family, "refused": f"not in transformers {transformers.__version__}"})
        else:
            cells.append(decoded(family, options.new_tokens))
        result = cells[-1]
        print(f"{family:24}", result.get("refused") or f"{result['identical']} of {result['rows']} rows identical")
    untested = set(stateful_families()) - {family.removesuffix("_text") for family in tested}
    print(f"stateful families without a tiny target: {', '.join(sorted(untested)) or 'none'}")
    stateful = {cell["family"].removesuffix("_text") for cell in cells}
    others = [
        loop_of(config_class.model_type, config_class)
        for config_class in MODEL_FOR_CAUSAL_LM_MAPPING
        if config_class.model_type.removesuffix("_text") not in stateful
    ]
    for each in others:
        print(f"{each['family']:24}", each["loop"])
    write_result(options.output, {"families": cells, "others": others, "provenance": provenance_of(parser, options)})


if __name__ == "__main__":
    main()
