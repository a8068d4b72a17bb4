"""`hf-dspark eval`, `calibrate`, `profile` and `check`: measurements, and the result files that cards are made of."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_dspark.data.prompts import PromptFile, read_prompt_file
from hf_dspark.decoding.step_costs import cache_folder
from hf_dspark.evaluation import results
from hf_dspark.evaluation.calibrate import calibrate
from hf_dspark.evaluation.evaluate import ALL, evaluate
from hf_dspark.evaluation.metrics import comparison_table
from hf_dspark.evaluation.profile import profile_throughput
from hf_dspark.evaluation.tables import markdown_table
from hf_dspark.formats.files import read_config
from hf_dspark.formats.tables import OURS
from hf_dspark.sharing.convert import detect_format
from hf_dspark.sharing.hub import RESULTS_FOLDER
from hf_dspark.targets.check import check_target

from . import Console
from .models import (
    as_asked,
    choose_policy,
    generate_kwargs,
    load_models,
    load_target,
    note_faults,
)


def run_eval(options: Namespace, console: Console) -> bool:
    """Measure how much of its drafts the target accepts, and how fast that is."""
    baseline = None if options.baseline is None else _read_baseline(options.baseline)
    files = {name: read_prompt_file(path, options.num_prompts) for name, path in options.prompts.items()}
    faults = note_faults(console, *files.values())
    models = load_models(options)
    policy = None if models.draft is None else choose_policy(options.policy or "full", models)
    kwargs = generate_kwargs(options, models.target)
    if baseline is not None:
        sampling = results.describe_sampling(kwargs, models.target, options.seed)
        prompts = {name: len(file.prompts) for name, file in files.items()}
        now = _way(results.describe_target(models.target), sampling, results.describe_policy(policy), prompts)
        _require_same_way(baseline, files, now)
    evaluation = evaluate(
        models.target,
        models.draft,
        files,
        models.tokenizer,
        options.result_file,
        policy,
        batch_size=options.batch_size,
        compare_plain=options.compare,
        seed=options.seed,
        enable_thinking=options.enable_thinking,
        **kwargs,
    )
    console.show(evaluation.table())
    result = evaluation.to_dict()
    if baseline is not None:
        console.show(f"\n{comparison_table(_tasks_of(baseline), _tasks_of(result))}")
    malformed = {(name, fault.line) for name, file in files.items() for fault in file.faults}
    unanswered = [part for part in evaluation.failed if (part.task, part.line) not in malformed]
    for part in unanswered:
        console.note(f"{part.task} line {part.line} failed: {part.error}")
    console.note(f"the result is in {options.result_file}")
    console.document(result | {"skipped_lines": faults})
    return not unanswered


def _read_baseline(path: str) -> dict[str, Any]:
    (result,) = results.read_results([path]) if Path(path).is_file() else (None,)
    if result is None or not result["draft"] or not _tasks_of(result):
        raise ValueError(f"--baseline {path} is no result of hf-dspark eval with a draft")
    return result


def _tasks_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = result.get("tasks") or result.get("domains") or {}
    return {name: part for name, part in found.items() if name != ALL}


def _way(
    target: Mapping[str, Any], sampling: Mapping[str, Any], policy: str | None, prompts: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return what two results must share, for only the draft to differ."""
    return {
        "target": target["name"],
        "dtype of the target": target.get("dtype"),
        "way of decoding": results.regime_of(sampling),
        "max_new_tokens": sampling.get("max_new_tokens"),
        "policy": policy or results.WHOLE_BLOCK,
        "set of tasks": sorted(prompts),
        **{f"number of prompts of {name}": number for name, number in prompts.items()},
    }


def _require_same_way(baseline: Mapping[str, Any], files: Mapping[str, PromptFile], now: Mapping[str, Any]) -> None:
    """Refuse a comparison in which not only the draft differs."""
    incomplete = {part["task"] for part in baseline.get("failed", ())}  # their counts are not those of the files
    incomplete |= {name for name, file in files.items() if file.faults}
    tasks = _tasks_of(baseline)
    prompts = {name: None if name in incomplete else part["prompts"] for name, part in tasks.items()}
    for what, before in _way(baseline["target"], baseline["sampling"], baseline.get("policy"), prompts).items():
        if before not in (None, now[what]):
            raise ValueError(
                f"--baseline has another {what}, {before}, than this run, {now[what]}: decode the same way, or leave "
                "it out"
            )


