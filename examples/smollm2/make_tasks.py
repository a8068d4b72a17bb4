"""Make tasks that ask for code, mathematics or the use of a text, from what lies at hand.

python examples/smollm2/make_tasks.py code --output_file out/smollm2/code.jsonl
python examples/smollm2/make_tasks.py mathematics --file gsm8k-train.jsonl --output_file out/smollm2/mathematics.jsonl
python examples/smollm2/make_tasks.py texts --file out/smollm2/answers-0.jsonl --output_file out/smollm2/texts.jsonl

`code` reads the documented functions of Python's own library. `mathematics` asks every other question for steps and a
boxed answer. `texts` asks to summarise, translate or use what the target itself wrote, as the answers of
`hf-dspark regenerate` have it.
"""

import argparse
import ast
import itertools
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from select_prompts import texts_of

from hf_dspark.files import replace_text

LONGEST_HEAD = 700  # characters of a function's head with its text
STEPS = "\nReason step by step. Put your final answer within \\boxed{}."
PASSAGE = (300, 2400)  # characters
TOGETHER = 3  # answers at most that make one text


def code() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or not (text := ast.get_docstring(node)):
                continue
            summary = text.partition("\n\n")[0].replace("\n", " ").strip()
            if len(summary.split()) < 5 or node.name.startswith("_"):
                continue
            head = f'def {node.name}({ast.unparse(node.args)}):\n    """{text}\n    """\n'
            yield f"Write a python function to {summary[0].lower()}{summary[1:].rstrip('.')}."
            if len(head) <= LONGEST_HEAD:
                yield f"Complete the following function:\n```python\n{head}```"


def mathematics(file: str) -> Iterator[str]:
    for number, question in enumerate(texts_of(file)):
        yield f"{question}{STEPS if number % 2 else ''}"


def texts(file: str) -> Iterator[str]:
    written = [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]
    for number, several in enumerate(itertools.zip_longest(*[iter(written)] * TOGETHER, fillvalue="")):
        text = cut("\n\n".join(several[: 1 + number % TOGETHER]))
        sentence = re.split(r"(?<=[.?!])\s", text)[0]
        language = ("German", "French", "Spanish")[number % 3]
        if len(text) >= PASSAGE[0]:
            yield f"Summarize: {text}"
            yield f"Rewrite the following text in simpler words.\n\n{text}"
            yield f"{text}\n\nWhich of this is most important, and why?"
            yield f"Translate English to {language}: {sentence}"


def cut(text: str) -> str:
    """Return its beginning, up to the last whole sentence that fits."""
    head = text[: PASSAGE[1]]
    return head[: head.rfind(".") + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("code", "mathematics", "texts"))
    parser.add_argument("--file", help="questions, of `mathematics`; the target's answers, of `texts`")
    parser.add_argument("--num_prompts", type=int, default=3000)
    parser.add_argument("--output_file", required=True)
    options = parser.parse_args()
    if (options.kind == "code") == (options.file is not None):
        parser.error("mathematics and texts take a --file, code takes none")
    found = (
        code() if options.kind == "code" else {"mathematics": mathematics, "texts": texts}[options.kind](options.file)
    )
    prompts = list(dict.fromkeys(found))
    random.Random(0).shuffle(prompts)
    path = Path(options.output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(json.dumps({"prompt": text}) + "\n" for text in prompts[: options.num_prompts]))
    print(f"{min(len(prompts), options.num_prompts)} of {len(prompts)} prompts")


if __name__ == "__main__":
    main()
