"""Drafts of three kinds and an assistant for SmolLM2, trained alike: what they commit, and how fast they decode.
And whether the shipped draft knows when it is right.

for kind in dspark dflash dflash_fill_in; do  # and eagle3 with --num_hidden_layers 1
    python examples/smollm2/train.py --kind $kind --train_file out/smollm2/answers.jsonl ... \\
        --output_dir out/smollm2/alike/$kind --num_hidden_layers 3 --batch_size 10 --max_steps 300
done
python benchmarks/smollm2.py assistant --train_file out/smollm2/answers.jsonl --max_steps 300
python benchmarks/smollm2.py tau --suite paper prompts/
python benchmarks/smollm2.py speed --suite spec_bench spec_bench/
python benchmarks/smollm2.py trials --train_file ... --eval_file ...
python benchmarks/smollm2.py confidence --suite paper prompts/ --draft examples/smollm2/draft

`assistant` trains a small Llama on the same answers, with the target's embedding, which is its head, too, and is
frozen as it is for the drafts. `tau` decodes the tasks of a suite with whole blocks of each kind, at both
temperatures. `speed` compares what a user can choose: plain decoding, prompt lookup, the assistant and DFlash of
transformers, and the drafts here. Both read the drafts in `--models`, and leave out those that are not there.
`trials` trains small variants of the draft, each with one thing changed, and says what each one is expected to commit
on held-out answers. With `--names` it trains some of them; it reports all that are there.
`confidence` records whole blocks of one draft by domain, and measures its calibration and what thresholds would have
cut: with the draft's own fits, and fitted on every second prompt of the domain and measured on the others. It also
says what a head would seem to be off that is always true, as the rounds are few, and how well the probability of
acceptance itself would tell what is accepted, which no head can know. It goes on where it stopped.
"""

import argparse
import copy
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from calibrate_pair import measure
from compare import compare
from compare_drafts import Models, assistant_row, transformers_dflash
from compare_prompts import Cell
from compare_summary import markdown
from muon import MuonWithAdamW
from pair import REGIMES, RESULTS, provenance_of, write_result
from threshold_sweep import THRESHOLDS, replay
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_dspark import evaluate
from hf_dspark.data.prompts import as_chat, read_prompt_file, suite_files, token_ids
from hf_dspark.measuring.calibrate import collect_rounds
from hf_dspark.measuring.tables import markdown_table, number
from hf_dspark.models.auto import load_draft
from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.scheduling.calibration import (
    CalibrationRounds,
    LogitFits,
    calibrated_confidence,
    conditional_auc,
    fit_confidence,
    measure_calibration,
)

KINDS = ("dspark", "dflash", "eagle3")
# The paper's three domains. No prompt of theirs was calibrated on.
DOMAINS = {
    "mathematics": ("gsm8k", "math500", "aime25"),
    "code": ("mbpp", "humaneval"),
    "chat": ("mt-bench", "arena-hard-v2"),
}
SMALL_VOCABULARY = ["--draft_vocab_size", "7040"]  # Eagle3 proposes all tokens
# How many times the steps of the others, and what is changed of a draft of three layers.
TRIALS: dict[str, tuple[int, list[str]]] = {
    "DSpark": (1, []),
    "DFlash": (1, ["--kind", "dflash"]),
    "Eagle3": (1, ["--kind", "eagle3", "--num_hidden_layers", "1"]),
    "one layer": (1, ["--num_hidden_layers", "1"]),
    "five layers": (1, ["--num_hidden_layers", "5"]),
    "taps: late layers": (1, ["--target_layer_ids", "20", "22", "24", "26", "28"]),
    "taps: one late layer": (1, ["--target_layer_ids", "28"]),
    "taps: early layers": (1, ["--target_layer_ids", "1", "4", "7", "10", "13"]),
    "head: RNN": (1, ["--markov_head_type", "rnn"]),
    "losses: by token": (1, ["--losses_of", "dflash"]),
    "rank 256": (1, ["--markov_rank", "256"]),
    "block of 5": (1, ["--block_size", "5"]),
    "twice the anchors": (1, ["--num_anchors", "32"]),
    "learning rate 0.002": (1, ["--learning_rate", "0.002"]),
    "learning rate 0.008": (1, ["--learning_rate", "0.008"]),
    "AdamW, 0.001": (1, ["--optimizer", "adamw", "--learning_rate", "0.001"]),
    "DSpark, twice as long": (2, []),
    "DFlash, twice as long": (2, ["--kind", "dflash"]),
    "Eagle3, twice as long": (2, ["--kind", "eagle3", "--num_hidden_layers", "1"]),
}


