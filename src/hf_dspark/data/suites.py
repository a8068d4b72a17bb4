"""Benchmarks of several tasks: the prompt files that each consists of."""

from pathlib import Path

SUITES = {
    # DSpark Table 1, with the names of DeepSpec's files: mathematics, code, chat.
    "paper": ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "mt-bench", "arena-hard-v2"),
    # Xia et al. 2024 (arXiv 2401.07851), by its categories.
    "spec_bench": ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"),
}


def suite_files(suite: str, folder: str | Path) -> dict[str, str]:
    """Return the file of each task of a suite: JSON Lines of prompts, named after the task.

    Raises:
        ValueError: If there is no such suite, or a file is missing.
    """
    if suite not in SUITES:
        raise ValueError(f"there is no suite {suite!r}: choose {' or '.join(SUITES)}")
    files = {task: Path(folder) / f"{task}.jsonl" for task in SUITES[suite]}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: a folder of {suite} has a JSON Lines file for each task"
        )
    return {task: str(path) for task, path in files.items()}
