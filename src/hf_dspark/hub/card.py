"""The model card of a draft, made of its config and of result files: a number that no result file holds is not shown.

The text is in `card.md`; here are the numbers, tables and metadata that fill it.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from ..files import differences
from ..measuring.results import describe_draft, read_results, regime_of, short_policy
from ..measuring.tables import markdown_table, number
from ..models.modeling_draft import DraftModel

NAMES = ("name", "revision")  # of describe_draft: how a draft is called; the rest is what it is
# Of a training's arguments, those that a reader looks for; all of them are in its result file.
SHOWN_ARGUMENTS = (
    "learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "processes",
    "num_anchors", "max_length",
)  # fmt: skip

Decoded = tuple[dict, str, dict]  # a result file, one of its tasks, and what that came to


def model_card(
    draft: DraftModel,
    results: Iterable[str | Path] = (),
    *,
    repo_id: str | None = None,
    target: str | None = None,
    picture: tuple[str, str] | None = None,
    **metadata: Any,
) -> ModelCard:
    """Return the model card of a draft; `results` are result files, or folders of them, of this draft and its target.

    `repo_id` is where the draft is or will be, by default where it was loaded from. `target` is the target's name on
    the Hub, by default the one that the results agree on; results that name a folder may have measured it. `picture`
    is what a picture in the repository shows, and its path there. `metadata` are fields of
    `huggingface_hub.ModelCardData`, such as `license="mit"`. Results of another draft or target are refused with the
    differences.
    """
    found, facts, config = read_results(results), describe_draft(draft), draft.config
    _require_this_draft(found, facts)
    target_name, revision = _agreed_target(found, target)
    title = repo_id or facts["name"] or "draft"
    decoded, training = decoded_tasks(found), of_kind(found, "training")
    earlier = next((result["draft"]["name"] for result in training if result["draft"].get("name")), None)
    earlier = None if earlier in (title, _last(title)) else earlier
    return ModelCard.from_template(
        _metadata(title, config, (target_name, earlier), decoded, metadata),
        template_path=str(Path(__file__).with_suffix(".md")),
        name=_text(_last(title)),
        kind=draft_kind(config),
        draft=json.dumps(title),
        target=json.dumps(target_name if _is_on_hub(target_name) else "path/to/the/target"),
        target_link=_link(target_name) if target_name else None,
        revision=_text(revision) if revision else None,
        started_from=_link(earlier) if earlier else None,
        headline=_headline(decoded, training),
        picture="![{}]({})".format(*picture) if picture else None,
        decoding=_table([_speed_row(*task) for task in decoded]),
        speed_measured=any(part.get("speedup") for _, _, part in decoded),
        devices=_text(" and ".join(dict.fromkeys(_device(result) for result, _, _ in decoded))),
        config=config,
        pruned=getattr(config, "draft_vocab_size", None),
        num_parameters=f"{facts['num_parameters']:,}",
        acceptance=_table([_acceptance_row(*task) for task in decoded if task[2].get("acceptance")]),
        calibration=_table([_calibration_row(result) for result in of_kind(found, "calibration")]),
        training=[_training_table(result) for result in training],
        origins=_origins(found),
    )


def missing_facts(card: ModelCard) -> list[str]:
    """Return what a published card should say and does not, each with its cure."""
    cures = {
        "license": "a license (--license mit, or another id of the Hub; in Python license=...)",
        "base_model": "its target on the Hub (--target user/name; in Python target=...)",
    }
    return [cure for field, cure in cures.items() if card.data.get(field) is None]


def draft_kind(config: PreTrainedConfig) -> str:
    return "Eagle3" if config.is_autoregressive else "DSpark" if config.markov_rank else "DFlash"


# ---- whose results they are


def _require_this_draft(results: list[dict], facts: Mapping[str, Any]) -> None:
    """Refuse results of other weights or another geometry. A name is no identity: drafts are renamed when trained."""
    needed = {name: value for name, value in facts.items() if name not in NAMES}
    for result in results:
        theirs = result["draft"]
        wrong = differences({name: theirs.get(name, "not said") for name in needed}, needed)
        if wrong:
            raise ValueError(
                f"a result of the kind {result['kind']!r} belongs to another draft, "
                f"{theirs.get('name') or 'without a name'}, which differs in {wrong}: measure this draft"
            )


def _agreed_target(results: list[dict], name: str | None) -> tuple[str | None, str | None]:
    described = [result["target"] for result in results]
    names = [facts["name"] for facts in described if facts.get("name")]
    if name:  # a folder may have any name
        names = [name, *filter(_is_on_hub, names)]
    revisions = sorted({facts["revision"] for facts in described if facts.get("revision")})
    if len({_last(each) for each in names}) > 1 or len(revisions) > 1:
        raise ValueError(
            f"these results belong to different targets ({', '.join(sorted(set(names)))}; revisions "
            f"{', '.join(revisions)}): a card describes a draft with one target, measured under one name"
        )
    names.sort(key=_is_on_hub, reverse=True)  # stable: the first on the Hub, else the first
    return names[0] if names else None, revisions[0] if revisions else None


def of_kind(results: Iterable[dict], kind: str) -> list[dict]:
    return [result for result in results if result["kind"] == kind]


def decoded_tasks(results: Iterable[dict]) -> list[Decoded]:
    parts = [(result, result.get("tasks") or result.get("domains") or {}) for result in results]
    return [(result, name, part) for result, tasks in parts for name, part in tasks.items() if name != "all"]


def task_label(result: dict, task: str, part: dict) -> str:
    """Return what was decoded, and how, in a few words."""
    batch = result.get("batch_size") or 1
    return f"{task}, {regime_of(result['sampling'])}" + (f", batch {batch}" if batch > 1 else "")


def held_out_sets(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return what the rows are called that a training was evaluated on, by the prefix of what was found."""
    prefixes = [name.removesuffix("tau") for name in metrics if name.startswith("eval_") and name.endswith("_tau")]
    return {prefix: " of ".join(filter(None, ("held-out rows", prefix[5:-1]))) for prefix in prefixes}