def assistant(options: argparse.Namespace, _: dict[str, Any]) -> None:
    """Train it with rows, steps, schedule and optimiser of the drafts. The same command goes on where it stopped."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    tokenizer, folder = AutoTokenizer.from_pretrained(options.target), Path(options.models) / "assistant"
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = options.num_hidden_layers
    model = LlamaForCausalLM(config)
    model.set_input_embeddings(target.get_input_embeddings().requires_grad_(False))
    model.tie_weights()
    rows = [assistant_row(json.loads(line)) for line in Path(options.train_file).read_text().splitlines()]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=options.max_steps, per_device_train_batch_size=10, learning_rate=4e-3,
        lr_scheduler_type="linear", warmup_steps=options.max_steps // 6, logging_steps=50, save_steps=100,
        save_total_limit=1, train_sampling_strategy="group_by_length", report_to="none", seed=0,
        bf16=options.dtype == "bfloat16", use_cpu=not torch.accelerator.is_available(),
    )  # fmt: skip
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    trainer = Trainer(
        model, arguments, DataCollatorForSeq2Seq(tokenizer), train_dataset=rows, processing_class=tokenizer,
        optimizers=(MuonWithAdamW(trained, 4e-3, 0.05), None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    model.config.use_cache = True  # Trainer had switched it off
    model.to(torch.bfloat16).save_pretrained(folder)


def tau(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Tokens of a round, and acceptance by position: DSpark Table 1 and Figure 2 on this target."""
    target, tokenizer = load_target(options)
    tasks, rows = suite_files(*options.suite), []
    prompts = {task: read_prompt_file(file, options.num_prompts) for task, file in tasks.items()}
    for kind in KINDS:
        draft = drafts_of(options, target, kind)
        if draft is None:
            continue
        for regime, sampling in REGIMES.items():
            limits = {"max_new_tokens": options.max_new_tokens, "batch_size": options.num_prompts, **sampling}
            found = evaluate(target, draft, prompts, tokenizer, **limits)
            for task in tasks:
                part = found.metrics[task]
                domain = next((domain for domain, members in DOMAINS.items() if task in members), task)
                facts = {"kind": kind, "regime": regime, "task": task, "domain": domain}
                facts |= {"tau": part.tau, "rounds": part.rounds, "tokens": part.tokens, "reached": part.reached}
                rows.append(facts | {"acceptance": part.acceptance})
            print(markdown_table(["task", "tau"], [[row["task"], number(row["tau"])] for row in rows[-len(tasks) :]]))
    write_result(RESULTS / f"{options.result}_{options.suite[0]}.json", {"provenance": origin, "rows": rows})


