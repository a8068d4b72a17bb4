"""Train a draft for SmolLM2 on the target's own answers, with Muon. The same command goes on where it stopped.

python examples/smollm2/train.py --target out/smollm2/target --train_file out/smollm2/answers.jsonl \\
    --output_dir out/smollm2/draft --num_train_epochs 3

`hf-dspark train` does the same with AdamW. Small drafts learn in fewer steps with Muon.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import DSparkConfig, DSparkDraftModel, DSparkTrainer, DSparkTrainingArguments
from hf_dspark.data.conversations import prepare_rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from muon import MuonWithAdamW

EVAL_ROWS = 100
LOOKUP_TABLES = ("markov_w", "proj.bias")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="out/smollm2/target")
    parser.add_argument("--train_file", required=True, help="answers, as hf-dspark regenerate writes them")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--draft", help="go on from the weights of this draft, with a new schedule")
    parser.add_argument("--feature_cache_dir", help="where the target's states are kept for later epochs")
    parser.add_argument("--num_train_epochs", type=float, default=3.0)
    parser.add_argument("--max_steps", type=int, default=-1, help="stop then; for short comparisons")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--copy_layers_from", type=int, help="begin with the target's layers from this one on")
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--batch_size", type=int, default=5)
    parser.add_argument("--num_anchors", type=int, default=32, help="blocks of an answer and step")
    parser.add_argument("--num_hidden_layers", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=7)
    parser.add_argument("--markov_rank", type=int, default=64, help="0 trains DFlash")
    parser.add_argument("--draft_vocab_size", type=int, help="propose the most frequent tokens of the answers alone")
    parser.add_argument("--target_layer_ids", type=int, nargs="+", default=[1, 8, 14, 20, 27])
    options = parser.parse_args()

    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16)
    config = DSparkConfig.from_target(
        target.config, num_hidden_layers=options.num_hidden_layers, block_size=options.block_size,
        target_layer_ids=options.target_layer_ids, markov_rank=options.markov_rank,
        confidence_head_with_markov=options.markov_rank > 0, draft_vocab_size=options.draft_vocab_size,
    )  # fmt: skip
    answers = [json.loads(line) for line in Path(options.train_file).read_text().splitlines()]
    if options.draft is not None:
        draft = DSparkDraftModel.from_pretrained(options.draft, dtype=torch.float32)
    else:
        draft = DSparkDraftModel(config)
        if options.copy_layers_from is not None:
            for index, layer in enumerate(draft.layers):  # norms of queries and keys are the draft's own
                theirs = target.model.layers[options.copy_layers_from + index].state_dict()
                layer.load_state_dict(theirs, strict=False)
        if options.draft_vocab_size is not None:
            keep_frequent_tokens(draft, target, answers)
    answers.sort(key=lambda answer: (answer["index"], answer["text"]))
    order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [answers[index] for index in order]
    rows = prepare_rows(chosen, tokenizer, config.block_size, target.config.vocab_size, max_length=1024)
    arguments = DSparkTrainingArguments(
        output_dir=options.output_dir, num_train_epochs=options.num_train_epochs, max_steps=options.max_steps,
        num_anchors=options.num_anchors,
        per_device_train_batch_size=options.batch_size, per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate, lr_scheduler_type="linear",
        warmup_steps=100 if options.max_steps < 0 else options.max_steps // 6, logging_steps=50,
        eval_strategy="steps", eval_steps=500, save_steps=100, save_total_limit=1,
        train_sampling_strategy="group_by_length", report_to="none", seed=0, bf16=True,
        use_cpu=not torch.accelerator.is_available(), feature_cache_dir=options.feature_cache_dir,
    )  # fmt: skip
    optimizer = None  # Trainer's own AdamW
    if options.optimizer == "muon":
        optimizer = MuonWithAdamW(draft.named_parameters(), options.learning_rate, 0.05, LOOKUP_TABLES)
    trainer = DSparkTrainer(
        draft, target, arguments, processing_class=tokenizer, train_dataset=rows[EVAL_ROWS:],
        eval_dataset=rows[:EVAL_ROWS], optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output_dir))
    print(trainer.evaluate())
    trainer.state.save_to_json(str(Path(options.output_dir) / "trainer_state.json"))
    draft.to(torch.bfloat16).save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