def held_out_rates(metrics: Mapping[str, float], prefix: str) -> list[float]:
    """Return the acceptance by position that an evaluation during training has estimated."""
    return [value for name, value in metrics.items() if name.startswith(f"{prefix}acceptance_")]


# ---- what the card says


def _headline(decoded: list[Decoded], training: list[dict]) -> str:
    ratios = [part["speedup"]["ratio_of_medians"] for _, _, part in decoded if part.get("speedup")]
    if ratios:
        return f"it makes `generate()` **{_span(ratios)} times as fast**."
    taus = [part["tau"] for _, _, part in decoded if part.get("tau") is not None]
    estimates = _held_out_taus([result["metrics"] for result in training])
    if not taus and not estimates:
        return "its speed was not measured for this card."
    before = _held_out_taus([result.get("before", {}) for result in training])
    how = f", as estimated on held-out rows of its training{f' ({_span(before)} before it)' if before else ''}"
    tokens = f"**{_span(taus or estimates)} tokens** per pass of the target{'' if taus else how}"
    return f"{tokens}. Its speed was not measured for this card."


def _held_out_taus(metrics: Iterable[Mapping[str, float | None]]) -> list[float]:
    found = [values[f"{prefix}tau"] for values in metrics for prefix in held_out_sets(values)]
    return [tau for tau in found if tau is not None]


