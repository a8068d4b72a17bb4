"""Fine-tune the shipped draft for a domain it has never seen: the Python standard library's own functions.

python examples/finetune.py --output_dir out/finetuned

The target answers the domain's prompts itself, the draft learns from that, is calibrated anew, and is measured before
and after, on the old domain as well. Resumes where it stopped.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from domains import code_rows
from muon import MuonWithAdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dspark import (
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    calibrate,
    evaluate,
    regenerate,
)
from hf_dspark.measuring.metrics import comparison_table
from hf_dspark.provenance import provenance
from hf_dspark.training.resume import last_checkpoint

PAIR = Path(__file__).parent / "gsm8k_pair"
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
REGIMES = {"sampled": SAMPLED, "greedy": {"do_sample": False}}
QUESTION_TOKENS = 96  # the target's own questions end before, most of them
ANSWER = "\nAnswer:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="out/finetuned")
    parser.add_argument("--num_prompts", type=int, default=2000, help="of the new domain")
    parser.add_argument("--replayed", type=int, default=1200, help="of the old domain, which keep it in memory")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--num_test_prompts", type=int, default=40)
    parser.add_argument("--num_test_samples", type=int, default=5, help="answers measured per prompt, when sampled")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    options = parser.parse_args()

    folder, num_tests = Path(options.output_dir), options.num_test_prompts
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(PAIR / "draft", dtype=torch.float32)
    code = [row["prompt"] for row in code_rows()]
    random.Random(0).shuffle(code)
    math = [row["prompt"] for row in read_rows(PAIR / "prompts.jsonl")]
    held_out = {"code": code[:num_tests], "math": math[:num_tests]}
    decoding = {"batch_size": 16, "max_new_tokens": options.max_new_tokens}

    def measured() -> dict[str, Any]:
        samples = {"sampled": options.num_test_samples, "greedy": 1}
        return {
            regime: evaluate(
                target, draft, {name: part * samples[regime] for name, part in held_out.items()}, tokenizer,
                **decoding, **sampling,
            ).to_dict()["tasks"]
            for regime, sampling in REGIMES.items()
        }  # fmt: skip

    before = measured()
    questions = own_questions(target, tokenizer, draft, folder / "questions.jsonl", options.replayed)
    rows = []
    for name, prompts in {"code": code[2 * num_tests :][: options.num_prompts], "math": questions}.items():
        regenerate(target, prompts, tokenizer, folder / f"{name}.jsonl", draft, **decoding, **SAMPLED)
        rows += read_rows(folder / f"{name}.jsonl")
    random.Random(0).shuffle(rows)

    arguments = DSparkTrainingArguments(
        output_dir=str(folder), max_steps=options.steps, per_device_train_batch_size=8, num_anchors=32,
        learning_rate=options.learning_rate, warmup_steps=20, logging_steps=25, save_steps=100, save_total_limit=2,
        report_to="none",
    )  # fmt: skip
    optimizer = MuonWithAdamW(
        draft.named_parameters(), options.learning_rate, 0.05, lookup_tables=("markov_w", "proj.bias")
    )
    trainer = DSparkTrainer(
        draft, target, arguments, train_dataset=rows, processing_class=tokenizer, optimizers=(optimizer, None)
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    calibration_error = {}
    for regime, sampling in REGIMES.items():
        report = calibrate(
            target, draft, code[num_tests : 2 * num_tests], tokenizer,
            max_new_tokens=options.max_new_tokens, **sampling,
        )  # fmt: skip
        calibration_error[regime] = report.mean_ece
        print(f"{regime}: calibration error of the survival {report.mean_ece[0]:.1%} -> {report.mean_ece[1]:.1%}")
    draft.save_pretrained(folder)
    after = measured()
    results: dict[str, Any] = {"provenance": provenance(options=vars(options)), "calibration_error": calibration_error}
    for regime in REGIMES:
        print(f"\n{regime}\n\n{comparison_table(before[regime], after[regime])}")
        results[regime] = {name: {"before": before[regime][name], "after": after[regime][name]} for name in held_out}
    results["log"] = trainer.state.log_history
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def own_questions(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, draft: DSparkDraftModel, path: Path, count: int
) -> list[str]:
    """Return prompts of the old domain that the target writes itself: no data of it is needed.

    They end where the answer begins. Only answers are learnt: of a prompt nothing is ever drafted, and the words of a
    question are harder to guess, so that a loss on them would drown the loss on what counts.
    """
    options = {"batch_size": 16, "max_new_tokens": QUESTION_TOKENS} | SAMPLED
    regenerate(target, ["Question:"], tokenizer, path, draft, count, **options)
    return [f"Question:{row['text'].split(ANSWER)[0]}{ANSWER}" for row in read_rows(path)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().strip().split("\n")]


if __name__ == "__main__":
    main()
