"""Write training and test rows of three domains, as `prompt` and `completion`: math, code and prose.

python examples/domains.py --gsm8k train.jsonl --prose tinyshakespeare.txt --output_dir out/domains

Math is GSM8K, code is the Python standard library's own functions (signature and docstring; then the body), prose is
a text file of speeches, cut into scenes.
"""

import argparse
import ast
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "encodings", "site-packages", "dist-packages"}
MAX_CHARACTERS = 1500


def math_rows(path: str) -> Iterator[dict[str, str]]:
    """Questions and answers of GSM8K."""
    for line in Path(path).read_text().strip().split("\n"):
        row = json.loads(line)
        yield {"prompt": f"Question: {row['question']}\nAnswer:", "completion": f" {row['answer']}"}


def code_rows() -> Iterator[dict[str, str]]:
    """Functions of the Python standard library that runs this, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            continue
        source = path.read_text(errors="replace")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield from _function_row(lines, node)


def _function_row(lines: list[str], node: ast.FunctionDef) -> Iterator[dict[str, str]]:
    """Signature and docstring are the prompt, the rest of the body is the completion."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body or body[0].lineno == node.lineno:
        return
    first_line = node.body[0].end_lineno if len(body) < len(node.body) else body[0].lineno - 1
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
    rows = text.splitlines(keepends=True)
    prompt, completion = "".join(rows[: first_line - node.lineno + 1]), "".join(rows[first_line - node.lineno + 1 :])
    if len(completion) >= 60 and len(text) <= MAX_CHARACTERS:
        yield split_before_white_space(prompt, completion)


def split_before_white_space(prompt: str, completion: str) -> dict[str, str]:
    """Let the completion have the white space between the two, as a tokenizer joins it with what follows."""
    stripped = prompt.rstrip()
    return {"prompt": stripped, "completion": prompt[len(stripped) :] + completion}


def prose_rows(path: str) -> Iterator[dict[str, str]]:
    """Scenes of some speeches each; the first speech is the prompt."""
    scene: list[str] = []
    for speech in Path(path).read_text().split("\n\n"):
        scene.append(speech)
        if sum(map(len, scene)) > 700 and len(scene) > 1:
            yield split_before_white_space(scene[0][:500] + "\n\n", "\n\n".join(scene[1:])[:MAX_CHARACTERS])
            scene = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", help="train.jsonl of openai/grade-school-math; no math without it")
    parser.add_argument("--prose", help="a text file of speeches between blank lines; no prose without it")
    parser.add_argument("--output_dir", default="out/domains")
    parser.add_argument("--max_rows", type=int, default=5000, help="of each domain, tests included")
    parser.add_argument("--num_test_rows", type=int, default=200)
    options = parser.parse_args()

    domains = {"code": list(code_rows())}
    if options.gsm8k:
        domains["math"] = list(math_rows(options.gsm8k))
    if options.prose:
        domains["prose"] = list(prose_rows(options.prose))
    output_dir = Path(options.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for domain, rows in domains.items():
        random.Random(0).shuffle(rows)
        rows = rows[: options.max_rows]
        for split, part in (("test", rows[: options.num_test_rows]), ("train", rows[options.num_test_rows :])):
            path = output_dir / f"{domain}_{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
            print(f"{path}: {len(part)} rows")


if __name__ == "__main__":
    main()
