"""Drafts of three kinds for SmolLM2, trained alike: what they commit, and how fast they decode.
And whether the shipped draft knows when it is right.

for kind in dspark dflash dflash_fill_in; do  # and eagle3 with --num_hidden_layers 1
    python examples/smollm2/train.py --kind $kind --train_file out/smollm2/answers.jsonl ... \\
        --output_dir out/smollm2/alike/$kind --num_hidden_layers 3 --batch_size 10 --max_steps 300
done
python benchmarks/smollm2.py speed --suite spec_bench --prompts spec_bench/ --output out/speed.json

`tau` decodes a suite with whole blocks of each kind. `speed` compares what a user can choose. Both leave out what is
not there. `confidence` measures the calibration of one draft by domain: with its own fits, fitted on every second
prompt, of a head that is always true, and of the probability of acceptance itself.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from bench import REGIMES, ROOT, Dtype, load_target, main
from compare import Cell, compared
from domains import Models, transformers_dflash
from pair import measure
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_dspark import evaluate
from hf_dspark.data.prompts import as_chat, read_prompt_file, suite_files, token_ids
from hf_dspark.measuring.calibrate import collect_rounds
from hf_dspark.models.auto import load_draft
from hf_dspark.scheduling.calibration import (
    CalibrationRounds,
    LogitFits,
    calibrated_confidence,
    conditional_auc,
    fit_confidence,
    measure_calibration,
)

TARGET, ALIKE = Path("out/smollm2/target"), Path("out/smollm2/alike")
KINDS = ("dspark", "dflash", "eagle3")
WEIGHTS = "model.safetensors"  # written last, of a model that was trained to its end
Suite = Literal["paper", "spec_bench"]
# The paper's three domains. No prompt of theirs was calibrated on.
DOMAINS = {
    "mathematics": ("gsm8k", "math500", "aime25"),
    "code": ("mbpp", "humaneval"),
    "chat": ("mt-bench", "arena-hard-v2"),
}


def drafts_of(models: Path, target: PreTrainedModel, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """Return the drafts of these kinds that are there."""
    trained = [kind for kind in kinds if (models / kind / WEIGHTS).exists()]
    return {kind: load_draft(models / kind, dtype=target.dtype).bind(target) for kind in trained}


def tau(
    prompts: Path,
    suite: Suite = "paper",
    target: Path = TARGET,
    models: Path = ALIKE,
    num_prompts: int = 10,
    max_new_tokens: int = 128,
    dtype: Dtype = "bfloat16",
) -> Iterator[dict[str, Any]]:
    """Tokens of a round, and acceptance by position: DSpark Table 1 and Figure 2 on this target."""
    (model, tokenizer), rows = load_target(target, dtype), []
    asked = {task: read_prompt_file(file, num_prompts) for task, file in suite_files(suite, prompts).items()}
    for (kind, draft), regime in itertools.product(drafts_of(models, model).items(), REGIMES):
        limits = {"max_new_tokens": max_new_tokens, "batch_size": num_prompts, **REGIMES[regime]}
        found = evaluate(model, draft, asked, tokenizer, **limits)
        for task in asked:
            part = found.metrics[task]
            domain = next((domain for domain, members in DOMAINS.items() if task in members), task)
            facts = {"kind": kind, "regime": regime, "task": task, "domain": domain, "tau": part.tau}
            rows.append(facts | {name: getattr(part, name) for name in ("rounds", "tokens", "reached", "acceptance")})
        yield {"rows": rows}


def speed(
    prompts: Path,
    suite: Suite = "spec_bench",
    target: Path = TARGET,
    models: Path = ALIKE,
    num_prompts: int = 10,
    max_new_tokens: int = 128,
    rows: tuple[int, ...] = (1, 4),
    dtype: Dtype = "bfloat16",
) -> Iterator[dict[str, Any]]:
    """Tokens per second of whole calls, greedy, in turns."""
    model, tokenizer = load_target(target, dtype)
    found = drafts_of(models, model, (*KINDS, "dflash_fill_in"))
    if "dflash_fill_in" in found:
        native = transformers_dflash(found.pop("dflash_fill_in"), model, models / "dflash_fill_in_transformers")
        found["fill_in"] = native.to(model.dtype)
    if (models / "assistant" / WEIGHTS).exists():
        found["assistant"] = AutoModelForCausalLM.from_pretrained(models / "assistant", dtype=dtype)
    tasks = {}
    for task, file in suite_files(suite, prompts).items():
        chats = (as_chat(each, tokenizer) for each in read_prompt_file(file, num_prompts).prompts)
        tasks[task] = [{"prompt": tokenizer.decode(token_ids(chat, tokenizer))} for chat in chats]
    cells = [Cell(task, size, 0.0, 0) for size in rows for task in tasks]
    known = Models(model, tokenizer, tasks, **found, facts={"trained_alike_in": models.name})
    return compared(known, cells, [], num_prompts, max_new_tokens, packed=True)


def confidence(
    prompts: Path,
    draft: Path = ROOT / "examples" / "smollm2" / "draft",
    target: Path = TARGET,
    rounds: Path = Path("out/smollm2/rounds"),
    num_prompts: int = 20,
    max_new_tokens: int = 128,
    regimes: tuple[Literal[tuple(REGIMES)], ...] = tuple(REGIMES),
    dtype: Dtype = "bfloat16",
) -> Iterator[dict[str, Any]]:
    """Calibration of c_k, and what limits it: DSpark Figure 6 on this target."""
    model, tokenizer = load_target(target, dtype)
    head, tasks, rows = load_draft(draft, dtype=dtype).bind(model), suite_files("paper", prompts), []
    for domain, regime in itertools.product(DOMAINS, regimes):
        asked = [each for task in DOMAINS[domain] for each in read_prompt_file(tasks[task], num_prompts).prompts]
        limits = {"max_new_tokens": max_new_tokens, **REGIMES[regime]}
        files = [rounds / f"{domain}-{regime}-{half}.jsonl" for half in range(2)]
        halves = [collect_rounds(model, head, asked[half::2], tokenizer, files[half], **limits) for half in range(2)]
        both, fits = CalibrationRounds.concatenate(halves), head.config.confidence_fits_for(None, regime == "sampled")
        others = [mean_ece(measured, fit_confidence(fitted)) for fitted, measured in (halves, halves[::-1])]
        facts = {
            "mean_ece_of_a_true_head": mean_ece(as_predicted(both, fits), fits),
            "auc_of_the_distribution": conditional_auc(replace(both, logits=both.acceptance.logit(eps=1e-6))),
            "mean_ece_fitted_on_the_other_half": sum(others) / 2,
        }
        rows.append({"domain": domain, "regime": regime} | measure(both, fits) | facts)
        yield {"rows": rows}


def mean_ece(rounds: CalibrationRounds, fits: LogitFits) -> float:
    """Return the error of the survivals, averaged over the draft positions."""
    parts = measure_calibration(rounds, fits)
    return sum(part.ece for part in parts) / len(parts)


def as_predicted(rounds: CalibrationRounds, fits: LogitFits) -> CalibrationRounds:
    """Return rounds of the same confidences, all of them true: so few rounds leave an error in the mean of a bin.

    Labels are as many and as coarse as in `rounds`: zero and one where those are.
    """
    confidence = calibrated_confidence(rounds.logits, fits)
    uniforms = torch.rand(confidence.shape, generator=torch.Generator().manual_seed(0))
    accepted = (uniforms < confidence).long().cumprod(-1).sum(-1)
    is_coarse = bool(((rounds.acceptance == 0) | (rounds.acceptance == 1)).all())
    labels = (torch.arange(rounds.block_size) < accepted[:, None]).float() if is_coarse else confidence
    return CalibrationRounds(rounds.logits, labels, accepted.minimum(rounds.proposed), rounds.proposed)


if __name__ == "__main__":
    main(__doc__, tau, speed, confidence)
