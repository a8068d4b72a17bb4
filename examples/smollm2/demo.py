"""Stream a chat model's answer without its draft and with it: the same tokens, faster.

python examples/smollm2/demo.py "How do plants make sugar?"
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils.logging import disable_progress_bar

from hf_dspark import DSparkDraftModel, fast_linears

HERE = Path(__file__).parent
QUESTIONS = (
    "Janet has 3 boxes with 12 pencils each. She gives 8 pencils to her brother. How many pencils are left?",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that returns the largest number of a list.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--target", default="out/smollm2/target")
    parser.add_argument("--draft", default=str(HERE / "draft"))
    parser.add_argument("--max_new_tokens", type=int, default=160)
    options = parser.parse_args()
    for folder in (options.target, options.draft):
        if not (Path(folder) / "config.json").is_file():
            sys.exit(f"error: {folder} holds no model: make demo-smollm2 prepares the target, make smollm2 a draft")
    if not sys.stderr.isatty():
        disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(options.draft, dtype=torch.float32)
    print(f"target: {target.num_parameters() / 1e6:.0f} M parameters; draft: {draft.num_parameters() / 1e6:.0f} M\n")

    def answer(question: str, **kwargs) -> tuple[list[int], float]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        started = time.perf_counter()
        output = target.generate(**inputs, do_sample=False, **kwargs)
        return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - started

    streamed = {"max_new_tokens": options.max_new_tokens, "streamer": TextStreamer(tokenizer, skip_prompt=True)}
    rows = []
    with fast_linears(target, draft, packed=True):  # serves plain decoding, too
        (
            answer(QUESTIONS[0], max_new_tokens=8),
            answer(QUESTIONS[0], max_new_tokens=8, assistant_model=draft),
        )  # warm-up
        for question in options.questions:
            print(f"### {question}\n\n--- target alone")
            plain, plain_seconds = answer(question, **streamed)
            print("\n--- with the draft")
            drafted, seconds = answer(question, assistant_model=draft, **streamed)
            print()
            rows.append((len(plain), plain_seconds, len(drafted), seconds, draft.last_stats.tau, plain == drafted))
    print("tokens   alone  with the draft  speed-up  tokens per round  identical")
    for count, plain_seconds, drafted_count, seconds, tau, identical in rows:
        speedup = (plain_seconds / count) / (seconds / drafted_count)
        print(f"{count:6d}  {plain_seconds:5.1f} s  {seconds:12.1f} s  {speedup:7.2f}x  {tau:16.2f}  {identical}")
    if not all(identical for *_, identical in rows):
        sys.exit("the answers differ: please report this")


if __name__ == "__main__":
    main()
