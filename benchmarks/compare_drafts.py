"""The models that `compare.py` compares: drafts of every kind for one target, and the alternatives of transformers.

python benchmarks/compare_drafts.py --work_dir out/domains

Data and target are those of `domains.py`, of all domains that the folder has rows of; what is missing in it is made.
The target answers half of the training prompts at temperature 1 and half greedily, because it is compared at both:
greedy answers of a small target run into loops that sampled ones do not show. All drafts learn from the same answers,
for the same steps of 8 rows with 64 anchors. Two models are trained for the comparison alone: a DFlash draft in the
fill-in layout, which is exported to transformers' own DFlash, and an autoregressive assistant, a small Qwen3 with the
target's tokenizer and as many parameters as DSpark's draft. Both counts are of what a model owns: the draft borrows
the target's embedding and head, so they do not count; the assistant's embedding, which is its head as well, counts
once. The first 300 answers are kept from training, to evaluate on. For the shipped target and the prompts that it has
not seen:

python examples/domains.py --gsm8k train.jsonl --output_dir out/gsm8k --max_rows 7473 --num_test_rows 73
rm out/gsm8k/code_*.jsonl
cp -r examples/gsm8k_pair/target out/gsm8k/target
cp examples/gsm8k_pair/prompts.jsonl out/gsm8k/math_test.jsonl
python benchmarks/compare_drafts.py --work_dir out/gsm8k --num_answers 3675 --steps 2000

Each training takes about half an hour on one core and resumes at its last 100 steps; so do answers and calibration,
prompt by prompt. The target's states of all rows, which the drafts share, take 4 GB.
"""

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import domains
import torch
from muon import MuonWithAdamW
from pair import REGIMES, held_out_prompts, load_pair
from transformers import (
    AutoModel,
    DataCollatorForSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import DSparkDraftModel, Eagle3DraftModel, calibrate
from hf_dspark.hub.convert import convert_checkpoint
from hf_dspark.models.modeling_draft import DraftModel

MAX_LENGTH = 384  # tokens of a training row, as in domains.py
ASSISTANT_LAYERS = 2  # as DSpark's draft has
WIDTH_UNIT = 8  # the assistant's intermediate size is a multiple
SAME_FIELDS = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "rope_parameters", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class Models:
    """Who is compared, on what.

    Args:
        target, tokenizer: The model that decodes.
        tasks (`Mapping[str, list[dict]]`): Rows with `prompt`, and `completion` where there is one, of each task.
        dspark (`DSparkDraftModel`): Calibrated in the regimes greedy and sampled.
        dflash, eagle3 (`DraftModel`, *optional*): Its rivals in this package.
        fill_in (`PreTrainedModel`, *optional*): A DFlash draft as transformers' own model.
        assistant (`PreTrainedModel`, *optional*): An autoregressive model.
        facts (`Mapping`): How they were made, for the result file.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tasks: Mapping[str, list[dict[str, Any]]]
    dspark: DSparkDraftModel
    dflash: DraftModel | None = None
    eagle3: DraftModel | None = None
    fill_in: PreTrainedModel | None = None
    assistant: PreTrainedModel | None = None
    facts: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Recipe:
    """How much work goes into the models.

    Args:
        num_prompts (`int`): Answered by the target at temperature 1, per domain, and as many others greedily.
        answer_tokens (`int`): Of an answer, at most.
        steps (`int`): Of each training.
        num_anchors (`int`): Blocks that a draft learns from, per row and step, at most.
        calibration_prompts (`int`): Decoded per domain and regime.
        block_size (`int`): gamma of all drafts, one of `domains.POSITION_DECAYS`.
    """

    num_prompts: int = 1000
    answer_tokens: int = 160
    steps: int = 500
    num_anchors: int = 64
    calibration_prompts: int = 50
    block_size: int = domains.GAMMA

    def folder(self, work_dir: Path, name: str) -> Path:
        """Return where a model of this recipe is kept; the steps come last."""
        of_length = "" if self.block_size == domains.GAMMA else f"_{self.block_size}"
        return work_dir / f"{name}{of_length}_{self.steps}"


def shipped_models() -> Models:
    """Return the shipped pair and its held-out prompts: other methods need no training."""
    target, draft, tokenizer = load_pair()
    tasks = {"math": [{"prompt": prompt} for prompt in held_out_prompts()]}
    return Models(target, tokenizer, tasks, draft, facts={"pair": "examples/gsm8k_pair"})


RIVALS = ("dflash", "eagle3", "fill_in", "assistant")  # as `Models` calls them


def trained_models(work_dir: Path, recipe: Recipe, rivals: Collection[str] = RIVALS) -> Models:
    """Train what is missing in a folder, and load DSpark's draft and its rivals.

    Args:
        work_dir (`Path`): Has data and target.
        recipe ([`Recipe`]): How much work goes into each.
        rivals (`Collection[str]`): Of [`RIVALS`].

    Raises:
        ValueError: If the folder lacks target or data.
    """
    tasks = domains.domains_in(work_dir)
    if not (work_dir / "target").exists() or not tasks:
        raise ValueError(
            f"{work_dir} must hold a folder target, and DOMAIN_train.jsonl and DOMAIN_test.jsonl of one of "
            f"{', '.join(domains.DOMAINS)} or more: make them as benchmarks/domains.py says in its first lines, or "
            "compare the shipped pair with --pair"
        )
    target, tokenizer = domains.load_target(work_dir)
    rows = answered(target, tokenizer, work_dir, recipe)

    def trained(name: str) -> DraftModel:
        return trained_draft(name, target, tokenizer, rows, work_dir, recipe)

    dspark = trained("dspark_2")
    assistant_folder = work_dir / f"assistant_{recipe.steps}"  # it drafts as many tokens as transformers asks for
    if "assistant" in rivals:
        train_assistant(target, tokenizer, rows, assistant_folder, recipe.steps, dspark.num_parameters())
    calibrate_regimes(target, dspark, tokenizer, work_dir, recipe)
    fill_in_folder = recipe.folder(work_dir, "dflash_fill_in_2")
    native_folder = fill_in_folder.with_name(f"{fill_in_folder.name}_transformers")
    loaders = {
        "dflash": lambda: trained("dflash_2"),
        "eagle3": lambda: trained("eagle3"),
        "fill_in": lambda: transformers_dflash(trained("dflash_fill_in_2"), target, native_folder),
        "assistant": lambda: Qwen3ForCausalLM.from_pretrained(assistant_folder, dtype=torch.float32).eval(),
    }
    return Models(
        target,
        tokenizer,
        {domain: domains.read_rows(work_dir / f"{domain}_test.jsonl") for domain in tasks},
        dspark,
        **{name: loaders[name]() for name in rivals},
        facts={
            "rows": len(rows), "greedy_rows": len(rows) // 2, "steps": recipe.steps, "rows_per_step": 8,
            "num_anchors": recipe.num_anchors, "max_length": MAX_LENGTH, "block_size": recipe.block_size,
            "trained_at": domains.trained_at(recipe.folder(work_dir, "dspark_2")),
        },
    )  # fmt: skip


def trained_draft(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    work_dir: Path,
    recipe: Recipe,
) -> DraftModel:
    """Train a draft of `domains.DRAFTS` if it is missing in a folder, and load it."""
    folder = recipe.folder(work_dir, name)
    domains.train(
        name, target, tokenizer, rows, folder, recipe.steps, recipe.num_anchors, str(work_dir / "features"),
        recipe.block_size,
    )  # fmt: skip
    kind = Eagle3DraftModel if name == "eagle3" else DSparkDraftModel
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def answered(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, work_dir: Path, recipe: Recipe
) -> list[dict[str, Any]]:
    """Return what drafts and assistant learn from: sampled and greedy answers by turns, as many of each."""
    sampled = domains.answer_all(target, tokenizer, work_dir, recipe.num_prompts, recipe.answer_tokens)
    greedy = domains.answer_greedily(target, tokenizer, work_dir, recipe.num_prompts, recipe.answer_tokens)
    return domains.training_rows(sampled | {f"{domain}, greedy": rows for domain, rows in greedy.items()})


def transformers_dflash(draft: DraftModel, target: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a DFlash draft in the fill-in layout as transformers' own model, exported once."""
    if not (folder / "model.safetensors").exists():
        convert_checkpoint(draft, folder, "transformers", target)
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def calibrate_regimes(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    work_dir: Path,
    recipe: Recipe,
) -> None:
    """Fit the draft's temperatures for both regimes on the last training prompts, in memory; the rounds are kept."""
    prompts = [
        prompt
        for of_domain in domains.training_prompts(work_dir).values()
        for prompt in of_domain[-recipe.calibration_prompts :]
    ]
    for regime, sampling in REGIMES.items():
        calibrate(
            target, draft, prompts, tokenizer, domain=regime, max_new_tokens=recipe.answer_tokens,
            output_file=recipe.folder(work_dir, "dspark_2") / f"rounds_{regime}.jsonl", **sampling,
        )  # fmt: skip


# ---- the autoregressive assistant


def assistant_config(target: PreTrainedConfig, num_parameters: int) -> Qwen3Config:
    """Return a Qwen3 of the target's width, whose MLPs are as wide as its number of parameters allows.

    Args:
        target (`PreTrainedConfig`): Of the target; vocabulary, heads and positions are the same.
        num_parameters (`int`): How many it shall have, the shared embedding and head counted once.

    Raises:
        ValueError: If so few parameters do not make a model of this width.
    """
    same = {name: getattr(target, name) for name in SAME_FIELDS}

    def config(intermediate_size: int) -> Qwen3Config:
        return Qwen3Config(
            **same, intermediate_size=intermediate_size, num_hidden_layers=ASSISTANT_LAYERS, tie_word_embeddings=True
        )

    narrow, wide = (count_parameters(config(size)) for size in (WIDTH_UNIT, 2 * WIDTH_UNIT))
    units = 1 + round((num_parameters - narrow) / (wide - narrow))
    if units < 1:
        raise ValueError(
            f"an assistant of {num_parameters} parameters is smaller than {ASSISTANT_LAYERS} layers and the embedding "
            f"of {target.vocab_size} tokens in {target.hidden_size} dimensions: compare with a larger draft"
        )
    return config(units * WIDTH_UNIT)


def count_parameters(config: Qwen3Config) -> int:
    """Return the parameters of a model that is not built, shared ones once."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(config).num_parameters()


def assistant_row(row: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return an answer with its prompt as a row for transformers' Trainer: only the answer has labels."""
    prompt, answer = list(row["prompt_ids"]), list(row["completion_ids"])
    return {
        "input_ids": (prompt + answer)[:MAX_LENGTH],
        "labels": ([-100] * len(prompt) + answer)[:MAX_LENGTH],
    }


def train_assistant(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Sequence[int]]],
    folder: Path,
    steps: int,
    num_parameters: int,
) -> None:
    """Train the assistant to its end with transformers' Trainer: rows, steps, schedule and optimiser of the drafts."""
    domains.note_recipe(folder, {"steps": steps, "parameters": num_parameters} | domains.learnt_from(target, rows))
    if (folder / "curve.json").exists():
        return
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(assistant_config(target.config, num_parameters))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, per_device_eval_batch_size=16,
        learning_rate=4e-3, lr_scheduler_type="linear", warmup_steps=40, logging_steps=25, save_steps=100,
        save_total_limit=1, train_sampling_strategy="group_by_length", report_to="none", seed=0,
    )  # fmt: skip
    data = [assistant_row(row) for row in rows]
    trainer = Trainer(
        model, arguments, DataCollatorForSeq2Seq(tokenizer), train_dataset=data[domains.NUM_EVAL_ROWS :],
        eval_dataset=data[: domains.NUM_EVAL_ROWS], processing_class=tokenizer,
        optimizers=(MuonWithAdamW(model.named_parameters(), lr=4e-3, weight_decay=0.05), None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    trainer.evaluate()
    model.config.use_cache = True  # Trainer had switched it off
    model.save_pretrained(folder)
    curve = [
        {key: round(value, 4) for key, value in entry.items() if key in ("step", "loss", "eval_loss")}
        for entry in trainer.state.log_history
    ]
    (folder / "curve.json").write_text(json.dumps(curve))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", default="out/domains", help="data and target; gets answers, drafts, assistant")
    parser.add_argument("--num_answers", type=int, default=Recipe.num_prompts, help="per domain, in each regime")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="of each training")
    options = parser.parse_args()
    models = trained_models(Path(options.work_dir), Recipe(options.num_answers, steps=options.steps))
    for name in ("target", "dspark", "dflash", "eagle3", "fill_in", "assistant"):
        print(f"{name}: {getattr(models, name).num_parameters() / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
