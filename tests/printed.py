"""Runs what documents, notebooks and `--help` print, in order, in a folder that looks like a checkout.

python -m tests.printed FOLDER     all of it; the last line of the output is JSON
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Groups of pages that continue each other, in one namespace and one folder.
PAGES = (
    ("README.md",),
    ("docs/quickstart.md", "docs/attach.md", "docs/batches.md", "docs/hybrid.md", "docs/scheduling.md",
     "docs/trees.md", "docs/troubleshooting.md", "docs/measuring.md",
     "docs/cpu.md", "docs/sharing.md", "docs/training.md"),
    ("docs/cli.md",),
)  # fmt: skip
# What is run in place of what is printed: models that are too large to load here, and data that is not here.
SUBSTITUTES = {
    "profile --target Qwen/Qwen3-4B": "profile --batch_sizes 1 --repetitions 1 --target Qwen/Qwen3-4B",
    "examples/smollm2/draft": "examples/gsm8k_pair/draft",  # its target is a download
    "--target Qwen/Qwen3-4B --license": "--target someone/target --license",  # a card names it, nobody loads it
    "Qwen/Qwen3-4B": "examples/gsm8k_pair/target",
    "Qwen/Qwen3-0.6B": "examples/gsm8k_pair/target",
    "user/Qwen3-4B-DSpark": "examples/gsm8k_pair/draft",
    "--eval_rows 200": "--eval_rows 2",
    "rows[200:]": "rows[2:]",
    "rows[:200]": "rows[:2]",
    "num_train_epochs=4": "num_train_epochs=1",
    "compile=True": 'compile="auto"',  # tests/decoding/test_compiled.py has no compiler to wait for
    "hf-dspark train --target": "hf-dspark train --max_steps 3 --target",
    "hf-dspark eval --target": "hf-dspark eval --max_new_tokens 16 --target",
    "hf-dspark calibrate --target": "hf-dspark calibrate --max_new_tokens 32 --target",
    "hf-dspark regenerate --target": "hf-dspark regenerate --max_new_tokens 32 --target",
    ".read_text().splitlines()]": ".read_text().splitlines()[:4]]",
    "me/my-draft --private": "me/private-draft --private",  # another page has made that one public
    "max_new_tokens=256": "max_new_tokens=16",
    "batch_sizes=(1, 4)": "batch_sizes=(1, 4), context_lengths=(16,), repetitions=1",
    "--batch_sizes 1 4 16": "--batch_sizes 1 4 --context_lengths 16 --repetitions 1",
}
# Commands that are not run, and why.
LEFT_OUT = {
    "make ": "builds an environment of its own; tests/test_examples.py runs the demo",
    "pip install": "needs the network",
    "torchrun": "tests/training/test_processes.py starts several processes",
    "accelerate launch": "needs several GPUs",
    "vllm serve": "needs vLLM",
    "python -m sglang": "needs SGLang",
    "hf-dspark serve": "ends with Ctrl-C; tests/cli/test_serve.py sends it",
    "hf-dspark chat": "reads a terminal; tests/cli/test_serve.py has one",
}
# Settings of the notebooks that make minutes of seconds.
SMALL = {
    "quickstart.ipynb": {"NUM_PROMPTS": 4, "MAX_NEW_TOKENS": 24},
    "calibrate_and_schedule.ipynb": {
        "NUM_PROMPTS": 4, "NUM_TEST_PROMPTS": 3, "MAX_NEW_TOKENS": 32, "BATCH_SIZES": (1, 2), "REPETITIONS": 1,
        "OUTPUT_DIR": None,
    },
    "finetune.ipynb": {
        "NUM_PROMPTS": 6, "NUM_REPLAYED": 2, "NUM_STEPS": 2, "NUM_TEST_PROMPTS": 2, "MAX_NEW_TOKENS": 16,
        "OUTPUT_DIR": None,
    },
    "share.ipynb": {
        "NUM_PROMPTS": 3, "NUM_CALIBRATION_PROMPTS": 4, "MAX_NEW_TOKENS": 24, "HUB_REPOSITORY": None, "FOLDER": None,
    },
}  # fmt: skip


def make_checkout(folder: Path, num_prompts: int = 4) -> list[str]:
    """Fill a folder with what the documents expect in the working folder; return the prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "examples").symlink_to(EXAMPLES)
    make_chat_target(folder / "out" / "smollm2" / "target")
    lines = (EXAMPLES / "gsm8k_pair" / "prompts.jsonl").read_text().splitlines()[:num_prompts]
    for name in ("prompts", "held_out", "math", "code"):
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [json.loads(line)["prompt"] for line in lines]


