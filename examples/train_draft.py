"""Train the demo's DSpark draft on answers that its target wrote itself. Resumes where it stopped.

python examples/train_draft.py --target out/target --train_file train.jsonl --output_dir out/draft
"""

import argparse
import json
from pathlib import Path

import torch
from muon import MuonWithAdamW
from regenerate import regenerate
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import DSparkConfig, DSparkDraftModel, DSparkTrainer, DSparkTrainingArguments
from hf_dspark.data.examples import prepare_examples
from hf_dspark.training.resume import last_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="out/target")
    parser.add_argument("--train_file", required=True, help="GSM8K train.jsonl: only its questions are used")
    parser.add_argument("--output_dir", default="out/draft")
    parser.add_argument("--num_samples", type=int, default=2, help="answers per question")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--markov_rank", type=int, default=256, help="0 trains DFlash")
    options = parser.parse_args()

    answers = Path(options.output_dir) / "answers.jsonl"
    regenerate(options.target, options.train_file, str(answers), options.num_samples)

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    config = DSparkConfig.from_target(
        target.config, num_hidden_layers=2, block_size=7, target_layer_ids=[1, 4, 7, 9, 10],
        mask_token_id=tokenizer.mask_token_id, markov_rank=options.markov_rank,
        confidence_head_with_markov=options.markov_rank > 0,
    )  # fmt: skip
    draft = DSparkDraftModel(config)
    lines = [json.loads(line) for line in answers.read_text().strip().split("\n")]
    lines.sort(key=lambda line: (line["index"], line["sample"]))
    rows = prepare_examples(lines, tokenizer, config.block_size, target.config.vocab_size, max_length=512)
    arguments = DSparkTrainingArguments(
        output_dir=options.output_dir, num_train_epochs=options.epochs, per_device_train_batch_size=16,
        per_device_eval_batch_size=16, num_anchors=48, learning_rate=4e-3, lr_scheduler_type="linear", warmup_steps=40,
        logging_steps=20, eval_strategy="steps", eval_steps=300, save_steps=100, save_total_limit=2,
        train_sampling_strategy="group_by_length", report_to="none", seed=0,
    )  # fmt: skip
    trainer = DSparkTrainer(
        draft, target, arguments, processing_class=tokenizer, train_dataset=rows[200:], eval_dataset=rows[:200],
        optimizers=(MuonWithAdamW(draft.named_parameters(), 4e-3, 0.05, lookup_tables=("markov_w", "proj.bias")),
        None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last_checkpoint(options.output_dir))
    print(trainer.evaluate())
    trainer.state.save_to_json(str(Path(options.output_dir) / "trainer_state.json"))
    draft.to(torch.bfloat16).save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