def run_calibrate(options: Namespace, console: Console) -> bool:
    """Fit the draft's confidences, and keep the temperatures in its config."""
    folder = _folder_to_calibrate(options)
    read = read_prompt_file(options.prompts_file, options.num_prompts)
    faults = note_faults(console, read)
    models = load_models(options)
    kwargs = generate_kwargs(options, models.target)
    prompts = as_asked(read.prompts, models)
    if options.enable_thinking is not None:
        thinking = {"enable_thinking": options.enable_thinking}
        prompts = [replace(prompt, chat_template_kwargs=thinking) for prompt in prompts]
    report = calibrate(
        models.target,
        models.draft,
        prompts,
        models.tokenizer,
        options.domain,
        output_file=options.rounds_file,
        seed=options.seed,
        **kwargs,
    )
    domain = report.domain
    result_file = options.result_file or folder / RESULTS_FOLDER / f"calibration-{domain.replace('/', '-')}.json"
    result = results.write_result(
        result_file,
        "calibration",
        results.describe_target(models.target),
        results.describe_draft(models.draft) | {"name": folder.name},
        domain=domain,
        num_prompts=len(prompts),
        sampling=results.describe_sampling(kwargs, models.target, options.seed),
        ece_before=[part.ece for part in report.before],
        ece_after=[part.ece for part in report.after],
        auc=report.auc,
        num_rounds=report.scaling.num_samples,
        temperatures=list(report.scaling.temperatures),
        raw=[asdict(part) for part in report.before],
        calibrated=[asdict(part) for part in report.after],
    )
    if options.output_dir is None:
        config = type(models.draft.config).from_pretrained(folder)  # the loaded one has the dtype of this run
        config.sts_temperatures = models.draft.config.sts_temperatures
        config.save_pretrained(folder)
    else:
        models.draft.save_pretrained(folder)
    rows = zip(report.scaling.temperatures, report.before, report.after, strict=True)
    console.show(
        markdown_table(
            [f"{domain}: position", "temperature", "ECE raw", "ECE calibrated"],
            [[raw.position, f"{t:.2f}", f"{raw.ece:.1%}", f"{calibrated.ece:.1%}"] for t, raw, calibrated in rows],
        )
    )
    console.note(f"the temperatures are in {folder / 'config.json'}, the result is in {result_file}")
    console.document(result | {"skipped_lines": faults})
    return True


def _folder_to_calibrate(options: Namespace) -> Path:
    """Return where the calibrated draft goes, before anything is decoded."""
    if options.output_dir is not None:
        return Path(options.output_dir)
    folder = Path(options.draft)
    if folder.is_dir() and detect_format(read_config(folder)) == OURS:
        return folder
    where = "in a format whose config.json has no place for temperatures" if folder.is_dir() else "on the Hub"
    raise ValueError(f"--draft {folder} is {where}: name the folder of the calibrated draft with --output_dir")


def run_profile(options: Namespace, console: Console) -> bool:
    """Measure what drafting and verifying cost on this machine."""
    models = load_models(options)
    profile = profile_throughput(
        models.target,
        models.draft,
        options.batch_sizes,
        options.context_lengths,
        options.repetitions,
        cache=not options.no_cache,
    )
    places = [] if options.no_cache else [str(cache_folder() / f"{profile.machine.key}.json")]
    if options.output_file is not None:
        (profile if options.format == "hf_dspark" else profile.table).save(options.output_file)
        places.append(options.output_file)
    table = profile.table.to_sglang()
    rows = zip(table["sample_batch_tokens"], table["sample_steps_per_sec"], strict=True)
    console.show(markdown_table(["verified tokens", "steps per second"], [[n, f"{rate:.1f}"] for n, rate in rows]))
    console.note(f"the table is in {' and '.join(places)}")
    console.document({"table": table, "fit": profile.fit, "machine": asdict(profile.machine), "files": places})
    return True


def run_check(options: Namespace, console: Console) -> bool:
    """Check that a target decodes rows together as it decodes each alone."""
    difference = check_target(load_target(options).target)
    console.show(f"rows decoded together say the same: logits differ by {difference:.1e} of the largest one at most")
    console.document({"target": options.target, "difference": difference})
    return True
