"""The model card of a draft, made of its config and of result files: a number that no result file holds is not shown.

Text and tables are in `card.md`; here are the facts and the metadata that fill it.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig

from ..files import differences
from ..measuring.results import describe_draft, read_results, regime_of, short_policy
from ..measuring.tables import ABSENT, number
from ..models.modeling_draft import DraftModel

# Of a training's arguments, those that a reader looks for; all of them are in its result file.
SHOWN_ARGUMENTS = (
    "learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "processes",
    "num_anchors", "max_length",
)  # fmt: skip

# What the one-file decoder of a repository knows of these fields; the first value is their default.
DECODER_KNOWS = {"markov_head_type": ("vanilla", "gated", "rnn"), "markov_start": (0,), "conv_kernel_size": (0,)}
DECODER_KNOWS |= {"num_experts": (0,), "hc_mult": (0,), "q_lora_rank": (None,), "v4_heads": (False,)}

# Of a card that transformers' Trainer makes.
TRAINERS_FIELDS = {"finetuned_from", "tasks", "dataset", "dataset_tags", "dataset_args"}

Decoded = tuple[dict, str, dict]  # a result file, one of its tasks, and what that came to


def model_card(
    draft: DraftModel,
    results: Iterable[str | Path] = (),
    *,
    repo_id: str | None = None,
    target: str | None = None,
    **metadata: Any,
) -> ModelCard:
    """Return the model card of a draft, of result files, or folders of them, of this draft and its target.

    `repo_id` is where the draft is or will be, by default where it was loaded from; `target` the target's name on the
    Hub, by default the one that the results agree on: those that name a folder may have measured it. `metadata` are
    fields of `huggingface_hub.ModelCardData`. A `ValueError` names in what results of another draft or target differ.
    """
    found, facts, config = read_results(results), describe_draft(draft), draft.config
    _require_this_draft(found, facts)
    target_name, revision = _agreed_target(found, target)
    title = repo_id or facts["name"] or "draft"
    decoded = [
        (result, task, part)
        for result in found
        for task, part in (result.get("tasks") or result.get("domains") or {}).items()
        if task != "all"
    ]
    training = [result for result in found if result["kind"] == "training"]
    earlier = next((result["draft"]["name"] for result in training if result["draft"].get("name")), title)
    earlier = None if earlier in (title, _last(title)) else earlier
    return ModelCard.from_template(
        _metadata(config, target_name, earlier, metadata),
        template_path=str(Path(__file__).with_suffix(".md")),
        name=_text(_last(title)),
        kind=draft_kind(config),
        has_decoder=has_one_file_decoder(config.to_dict()),
        draft=json.dumps(title if is_on_hub(title) else "path/to/the/draft"),
        target=json.dumps(target_name if is_on_hub(target_name) else "path/to/the/target"),
        target_link=_link(target_name) if target_name else None,
        revision=_text(revision) if revision else None,
        started_from=_link(earlier) if earlier else None,
        headline=_headline(decoded, training),
        decoded=decoded,
        calibrations=[result for result in found if result["kind"] == "calibration"],
        trainings=[_training_facts(result) for result in training],
        devices=_text(" and ".join(dict.fromkeys(_device(result) for result, _, _ in decoded))),
        origins=_origins(found),
        config=config,
        num_parameters=f"{facts['num_parameters']:,}",
        text=_text,
        number=number,
        regime_of=regime_of,
        short_policy=short_policy,
    )


def draft_kind(config: PreTrainedConfig) -> str:
    if config.model_type == "dspark_eagle3":
        return "MTP" if config.mtp else "Eagle3" if config.is_autoregressive else "P-EAGLE"
    kinds = {"selector": "DFlash 2", "domino": "Domino"}
    return kinds.get(config.markov_head_type, "DSpark") if config.markov_rank else "DFlash"


def has_one_file_decoder(config: Mapping[str, Any]) -> bool:
    """Tell whether the code that a repository carries can decode with the draft of a `config.json` of ours."""
    known = all(config.get(name, values[0]) in values for name, values in DECODER_KNOWS.items())
    return config.get("model_type") == "dspark" and known


def _require_this_draft(results: list[dict], facts: Mapping[str, Any]) -> None:
    """Refuse results of other weights or another geometry. A name is no identity: drafts are renamed when trained."""
    for kind, theirs in ((result["kind"], result["draft"]) for result in results):
        known = {name: theirs.get(name, "not said") for name in facts}
        if wrong := differences(known | {name: facts[name] for name in ("name", "revision")}, facts):
            other = f"another draft, {theirs.get('name') or 'without a name'}, which differs in {wrong}"
            raise ValueError(f"a result of the kind {kind!r} belongs to {other}: measure this draft")


def _agreed_target(results: list[dict], name: str | None) -> tuple[str | None, str | None]:
    described = [result["target"] for result in results]
    names = [facts["name"] for facts in described if facts.get("name")]
    if name:  # a folder may have any name
        names = [name, *filter(is_on_hub, names)]
    revisions = sorted({facts["revision"] for facts in described if facts.get("revision")})
    if len({_last(each) for each in names}) > 1 or len(revisions) > 1:
        found = f"{', '.join(sorted(set(names)))}; revisions {', '.join(revisions)}"
        raise ValueError(f"these results belong to different targets ({found}): a card names one target")
    names.sort(key=is_on_hub, reverse=True)  # stable: the first on the Hub, else the first
    return names[0] if names else None, revisions[0] if revisions else None


def _sets(training: dict) -> dict[str, str]:
    """Return the names of the sets that a training was evaluated on, by the prefix of their metrics."""
    prefixes = [name[:-3] for name in training["metrics"] if name.startswith("eval_") and name.endswith("_tau")]
    return {prefix: " of ".join(filter(None, ("held-out examples", prefix[5:-1]))) for prefix in prefixes}


# ---- what the card says


def _headline(decoded: list[Decoded], training: list[dict]) -> str:
    if faster := _span(part["speedup"]["ratio_of_medians"] for _, _, part in decoded if part.get("speedup")):
        return f"it makes `generate()` **{faster} times as fast**."
    tau, how = _span(part.get("tau") for _, _, part in decoded), ""
    if not tau:
        then, tau = (
            _span(result.get(part, {}).get(f"{prefix}tau") for result in training for prefix in _sets(result))
            for part in ("before", "metrics")
        )
        how = f", as estimated on held-out examples of its training{f' ({then} before it)' if then else ''}"
    if not tau:
        return "its speed was not measured for this card."
    return f"**{tau} tokens** per pass of the target{how}. Its speed was not measured for this card."


def _span(values: Iterable[float | None]) -> str:
    """Return the least and the largest number; an empty text if there are none."""
    found = [value for value in values if value is not None]
    return " to ".join(dict.fromkeys(number(pick(found)) for pick in (min, max) if found))


def _training_facts(result: dict) -> dict[str, str]:
    metrics, before, arguments = result["metrics"], result.get("before", {}), result["arguments"]
    shown = {"data": "data", "num_rows": "examples", "steps": "steps"}
    facts = {title: result[name] for name, title in shown.items() if name in result}
    facts |= {f"`{name}`": arguments[name] for name in SHOWN_ARGUMENTS if name in arguments}
    titles = {"loss": "loss on", "tau": "tau, estimated on", "acceptance": "acceptance by position, estimated on"}
    for prefix, where in (_sets(result) or {"": "the last batches"}).items():
        for name, title in titles.items():
            then, now = (_reported(values, prefix + name) for values in (before, metrics))
            if now:
                facts[f"{title} {where}"] = f"{then} before, {now} after" if then else now
    return {name: _text(value) for name, value in facts.items()}


def _reported(metrics: Mapping[str, Any], name: str) -> str:
    """Return a metric, or its values by position; an empty text if a training did not report it."""
    return " ".join(number(value) for key, value in metrics.items() if key.rstrip("0123456789") in (name, f"{name}_"))


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
    config: PreTrainedConfig, target: str | None, earlier: str | None, fields: Mapping[str, Any]
) -> ModelCardData:
    if unknown := sorted(fields.keys() - set(inspect.signature(ModelCardData).parameters) - TRAINERS_FIELDS):
        raise ValueError(f"{', '.join(unknown)}: no argument of an upload of drafts, and no field of a model card")
    tags = ("speculative-decoding", draft_kind(config).lower().replace(" ", ""), "draft-model", "custom_generate")
    known: dict[str, Any] = {"library_name": "hf_dspark"}
    if is_on_hub(target):
        # Of the relations that the Hub knows, of which it takes one for all: only this target can use the draft, which
        # is no fine-tune of it, but may be one of another draft.
        known |= {"base_model": target, "base_model_relation": "adapter"}
        if is_on_hub(earlier):
            known |= {"base_model": [target, earlier], "base_model_relation": "finetune"}
    return ModelCardData(**known | fields | {"tags": [*dict.fromkeys((*tags, *fields.get("tags", ())))]})


# ---- words


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def is_on_hub(name: str | None) -> bool:
    return bool(name) and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _link(name: str) -> str:
    return f"[{_text(name)}](https://huggingface.co/{name})" if is_on_hub(name) else f"`{_text(name)}`"


def _text(value: Any) -> str:
    """Return a value as it may stand in a line or a table of Markdown."""
    return ABSENT if value is None else " ".join(str(value).split()).replace("<", "&lt;").replace("|", "\\|")
