"""Train a draft for any causal LM, on one device or many.

python examples/train_any.py --target Qwen/Qwen3-4B --train_file answers.jsonl --output_dir out/draft --bf16 \\
    --max_length 4096 --packing --num_anchors 512 --learning_rate 6e-4 --num_train_epochs 6
accelerate launch --config_file examples/fsdp.yaml examples/train_any.py --target ... (the same)

Rows as `hf_dspark.regenerate` writes them, or `messages`, `prompt` and `completion`, `text`. All options of
`DSparkTrainingArguments` can be given; resumes from the last checkpoint in output_dir.
"""

import os
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import DSparkConfig, DSparkDraftModel, DSparkTrainer, DSparkTrainingArguments


@dataclass
class DraftArguments:
    """What to train, and on what."""

    target: str = field(metadata={"help": "Model id or folder of the target."})
    train_file: str = field(metadata={"help": "JSON lines."})
    eval_rows: int = field(default=200, metadata={"help": "Held out of the file."})
    draft: str | None = field(default=None, metadata={"help": "A draft to go on from; a new one unless given."})
    num_hidden_layers: int = field(default=5, metadata={"help": "Of a new draft."})
    block_size: int = field(default=7, metadata={"help": "Of a new draft: tokens per block."})
    markov_rank: int = field(default=256, metadata={"help": "Of a new draft; 0 makes it DFlash."})


def main() -> None:
    options, args = HfArgumentParser((DraftArguments, DSparkTrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
    if options.draft is None:
        torch.manual_seed(args.seed)  # the same weights in every process
        draft = DSparkDraftModel(
            DSparkConfig.from_target(
                target.config,
                num_hidden_layers=options.num_hidden_layers,
                block_size=options.block_size,
                markov_rank=options.markov_rank,
                confidence_head_with_markov=options.markov_rank > 0,
            )  # fmt: skip
        )
    else:
        draft = DSparkDraftModel.from_pretrained(options.draft, dtype=torch.float32)
    data = load_dataset("json", data_files=options.train_file, split="train")
    data = data.train_test_split(options.eval_rows, seed=args.seed) if options.eval_rows else {"train": data}
    trainer = DSparkTrainer(
        draft, target, args, train_dataset=data["train"], eval_dataset=data.get("test"), processing_class=tokenizer
    )
    trainer.train(get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None)
    if options.eval_rows:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
