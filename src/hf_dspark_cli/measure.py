"""`hf-dspark eval`, `calibrate` and `profile`: measurements, and the result files that cards are made of."""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from hf_dspark.cpu import fast_linears
from hf_dspark.data.prompts import as_chat, read_prompt_file, suite_files
from hf_dspark.files import require_writable
from hf_dspark.formats.checkpoint import Checkpoint
from hf_dspark.formats.translate import recognise
from hf_dspark.hub.repository import RESULTS_FOLDER
from hf_dspark.measuring import results
from hf_dspark.measuring.calibrate import CALIBRATED, calibrate
from hf_dspark.measuring.evaluate import evaluate
from hf_dspark.measuring.profile import profile_throughput
from hf_dspark.measuring.tables import markdown_table
from hf_dspark.models.auto import load_draft
from hf_dspark.scheduling.step_costs import cache_folder, find_cost

from . import Console
from .models import choose_policy, generate_kwargs, load_models, values_of


def run_eval(options: Namespace, console: Console) -> bool:
    tasks = dict(options.prompts or suite_files(*options.suite))
    if len(tasks) < len(options.prompts or tasks):
        raise ValueError("--prompts names a task twice: give NAME=FILE with different names")
    files = {name: read_prompt_file(path, options.num_prompts) for name, path in tasks.items()}
    console.skip(fault for file in files.values() for fault in file.faults)
    target, tokenizer, draft = load_models(options)
    kwargs = values_of(options, "batch_size", "seed", "enable_thinking", "packed") | generate_kwargs(options, target)
    if options.policy is not None:
        kwargs["policy"] = choose_policy(options.policy, target, draft)
    found = evaluate(target, draft, files, tokenizer, options.result_file, compare_plain=options.compare, **kwargs)
    console.show(found.table())
    malformed = {(name, fault.line) for name, file in files.items() for fault in file.faults}
    unanswered = [part for part in found.failed if (part.task, part.line) not in malformed]
    for part in unanswered:
        console.note(f"{part.task} line {part.line} failed: {part.error}")
    console.note(f"the result is in {options.result_file}")
    console.document(found.to_dict())
    return not unanswered


def run_calibrate(options: Namespace, console: Console) -> bool:
    folder = Path(options.output_dir or options.draft)
    if options.output_dir is None and (not folder.is_dir() or recognise(Checkpoint(folder).config) is not None):
        where = "in a format that has no place for temperatures" if folder.is_dir() else "on the Hub"
        raise ValueError(f"--draft {folder} is {where}: name the folder of the calibrated draft with --output_dir")
    require_writable(folder)
    read = read_prompt_file(options.prompts_file, options.num_prompts)
    console.skip(read.faults)
    target, tokenizer, draft = load_models(options)
    kwargs = generate_kwargs(options, target)
    prompts = [as_chat(prompt, tokenizer, options.enable_thinking) for prompt in read.prompts]
    files = {"output_file": options.rounds_file, "seed": options.seed}
    report = calibrate(target, draft, prompts, tokenizer, options.domain, **files, **kwargs)
    # The config first: where the result is, the calibration is done. It is read again, and so are weights that are
    # saved: the loaded ones have the dtype of this run.
    found = {name: getattr(draft.config, name) for name in CALIBRATED}
    if options.output_dir is None:
        config = type(draft.config).from_pretrained(folder)
        config.update(found)
        config.save_pretrained(folder)
    else:
        revision = draft.config._commit_hash or options.draft_revision
        saved = load_draft(options.draft, dtype="auto", revision=revision)
        saved.config.update(found)
        saved.save_pretrained(folder)
    result_file = folder / RESULTS_FOLDER / f"calibration-{report.domain.replace('/', '-')}.json"
    result = results.write_result(
        result_file,
        "calibration",
        results.describe_target(target),
        results.describe_draft(draft) | {"name": folder.name},
        domain=report.domain,
        num_prompts=len(prompts),
        sampling=results.describe_sampling(kwargs, target, options.seed),
        ece_before=[part.ece for part in report.before],
        ece_after=[part.ece for part in report.after],
        auc=report.auc,
        num_rounds=report.num_rounds,
        temperatures=report.temperatures,
        fits=[list(pair) for pair in report.fits],
        raw=[asdict(part) for part in report.before],
        calibrated=[asdict(part) for part in report.after],
    )
    rows = [
        [raw.position, f"{slope:.2f}", f"{offset:+.2f}", f"{raw.ece:.1%}", f"{calibrated.ece:.1%}"]
        for (slope, offset), raw, calibrated in zip(report.fits, report.before, report.after, strict=True)
    ]
    console.show(markdown_table([f"{report.domain}: position", "slope", "offset", "ECE raw", "ECE calibrated"], rows))
    console.note(f"the calibration is in {folder / 'config.json'}, the result is in {result_file}")
    console.document(result)
    return True


def run_profile(options: Namespace, console: Console) -> bool:
    target, _, draft = load_models(options)
    profile, places = None, []
    with fast_linears(target, draft, packed=True) if options.packed else nullcontext():
        if options.show:
            table = find_cost(target, draft)
        else:
            settings = (options.batch_sizes, options.context_lengths, options.repetitions)
            profile = profile_throughput(target, draft, *settings)
            table = profile.table
    if profile is not None:
        places = [str(cache_folder() / f"{profile.machine.key}.json")]
        if options.output_file is not None:
            profile.save(options.output_file)
            places.append(options.output_file)
    if table is None:
        console.show("no table fits these models on this machine: generate() learns from its first rounds")
    else:
        rates = zip(table.verify_tokens, table.steps_per_second, strict=True)
        rows = [[tokens, f"{rate:.1f}"] for tokens, rate in rates]
        console.show(markdown_table(["verified tokens", "steps per second"], rows))
    if options.show and table is not None:
        origin = table.provenance
        console.show(f"\n{origin['table']}\nmeasured on {origin.get('device')}, {origin.get('threads')} threads")
        if "measured" in origin:
            age = datetime.now(timezone.utc) - datetime.fromisoformat(origin["measured"])
            console.show(f"{age.days} days old")
    if places:
        console.note(f"the table is in {' and '.join(places)}")
    document = {"table": None if table is None else table.to_sglang(), "files": places}
    console.document(document | {"machine": None if profile is None else asdict(profile.machine)})
    return True