def make_chat_target(folder: Path) -> None:
    """Put the shipped target there, as if it had learned to chat."""
    shutil.copytree(EXAMPLES / "gsm8k_pair" / "target", folder, copy_function=os.symlink)
    template = "{% for message in messages %}Question: {{ message.content }}\n{% endfor %}Answer:"
    (folder / "chat_template.jinja").write_text(template)


def blocks(text: str, language: str | None = None) -> list[tuple[str, str]]:
    """Return the languages and the code of the blocks of a Markdown text."""
    return [block for block in BLOCK.findall(text) if language in (None, block[0])]


def substituted(text: str, substitutes: Mapping[str, str] = SUBSTITUTES) -> str:
    for printed, run in substitutes.items():
        text = text.replace(printed, run)
    return text


def run_notebook(name: str, settings: Mapping[str, object]) -> dict:
    """Execute the code of a notebook with other settings; return what it left."""
    namespace: dict = {}
    for cell in json.loads((EXAMPLES / name).read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), name, "exec"), namespace)
        if "parameters" in cell["metadata"].get("tags", ()):
            assert settings.keys() == {key for key in namespace if key.isupper()}
            namespace |= settings
    return namespace


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a shell block, without comments, continued lines as one."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def run_command(line: str) -> str | None:
    """Run an `hf-dspark` command in this process; return why another one is left out."""
    reason = next((reason for start, reason in LEFT_OUT.items() if line.startswith(start)), None)
    if reason is not None:
        return reason
    from hf_dspark_cli import main

    echo = 'hf-dspark() { printf "%s\\0" "$@"; }; ' + substituted(line)  # the shell reads quotes and `$'...'`
    words = subprocess.run(["bash", "-ec", echo], check=True, capture_output=True, text=True).stdout.split("\0")[:-1]
    code = main(words)
    assert code == 0, f"{line} ended with {code}"
    return None


def help_example(command: str) -> str:
    """Return the example that the help of a command prints, as one line."""
    done = subprocess.run(
        [sys.executable, "-m", "hf_dspark", command, "--help"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return " ".join(done.stdout.partition("example: ")[2].partition("\n\n")[0].split())


def run_everything(folder: Path) -> dict[str, list[str]]:
    """Run all that is printed; return what ran, what failed with its error, and what was left out with the reason."""
    from hf_dspark_cli.parser import COMMANDS

    found: dict[str, list[str]] = {"ran": [], "failed": [], "left out": []}

    def attempt(what: str, run) -> None:
        started = time.monotonic()
        try:
            reason = run()
        except (Exception, SystemExit):
            found["failed"].append(f"{what}\n{traceback.format_exc(limit=-3)}")
        else:
            found["ran" if reason is None else "left out"].append(what if reason is None else f"{what}: {reason}")
        print(f"{time.monotonic() - started:6.1f} s: {what}", file=sys.stderr, flush=True)

    for pages in PAGES:
        place = folder / Path(pages[0]).stem
        names: dict = {"prompts": make_checkout(place)}
        os.chdir(place)
        if len(pages) > 1:
            prepare_pages(names["prompts"])
        for page in pages:
            for language, code in blocks((ROOT / page).read_text()):
                if language == "python":
                    block = compile(substituted(code), page, "exec")
                    attempt(f"{page}: {code.splitlines()[0]}", lambda block=block, names=names: exec(block, names))
                else:
                    for line in commands(code):
                        attempt(f"{page}: {line}", lambda line=line: run_command(line))
    make_checkout(folder / "help")
    os.chdir(folder / "help")
    for declare in (declare for part in COMMANDS.values() for declare in part):
        line = help_example(declare.__name__.strip("_"))
        attempt(f"help: {line}", lambda line=line: run_command(line))
    os.chdir(EXAMPLES)
    sys.path.insert(0, str(EXAMPLES))
    for name, small in SMALL.items():
        outputs = {key: str(folder / name) for key in ("OUTPUT_DIR", "FOLDER") if key in small}
        attempt(name, lambda name=name, settings=small | outputs: run_notebook(name, settings) and None)
    return found


def prepare_pages(prompts: list[str]) -> None:
    """Make what the pages of the manual take for granted: a draft of one's own, and results of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_dspark import DSparkDraftModel, evaluate

    pair = EXAMPLES / "gsm8k_pair"
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    draft = DSparkDraftModel.from_pretrained(pair / "draft")
    draft.save_pretrained("my-draft")
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    evaluate(target, draft, {"math": prompts[:2]}, tokenizer, "results/eval.json", do_sample=False, max_new_tokens=16)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(json.dumps(run_everything(Path(sys.argv[1]).resolve())))