def speed(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Tokens per second of whole calls, greedy, in turns."""
    target, tokenizer = load_target(options)
    found: dict[str, Any] = {kind: drafts_of(options, target, kind) for kind in KINDS}
    fill_in = drafts_of(options, target, "dflash_fill_in")
    if fill_in is not None:
        folder = Path(options.models) / "dflash_fill_in_transformers"
        found["fill_in"] = transformers_dflash(fill_in, target, folder).to(target.dtype)
    if is_trained(Path(options.models) / "assistant"):
        found["assistant"] = AutoModelForCausalLM.from_pretrained(
            Path(options.models) / "assistant", dtype=options.dtype
        )
    tasks = {}
    for task, file in suite_files(*options.suite).items():
        prompts = [as_chat(prompt, tokenizer) for prompt in read_prompt_file(file, options.num_prompts).prompts]
        tasks[task] = [{"prompt": tokenizer.decode(token_ids(prompt, tokenizer))} for prompt in prompts]
    cells = [Cell(task, rows, 0.0, 0) for rows in options.rows for task in tasks]
    output = RESULTS / f"smollm2_speed_{options.suite[0]}.json"
    models = Models(target, tokenizer, tasks, **found, facts={"trained_alike_in": Path(options.models).name})
    print(markdown(compare(
        models, cells, output, options.num_prompts, options.max_new_tokens, packed=True, origin=origin
    )))  # fmt: skip


def trials(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Train variants of the draft; report what they are expected to commit at temperature 1, and their time."""
    script = Path(__file__).parents[1] / "examples" / "smollm2" / "train.py"
    common = ["--batch_size", str(options.batch_size), "--num_anchors", str(options.num_anchors)]
    common += ["--num_hidden_layers", "3", "--dtype", options.dtype]
    files = ["--target", options.target, "--train_file", options.train_file, "--eval_file", options.eval_file]
    states, rows = ["--feature_cache_dir", str(Path(options.models) / "trials" / "states")], []
    for name, (times, changed) in TRIALS.items():
        words = [*common, "--max_steps", str(times * options.max_steps)]
        words += [] if "eagle3" in changed else SMALL_VOCABULARY
        words += changed
        own = [*files, *words] + ([] if "--target_layer_ids" in changed else states)  # all others read the same layers
        folder = Path(options.models) / "trials" / "".join(c if c.isalnum() else "_" for c in name)
        if name in options.names and not is_trained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "words.json").write_text(json.dumps(words))
            subprocess.run([sys.executable, script, *own, "--output_dir", str(folder)], check=True)
        if is_trained(folder):
            log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
            measured, timed = (
                next(entry for entry in reversed(log) if key in entry) for key in ("eval_tau", "train_runtime")
            )
            parts = {key.removeprefix("eval_"): value for key, value in measured.items() if key.startswith("eval_")}
            facts = {"name": name, "steps": measured["step"], "seconds": timed["train_runtime"]}
            rows.append(facts | {"words": json.loads((folder / "words.json").read_text())} | parts)
            print(name, number(parts["tau"]))
    write_result(RESULTS / f"{options.result}.json", {"provenance": origin, "rows": rows})


