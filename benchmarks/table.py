"""Print results of `benchmarks/speed.py` as the Markdown table of the README.

python benchmarks/table.py benchmarks/results/speed.json
"""

import json
import sys
from pathlib import Path


def table(result: dict) -> str:
    """Return one column per temperature and policy, and the provenance below."""
    cells = result["cells"]
    rows = {
        "tau, tokens per round": [f"{cell['tau']:.2f}" for cell in cells],
        "drafts verified per round": [f"{cell['proposed_per_round']:.2f}" for cell in cells],
        "conditional acceptance, positions 1 to 7": [
            " ".join("–" if rate is None else f"{rate:.2f}".lstrip("0") for rate in cell["conditional_acceptance"])
            for cell in cells
        ],
        "plain `generate()`, tokens/s": [f"{cell['plain_tokens_per_second']:.0f}" for cell in cells],
        "with the draft, tokens/s": [f"{cell['tokens_per_second']:.0f}" for cell in cells],
        "speed-up (median / median)": [f"**{cell['speedup']:.2f}x**" for cell in cells],
        "draft + verify + rest, ms per round": [
            f"{cell['draft_ms_per_round']:.1f} + {cell['verify_ms_per_round']:.1f} + {cell['rest_ms_per_round']:.1f}"
            for cell in cells
        ],
        "plain, ms per token": [f"{cell['plain_ms_per_token']:.1f}" for cell in cells],
        "outputs identical to plain": [
            "same law (see tests)" if cell["identical_outputs"] is None else
            f"{cell['identical_outputs']} of {result['num_prompts']}"
            for cell in cells
        ],
    }  # fmt: skip
    names = [
        ("greedy" if cell["temperature"] == 0 else f"temperature {cell['temperature']:g}") + f", {cell['policy']}"
        for cell in cells
    ]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(values) + " |" for name, values in rows.items()]
    origin = result["provenance"]
    return "\n".join(lines) + (
        f"\n\n{result['num_prompts']} held-out prompts, 128 new tokens at most, batch 1, {result['dtype']}, "
        f"{origin['threads']} threads; paired and interleaved in one process. {origin['device']}; torch "
        f"{origin['torch']}, transformers {origin['transformers']}, revision {origin['revision']}: "
        f"`{origin['command']}`."
    )


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
