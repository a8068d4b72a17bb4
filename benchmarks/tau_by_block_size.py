"""Tokens that a round commits with longer blocks, by DSpark, which sees what it has drawn, and by DFlash.

python benchmarks/tau_by_block_size.py --work_dir out/gsm8k --num_answers 3675 --steps 2000 \
    --output benchmarks/results/tau_by_block_size.json

Data, target and recipe are those of `compare_drafts.py`, which says how to make the folder; what is missing in it is
made, draft by draft, in half an hour to an hour each. The DFlash drafts have the fill-in layout of transformers' own.
Every block size has a draft of its own, as long blocks take training that short ones do not need. Decoded are the
held-out prompts of each domain, four times each at temperature 1, with whole blocks; the report's Figures 2 and 4 show
the result. Knows nothing of times: `drafting.py block_sizes` measures those of rounds, and `compare.py --block_size`
those of calls.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import domains
from compare_drafts import Recipe, answered, trained_draft
from pair import write_result
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.provenance import provenance
from hf_dspark.targets.fingerprint import weight_hash

DRAFTS = {"dspark": "dspark_2", "dflash": "dflash_fill_in_2"}
NUM_SAMPLES = 4  # of each prompt at temperature 1: tau of a few hundred rounds is known to some per cent only


def rows_of(
    kind: str,
    draft: DraftModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    work_dir: Path,
    num_prompts: int,
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """Return what a draft reaches on the held-out prompts, a row per regime in the form that Figure 4 reads.

    Args:
        kind (`str`): Of [`DRAFTS`].
        draft (`DraftModel`): Verified block by block, whole.
        target, tokenizer: Who decodes.
        work_dir (`Path`): Has the prompts, by domain.
        num_prompts, max_new_tokens (`int`): Per domain and regime, and per prompt, at most.
    """
    measured = domains.measured_acceptance(
        target, draft, tokenizer, work_dir, num_prompts, max_new_tokens, NUM_SAMPLES
    )
    config = draft.config
    return [
        {
            "kind": kind, "layers": config.num_hidden_layers, "block_size": config.block_size, "regime": regime,
            "head": config.markov_head_type if config.markov_rank else None, "parameters": draft.num_parameters(),
            "weights": weight_hash(draft), "sample_from_anchor": config.sample_from_anchor,
            "tau": {domain: regimes[regime]["tau"] for domain, regimes in measured.items()},
            "acceptance": {domain: regimes[regime]["acceptance"] for domain, regimes in measured.items()},
            "rounds": {domain: regimes[regime]["rounds"] for domain, regimes in measured.items()},
        }
        for regime in domains.REGIMES
    ]  # fmt: skip


def ratio_to_dflash(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Return DSpark's tau over DFlash's, by regime, domain and block size, where both were measured."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    taus = {(row["kind"], row["regime"], row["block_size"]): row["tau"] for row in rows}
    for (kind, regime, size), tau in taus.items():
        dflash = taus.get(("dflash", regime, size))
        if kind == "dspark" and dflash is not None:
            for domain, value in tau.items():
                found.setdefault(regime, {}).setdefault(domain, {})[size] = value / dflash[domain]
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return tau of each kind by block size, how much more DSpark's is, and the acceptance by position, as tables."""
    sizes = sorted({row["block_size"] for row in result["block_sizes"]})
    lines = ["| tau | " + " | ".join(f"γ = {size}" for size in sizes) + " |", "|---" * (1 + len(sizes)) + "|"]
    cells = {(row["kind"], row["regime"], row["block_size"]): row["tau"] for row in result["block_sizes"]}
    ratios = ratio_to_dflash(result["block_sizes"])
    for regime in domains.REGIMES:
        for domain in next(iter(cells.values())):
            for kind in DRAFTS:
                taus = [cells.get((kind, regime, size), {}).get(domain) for size in sizes]
                shown = " | ".join("–" if tau is None else f"{tau:.2f}" for tau in taus)
                lines.append(f"| {domain}, {regime}, {kind} | {shown} |")
            by_size = ratios.get(regime, {}).get(domain, {})
            shown = " | ".join(f"{by_size[size]:.2f}x" if size in by_size else "–" for size in sizes)
            lines.append(f"| {domain}, {regime}, dspark over dflash | {shown} |")
    lines += ["", "| | acceptance by position |", "|---|---|"]
    for row in result["block_sizes"]:
        for domain, rates in row["acceptance"].items():
            name = f"{domain}, {row['regime']}, {row['kind']}, γ = {row['block_size']}"
            lines.append(f"| {name} | {domains.shown_rates(rates)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", default="out/gsm8k", help="data and target; gets answers and drafts")
    parser.add_argument("--block_sizes", type=int, nargs="+", choices=domains.POSITION_DECAYS, default=[4, 7, 15])
    parser.add_argument("--num_answers", type=int, default=Recipe.num_prompts, help="to train on, in each regime")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="of each training")
    parser.add_argument("--num_prompts", type=int, default=50, help="decoded per domain and regime")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--output", help="result file")
    parser.add_argument("--table", help="only print the table of this result file")
    options = parser.parse_args()
    if options.table:
        print(markdown(json.loads(Path(options.table).read_text())))
        return
    origin = provenance(options=vars(options))  # of what runs from here on
    work_dir = Path(options.work_dir)
    target, tokenizer = domains.load_target(work_dir)
    rows: list[dict[str, Any]] = []
    trained_at: dict[str, str | None] = {}
    recipes = [Recipe(options.num_answers, steps=options.steps, block_size=size) for size in options.block_sizes]
    answers = answered(target, tokenizer, work_dir, recipes[0])  # all learn from the same
    for recipe in recipes:
        for kind, name in DRAFTS.items():
            draft = trained_draft(name, target, tokenizer, answers, work_dir, recipe)
            folder = recipe.folder(work_dir, name)
            trained_at[folder.name] = domains.trained_at(folder)
            rows += rows_of(kind, draft, target, tokenizer, work_dir, options.num_prompts, options.max_new_tokens)
    result = {
        "provenance": origin, "target": f"target of {work_dir.name}", "steps": options.steps,
        "answers": len(answers), "num_prompts": options.num_prompts, "max_new_tokens": options.max_new_tokens,
        "trained_at": trained_at, "block_sizes": rows, "ratio_to_dflash": ratio_to_dflash(rows),
    }  # fmt: skip
    print(markdown(result))
    if options.output:
        write_result(Path(options.output), result)


if __name__ == "__main__":
    main()
