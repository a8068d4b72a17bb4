"""`hf-dspark eval`, `calibrate` and `profile`: measurements, and the result files that cards are made of.

Knows nothing of how options are parsed or errors shown.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .checkpoint_files import read_config
from .checkpoint_formats import OURS
from .checkpoints import detect_format
from .cli_console import Console, Outcome, note_faults, require_new_file, require_new_folder
from .cli_models import (
    LoadedTarget,
    all_token_ids,
    choose_policy,
    describe_sampling,
    generate_kwargs,
    is_sampled,
    load_pair,
    policy_name,
    require_model,
)
from .cli_options import (
    CalibrateOptions,
    ChatOptions,
    DraftOptions,
    EvalOptions,
    PolicyChoice,
    ProfileOptions,
    SamplingOptions,
    TargetOptions,
)
from .cli_prompts import Prompt, as_chat, expand_turns, read_prompt_file, token_ids
from .collection import CalibrationReport, calibrate
from .draft_model import DraftModel
from .evaluation import AcceptanceReport, compare_domains, measure_domains
from .generate_many import Completion, generate_many
from .hub import RESULTS_FOLDER
from .profiling import cache_folder, profile_throughput
from .results import describe_draft, describe_target, read_results, write_result
from .throughput import save_cost


def run_eval(
    console: Console,
    words: Sequence[str],
    options: EvalOptions,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> Outcome:
    """Measure how much of its drafts the target accepts."""
    result_file = require_new_file(options.result_file, options.overwrite)
    before = None if options.baseline is None else _read_baseline(options.baseline)
    files = {name: read_prompt_file(path, options.num_prompts) for name, path in _domains(options.prompts)}
    if before is not None and before.keys() != files.keys():
        raise ValueError(f"--baseline has the domains {sorted(before)}, --prompts has {sorted(files)}: give the same")
    note_faults(console, files.values())
    target, draft = load_pair(target_options, draft_options)
    kwargs = generate_kwargs(sampling, target.model)
    policy = choose_policy(PolicyChoice.parse(options.policy), target.model, draft)
    torch.manual_seed(sampling.seed)
    prompts = {}
    for name, file in files.items():
        turns = _expanded(file.prompts, target, draft, chat, options.batch_size, kwargs)
        prompts[name] = all_token_ids(turns, target, chat)
    reports = measure_domains(
        target.model, draft, prompts, target.tokenizer, policy=policy, batch_size=options.batch_size, **kwargs
    )
    result = write_result(
        result_file, "acceptance", describe_target(target.model), describe_draft(draft),
        sampling=describe_sampling(kwargs, target.model, sampling.seed), policy=policy_name(policy),
        domains={name: _without_nans(report.to_dict()) for name, report in reports.items()},
    )  # fmt: skip
    console.show(_acceptance_table(reports) if before is None else compare_domains(before, reports))
    console.note(f"the result is in {result_file}")
    return Outcome(result | {"skipped_lines": [fault for file in files.values() for fault in file.faults]})


def _domains(words: Sequence[str]) -> list[tuple[str, str]]:
    """Read NAME=FILE, or FILE, whose name is then the domain's."""
    domains = []
    for word in words:
        name, _, path = word.rpartition("=") if not Path(word).is_file() else ("", "", word)
        domains.append((name or Path(path).stem, path))
    twice = sorted({name for name, _ in domains if [other for other, _ in domains].count(name) > 1})
    if twice:
        raise ValueError(f"--prompts names the domain {twice[0]!r} twice: give NAME=FILE with different names")
    return domains


def _read_baseline(path: str) -> dict[str, AcceptanceReport]:
    (result,) = read_results([path]) if Path(path).is_file() else (None,)
    if result is None or result["kind"] != "acceptance":
        raise ValueError(f"--baseline {path} is no result of hf-dspark eval")
    reports = {}
    for name, found in result["domains"].items():
        rates = [float("nan") if rate is None else rate for rate in found["acceptance"]]
        reports[name] = AcceptanceReport(found["tau"], rates, found["prompts"], found["rounds"], found["tokens"])
    return reports


def _acceptance_table(reports: dict[str, AcceptanceReport]) -> str:
    lines = ["| domain | prompts | rounds | tau | acceptance by position |", "|---|---|---|---|---|"]
    for name, report in reports.items():
        rates = " ".join(f"{rate:.2f}" for rate in report.acceptance)
        lines.append(f"| {name} | {report.prompts} | {report.rounds} | {report.tau:.2f} | {rates} |")
    return "\n".join(lines)


