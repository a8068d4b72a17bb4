"""`hf-dspark eval`, `calibrate` and `profile`: measurements, and the result files that cards are made of.

Knows nothing of how options are parsed or errors shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..data.prompts import PromptFile, read_prompt_file
from ..decoding.step_costs import cache_folder
from ..evaluation.calibrate import CalibrationReport, calibrate
from ..evaluation.evaluate import ALL, evaluate
from ..evaluation.metrics import comparison_table
from ..evaluation.profile import profile_throughput
from ..evaluation.results import (
    WHOLE_BLOCK,
    describe_draft,
    describe_policy,
    describe_sampling,
    describe_target,
    read_results,
    regime_of,
    write_result,
)
from ..evaluation.tables import markdown_table, number
from ..formats.files import read_config
from ..formats.tables import OURS
from ..sharing.convert import detect_format
from ..sharing.hub import RESULTS_FOLDER
from .console import Console, Outcome, note_faults, require_new_file, require_new_folder
from .models import (
    as_asked,
    choose_policy,
    generate_kwargs,
    load_draft_for,
    load_pair,
    load_target,
    require_model,
)
from .options import (
    CalibrateOptions,
    ChatOptions,
    DraftOptions,
    EvalOptions,
    EvaluatedDraftOptions,
    PolicyChoice,
    ProfileOptions,
    SamplingOptions,
    TargetOptions,
)


def run_eval(
    console: Console,
    words: Sequence[str],
    options: EvalOptions,
    target_options: TargetOptions,
    draft_options: EvaluatedDraftOptions,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> Outcome:
    """Measure how much of its drafts the target accepts, and how fast that is."""
    result_file = require_new_file(options.result_file, options.overwrite)
    if draft_options.draft is None and (options.policy or options.compare or options.baseline):
        given = "--policy" if options.policy else "--compare" if options.compare else "--baseline"
        raise ValueError(f"{given} needs --draft: give it, or drop {given}")
    baseline, before = (None, None) if options.baseline is None else _read_baseline(options.baseline)
    files = {name: read_prompt_file(path, options.num_prompts) for name, path in _tasks(options.prompts)}
    if before is not None and before.keys() != files.keys():
        raise ValueError(f"--baseline has the tasks {sorted(before)}, --prompts has {sorted(files)}: give the same")
    note_faults(console, files.values())
    if draft_options.draft is not None:
        require_model(draft_options.draft, "--draft")  # before a big target is read
    target = load_target(target_options)
    draft = None if draft_options.draft is None else load_draft_for(target.model, draft_options)
    policy = (
        None if draft is None else choose_policy(PolicyChoice.parse(options.policy or "full"), target.model, draft)
    )
    kwargs = generate_kwargs(sampling, target.model)
    if baseline is not None:
        _require_same_way(
            baseline, files, describe_target(target.model), describe_sampling(kwargs, target.model, sampling.seed),
            None if policy is None else describe_policy(policy),
        )  # fmt: skip
    if chat.no_chat_template:
        target.tokenizer.chat_template = None
    evaluation = evaluate(
        target.model, draft, files, target.tokenizer, result_file, policy, options.batch_size, options.compare,
        seed=sampling.seed, enable_thinking=chat.thinking, **kwargs,
    )  # fmt: skip
    found = evaluation.to_dict()
    console.show(evaluation.table())
    if before is not None:
        console.show(f"\n{comparison_table(before, _reports(found['tasks']))}")
    malformed = [fault for file in files.values() for fault in file.faults]
    unanswered = [part for part in evaluation.failed if (part.task, part.line) not in _places(files)]
    for part in unanswered:
        console.note(f"{part.task} line {part.line} failed: {part.error}")
    console.note(f"the result is in {result_file}")
    return Outcome(found | {"skipped_lines": [str(fault) for fault in malformed]}, failed=bool(unanswered))


def _places(files: Mapping[str, PromptFile]) -> set[tuple[str, int]]:
    """Return which lines are malformed, by task."""
    return {(name, fault.line) for name, file in files.items() for fault in file.faults}


def _tasks(words: Sequence[str]) -> list[tuple[str, str]]:
    """Read NAME=FILE, or FILE, whose name is then the task's."""
    tasks = []
    for word in words:
        name, _, path = word.rpartition("=") if not Path(word).is_file() else ("", "", word)
        tasks.append((name or Path(path).stem, path))
    twice = sorted({name for name, _ in tasks if [other for other, _ in tasks].count(name) > 1})
    if twice:
        raise ValueError(f"--prompts names the task {twice[0]!r} twice: give NAME=FILE with different names")
    return tasks