def confidence(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Calibration of c_k, and the rounds that thresholds would cut: DSpark Figures 5 and 6 on this target."""
    target, tokenizer = load_target(options)
    draft = load_draft(options.draft, dtype=options.dtype).bind(target)
    tasks, rows = suite_files(*options.suite), []
    for domain, regime in itertools.product(DOMAINS, options.regimes):
        prompts = [
            prompt for task in DOMAINS[domain] for prompt in read_prompt_file(tasks[task], options.num_prompts).prompts
        ]
        limits = {"max_new_tokens": options.max_new_tokens, **REGIMES[regime]}
        halves = [
            collect_rounds(
                target, draft, prompts[half::2], tokenizer, rounds_file(options, domain, regime, half), **limits
            )
            for half in range(2)
        ]
        rounds = CalibrationRounds.concatenate(halves)
        fits = draft.config.confidence_fits_for(None, regime == "sampled")
        whole = rounds.proposed == rounds.block_size
        known = calibrated_confidence(rounds.logits[whole], fits)
        thresholds = replay(THRESHOLDS, known, rounds.num_accepted[whole])
        found = measure(rounds, fits) | {
            "mean_ece_of_a_true_head": mean_ece(as_predicted(rounds, fits), fits),
            "auc_of_the_distribution": conditional_auc(replace(rounds, logits=rounds.acceptance.logit(eps=1e-6))),
            "mean_ece_fitted_on_the_other_half": sum(
                mean_ece(measured, fit_confidence(fitted)) for fitted, measured in (halves, halves[::-1])
            ) / 2,
        }  # fmt: skip
        rows.append({"domain": domain, "regime": regime, "thresholds": thresholds} | found)
        print(
            domain,
            regime,
            {key: value for key, value in found.items() if key not in ("raw", "calibrated")},
            flush=True,
        )
    write_result(RESULTS / f"{options.result}.json", {"provenance": origin, "rows": rows})


def rounds_file(options: argparse.Namespace, domain: str, regime: str, half: int) -> Path:
    return Path(options.models) / f"rounds-{domain}-{regime}-{half}.jsonl"


def mean_ece(rounds: CalibrationRounds, fits: LogitFits) -> float:
    """Return the error of the survivals, averaged over the draft positions."""
    parts = measure_calibration(rounds, fits)
    return sum(part.ece for part in parts) / len(parts)


def as_predicted(rounds: CalibrationRounds, fits: LogitFits) -> CalibrationRounds:
    """Return rounds of the same confidences, all of them true: so few rounds leave an error in the mean of a bin.

    Labels are as many and as coarse as in `rounds`: zero and one where those are.
    """
    generator = torch.Generator().manual_seed(0)
    confidence = calibrated_confidence(rounds.logits, fits)
    accepted = (torch.rand(confidence.shape, generator=generator) < confidence).long().cumprod(-1).sum(-1)
    is_coarse = bool(((rounds.acceptance == 0) | (rounds.acceptance == 1)).all())
    one_or_zero = (torch.arange(rounds.block_size) < accepted[:, None]).float()
    return CalibrationRounds(
        rounds.logits, one_or_zero if is_coarse else confidence, accepted.minimum(rounds.proposed), rounds.proposed
    )


def load_target(options: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).eval()
    return target, AutoTokenizer.from_pretrained(options.target)


def drafts_of(options: argparse.Namespace, target: PreTrainedModel, kind: str) -> DraftModel | None:
    folder = Path(options.models) / kind
    return load_draft(folder, dtype=options.dtype).bind(target) if is_trained(folder) else None


def is_trained(folder: Path) -> bool:
    """Tell whether a model was trained to its end: its weights are written last."""
    return (folder / "model.safetensors").exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="part", required=True)
    parts = {"assistant": assistant, "tau": tau, "speed": speed, "trials": trials, "confidence": confidence}
    for name in parts:
        command = commands.add_parser(name)
        command.add_argument("--target", default="out/smollm2/target")
        command.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="the fast one here")
        command.add_argument("--models", default="out/smollm2/alike", help="a folder with a folder for each kind")
        if name == "assistant":
            command.add_argument("--train_file", required=True, help="answers, as hf-dspark regenerate writes them")
            command.add_argument("--max_steps", type=int, default=400)
            command.add_argument("--num_hidden_layers", type=int, default=3)
            continue
        if name == "trials":
            command.add_argument("--train_file", required=True, help="answers, as hf-dspark regenerate writes them")
            command.add_argument("--eval_file", required=True, help="answers to prompts that are not trained on")
            command.add_argument("--max_steps", type=int, default=300)
            command.add_argument("--batch_size", type=int, default=8, help="answers of a step")
            command.add_argument("--num_anchors", type=int, default=16, help="blocks of an answer and step")
            command.add_argument("--result", default="smollm2_trials", help="the name of its file")
            command.add_argument("--names", nargs="*", choices=TRIALS, default=list(TRIALS), help="to train")
            continue
        command.add_argument("--suite", nargs=2, required=True, metavar=("SUITE", "FOLDER"))
        command.add_argument("--num_prompts", type=int, default=10, help="of each task")
        command.add_argument("--max_new_tokens", type=int, default=128)
        if name == "confidence":
            command.add_argument("--draft", default="examples/smollm2/draft")
            command.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
            command.add_argument("--result", default="smollm2_confidence", help="the name of its file")
        if name == "tau":
            command.add_argument("--result", default="smollm2_tau", help="how the name of its file begins")
        if name == "speed":
            command.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="of a batch")
    options = parser.parse_args()
    parts[options.part](options, provenance_of(parser, options))


if __name__ == "__main__":
    main()