def run_calibrate(
    console: Console,
    words: Sequence[str],
    options: CalibrateOptions,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> Outcome:
    """Fit the draft's confidences, and keep the temperatures in its config."""
    folder = _folder_to_calibrate(options, draft_options)
    read = read_prompt_file(options.prompts_file, options.num_prompts)
    note_faults(console, [read])
    target, draft = load_pair(target_options, draft_options)
    kwargs = generate_kwargs(sampling, target.model)
    torch.manual_seed(sampling.seed)
    prompts = all_token_ids(_expanded(read.prompts, target, draft, chat, 8, kwargs), target, chat)
    domain = options.domain or ("sampled" if is_sampled(kwargs, target.model) else "greedy")
    report = calibrate(
        target.model, draft, prompts, target.tokenizer, domain, output_file=options.rounds_file, seed=sampling.seed,
        **kwargs,
    )  # fmt: skip
    if options.output_dir is None:
        stored = type(draft.config).from_pretrained(folder)  # the loaded one has the dtype of this run
        stored.sts_temperatures = draft.config.sts_temperatures
        stored.save_pretrained(folder)
    else:
        draft.save_pretrained(folder)
    name = f"calibration-{domain.replace('/', '-')}.json"
    result_file = Path(options.result_file or folder / RESULTS_FOLDER / name)
    result = write_result(
        result_file, "calibration", describe_target(target.model), describe_draft(draft) | {"name": folder.name},
        domain=domain,
        num_prompts=len(prompts), sampling=describe_sampling(kwargs, target.model, sampling.seed),
        **_describe_calibration(report),
    )  # fmt: skip
    console.show(_calibration_table(domain, report))
    console.note(f"the temperatures are in {folder / 'config.json'}, the result is in {result_file}")
    return Outcome(result | {"skipped_lines": read.faults})


def _folder_to_calibrate(options: CalibrateOptions, draft_options: DraftOptions) -> Path:
    """Return where the calibrated draft goes, before anything is decoded."""
    if options.output_dir is not None:
        return require_new_folder(options.output_dir)
    folder = Path(draft_options.draft)
    require_model(draft_options.draft, "--draft")
    if not folder.is_dir():
        raise ValueError(f"--draft {folder} is on the Hub: say with --output_dir where the calibrated draft goes")
    found = detect_format(read_config(folder))
    if found != OURS:
        raise ValueError(
            f"--draft {folder} is in the format {found}, whose config.json has no place for temperatures: say with "
            "--output_dir where the calibrated draft goes"
        )
    return folder


def _describe_calibration(report: CalibrationReport) -> dict[str, Any]:
    before, after = report.mean_ece
    return {
        "ece_before": before,
        "ece_after": after,
        "auc": report.auc,
        "num_rounds": report.scaling.num_samples,
        "temperatures": list(report.scaling.temperatures),
        "raw": [asdict(part) for part in report.before],
        "calibrated": [asdict(part) for part in report.after],
    }


def _calibration_table(domain: str, report: CalibrationReport) -> str:
    lines = [f"| {domain}: position | temperature | ECE raw | ECE calibrated |", "|---|---|---|---|"]
    rows = zip(report.scaling.temperatures, report.before, report.after, strict=True)
    for temperature, raw, calibrated in rows:
        lines.append(f"| {raw.position} | {temperature:.2f} | {raw.ece:.1%} | {calibrated.ece:.1%} |")
    return "\n".join(lines)


def run_profile(
    console: Console,
    words: Sequence[str],
    options: ProfileOptions,
    target_options: TargetOptions,
    draft_options: DraftOptions,
) -> Outcome:
    """Measure what drafting and verifying cost on this machine."""
    if options.no_cache and options.output_file is None:
        raise ValueError("--no_cache without --output_file would measure for nobody: drop the one, or give the other")
    output = None if options.output_file is None else require_new_file(options.output_file, options.overwrite)
    target, draft = load_pair(target_options, draft_options)
    profile = profile_throughput(
        target.model, draft, options.batch_sizes, options.context_lengths, options.repetitions,
        cache=not options.no_cache,
    )  # fmt: skip
    places = [] if options.no_cache else [str(cache_folder() / f"{profile.machine.key}.json")]
    if output is not None:
        profile.save(output) if options.format == "hf_dspark" else save_cost(profile.table, output)
        places.append(str(output))
    table = profile.table.to_sglang()
    rows = zip(table["sample_batch_tokens"], table["sample_steps_per_sec"], strict=True)
    lines = [f"| {tokens} | {rate:.1f} |" for tokens, rate in rows]
    console.show("\n".join(["| verified tokens | steps per second |", "|---|---|", *lines]))
    console.note(f"the table is in {' and '.join(places)}")
    return Outcome({"table": table, "fit": profile.fit, "machine": asdict(profile.machine), "files": places})


def _expanded(
    prompts: Sequence[Prompt],
    target: LoadedTarget,
    draft: DraftModel,
    chat: ChatOptions,
    batch_size: int,
    kwargs: dict[str, Any],
) -> list[Prompt]:
    """Return one prompt per turn; the target answers the earlier ones."""
    read = [as_chat(prompt, target.tokenizer, chat.no_chat_template) for prompt in prompts]

    def answer(some: list[Prompt]) -> list[str]:
        ids = [token_ids(prompt, target.tokenizer, chat.thinking) for prompt in some]
        return [done.text for done in _in_order(target, draft, ids, batch_size, kwargs)]

    return expand_turns(read, answer)


def _in_order(
    target: LoadedTarget, draft: DraftModel, prompts: list[list[int]], batch_size: int, kwargs: dict[str, Any]
) -> Iterator[Completion]:
    for done in sorted(
        generate_many(target.model, draft, prompts, target.tokenizer, batch_size, **kwargs),
        key=lambda done: done.index,
    ):
        if done.error is not None:
            raise done.error
        yield done


def _without_nans(report: dict[str, Any]) -> dict[str, Any]:
    return report | {"tau": report["tau"] if math.isfinite(report["tau"]) else None}
