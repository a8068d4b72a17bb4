"""Is this revision as fast as another one? Two checkouts decode the same prompts by turns, each in its own process.

git worktree add ../before REVISION
python benchmarks/revisions.py --checkouts ../before .
python benchmarks/revisions.py --checkouts ../before . --models qwen3-0.6b
python benchmarks/revisions.py --checkouts ../before . --models out/smollm2/target examples/smollm2/draft
python benchmarks/revisions.py --checkouts ../before . --regimes greedy sampled --host
python benchmarks/revisions.py --ways drafts compiled-drafts
python benchmarks/revisions.py --ways compiled-plain compiled-drafts

The number is the ratio of median seconds per round, second checkout over first, and that of seconds per token, for
ways that differ. Decoding is greedy or at T = 1, one row, whole blocks, with packed weights unless one is compiled.
Random weights (`qwen3-0.6b`) accept nothing. The two processes never compute at the same time. Each runs the code of
its own checkout, of which names are used that all have. `--host` packs no weights, and also compares the CPU time of a
round outside of the modules of both models, or of its compiled passes.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

PAIR = Path(__file__).resolve().parents[1] / "examples" / "gsm8k_pair"
COMPILED = {"compiled-drafts": {"compile": True}}  # an earlier checkout has no such option
SAMPLING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0}}
Way = Literal["drafts", "compiled-drafts", "plain", "compiled-plain"]


def load(models: list[str]) -> tuple[Any, Any, list, int]:
    """Return target, draft, prompts as tensors, and how many tokens are decoded."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_dspark import DSparkDraftModel

    torch.manual_seed(0)
    if models == ["qwen3-0.6b"]:
        sys.path.pop(0)  # the folder of this script
        import bench

        return *bench.random_pair(models[0], "bfloat16"), [torch.randint(1, 150000, (1, 64)) for _ in range(8)], 16
    target_folder, draft_folder = (PAIR / "target", PAIR / "draft") if models == ["pair"] else models
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(draft_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    texts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    return target, draft, [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts], 128


def watch_rounds(way: Way) -> list[float]:
    """Return the seconds of all rounds so far, and those of the modules or of the compiled passes within them."""
    from torch import nn

    from hf_dspark.decoding.loop import DecodingLoop

    seconds, level = [0.0, 0.0], 0

    def counting(run: Callable, own_level: int) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal level
            if level != own_level:  # in a module within another one, or outside of a round
                return run(*args, **kwargs)
            level, started = own_level + 1, time.thread_time()
            result = run(*args, **kwargs)
            seconds[own_level] += time.thread_time() - started
            level = own_level
            return result

        return counted

    DecodingLoop.run_round = counting(DecodingLoop.run_round, 0)
    if way in COMPILED:
        from hf_dspark.targets import compiled_target

        compiled = compiled_target.compiled
        compiled_target.compiled = lambda *args: counting(compiled(*args), 1)
    else:
        nn.Module.__call__ = counting(nn.Module.__call__, 1)
    return seconds


def work(way: Way, regime: str, models: list[str], packed: bool, host: bool) -> None:
    """Answer each line of stdin, the number of a prompt, by a line with what decoding it took."""
    import torch
    from transformers import CompileConfig

    import hf_dspark

    of_rounds = watch_rounds(way) if host else [0.0, 0.0]
    target, draft, prompts, count = load(models)
    draft.decoding = hf_dspark.DecodingOptions(policy=hf_dspark.FullBlock(), **COMPILED.get(way, {}))
    assistant: dict[str, Any] = {} if way == "plain" else {"assistant_model": draft}
    if way == "compiled-plain":
        compiling = CompileConfig()
        compiling._compile_all_devices = True  # else on a GPU alone
        assistant = {"cache_implementation": "static", "compile_config": compiling}
    options = {"pad_token_id": 0, "max_new_tokens": count, **assistant, **SAMPLING[regime]}
    with hf_dspark.fast_linears(target, draft, packed=packed):
        print("ready", flush=True)
        for line in sys.stdin:
            ids, of_rounds[:] = prompts[int(line) % len(prompts)], [0.0, 0.0]
            torch.manual_seed(int(line))
            started = time.perf_counter()
            output = target.generate(ids, **options)
            found = {"seconds": time.perf_counter() - started, "tokens": output[0, ids.shape[1] :].tolist()}
            found["rounds"] = draft.last_stats.rounds if "assistant_model" in assistant else len(found["tokens"])
            print(json.dumps({**found, "host": of_rounds[0] - of_rounds[1]}), flush=True)


class Worker:
    """A process that decodes with the code of one checkout."""

    def __init__(self, checkout: str, **how: Any) -> None:
        paths = os.pathsep.join(str(Path(checkout).resolve() / folder) for folder in ("src", "benchmarks"))
        environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, __file__, "work", json.dumps(how)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, env=environment, text=True, **pipes)
        while (line := self.process.stdout.readline()).strip() != "ready":
            if not line:
                raise RuntimeError(f"the process of {checkout} ended before it was ready")

    def decode(self, prompt: int) -> dict[str, Any]:
        self.process.stdin.write(f"{prompt}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def compare(
    checkouts: tuple[str, ...] = (".", "."),
    models: tuple[str, ...] = ("pair",),
    ways: tuple[Way, ...] = ("drafts", "drafts"),
    regimes: tuple[Literal["greedy", "sampled"], ...] = ("greedy",),
    repetitions: int = 24,
    host: bool = False,
) -> dict[str, Any]:
    """Two checkouts, each in its way; `models` is `qwen3-0.6b`, or folders of target and draft."""
    packed = not host and not any(way.startswith("compiled") for way in ways)
    return {"cells": [cell_of(checkouts, ways, repetitions, regime=regime, models=models, packed=packed, host=host)
                      for regime in regimes]}  # fmt: skip


def cell_of(checkouts: tuple[str, ...], ways: tuple[Way, ...], repetitions: int, **how: Any) -> dict[str, Any]:
    workers = [Worker(checkout, way=way, **how) for checkout, way in zip(checkouts, ways, strict=True)]
    found, identical = {"round": ([], []), "token": ([], []), "host": ([], [])}, 0
    for prompt in range(-2, repetitions):
        answers = {index: workers[index].decode(prompt % 50) for index in ((0, 1) if prompt % 2 else (1, 0))}
        if prompt >= 0:  # the first two warm up
            identical += answers[0]["tokens"] == answers[1]["tokens"]
            for index, answer in answers.items():
                found["round"][index].append(answer["seconds"] / answer["rounds"])
                found["token"][index].append(answer["seconds"] / len(answer["tokens"]))
                found["host"][index].append(answer["host"] / answer["rounds"])
    for worker in workers:
        worker.process.stdin.close()
        worker.process.wait()
    medians = {name: list(map(statistics.median, both)) for name, both in found.items()}
    ratios = {name: after / before for name, (before, after) in medians.items() if before}
    return {"regime": how["regime"], "ways": ways, "ratios": ratios, "seconds": medians,
            "identical": f"{identical} of {repetitions}"}  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(**json.loads(sys.argv[2]))
    else:
        import bench

        bench.main(__doc__, compare)
