"""Let a chat model write questions itself: it sees the opening of a user's turn, and goes on.

python examples/smollm2/write_questions.py --target out/smollm2/target --output_file out/smollm2/questions.jsonl

Goes on where it stopped. The idea is Magpie's (Xu et al., 2024, arXiv 2406.08464).
"""

import argparse
import re

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark.files import Journal
from hf_dspark.targets.fingerprint import fingerprint

BATCH = 192
SHORTEST = 12  # characters
SENTENCE_END = re.compile(r"[.?!](?=\s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--output_file", required=True)
    parser.add_argument("--num_questions", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other questions, for another sitting")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="the machine's fast one")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype)
    end = tokenizer.eos_token_id
    # With the system's message that the template adds, and without.
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False).partition("\0")[0]
    openings = (whole, whole[whole.rindex("<|im_start|>") :])
    settings = {"target": fingerprint(target), "seed": options.seed, "dtype": options.dtype}
    journal = Journal(options.output_file, settings, lambda entry: entry["prompt"])
    seen, batch = set(journal.entries), 0
    with tqdm(total=max(0, options.num_questions - len(seen)), disable=None) as bar:
        while len(seen) < options.num_questions:
            torch.manual_seed(options.seed + len(seen) + batch)  # other draws also if nothing was new
            opening = tokenizer([openings[batch % 2]] * BATCH, return_tensors="pt", add_special_tokens=False)
            rows = target.generate(
                **opening, do_sample=True, temperature=1.0, top_k=0, min_p=0.03, max_new_tokens=72, eos_token_id=end,
                pad_token_id=end,
            )  # fmt: skip
            for row in rows[:, opening["input_ids"].shape[1] :].tolist():
                question = as_question(tokenizer.decode(row, skip_special_tokens=True), whole=end in row)
                if question and question not in seen:
                    seen.add(question)
                    journal.append({"prompt": question})
                    bar.update()
            batch += 1


def as_question(text: str, whole: bool) -> str | None:
    """Return what was written, up to its last whole sentence if it has no end."""
    if not whole:
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        text = text[: ends[-1]] if ends else ""
    return text.strip() if len(text.strip()) >= SHORTEST else None


if __name__ == "__main__":
    main()
