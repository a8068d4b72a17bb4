"""DSpark, DFlash and Eagle3 drafts of one target on three domains: same data, same steps, same trainer.

python examples/domains.py --gsm8k train.jsonl --prose tinyshakespeare.txt --output_dir out/domains
python examples/train_target.py --train_file out/domains/*_train.jsonl --test_file out/domains/*_test.jsonl \\
    --num_hidden_layers 6 --epochs 2 --output_dir out/domains/target
python benchmarks/domains.py --work_dir out/domains --output benchmarks/results/domains.json

Every stage resumes where it stopped. The training curves go into the result.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pair import GREEDY, SAMPLING, acceptance, provenance_of, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import (
    DSparkConfig,
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    Eagle3Config,
    Eagle3DraftModel,
    regenerate,
)
from hf_dspark.data.prompts import read_json_lines
from hf_dspark.files import differences, digest
from hf_dspark.measuring.tables import markdown_table, number
from hf_dspark.provenance import provenance
from hf_dspark.targets.fingerprint import fingerprint

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from muon import MuonWithAdamW  # noqa: E402

DOMAINS = ("math", "code", "prose")
REGIMES = {"temperature 1": SAMPLING, "greedy": GREEDY}
GAMMA = 7
# By block size: longer blocks let more weight to their last tokens, as DFlash's authors do (8: 4, 16: 7).
POSITION_DECAYS = {4: 2.0, GAMMA: 4.0, 15: 7.0}
DSPARK = {"cross_entropy_weight": 0.1, "l1_weight": 0.9, "confidence_weight": 1.0}
DFLASH = {"cross_entropy_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0}
# 0.8 to the power of the step, as DeepSpec weighs Eagle3's steps, however many there are.
EAGLE3 = {
    "cross_entropy_weight": 0.0, "l1_weight": 0.0, "confidence_weight": 0.0, "soft_cross_entropy_weight": 1.0,
    "position_decay": 4.4814,
}  # fmt: skip
DRAFTS = {
    "dspark_2": (2, 128, DSPARK),
    "dspark_5": (5, 128, DSPARK),
    "dflash_2": (2, 0, DFLASH),
    "dflash_5": (5, 0, DFLASH),
    "dflash_fill_in_2": (2, 0, DFLASH),
    "eagle3": (1, None, EAGLE3),
}
# Their anchor's slot predicts nothing: the layout of transformers' own DFlash. For `compare.py`; here only if named.
FILL_IN = {"dflash_fill_in_2"}
NUM_EVAL_ROWS = 300
RECIPE = "recipe.json"  # in the folder of each trained model


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a file that a script has written.

    Raises:
        ValueError: If a line is not JSON, naming the first one.
    """
    rows, faults = read_json_lines(str(path))
    if faults:
        raise ValueError(f"{faults[0]}: delete the line, or make the file anew")
    return [row for _, row in rows]


def domains_in(work_dir: Path) -> list[str]:
    """Return the domains whose training and test rows a folder holds."""
    parts = ("train", "test")
    return [name for name in DOMAINS if all((work_dir / f"{name}_{part}.jsonl").exists() for part in parts)]


