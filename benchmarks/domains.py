"""Drafts of every kind for one target, trained alike: same data, same steps, same trainer. Every stage resumes.

python examples/domains.py --gsm8k train.jsonl --prose tinyshakespeare.txt --output_dir out/domains
python examples/train_target.py --train_file out/domains/*_train.jsonl --test_file out/domains/*_test.jsonl \\
    --num_hidden_layers 6 --epochs 2 --output_dir out/domains/target
python benchmarks/domains.py --work_dir out/domains --output benchmarks/results/domains.json

Measures what DSpark, DFlash and EAGLE-3 commit in a round on three domains. `compare.py` decodes with the same kinds
of drafts, for which the target answers half of the prompts greedily: greedy answers of a small target run into loops
that sampled ones do not show. For the shipped target:

python examples/domains.py --gsm8k train.jsonl --output_dir out/gsm8k --max_rows 7473 --num_test_rows 73
rm out/gsm8k/code_*.jsonl
cp -r examples/gsm8k_pair/target out/gsm8k/target
cp examples/gsm8k_pair/prompts.jsonl out/gsm8k/math_test.jsonl
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import GREEDY, REGIMES, ROOT, SAMPLING, acceptance, held_out_prompts, load_pair, load_target, main
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, Trainer
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import (
    DSparkConfig,
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    Eagle3Config,
    Eagle3DraftModel,
    calibrate,
    convert_checkpoint,
    regenerate,
)
from hf_dspark.provenance import provenance

sys.path.append(str(ROOT / "examples"))
from muon import MuonWithAdamW  # noqa: E402

DOMAINS = ("math", "code", "prose")
GAMMA = 7
# By block size: longer blocks let more weight to their last tokens, as DFlash's authors do (8: 4, 16: 7).
POSITION_DECAYS = {4: 2.0, GAMMA: 4.0, 15: 7.0}
DSPARK = {"cross_entropy_weight": 0.1, "l1_weight": 0.9, "confidence_weight": 1.0}
DFLASH = {"cross_entropy_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0}
# 0.8 to the power of the step, as DeepSpec weighs EAGLE-3's steps, however many there are.
EAGLE3 = {
    "cross_entropy_weight": 0.0, "l1_weight": 0.0, "confidence_weight": 0.0, "soft_cross_entropy_weight": 1.0,
    "position_decay": 4.4814,
}  # fmt: skip
# Layers, rank of the Markov head, losses.
DRAFTS = {
    "dspark_2": (2, 128, DSPARK),
    "dspark_5": (5, 128, DSPARK),
    "dflash_2": (2, 0, DFLASH),
    "dflash_5": (5, 0, DFLASH),
    "dflash_fill_in_2": (2, 0, DFLASH),  # its anchor's slot predicts nothing: the layout of transformers' own DFlash
    "eagle3": (1, None, EAGLE3),
    "mtp": (1, None, EAGLE3),  # one token a round
    "v4_2": (2, 128, DSPARK),
}
NEW_KINDS = {"mtp": {"mtp": True}, "v4_2": {"num_experts": 8, "hc_mult": 4}}
RIVALS = ("dflash", "eagle3", "fill_in", "assistant")  # as [`Models`] calls them
NUM_EVAL_ROWS = 300
MAX_LENGTH = 384  # tokens of a training row
TRAINING = {
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 16, "learning_rate": 4e-3, "warmup_steps": 40,
    "lr_scheduler_type": "linear", "logging_steps": 25, "save_steps": 100, "save_total_limit": 1, "seed": 0,
    "train_sampling_strategy": "group_by_length", "report_to": "none",
}  # fmt: skip
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Models:
    """Who is compared, on what. Rows of tasks have `prompt`, and `completion` where there is one."""

    target: PreTrainedModel
    tokenizer: Any
    tasks: Mapping[str, Rows]
    dspark: DSparkDraftModel
    dflash: DSparkDraftModel | None = None
    eagle3: Eagle3DraftModel | None = None
    fill_in: PreTrainedModel | None = None  # a DFlash draft as transformers' own model
    assistant: PreTrainedModel | None = None
    facts: Mapping[str, Any] | None = None  # how they were made, for the result file


@dataclass(frozen=True)
class Workshop:
    """A folder with `target`, and `DOMAIN_train.jsonl` and `DOMAIN_test.jsonl` of a domain or more. Drafts are
    trained there once: on so many answers per domain and regime, with so many blocks per row and step at most."""

    folder: Path
    num_answers: int
    steps: int
    num_anchors: int = 64
    regimes: Sequence[str] = ("sampled", "greedy")

    def domains(self) -> list[str]:
        """Return the domains whose training and test rows are there."""
        parts = ("train", "test")
        found = [name for name in DOMAINS if all((self.folder / f"{name}_{part}.jsonl").exists() for part in parts)]
        if not found or not (self.folder / "target").exists():
            needed = f"target, and DOMAIN_train.jsonl and DOMAIN_test.jsonl of one of {', '.join(DOMAINS)} or more"
            raise ValueError(f"{self.folder} must hold {needed}: make them as benchmarks/domains.py says")
        return found

    def rows(self, domain: str, part: str) -> Rows:
        return [json.loads(line) for line in (self.folder / f"{domain}_{part}.jsonl").read_text().splitlines()]

    def answers(self, target: PreTrainedModel, tokenizer: Any) -> Rows:
        """Return what drafts learn from: the target's answers, domain and regime by turns, as token ids.

        Greedy answers are to the prompts after those of the sampled ones, or the same in a small domain, which is
        answered several times.
        """
        groups = []
        for domain in self.domains():
            prompts, count = [row["prompt"] for row in self.rows(domain, "train")], self.num_answers
            for regime in self.regimes:
                file = self.folder / f"{domain}_{'' if regime == 'sampled' else 'greedy_'}answers.jsonl"
                asked = prompts[:count] if regime == "sampled" else prompts[count : 2 * count] or prompts
                times = max(1, count // len(asked)) if regime == "sampled" else 1
                options = {"max_new_tokens": 160, "num_samples": times, **REGIMES[regime]}
                regenerate(target, asked, tokenizer, file, batch_size=64, **options)
                lines = map(json.loads, file.read_text().splitlines())
                names = ("prompt_ids", "completion_ids")
                groups.append([{name: row[name] for name in names} for row in lines if len(row.get(names[1], ())) > 1])
        return [row for group in zip(*groups, strict=False) for row in group]

    def draft(self, name: str, target: PreTrainedModel, tokenizer: Any, rows: Rows, block_size: int = GAMMA) -> Any:
        """Train a draft of [`DRAFTS`] to its end if it is missing, and load it."""
        of_length = "" if block_size == GAMMA else f"_{block_size}"
        folder = self.folder / f"{name}{of_length}_{self.steps}"
        weights = {"position_decay": POSITION_DECAYS[block_size]} | DRAFTS[name][2]
        recipe = {"steps": self.steps, "num_anchors": self.num_anchors, "rows": len(rows), **weights}
        note_recipe(folder, recipe)
        if not (folder / "curve.json").exists():
            draft = make_draft(name, target, tokenizer, block_size)
            arguments = DSparkTrainingArguments(
                output_dir=str(folder), max_steps=self.steps, num_anchors=self.num_anchors, max_length=MAX_LENGTH,
                feature_cache_dir=str(self.folder / "-".join(["features", *map(str, draft.config.target_layer_ids)])),
                **TRAINING, **weights,
            )  # fmt: skip
            optimizer = MuonWithAdamW(draft.named_parameters(), 4e-3, 0.05, lookup_tables=("markov_w", "proj.bias"))
            trainer = DSparkTrainer(
                draft, target, arguments, train_dataset=rows[NUM_EVAL_ROWS:], eval_dataset=rows[:NUM_EVAL_ROWS],
                processing_class=tokenizer, optimizers=(optimizer, None),
            )  # fmt: skip
            train_to_the_end(trainer, draft, folder)
        kind = Eagle3DraftModel if DRAFTS[name][1] is None else DSparkDraftModel
        return kind.from_pretrained(folder, dtype="float32").eval()

    def models(self, rivals: Collection[str] = RIVALS, block_size: int = GAMMA) -> Models:
        """Train what is missing, calibrate DSpark's draft in both regimes, and load it with its rivals."""
        domains, (target, tokenizer) = self.domains(), load_target(self.folder / "target")
        rows = self.answers(target, tokenizer)

        def trained(name: str) -> Any:
            return self.draft(name, target, tokenizer, rows, block_size)

        dspark = trained("dspark_2")
        prompts = [row["prompt"] for domain in domains for row in self.rows(domain, "train")[-50:]]
        for regime, sampling in REGIMES.items():
            file = self.folder / f"rounds_{block_size}_{self.steps}_{regime}.jsonl"
            limits = {"max_new_tokens": 160, "output_file": file}
            calibrate(target, dspark, prompts, tokenizer, domain=regime, **limits, **sampling)
        native = self.folder / f"dflash_{block_size}_{self.steps}_transformers"
        makers = {
            "dflash": lambda: trained("dflash_2"),
            "eagle3": lambda: trained("eagle3"),
            "fill_in": lambda: transformers_dflash(trained("dflash_fill_in_2"), target, native),
            # any causal language model with the target's tokenizer
            "assistant": lambda: AutoModelForCausalLM.from_pretrained(self.folder / "assistant", dtype="float32"),
        }
        found, tests = {name: makers[name]() for name in rivals}, {name: self.rows(name, "test") for name in domains}
        facts = {"rows": len(rows), "steps": self.steps, "num_anchors": self.num_anchors, "block_size": block_size}
        return Models(target, tokenizer, tests, dspark, **found, facts=facts)


