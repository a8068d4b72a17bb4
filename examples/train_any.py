"""Train a draft for any causal LM, on one device or many: `hf-dspark train`, as a script that resumes by itself.

python examples/train_any.py --target Qwen/Qwen3-4B --train_file answers.jsonl --output_dir out/draft --bf16 \\
    --max_length 4096 --packing --num_anchors 512 --learning_rate 6e-4 --num_train_epochs 6 --eval_rows 200
accelerate launch --config_file examples/fsdp.yaml examples/train_any.py --target ... (the same)

Rows as `hf_dspark.regenerate` writes them, or `messages`, `prompt` and `completion`, `text`. All options of
`DSparkTrainingArguments` can be given.
"""

import argparse
import sys

from hf_dspark.training.resume import last_checkpoint
from hf_dspark_cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_dir", default="")
    folder = parser.parse_known_args()[0].output_dir
    resume = ["--resume_from_checkpoint", "last"] if last_checkpoint(folder) else []
    sys.exit(main(["train", *sys.argv[1:], *resume]))
