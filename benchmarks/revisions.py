"""Is this revision as fast as another one? Two checkouts decode the same prompts by turns, each in its own process.

git worktree add ../before REVISION
python benchmarks/revisions.py ../before . --output benchmarks/results/revisions.json
python benchmarks/revisions.py ../before . --models qwen3-0.6b --output benchmarks/results/revisions_0.6b.json

The number is the ratio of median seconds per round, second checkout over first: below one, the second is faster.
Random weights (`qwen3-0.6b`) accept nothing, so that both run equally many rounds. Decoding is greedy, one row, whole
blocks, with packed copies of the weights where a revision has them. The two processes never compute at the same time.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = {"pair": 128, "qwen3-0.6b": 16}
GEOMETRY = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
PAIR = Path(__file__).resolve().parent.parent / "examples" / "gsm8k_pair"


def load(models: str) -> tuple[Any, Any, list]:
    """Return target, draft and prompts as tensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from hf_dspark import DSparkConfig, DSparkDraftModel

    if models == "pair":
        tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
        texts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
        target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
        draft = DSparkDraftModel.from_pretrained(PAIR / "draft", dtype=torch.float32)
        return target, draft, [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3Config(**GEOMETRY, vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
    target = Qwen3ForCausalLM(config).eval()
    draft = DSparkDraftModel(DSparkConfig.from_target(config, num_hidden_layers=5, block_size=7)).eval()
    return target, draft, [torch.randint(1, 150000, (1, 64)) for _ in range(8)]


def work(models: str) -> None:
    """Answer each line of stdin, the number of a prompt, by a line with what decoding it took."""
    import hf_dspark

    target, draft, prompts = load(models)
    if hasattr(hf_dspark, "DecodingOptions"):
        draft.decoding = hf_dspark.DecodingOptions(policy=hf_dspark.FullBlock())
    else:
        draft.policy = hf_dspark.FullBlock()
    packed = (
        hf_dspark.fast_linears(target, draft, packed=True)
        if hasattr(hf_dspark, "fast_linears")
        else contextlib.nullcontext()
    )
    with packed:
        print("ready", flush=True)
        for line in sys.stdin:
            ids = prompts[int(line) % len(prompts)]
            started = time.perf_counter()
            output = target.generate(
                ids, assistant_model=draft, do_sample=False, max_new_tokens=NEW_TOKENS[models], pad_token_id=0
            )
            seconds = time.perf_counter() - started
            answer = {"seconds": seconds, "rounds": draft.last_stats.rounds, "tokens": output[0].tolist()}
            print(json.dumps(answer), flush=True)


class Worker:
    """A process that decodes with the code of one checkout."""

    def __init__(self, checkout: Path, models: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src"), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", "--models", models],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        while (line := self.process.stdout.readline()).strip() != "ready":
            if not line:
                raise RuntimeError(f"the process of {checkout} ended before it was ready")

    def decode(self, prompt: int) -> dict[str, Any]:
        self.process.stdin.write(f"{prompt}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="two of them")
    parser.add_argument("--models", choices=NEW_TOKENS, default="pair")
    parser.add_argument("--repetitions", type=int, default=24)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.models)
    if len(options.checkouts) != 2:
        parser.error(f"two checkouts are needed, got {len(options.checkouts)}")

    from hf_dspark.provenance import provenance

    workers = [Worker(checkout, options.models) for checkout in options.checkouts]
    for worker in workers:
        worker.decode(0), worker.decode(1)  # warm
    seconds: list[list[float]] = [[], []]
    identical = 0
    for prompt in range(options.repetitions):
        answers = {}
        for index in (0, 1) if prompt % 2 else (1, 0):
            answers[index] = workers[index].decode(prompt)
            seconds[index].append(answers[index]["seconds"] / answers[index]["rounds"])
        identical += answers[0]["tokens"] == answers[1]["tokens"]
    for worker in workers:
        worker.end()
    medians = [statistics.median(values) for values in seconds]
    result = {
        "models": options.models,
        "ratio_of_medians": medians[1] / medians[0],
        "median_of_ratios": statistics.median(new / old for old, new in zip(*seconds, strict=True)),
        "seconds_per_round": medians,
        "identical": f"{identical} of {options.repetitions}",
        "provenance": provenance(options={name: getattr(options, name) for name in ("models", "repetitions")}),
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