def _span(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def _table(rows: list[dict[str, Any]]) -> str | None:
    return markdown_table([*rows[0]], (row.values() for row in rows)) if rows else None


def _speed_row(result: dict, task: str, part: dict) -> dict[str, Any]:
    speedup = None
    if found := part.get("speedup"):
        quartiles = f"{number(found['lower_quartile'])} to {number(found['upper_quartile'])}"
        speedup = f"**{number(found['ratio_of_medians'])}** ({quartiles})"
    return _task(result, task) | {
        "batch": result.get("batch_size"),
        "speed-up": speedup,
        "tau": number(part.get("tau")),
        "tokens/s": number(part.get("tokens_per_second"), 1),
    }


def _acceptance_row(result: dict, task: str, part: dict) -> dict[str, Any]:
    counts = {"policy": short_policy(result["policy"]), "prompts": part.get("prompts"), "rounds": part.get("rounds")}
    rates = {str(position): number(rate) for position, rate in enumerate(part.get("acceptance", ()), start=1)}
    return _task(result, task) | counts | rates


def _task(result: dict, task: str) -> dict[str, Any]:
    return {"task": _text(task), "sampling": regime_of(result["sampling"])}


def _calibration_row(result: dict) -> dict[str, Any]:
    return {
        "domain": _text(result["domain"]),
        "prompts": result["num_prompts"],
        "mean ECE, raw": _percent(result["ece_before"]),
        "mean ECE, calibrated": _percent(result["ece_after"]),
        "AUC of c_k": number(result["auc"]),
    }


def _percent(values: Sequence[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"


def _training_table(result: dict) -> str:
    metrics, before, arguments = result["metrics"], result.get("before", {}), result["arguments"]
    facts = {name: result[name] for name in ("data", "num_rows", "steps") if name in result}
    facts |= {f"`{name}`": arguments[name] for name in SHOWN_ARGUMENTS if name in arguments}

    def add(name: str, read: Callable[[Mapping[str, Any]], str | None]) -> None:
        then, now = read(before), read(metrics)
        if now is not None:
            facts[name] = now if then is None else f"{then} before, {now} after"

    sets = held_out_sets(metrics)
    for prefix, where in (sets or {"": "the last batches"}).items():
        add(f"loss on {where}", partial(_number_in, name=f"{prefix}loss"))
        add(f"tau on {where}, estimated", partial(_number_in, name=f"{prefix}tau"))
        if sets:
            add(f"acceptance by position on {where}, estimated", partial(_rates_in, prefix=prefix))
    return markdown_table(("", ""), ((name, _text(value)) for name, value in facts.items()))


def _number_in(values: Mapping[str, Any], name: str) -> str | None:
    return number(values[name]) if name in values else None


def _rates_in(values: Mapping[str, Any], prefix: str) -> str | None:
    return " ".join(map(number, held_out_rates(values, prefix))) or None


def _origins(results: list[dict]) -> str:
    """Return a line about each machine and set of versions, with what was measured there."""
    kinds: dict[str, list[str]] = {}
    for result in results:
        origin, dtype = result["provenance"], result["target"].get("dtype", "").removeprefix("torch.")
        named = ("hf_dspark", "revision", "torch", "transformers")
        facts = [_device(result), *(f"{name} {origin[name]}" for name in named if name in origin)]
        facts += [f"target in {dtype}"] if dtype else []
        kinds.setdefault(_text("; ".join(facts)), []).append(result["kind"])
    return "\n".join(f"- {', '.join(dict.fromkeys(names))}: {line}" for line, names in kinds.items())


def _device(result: dict) -> str:
    return result["provenance"].get("device", "a device that is not named")


def _metadata(
    title: str,
    config: PreTrainedConfig,
    bases: tuple[str | None, str | None],
    decoded: list[Decoded],
    fields: Mapping[str, Any],
) -> ModelCardData:
    target, earlier = bases
    own = ("speculative-decoding", draft_kind(config).lower(), "draft-model", "custom_generate")
    tags = [*dict.fromkeys([*own, *fields.get("tags", ())])]
    known: dict[str, Any] = {"library_name": "hf_dspark"}
    if _is_on_hub(target):
        # Of the relations that the Hub knows, of which it takes one for all: only this target can use the draft, which
        # is no fine-tune of it, but may be one of another draft.
        known |= {"base_model": target, "base_model_relation": "adapter"}
        if _is_on_hub(earlier):
            known |= {"base_model": [target, earlier], "base_model_relation": "finetune"}
    fixed = {"task_type": "text-generation", "task_name": "Speculative decoding", "metric_type": "tau"}
    measured = [
        EvalResult(
            dataset_type=task,
            dataset_name=task,
            metric_name=f"tau, tokens per pass ({regime_of(result['sampling'])}; {short_policy(result['policy'])})",
            metric_value=part["tau"],
            **fixed,
        )
        for result, task, part in decoded
        if part.get("tau") is not None
    ]
    if measured:
        known |= {"model_name": _last(title), "eval_results": measured}
    return ModelCardData(**known | fields | {"tags": tags})


# ---- words


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _is_on_hub(name: str | None) -> bool:
    return bool(name) and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _link(name: str) -> str:
    return f"[{_text(name)}](https://huggingface.co/{name})" if _is_on_hub(name) else f"`{_text(name)}`"


def _text(value: Any) -> str:
    """Return a value as it may stand in a line of Markdown."""
    return " ".join(str(value).split()).replace("<", "&lt;")
