"""See a language model answer held-out GSM8K questions with and without its draft: the same tokens, faster.

python examples/demo.py --num_prompts 12
python examples/demo.py --dtype bfloat16
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from hf_dspark import DSparkDraftModel, Rounds
from hf_dspark.measuring.rounding import count_best, tolerance_of

PAIR = Path(__file__).parent / "gsm8k_pair"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_prompts", type=int, default=12, help="of the 50 shipped ones")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    if not sys.stderr.isatty():
        disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=options.dtype)
    draft = DSparkDraftModel.from_pretrained(PAIR / "draft", dtype=options.dtype)
    prompts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().strip().split("\n")]
    print(f"target: {target.num_parameters() / 1e6:.1f} M parameters; draft: {draft.num_parameters() / 1e6:.1f} M\n")

    greedy = {"do_sample": False, "max_new_tokens": options.max_new_tokens}

    def answer(prompt: str, **kwargs) -> tuple[list[int], float]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        started = time.perf_counter()
        output = target.generate(ids, **greedy, **kwargs)
        return output[0, ids.shape[1] :].tolist(), time.perf_counter() - started

    answer(prompts[0]), answer(prompts[0], assistant_model=draft)  # warm-up
    plain_seconds, seconds, rounds, identical, best, tokens = [], [], [], 0, 0, 0
    for number, prompt in enumerate(tqdm(prompts[: options.num_prompts], unit="question", disable=None)):
        plain, plain_time = answer(prompt)
        assisted, assisted_time = answer(prompt, assistant_model=draft)
        plain_seconds.append(plain_time / len(plain))
        seconds.append(assisted_time / len(assisted))
        identical += plain == assisted
        rounds.append(draft.last_stats)
        best += count_best(target, tokenizer(prompt)["input_ids"], assisted, plain, **greedy)
        tokens += len(assisted)
        if number < 2:
            text = tokenizer.decode(assisted, skip_special_tokens=True)
            tqdm.write(f"{prompt}{text}\n  [{len(assisted)} tokens: {plain_time:.2f} s -> {assisted_time:.2f} s]\n")

    count = len(seconds)
    print(f"\nidentical answers      {identical} of {count} (greedy, {options.dtype})")
    print(f"best up to rounding    {best} of {tokens} tokens ({tolerance_of(target.dtype)})")
    print(f"tokens per round (tau) {Rounds.joined(rounds).tau:.2f}")
    print(f"plain generate()       {1 / statistics.median(plain_seconds):.0f} tokens/s")
    print(f"with the draft         {1 / statistics.median(seconds):.0f} tokens/s")
    print(
        f"speed-up               {statistics.median(plain_seconds) / statistics.median(seconds):.2f}x (median / "
        f"median)"
    )
    if best < tokens or (options.dtype == "float32" and identical < count):
        raise SystemExit("the outputs differ: please report this")


if __name__ == "__main__":
    main()
