"""Join prompts of several kinds, drop what an evaluation asks, too, and hold some out.

python examples/smollm2/select_prompts.py --domains gsm8k=train.jsonl own=questions.jsonl \\
    --evaluations paper=prompts spec_bench=spec_bench --output_dir out/smollm2/chosen

Writes train.jsonl, and held_out.jsonl with every 20th prompt of each domain. A prompt is dropped if 13 words in a row,
or the whole of a shorter one, are in an evaluation prompt: letters and digits alone are compared. Without `--domains`
it only says whether the evaluations are there.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_dspark.data.prompts import SUITES, Prompt, read_prompt_file, suite_files
from hf_dspark.files import replace_text

WORDS_IN_A_ROW = 13
HELD_OUT_EVERY = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domains", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument(
        "--evaluations", nargs="+", required=True, metavar="FILE", help="of prompts; SUITE=FOLDER is all of a suite"
    )
    parser.add_argument("--num_prompts", type=int, help="of each domain at most")
    parser.add_argument("--output_dir", help="needed with --domains")
    options = parser.parse_args()
    if options.domains and options.output_dir is None:
        parser.error("--domains needs --output_dir")
    try:
        forbidden = known_runs(text for file in evaluation_files(options.evaluations) for text in texts_of(file))
        parts = select(options.domains, options.num_prompts, forbidden)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for part, lines in parts.items() if options.domains else ():
        path = Path(options.output_dir) / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, "".join(f"{line}\n" for line in lines))


def select(domains: list[str], num_prompts: int | None, forbidden: set[str]) -> dict[str, list[str]]:
    """Return the lines of both parts; the training part, which says that all is done, is the last."""
    parts: dict[str, list[str]] = {"held_out": [], "train": []}
    for domain in domains:
        name, _, file = domain.partition("=")
        prompts = [text for text in texts_of(file, num_prompts) if not forbidden & set(runs(text))]
        parts["held_out"] += [json.dumps({"prompt": text, "domain": name}) for text in prompts[::HELD_OUT_EVERY]]
        parts["train"] += [
            json.dumps({"prompt": text, "domain": name}) for n, text in enumerate(prompts) if n % HELD_OUT_EVERY
        ]
        print(f"{name}: {len(prompts)} prompts that no evaluation asks")
    random.Random(0).shuffle(parts["held_out"])  # the first hundred are of all domains
    return parts


def evaluation_files(words: list[str]) -> list[str]:
    """Return the files that are named, and those of the suites that are named."""
    files = []
    for word in words:
        suite, is_suite, folder = word.partition("=")
        files += suite_files(suite, folder).values() if is_suite and suite in SUITES else [word]
    return files


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