def shipped_models() -> Models:
    """Return the shipped pair and its held-out prompts: other methods need no training."""
    target, draft, tokenizer = load_pair()
    tasks = {"math": [{"prompt": prompt} for prompt in held_out_prompts()]}
    return Models(target, tokenizer, tasks, draft, facts={"pair": "examples/gsm8k_pair"})


def make_draft(name: str, target: PreTrainedModel, tokenizer: Any, block_size: int = GAMMA) -> Any:
    num_layers, rank, _ = DRAFTS[name]
    last_tapped = target.config.num_hidden_layers - 2  # from the first layer to the last that may be tapped
    facts = {"block_size": block_size, "target_layer_ids": [round(last_tapped * part / 4) for part in range(5)]}
    facts = NEW_KINDS[name] if name == "mtp" else facts | NEW_KINDS.get(name, {})
    torch.manual_seed(0)
    if rank is None:
        return Eagle3DraftModel(Eagle3Config.from_target(target.config, **facts))
    heads = {"markov_rank": rank, "enable_confidence_head": rank > 0, "confidence_head_with_markov": rank > 0}
    layout = {"mask_token_id": tokenizer.mask_token_id, "sample_from_anchor": "fill_in" not in name}
    config = DSparkConfig.from_target(target.config, **facts, num_hidden_layers=num_layers, **heads, **layout)
    return DSparkDraftModel(config)


