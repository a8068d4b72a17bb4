"""Let a target answer questions in its own words: sampled at temperature 1, resumable, one JSON line per answer.

python examples/regenerate.py --target out/target --train_file train.jsonl --output_file out/answers.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dspark
from hf_dspark.models.modeling_draft import DraftModel


def regenerate(
    target_path: str,
    train_file: str,
    output_file: str,
    num_samples: int = 2,
    batch_size: int = 128,
    draft: DraftModel | None = None,
) -> None:
    """Answer every question `num_samples` times; answers that are already in `output_file` are skipped."""
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    questions = [json.loads(line)["question"] for line in Path(train_file).read_text().strip().split("\n")]
    prompts = [f"Question: {question}\nAnswer:" for question in questions]
    report = hf_dspark.regenerate(
        target, prompts, tokenizer, output_file, draft, num_samples, batch_size,
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=320,
    )  # fmt: skip
    print(report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--train_file", required=True, help="JSONL with a 'question' field")
    parser.add_argument("--output_file", required=True)
    parser.add_argument("--num_samples", type=int, default=2)
    options = parser.parse_args()
    regenerate(options.target, options.train_file, options.output_file, options.num_samples)
