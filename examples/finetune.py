"""Fine-tune the shipped draft for a domain it has never seen: the Python standard library's own functions.

python examples/finetune.py --output_dir out/finetuned

The target answers the domain's prompts itself, the draft learns from that, is calibrated anew, and is measured before
and after, on the old domain as well. Resumes where it stopped; minutes on two cores.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from domains import code_rows
from muon import MuonWithAdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import (
    DSparkDraftModel,
    DSparkTrainer,
    DSparkTrainingArguments,
    calibrate,
    compare_domains,
    measure_domains,
    regenerate,
)
from hf_dspark.provenance import provenance

PAIR = Path(__file__).parent / "gsm8k_pair"
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="out/finetuned")
    parser.add_argument("--num_prompts", type=int, default=1000, help="of the new domain")
    parser.add_argument("--replayed", type=int, default=1200, help="texts of the old domain, which keep it in memory")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--kept", type=float, default=0.3, help="share of the old weights in the new ones (WiSE-FT)")
    parser.add_argument("--num_test_prompts", type=int, default=40)
    parser.add_argument("--num_test_samples", type=int, default=5, help="answers measured per prompt")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    options = parser.parse_args()

    folder = Path(options.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(PAIR / "draft", dtype=torch.float32)
    old_weights = {name: weight.clone() for name, weight in draft.state_dict().items()}
    code = [row["prompt"] for row in code_rows()]
    random.Random(0).shuffle(code)
    math = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().strip().split("\n")]
    held_out = {"code": code[: options.num_test_prompts], "math": math[: options.num_test_prompts]}
    held_out = {name: prompts * options.num_test_samples for name, prompts in held_out.items()}
    measuring = {"batch_size": 16, "max_new_tokens": options.max_new_tokens} | SAMPLING
    before = measure_domains(target, draft, held_out, tokenizer, **measuring)

    # This target writes its questions as well: the old domain needs no data, only the word that starts it.
    sources = {
        "code": (code[2 * options.num_test_prompts :][: options.num_prompts], 1),
        "math": (["Question:"], options.replayed),
    }
    rows = []
    for name, (prompts, num_samples) in sources.items():
        path = folder / f"{name}.jsonl"
        regenerate(target, tokenizer, prompts, path, draft, num_samples, **measuring)
        rows += [json.loads(line) for line in path.read_text().strip().split("\n")]
    random.Random(0).shuffle(rows)

    arguments = DSparkTrainingArguments(
        output_dir=str(folder), max_steps=options.steps, per_device_train_batch_size=8, num_anchors=32,
        learning_rate=options.learning_rate, warmup_steps=20, logging_steps=25, save_steps=100, save_total_limit=1,
        report_to="none",
    )  # fmt: skip
    optimizer = MuonWithAdamW(
        draft.named_parameters(), options.learning_rate, 0.05, lookup_tables=("markov_w", "proj.bias")
    )
    trainer = DSparkTrainer(
        draft, target, arguments, train_dataset=rows, processing_class=tokenizer, optimizers=(optimizer, None)
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    # Part of the way back to where it came from, a draft keeps most of what it knew, and loses little of what is new.
    mixed = {name: torch.lerp(weight, old_weights[name], options.kept) for name, weight in draft.state_dict().items()}
    draft.load_state_dict(mixed)
    calibration_error = {}
    for regime, sampling in (("sampled", SAMPLING), ("greedy", {"do_sample": False})):
        fresh = code[options.num_test_prompts : 2 * options.num_test_prompts]
        report = calibrate(
            target, draft, fresh, tokenizer, regime, progress=False, max_new_tokens=options.max_new_tokens, **sampling
        )
        calibration_error[regime] = report.mean_ece
        print(f"{regime}: calibration error of the survival {report.mean_ece[0]:.1%} -> {report.mean_ece[1]:.1%}")
    draft.save_pretrained(folder)
    after = measure_domains(target, draft, held_out, tokenizer, **measuring)
    print(compare_domains(before, after))
    results = {"provenance": provenance(), "calibration_error": calibration_error, "log": trainer.state.log_history}
    results |= {name: {"before": before[name].to_dict(), "after": after[name].to_dict()} for name in held_out}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