def train_to_the_end(trainer: Trainer, model: PreTrainedModel, folder: Path) -> None:
    """Train from the last checkpoint on, evaluate, and save the model with its curve, which comes last."""
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    trainer.evaluate()
    model.config.use_cache = True  # Trainer had switched it off
    model.save_pretrained(folder)
    kept, history = ("step", "loss", "tau", "eval_tau", "eval_loss"), trainer.state.log_history
    curve = [{key: round(value, 4) for key, value in entry.items() if key in kept} for entry in history]
    (folder / "curve.json").write_text(json.dumps(curve))


def note_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Write down how the model of a folder is trained, or refuse one that was trained in another way."""
    path = folder / "recipe.json"
    if path.exists():
        if (before := json.loads(path.read_text())["recipe"]) != recipe:
            raise ValueError(f"{folder} holds a model that was trained with {before}: give another --work_dir")
    else:
        folder.mkdir(parents=True)
        path.write_text(json.dumps({"revision": provenance().get("revision"), "recipe": recipe}, indent=1) + "\n")


def transformers_dflash(draft: DSparkDraftModel, target: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a DFlash draft in the fill-in layout as transformers' own model, exported once."""
    if not (folder / "model.safetensors").exists():
        convert_checkpoint(draft, folder, "transformers", target)
    return AutoModel.from_pretrained(folder, dtype="float32").eval()


def measured_acceptance(
    shop: Workshop, target: PreTrainedModel, draft: Any, tokenizer: Any, num_prompts: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the acceptance of whole blocks on held-out prompts, by domain and regime."""
    asked = {domain: shop.rows(domain, "test")[:num_prompts] for domain in shop.domains()}
    return {
        domain: {
            regime: acceptance(target, draft, prompts, tokenizer, max_new_tokens=160, **sampling)
            for regime, sampling in {"temperature 1": SAMPLING, "greedy": GREEDY}.items()
        }
        for domain, prompts in asked.items()
    }


def kinds(
    work_dir: Path = Path("out/domains"),
    drafts: tuple[str, ...] = tuple(name for name in DRAFTS if "fill_in" not in name),
    num_answers: int = 1000,
    steps: int = 500,
    num_prompts: int = 60,
) -> dict[str, Any]:
    """Tokens per round of every kind of draft, by domain."""
    shop = Workshop(work_dir, num_answers, steps, num_anchors=32, regimes=("sampled",))
    target, tokenizer = load_target(work_dir / "target")
    rows, found = shop.answers(target, tokenizer), {}
    for name in drafts:
        draft = shop.draft(name, target, tokenizer, rows)
        found[name] = {
            "parameters": draft.num_parameters(),
            "layers": DRAFTS[name][0],
            "measured": measured_acceptance(shop, target, draft, tokenizer, num_prompts),
        }
    return {"steps": steps, "rows": len(rows), "drafts": found}


if __name__ == "__main__":
    main(__doc__, kinds)