def load_target(work_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    target = AutoModelForCausalLM.from_pretrained(work_dir / "target", dtype=torch.float32).eval()
    return target, AutoTokenizer.from_pretrained(work_dir / "target")


def training_prompts(work_dir: Path) -> dict[str, list[str]]:
    """Return the prompts of each domain's training rows."""
    return {
        domain: [row["prompt"] for row in read_rows(work_dir / f"{domain}_train.jsonl")]
        for domain in domains_in(work_dir)
    }


def answers_to(prompts: list[str], path: Path, target, tokenizer, **options) -> list[dict]:
    """Let the target answer into a file; return the answers of two tokens or more, as token ids."""
    regenerate(target, prompts, tokenizer, path, batch_size=64, **options)
    return [
        {name: row[name] for name in ("prompt_ids", "completion_ids")}
        for row in read_rows(path)
        if len(row.get("completion_ids", ())) > 1
    ]


def answer_all(target, tokenizer, work_dir: Path, num_prompts: int, max_new_tokens: int) -> dict[str, list[dict]]:
    """Let the target write what the drafts are trained on; a small domain is answered several times."""
    answers = {}
    for domain, prompts in training_prompts(work_dir).items():
        prompts, path = prompts[:num_prompts], work_dir / f"{domain}_answers.jsonl"
        options = {"num_samples": max(1, num_prompts // len(prompts)), "max_new_tokens": max_new_tokens, **SAMPLING}
        answers[domain] = answers_to(prompts, path, target, tokenizer, **options)
    return answers


def answer_greedily(target, tokenizer, work_dir: Path, num_prompts: int, max_new_tokens: int) -> dict[str, list[dict]]:
    """Let the target answer the prompts after those of `answer_all` greedily, or the same in a small domain.

    Greedy decoding of a small target runs into loops that sampling leaves, and that no sampled answer shows.
    """
    answers = {}
    for domain, prompts in training_prompts(work_dir).items():
        others, path = prompts[num_prompts : 2 * num_prompts], work_dir / f"{domain}_greedy_answers.jsonl"
        answers[domain] = answers_to(
            others or prompts, path, target, tokenizer, max_new_tokens=max_new_tokens, **GREEDY
        )
    return answers


def training_rows(answers: dict[str, list[dict]]) -> list[dict]:
    """Return the answers domain by turns, so that every batch and the evaluation rows hold all of them."""
    return [row for group in zip(*answers.values(), strict=False) for row in group]


def make_draft(
    name: str, target: PreTrainedModel, tokenizer, block_size: int = GAMMA
) -> DSparkDraftModel | Eagle3DraftModel:
    num_layers, markov_rank, _ = DRAFTS[name]
    last_tapped = target.config.num_hidden_layers - 2  # from the first layer to the last that may be tapped
    facts = {"block_size": block_size, "target_layer_ids": [round(last_tapped * part / 4) for part in range(5)]}
    torch.manual_seed(0)
    if markov_rank is None:
        return Eagle3DraftModel(Eagle3Config.from_target(target.config, **facts))
    return DSparkDraftModel(
        DSparkConfig.from_target(
            target.config,
            **facts,
            num_hidden_layers=num_layers,
            markov_rank=markov_rank,
            mask_token_id=tokenizer.mask_token_id,
            enable_confidence_head=markov_rank > 0,
            confidence_head_with_markov=markov_rank > 0,
            sample_from_anchor=name not in FILL_IN,
        )  # fmt: skip
    )


def train(
    name: str,
    target,
    tokenizer,
    rows: list[dict],
    folder: Path,
    steps: int,
    num_anchors: int = 32,
    feature_cache_dir: str | None = None,
    block_size: int = GAMMA,
) -> list[dict]:
    """Train one draft to its end, and return its curve."""
    weights = {"position_decay": POSITION_DECAYS[block_size]} | DRAFTS[name][2]
    recipe = {"steps": steps, "num_anchors": num_anchors, "block_size": block_size, **weights}
    note_recipe(folder, recipe | learnt_from(target, rows))
    if not (folder / "curve.json").exists():
        draft = make_draft(name, target, tokenizer, block_size)
        arguments = DSparkTrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, per_device_eval_batch_size=16,
            num_anchors=num_anchors, learning_rate=4e-3, lr_scheduler_type="linear", warmup_steps=40, logging_steps=25,
            save_steps=100, save_total_limit=1, train_sampling_strategy="group_by_length", report_to="none",
            seed=0, max_length=384, feature_cache_dir=feature_cache_dir, **weights,
        )  # fmt: skip
        optimizer = MuonWithAdamW(draft.named_parameters(), 4e-3, 0.05, lookup_tables=("markov_w", "proj.bias"))
        trainer = DSparkTrainer(
            draft, target, arguments, train_dataset=rows[NUM_EVAL_ROWS:], eval_dataset=rows[:NUM_EVAL_ROWS],
            processing_class=tokenizer, optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
        trainer.evaluate()
        draft.save_pretrained(folder)
        curve = [
            {key: round(value, 4) for key, value in entry.items() if key in ("step", "loss", "tau", "eval_tau")}
            for entry in trainer.state.log_history
        ]
        (folder / "curve.json").write_text(json.dumps(curve))
    return json.loads((folder / "curve.json").read_text())


def learnt_from(target: PreTrainedModel, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what identifies the answers that a model learns from, and the target that gave them."""
    return {"target": fingerprint(target), "num_rows": len(rows), "rows": digest(rows)}


def note_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Write down how the model of a folder is trained, with the revision that begins it.

    Raises:
        ValueError: If the folder holds a model that was trained in another way: scripts share folders.
    """
    path = folder / RECIPE
    if path.exists():
        different = differences(json.loads(path.read_text())["recipe"], recipe)
        if different:
            raise ValueError(
                f"{folder} holds a model that was trained in another way, which differs in {different}: give another "
                "--work_dir, or delete the folder"
            )
    elif folder.exists():
        raise ValueError(f"{folder} does not say how its model was trained: give another --work_dir, or delete it")
    else:
        folder.mkdir(parents=True)
        path.write_text(json.dumps({"revision": provenance().get("revision"), "recipe": recipe}, indent=1) + "\n")


def trained_at(folder: Path) -> str | None:
    """Return the revision that trained the model of a folder."""
    return json.loads((folder / RECIPE).read_text())["revision"]


def measured_acceptance(
    target, draft, tokenizer, work_dir: Path, num_prompts: int, max_new_tokens: int, num_samples: int = 1
) -> dict[str, dict[str, dict]]:
    """Return the acceptance of whole blocks on held-out prompts, by domain and regime.

    At temperature 1 each prompt is answered `num_samples` times.
    """
    measured = {}
    for domain in domains_in(work_dir):
        prompts = read_rows(work_dir / f"{domain}_test.jsonl")[:num_prompts]
        for regime, sampling in REGIMES.items():
            times = num_samples if sampling["do_sample"] else 1
            found = acceptance(target, draft, times * prompts, tokenizer, max_new_tokens=max_new_tokens, **sampling)
            measured.setdefault(domain, {})[regime] = found
    return measured


def markdown(result: Mapping[str, Any]) -> str:
    """Return tau of each draft by domain, at temperature 1 and greedy, as a table."""
    columns = [(domain, regime) for regime in REGIMES for domain in DOMAINS]
    rows = [
        [name, *(number(draft["measured"][domain][regime]["tau"]) for domain, regime in columns)]
        for name, draft in result["drafts"].items()
    ]
    return markdown_table(["tau", *(f"{domain}, {regime}" for domain, regime in columns)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", default="out/domains", help="holds data and target, gets answers and drafts")
    parser.add_argument(
        "--drafts", nargs="+", choices=DRAFTS, default=[name for name in DRAFTS if name not in FILL_IN]
    )
    parser.add_argument("--num_prompts", type=int, default=1000, help="answered per domain")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--num_test_prompts", type=int, default=60, help="decoded per domain and temperature")
    parser.add_argument("--max_new_tokens", type=int, default=160)
    parser.add_argument("--output", help="result file")
    options = parser.parse_args()
    origin = provenance_of(parser, options)
    work_dir = Path(options.work_dir)
    target, tokenizer = load_target(work_dir)
    answers = answer_all(target, tokenizer, work_dir, options.num_prompts, options.max_new_tokens)
    lacking = [domain for domain in DOMAINS if domain not in answers]
    if lacking:
        raise ValueError(f"{work_dir} lacks the rows of {', '.join(lacking)}: make them with examples/domains.py")
    rows = training_rows(answers)
    result = {"provenance": origin, "steps": options.steps, "rows": len(rows), "drafts": {}}
    for name in options.drafts:
        folder = work_dir / f"{name}_{options.steps}"
        curve = train(name, target, tokenizer, rows, folder, options.steps)
        kind = Eagle3DraftModel if DRAFTS[name][1] is None else DSparkDraftModel
        draft = kind.from_pretrained(folder).eval()
        measured = measured_acceptance(
            target, draft, tokenizer, work_dir, options.num_test_prompts, options.max_new_tokens
        )
        result["drafts"][name] = {
            "parameters": draft.num_parameters(), "layers": DRAFTS[name][0], "curve": curve, "measured": measured,
        }  # fmt: skip
    print(markdown(result))
    if options.output:
        write_result(options.output, result)


if __name__ == "__main__":
    main()