def _read_baseline(path: str) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """Return an earlier result, and what it says of acceptance."""
    (result,) = read_results([path]) if Path(path).is_file() else (None,)
    found = {} if result is None else result.get("tasks") or result.get("domains") or {}
    if not found or not result["draft"]:
        raise ValueError(f"--baseline {path} is no result of hf-dspark eval with a draft")
    return result, _reports(found)


def _require_same_way(
    baseline: Mapping[str, Any],
    files: Mapping[str, PromptFile],
    target: Mapping[str, Any],
    sampling: Mapping[str, Any],
    policy: str | None,
) -> None:
    """Refuse a comparison in which not only the draft differs."""
    there = str(baseline["target"]["name"]), regime_of(baseline["sampling"])
    here = str(target["name"]), regime_of(sampling)
    if there != here:
        raise ValueError(
            f"--baseline is of {there[0]}, {there[1]}; this run is of {here[0]}, {here[1]}: decode the same way, or "
            "leave it out"
        )
    lost = {part["task"] for part in baseline.get("failed", ())}  # their counts say nothing of the file
    compared = [
        ("policy", baseline.get("policy") or WHOLE_BLOCK, policy),
        ("max_new_tokens", baseline["sampling"].get("max_new_tokens"), sampling["max_new_tokens"]),
        ("dtype of the target", baseline["target"].get("dtype"), target["dtype"]),
        *(
            (f"number of prompts of {name}", part["prompts"], len(files[name].prompts))
            for name, part in (baseline.get("tasks") or baseline["domains"]).items()
            if name in files and name not in lost and not files[name].faults
        ),
    ]
    for what, before, now in compared:
        if before not in (None, now):
            raise ValueError(
                f"--baseline has another {what}, {before}, than this run, {now}: decode the same way, or leave it out"
            )


def _reports(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return what tasks say of acceptance; not of all tasks together, which a result of another kind does not have."""
    return {name: found for name, found in tasks.items() if name != ALL}


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
    prompts = as_asked(read.prompts, target, chat)
    if chat.thinking is not None:
        thinking = {"enable_thinking": chat.thinking}
        prompts = [replace(prompt, chat_template_kwargs=thinking) for prompt in prompts]
    report = calibrate(
        target.model, draft, prompts, target.tokenizer, options.domain, output_file=options.rounds_file,
        seed=sampling.seed, **kwargs,
    )  # fmt: skip
    domain = report.domain
    name = f"calibration-{domain.replace('/', '-')}.json"
    result_file = Path(options.result_file or folder / RESULTS_FOLDER / name)
    result = write_result(
        result_file, "calibration", describe_target(target.model), describe_draft(draft) | {"name": folder.name},
        domain=domain,
        num_prompts=len(prompts), sampling=describe_sampling(kwargs, target.model, sampling.seed),
        **_describe_calibration(report),
    )  # fmt: skip
    if options.output_dir is None:
        stored = type(draft.config).from_pretrained(folder)  # the loaded one has the dtype of this run
        stored.sts_temperatures = draft.config.sts_temperatures
        stored.save_pretrained(folder)
    else:
        draft.save_pretrained(folder)
    console.show(_calibration_table(domain, report))
    console.note(f"the temperatures are in {folder / 'config.json'}, the result is in {result_file}")
    return Outcome(result | {"skipped_lines": [str(fault) for fault in read.faults]})


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
    return {
        "ece_before": [part.ece for part in report.before],
        "ece_after": [part.ece for part in report.after],
        "auc": report.auc,
        "num_rounds": report.scaling.num_samples,
        "temperatures": list(report.scaling.temperatures),
        "raw": [asdict(part) for part in report.before],
        "calibrated": [asdict(part) for part in report.after],
    }


def _calibration_table(domain: str, report: CalibrationReport) -> str:
    rows = [
        (raw.position, number(temperature), f"{raw.ece:.1%}", f"{calibrated.ece:.1%}")
        for temperature, raw, calibrated in zip(report.scaling.temperatures, report.before, report.after, strict=True)
    ]
    return markdown_table((f"{domain}: position", "temperature", "ECE raw", "ECE calibrated"), rows)


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
        (profile if options.format == "hf_dspark" else profile.table).save(output)
        places.append(str(output))
    table = profile.table.to_sglang()
    rows = zip(table["sample_batch_tokens"], table["sample_steps_per_sec"], strict=True)
    lines = [(tokens, number(rate, 1)) for tokens, rate in rows]
    console.show(markdown_table(("verified tokens", "steps per second"), lines))
    console.note(f"the table is in {' and '.join(places)}")
    return Outcome({"table": table, "fit": profile.fit, "machine": asdict(profile.machine), "files": places})
