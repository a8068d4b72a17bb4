"""Train a draft for SmolLM2 on the target's own answers, with Muon. The same command goes on where it stopped.

python examples/smollm2/train.py --target out/smollm2/target --train_file out/smollm2/answers.jsonl \\
    --eval_file out/smollm2/answers-held_out.jsonl --output_dir out/smollm2/draft --num_train_epochs 3

`hf-dspark train` does the same with AdamW. Small drafts learn in fewer steps with Muon.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_dspark import (
    DSparkConfig,
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    Eagle3Config,
    Eagle3DraftModel,
)
from hf_dspark.data.examples import prepare_examples
from hf_dspark.models.configuration_dspark import MARKOV_HEAD_TYPES, WITHOUT_HEADS
from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.training.resume import last_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from muon import MuonWithAdamW

SHAPE = (
    "num_hidden_layers", "block_size", "markov_rank", "markov_head_type", "draft_vocab_size", "target_layer_ids"
)  # fmt: skip
LOOKUP_TABLES = ("markov_w", "proj.bias")
BY_TOKEN = {"cross_entropy_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0}
# Each kind learns by its own loss: DSpark Eq. 9-12; cross-entropy; soft cross-entropy, each step .8 of the one before.
LOSSES = {
    "dspark": {},
    "dflash": BY_TOKEN,
    "dflash_fill_in": BY_TOKEN,  # the layout of transformers' own DFlash
    "eagle3": BY_TOKEN | {"cross_entropy_weight": 0.0, "soft_cross_entropy_weight": 1.0, "position_decay": 4.4814},
}


def new_draft(options: argparse.Namespace, target: PreTrainedModel, answers: list[dict]) -> DraftModel:
    """Return an untrained draft of the kind, size and vocabulary that is asked for."""
    facts = {name: getattr(options, name) for name in ("num_hidden_layers", "block_size", "target_layer_ids")}
    if options.kind == "eagle3":
        return Eagle3DraftModel(Eagle3Config.from_target(target.config, **facts))
    heads = {"markov_rank": options.markov_rank, "markov_head_type": options.markov_head_type}
    heads = heads if options.kind == "dspark" else WITHOUT_HEADS
    facts |= {"draft_vocab_size": options.draft_vocab_size, "sample_from_anchor": options.kind != "dflash_fill_in"}
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, **facts, **heads))
    if options.draft_vocab_size is not None:
        keep_frequent_tokens(draft, target, answers)
    return draft


@torch.no_grad()
def keep_frequent_tokens(draft: DSparkDraftModel, target: PreTrainedModel, answers: list[dict]) -> None:
    """Let the draft propose the tokens that are most frequent in the answers, with the rows of the target's head."""
    vocab_size, count = draft.config.vocab_size, draft.config.draft_vocab_size
    tokens = torch.tensor([token for answer in answers for token in answer["completion_ids"]])
    counts = torch.bincount(tokens, minlength=vocab_size)
    kept = counts.argsort(descending=True, stable=True)[:count].sort().values
    draft.d2t.copy_(kept - torch.arange(count))
    draft.lm_head.weight.copy_(target.get_output_embeddings().weight[kept])
    print(f"{count} of {vocab_size} tokens make up {counts[kept].sum() / len(tokens):.1%} of the answers", flush=True)


def save(draft: DraftModel, folder: Path) -> None:
    """Write the trained draft; its weights come last, and at once: where they are, training is done."""
    parts = folder / "draft.part"
    draft.to(torch.bfloat16).save_pretrained(parts)
    for path in sorted(parts.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        path.replace(folder / path.name)
    parts.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="out/smollm2/target")
    parser.add_argument("--train_file", required=True, help="answers, as hf-dspark regenerate writes them")
    parser.add_argument("--eval_file", required=True, help="answers to prompts that are not trained on")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--kind", choices=LOSSES, default="dspark")
    parser.add_argument("--draft", help="go on from the weights of this draft, with a new schedule")
    parser.add_argument("--feature_cache_dir", help="where the target's states are kept for later epochs")
    parser.add_argument("--num_train_epochs", type=float, default=3.0)
    parser.add_argument("--max_steps", type=int, default=-1, help="stop then; for short comparisons")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--batch_size", type=int, default=5)
    parser.add_argument("--num_anchors", type=int, default=32, help="blocks of an answer and step")
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=7)
    parser.add_argument("--markov_rank", type=int, default=64, help="of DSpark's head")
    parser.add_argument("--markov_head_type", choices=MARKOV_HEAD_TYPES, default="vanilla")
    parser.add_argument("--losses_of", choices=LOSSES, help="learn by the losses of another kind")
    parser.add_argument("--draft_vocab_size", type=int, help="propose the most frequent tokens of the answers alone")
    parser.add_argument("--target_layer_ids", type=int, nargs="+", default=[1, 8, 14, 20, 27])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="the machine's fast one")
    options = parser.parse_args()
    if options.kind == "eagle3" and options.draft_vocab_size is not None:
        parser.error("an Eagle3 draft proposes all tokens of the target: leave --draft_vocab_size out")
    shaped = [f"--{name}" for name in SHAPE if getattr(options, name) != parser.get_default(name)]
    if options.draft is not None and shaped:
        parser.error(f"--draft has its shape already: leave {', '.join(shaped)} out")

    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype)
    answers, held_out = (
        [json.loads(line) for line in Path(file).read_text().splitlines()]
        for file in (options.train_file, options.eval_file)
    )
    if options.draft is not None:
        draft = {"eagle3": Eagle3DraftModel}.get(options.kind, DSparkDraftModel).from_pretrained(
            options.draft, dtype=torch.float32
        )
    else:
        draft = new_draft(options, target, answers)
    rows, eval_rows = (
        prepare_examples(part, tokenizer, draft.config.block_size, target.config.vocab_size, max_length=1024)
        for part in (answers, held_out)
    )
    arguments = DSparkTrainingArguments(
        output_dir=options.output_dir, num_train_epochs=options.num_train_epochs, max_steps=options.max_steps,
        num_anchors=options.num_anchors,
        per_device_train_batch_size=options.batch_size, per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate, lr_scheduler_type="linear",
        warmup_steps=100 if options.max_steps < 0 else options.max_steps // 6, logging_steps=50,
        eval_strategy="steps", eval_steps=500, save_steps=100, save_total_limit=2,
        train_sampling_strategy="group_by_length", report_to="none", seed=0,
        bf16=options.dtype == "bfloat16",
        use_cpu=not torch.accelerator.is_available(), feature_cache_dir=options.feature_cache_dir,
        **LOSSES[options.losses_of or options.kind],
    )  # fmt: skip
    optimizer = None  # Trainer's own AdamW
    if options.optimizer == "muon":
        optimizer = MuonWithAdamW(draft.named_parameters(), options.learning_rate, 0.05, LOOKUP_TABLES)
    trainer = DSparkTrainer(
        draft, target, arguments, processing_class=tokenizer, train_dataset=rows, eval_dataset=eval_rows,
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last_checkpoint(options.output_dir))
    print(trainer.evaluate())
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(options.output_dir) / "trainer_state.json"))
        save(draft, Path(options.output_dir))


if __name__ == "__main__":
    main()
