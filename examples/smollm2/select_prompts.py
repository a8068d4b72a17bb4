"""Join prompts of several kinds, drop what an evaluation asks, too, and hold some out.

python examples/smollm2/select_prompts.py --kinds gsm8k=train.jsonl own=questions.jsonl \\
    --evaluations prompts/*.jsonl --output_dir out/smollm2/chosen

Writes train.jsonl, and held_out.jsonl with every 20th prompt of each kind. A prompt is dropped if 13 words in a row,
or the whole of a shorter one, are in an evaluation prompt: letters and digits alone are compared.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_dspark.data.prompts import Prompt, read_prompt_file

WORDS_IN_A_ROW = 13
HELD_OUT_EVERY = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--evaluations", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--num_prompts", type=int, help="of each kind at most")
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    forbidden = known_runs(text for file in options.evaluations for text in texts_of(file))
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for kind in options.kinds:
        name, _, file = kind.partition("=")
        prompts = [text for text in texts_of(file, options.num_prompts) if not forbidden & set(runs(text))]
        parts["held_out"] += [json.dumps({"prompt": text, "kind": name}) for text in prompts[::HELD_OUT_EVERY]]
        parts["train"] += [
            json.dumps({"prompt": text, "kind": name}) for n, text in enumerate(prompts) if n % HELD_OUT_EVERY
        ]
        print(f"{name}: {len(prompts)} prompts that no evaluation asks")
    random.Random(0).shuffle(parts["held_out"])  # the first hundred are of all kinds
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for part, lines in parts.items():
        (folder / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def texts_of(file: str, limit: int | None = None) -> Iterator[str]:
    """Yield the text of each prompt of a file, all turns together."""
    for prompt in read_prompt_file(file, limit).prompts:
        yield "\n".join([text_of(prompt), *prompt.later_turns])


def text_of(prompt: Prompt) -> str:
    if isinstance(prompt.content, str):
        return prompt.content
    return "\n".join(str(message["content"]) for message in prompt.content)


def runs(text: str) -> list[str]:
    """Return all runs of so many words; of a shorter text, the whole."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return [
        " ".join(words[start : start + WORDS_IN_A_ROW]) for start in range(max(1, len(words) - WORDS_IN_A_ROW + 1))
    ]


def known_runs(texts: Iterable[str]) -> set[str]:
    return {run for text in texts for run in runs(text)}


if __name__ == "__main__":
    main()
