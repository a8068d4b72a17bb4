"""Is this revision as fast as another one? Two checkouts decode the same prompts by turns, each in its own process.

git worktree add ../before REVISION
python benchmarks/revisions.py ../before .
python benchmarks/revisions.py ../before . --models qwen3-0.6b
python benchmarks/revisions.py ../before . --models out/smollm2/target examples/smollm2/draft
python benchmarks/revisions.py . . --ways drafts compiled-drafts
python benchmarks/revisions.py . . --ways compiled-plain compiled-drafts

The number is the ratio of median seconds per round, second checkout over first, and that of seconds per token, for
ways that differ. Decoding is greedy, one row, whole blocks, with packed weights unless one is compiled. Random weights
(`qwen3-0.6b`) accept nothing. The two processes never compute at the same time. Each runs the code of its own
checkout, of whose `bench.py` only what loads models and prompts is used: other names may differ.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMPILED = {"compiled-drafts": {"compile": True}}  # an earlier checkout has no such option
WAYS = ["drafts", "compiled-drafts", "plain", "compiled-plain"]


def load(models: list[str]) -> tuple[Any, Any, list, int]:
    """Return target, draft, prompts as tensors, and how many tokens are decoded."""
    sys.path.pop(0)  # the folder of this script
    import bench
    import torch

    from hf_dspark import DSparkDraftModel

    torch.manual_seed(0)
    if models == ["qwen3-0.6b"]:
        return *bench.random_pair(models[0], "bfloat16"), [torch.randint(1, 150000, (1, 64)) for _ in range(8)], 16
    target_folder, draft_folder = (bench.PAIR / "target", bench.PAIR / "draft") if models == ["pair"] else models
    target, tokenizer = bench.load_target(target_folder)
    draft = DSparkDraftModel.from_pretrained(draft_folder, dtype=torch.float32)
    return target, draft, [torch.tensor([ids]) for ids in bench.held_out_ids(tokenizer)], 128


def work(models: list[str], way: str, packed: bool) -> None:
    """Answer each line of stdin, the number of a prompt, by a line with what decoding it took."""
    from transformers import CompileConfig

    import hf_dspark

    target, draft, prompts, count = load(models)
    draft.decoding = hf_dspark.DecodingOptions(policy=hf_dspark.FullBlock(), **COMPILED.get(way, {}))
    assistant: dict[str, Any] = {} if way == "plain" else {"assistant_model": draft}
    if way == "compiled-plain":
        compiling = CompileConfig()
        compiling._compile_all_devices = True  # else on a GPU alone
        assistant = {"cache_implementation": "static", "compile_config": compiling}
    with hf_dspark.fast_linears(target, draft, packed=packed):
        print("ready", flush=True)
        for line in sys.stdin:
            ids, options = prompts[int(line) % len(prompts)], {"do_sample": False, "max_new_tokens": count}
            started = time.perf_counter()
            output = target.generate(ids, pad_token_id=0, **assistant, **options)
            seconds = time.perf_counter() - started
            tokens = output[0, ids.shape[1] :].tolist()
            rounds = draft.last_stats.rounds if "assistant_model" in assistant else len(tokens)
            print(json.dumps({"seconds": seconds, "rounds": rounds, "tokens": tokens}), flush=True)


class Worker:
    """A process that decodes with the code of one checkout."""

    def __init__(self, checkout: Path, way: str, options: argparse.Namespace) -> None:
        paths = os.pathsep.join(str(checkout.resolve() / folder) for folder in ("src", "benchmarks"))
        environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, __file__, "--work", "--ways", way, "--models", *options.models]
        words += [] if any(each.startswith("compiled") for each in options.ways) else ["--packed"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, env=environment, text=True, **pipes)
        while (line := self.process.stdout.readline()).strip() != "ready":
            if not line:
                raise RuntimeError(f"the process of {checkout} ended before it was ready")

    def decode(self, prompt: int) -> dict[str, Any]:
        self.process.stdin.write(f"{prompt}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="two of them")
    parser.add_argument("--models", nargs="+", default=["pair"], help="or qwen3-0.6b, or folders of target and draft")
    parser.add_argument("--repetitions", type=int, default=24)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["drafts", "drafts"], help="to decode, of each")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--packed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.models, options.ways[0], options.packed)
    if len(options.checkouts) != 2:
        parser.error(f"two checkouts are needed, got {len(options.checkouts)}")
    workers = [Worker(*each, options) for each in zip(options.checkouts, options.ways, strict=True)]
    seconds, by_token, identical = ([], []), ([], []), 0
    for prompt in range(-2, options.repetitions):
        answers = {index: workers[index].decode(prompt % 50) for index in ((0, 1) if prompt % 2 else (1, 0))}
        if prompt >= 0:  # the first two warm up
            identical += answers[0]["tokens"] == answers[1]["tokens"]
            for index, answer in answers.items():
                seconds[index].append(answer["seconds"] / answer["rounds"])
                by_token[index].append(answer["seconds"] / len(answer["tokens"]))
    for worker in workers:
        worker.process.stdin.close()
        worker.process.wait(timeout=60)
    medians = [statistics.median(values) for values in seconds]
    result = {
        "models": options.models,
        "ways": options.ways,
        "ratio_of_medians": medians[1] / medians[0],
        "seconds_per_round": medians,
        "ratio_by_token": statistics.median(by_token[1]) / statistics.median(by_token[0]),
        "identical": f"{identical} of {options.repetitions}",
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
