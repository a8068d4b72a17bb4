"""The shipped pair and its held-out prompts, as the benchmarks load them."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dspark import DSparkDraftModel

PAIR = Path(__file__).parent.parent / "examples" / "gsm8k_pair"
RESULTS = Path(__file__).parent / "results"
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0}
GREEDY = {"do_sample": False}
REGIMES = {"greedy": GREEDY, "sampled": SAMPLING}


def load_pair(
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, DSparkDraftModel, PreTrainedTokenizerBase]:
    """Return target, draft and tokenizer."""
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=dtype).eval()
    draft = DSparkDraftModel.from_pretrained(PAIR / "draft", dtype=dtype).eval()
    return target, draft, AutoTokenizer.from_pretrained(PAIR / "target")


def held_out_prompts() -> list[str]:
    """Return the 50 shipped prompts: questions of GSM8K's test file that no fit has seen."""
    return [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().strip().split("\n")]


def calibration_prompts(test_file: str, count: int) -> list[str]:
    """Return prompts from GSM8K's test file that are not among the held-out ones, evenly spread.

    Raises:
        ValueError: If a line is no question, naming it.
    """
    reserved, prompts = set(held_out_prompts()), []
    for number, line in enumerate(Path(test_file).read_text().strip().split("\n"), start=1):
        try:
            prompt = f"Question: {json.loads(line)['question']}\nAnswer:"
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{test_file}, line {number}: not a JSON object with a 'question'") from error
        if prompt not in reserved:
            prompts.append(prompt)
    return prompts[:: max(1, len(prompts) // count)][:count]


def write_result(path: Path, content: dict) -> None:
    """Write one result file, keys in order, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
