"""The model card of a draft, made of its config and of result files: what no result file holds, no card claims.

Knows nothing of the Hub beyond the form of its cards, and nothing of how anything is measured.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from ..decoding.step_costs import ThroughputProfile
from ..evaluation.results import describe_draft, read_results, short_policy
from ..models.modeling_draft import DraftModel

# Of describe_draft: how a draft is called, as against what it is.
NAMES = ("name", "revision")
KINDS = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
NOT_MEASURED = "**Not measured:** no result file of {} was given when this card was made."


def model_card(
    draft: DraftModel,
    results: Iterable[str | Path] = (),
    *,
    repo_id: str | None = None,
    target: str | None = None,
    draft_name: str | None = None,
    throughput: Iterable[str | Path] = (),
    tags: Sequence[str] = (),
    **metadata: Any,
) -> ModelCard:
    """Return the model card of a draft.

    Args:
        draft ([`DraftModel`]): The draft.
        results (`Iterable`): Result files, or folders of them, of this draft and its target.
        repo_id (`str`, *optional*): Where the draft is published, `user/name`.
        target (`str`, *optional*): The target's name on the Hub; by default the one that the results agree on.
        draft_name (`str`, *optional*): What the results call the draft, if it was renamed since.
        throughput (`Iterable`): Files that [`ThroughputProfile`] has saved: what a step costs, and where.
        tags (`Sequence[str]`): More tags than those of every draft.
        metadata: Fields of `huggingface_hub.ModelCardData`, such as `license="mit"` or `datasets=["openai/gsm8k"]`.

    Returns:
        `huggingface_hub.ModelCard`

    Raises:
        ValueError: If a file is no result file, or belongs to another draft or target, naming the differences.
    """
    found = read_results(results)
    facts = describe_draft(draft)
    title = repo_id or draft_name or facts["name"] or "draft"
    _require_this_draft(found, facts, {draft_name or facts["name"], repo_id or ""})
    target_facts = _agreed_target(found, target)
    profiles = [_read_profile(path, draft.config) for path in throughput]
    decoded = _decoded(found)
    notes = _Notes()
    sections = [
        _introduction(title, draft.config, target_facts),
        _usage(title, target_facts["name"] if _is_on_hub(target_facts["name"]) else "path/to/the/target"),
        _architecture(draft.config, facts, target_facts),
        _acceptance(decoded, notes),
        *_speed(_of_kind(decoded, "evaluation"), notes),
        _calibration(_of_kind(found, "calibration"), draft.config, notes),
        _training(_of_kind(found, "training"), notes),
        _step_times(profiles),
        notes.section(),
        WITHOUT_THE_PACKAGE,
    ]
    data = _metadata(title, draft.config, target_facts["name"], decoded, tags, metadata)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def kind_of(config: PreTrainedConfig) -> str:
    """Return which kind of draft a config describes: `dspark`, `dflash` or `eagle3`."""
    if config.is_autoregressive:
        return "eagle3"
    return "dspark" if config.markov_rank else "dflash"


# Whose results they are


def _require_this_draft(results: list[dict], facts: Mapping[str, Any], names: set[str]) -> None:
    """Refuse results of another draft; those of a training bear the name that the draft had before it."""
    known = {_last(name) for name in names if name}
    for result in results:
        theirs = result["draft"]
        wrong = [
            f"{name}: {theirs.get(name, 'not said')!r} there, {value!r} here"
            for name, value in facts.items()
            if name not in NAMES and theirs.get(name, "not said") != value
        ]
        name = theirs.get("name")
        if result["kind"] != "training" and name and known and _last(name) not in known:
            wrong.append(f"name: {name!r} there, {' or '.join(map(repr, sorted(known)))} here")
        if wrong:
            raise ValueError(
                f"a result of the kind {result['kind']!r} belongs to another draft ({'; '.join(wrong)}): measure this "
                "draft, or pass draft_name if only its name has changed"
            )


def _agreed_target(results: list[dict], name: str | None) -> dict[str, Any]:
    """Return the name and revision of the target that all results are about."""
    described = [result["target"] for result in results]
    names = ([name] if name else []) + [facts["name"] for facts in described if facts.get("name")]
    revisions = sorted({facts["revision"] for facts in described if facts.get("revision")})
    if len({_last(each) for each in names}) > 1 or len(revisions) > 1:
        shown = ", ".join(sorted(set(names))) + (f"; revisions {', '.join(revisions)}" if len(revisions) > 1 else "")
        raise ValueError(
            f"these results belong to different targets ({shown}): a card describes a draft with one target, measured "
            "under one name"
        )
    on_hub = [each for each in names if "/" in each]
    return {"name": (on_hub or names or [None])[0], "revision": revisions[0] if revisions else None}


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _of_kind(results: list[dict], kind: str) -> list[dict]:
    return [result for result in results if result["kind"] == kind]


def _decoded(results: list[dict]) -> list[dict]:
    """Return the results of decoding, whose `domains` say what was accepted."""
    decoded = []
    for result in results:
        if result["kind"] == "evaluation":
            domains = {name: part for name, part in result["tasks"].items() if name != "all"}
            decoded.append(result | {"domains": domains})
        elif result["kind"] == "acceptance":
            decoded.append(result)
    return decoded


def _read_profile(path: str | Path, config: PreTrainedConfig) -> ThroughputProfile:
    try:
        profile = ThroughputProfile.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no measured step times ({error!r}): pass a file that hf_dspark.profile_throughput(...)"
            ".save(path) wrote"
        ) from error
    wrong = [
        f"{name}: {value} there, {getattr(config, name)} here"
        for name, value in profile.machine.draft.items()
        if value != getattr(config, name)
    ]
    if wrong:
        raise ValueError(f"{path} was measured with another draft ({'; '.join(wrong)}): profile this one")
    return profile


# The parts of the card


class _Notes:
    """Where each number comes from: one note per result, numbered as they are first named."""

    def __init__(self) -> None:
        self._results: list[dict] = []

    def mark(self, result: dict) -> str:
        """Return the mark of a result."""
        if result not in self._results:
            self._results.append(result)
        return f"[{self._results.index(result) + 1}]"

    def section(self) -> str:
        """Return the section that the marks point to."""
        lines = ["## How it was measured", ""]
        if not self._results:
            return "\n".join([*lines, "Nothing was measured for this card."])
        for number, result in enumerate(self._results, start=1):
            origin = result["provenance"]
            facts = [f"{name} {value}" for name, value in origin.items() if name not in ("command", "device")]
            dtype = result["target"].get("dtype", "").removeprefix("torch.")
            facts += [f"target in {dtype}"] if dtype else []
            lines += [
                f"- **[{number}]** {_text(origin.get('device', 'device not said'))}; {_text('; '.join(facts))}:",
                "",
                *(f"      {line}" for line in origin.get("command", "command not said").splitlines()),
                "",
            ]
        return "\n".join(lines).rstrip()


def _introduction(title: str, config: PreTrainedConfig, target: Mapping[str, Any]) -> str:
    kind = KINDS[kind_of(config)]
    of = f" of [{target['name']}](https://huggingface.co/{target['name']})" if _is_on_hub(target["name"]) else ""
    of = of or (f" of {_text(target['name'])}" if target["name"] else "")
    return (
        f"# {_text(_last(title))}: a {kind} draft{of}\n\n"
        "A draft model for speculative decoding: it proposes tokens that its target verifies, so that `generate()` "
        "needs fewer passes through the target and its output distribution stays the target's own. The draft works "
        f"with this target only: {_borrowed(config)} borrowed from it."
    )


def _usage(draft: str, target: str) -> str:
    return f"""## Use

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("The capital of France is", return_tensors="pt").to(target.device)
```

With the package hf_dspark:

```python
import hf_dspark  # makes AutoModel and generate() know the draft

draft = AutoModel.from_pretrained("{draft}", dtype="auto").to(target.device)
ids = target.generate(**inputs, assistant_model=draft, max_new_tokens=128)
```

With transformers alone, by the code in this repository:

```python
ids = target.generate(**inputs, custom_generate="{draft}", trust_remote_code=True, max_new_tokens=128)
```

The second call loads the draft itself, once. To set something on it, load it and pass it along:

```python
draft = AutoModel.from_pretrained("{draft}", dtype="auto", trust_remote_code=True).to(target.device)
ids = target.generate(
    **inputs, assistant_model=draft, custom_generate="{draft}", trust_remote_code=True, max_new_tokens=128
)
```"""


WITHOUT_THE_PACKAGE = """## What is lost without hf_dspark

The code in `custom_generate/` is that of hf_dspark (MIT licence), as far as decoding needs it. The tokens are the
same. What only the package can do:

- `generate(assistant_model=draft)` alone, and all that calls it so, such as `pipeline`: without the package, every
  call names `custom_generate`.
- Scheduling by measured step times: neither the package's tables nor its profiler are here, so the full block is
  verified unless `draft.decoding` has a policy, or the package has measured this machine before.
- Targets whose attention cannot be packed (ALiBi, recurrent and hybrid layers, images): they are refused here.
- Queues of prompts (`generate_many`), training, calibration, measuring, conversion to other engines, publishing."""


def _architecture(config: PreTrainedConfig, facts: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    kind = kind_of(config)
    rank = config.markov_rank
    rows = {
        "target": _text(target["name"] or "not named by any result"),
        "target's revision": _text(target["revision"] or "not known"),
        "target's geometry": f"{config.target_model_type or 'type not known'}, {config.num_target_layers} layers, "
        f"width {config.hidden_size}, vocabulary {config.vocab_size}",
        "draft": f"{KINDS[kind]}, {config.num_hidden_layers} layers, MLP {config.intermediate_size}, "
        f"{config.num_attention_heads} heads / {config.num_key_value_heads} kv heads of {config.head_dim}",
        "block size γ": f"{config.block_size} tokens",
        "tapped target layers": ", ".join(map(str, config.target_layer_ids)),
        "Markov head": f"{config.markov_head_type}, rank {rank}" if rank else "none",
        "confidence head": _confidence_head(config),
        "vocabulary of the draft": _vocabulary(config),
        "parameters": f"{facts['num_parameters']:,} ({_borrowed(config)} the target's)",
    }
    return "## Draft and target\n\n" + _table(("", ""), rows.items())


def _confidence_head(config: PreTrainedConfig) -> str:
    if not config.enable_confidence_head:
        return "none"
    return "reads the hidden state" + (
        " and the Markov embedding of the previous token" if config.confidence_head_with_markov else ""
    )


def _borrowed(config: PreTrainedConfig) -> str:
    pruned = getattr(config, "draft_vocab_size", None) is not None
    return "the embedding is" if pruned else "embedding and LM head are"


def _vocabulary(config: PreTrainedConfig) -> str:
    size = getattr(config, "draft_vocab_size", None)
    return "the target's" if size is None else f"{size} of the target's {config.vocab_size} tokens"


def _acceptance(results: list[dict], notes: _Notes) -> str:
    lines = ["## Accepted tokens", ""]
    if not results:
        return "\n".join([*lines, NOT_MEASURED.format("acceptance")])
    rows = [
        (
            domain, _sampling(result["sampling"]), _shortened(result["policy"]), part.get("prompts"),
            part.get("rounds"), _number(part.get("tau")),
            " ".join(_number(rate) for rate in part.get("acceptance", ())), notes.mark(result),
        )
        for result in results
        for domain, part in result["domains"].items()
    ]  # fmt: skip
    head = ("task", "sampling", "policy", "prompts", "rounds", "tau", "acceptance, position 1 to γ", "")
    return "\n".join(
        [
            *lines,
            "tau is the mean number of tokens per round, the bonus token included; the acceptance of a position is "
            "the share accepted where all before it were.",
            "",
            _table(head, rows),
        ]
    )


def _speed(results: list[dict], notes: _Notes) -> list[str]:
    """Return the section about speed, if evaluations say anything of it."""
    rows = [
        (
            task, _sampling(result["sampling"]), _shortened(result["policy"]), result["batch_size"],
            _number(part["tokens_per_second"], 1), _speedup(part["speedup"]), notes.mark(result),
        )
        for result in results
        for task, part in result["domains"].items()
    ]  # fmt: skip
    if not rows:
        return []
    explanation = (
        "The speed-up is the ratio of the medians of seconds per token, plain decoding of the same turns in the same "
        "process over decoding with the draft; in brackets the quartiles of single turns. It holds for this machine."
    )
    head = ("task", "sampling", "policy", "batch", "tokens/s", "speed-up", "")
    return ["\n".join(["## Speed", "", explanation, "", _table(head, rows)])]


def _speedup(found: Mapping[str, Any] | None) -> str | None:
    if found is None:
        return None
    return f"{found['ratio_of_medians']:.2f} ({found['lower_quartile']:.2f} to {found['upper_quartile']:.2f})"


def _calibration(results: list[dict], config: PreTrainedConfig, notes: _Notes) -> str:
    lines = ["## Calibration of the confidences", ""]
    fitted = sorted(config.sts_temperatures or ())
    lines += [
        f"`config.json` holds temperatures for: {', '.join(fitted)}."
        if fitted
        else "`config.json` holds no temperatures: the confidences are as the head says them.",
        "",
    ]
    if not results:
        return "\n".join([*lines, NOT_MEASURED.format("calibration")])
    rows = [
        (
            result["domain"], result["num_prompts"], _mean_percent(result["ece_before"]),
            _mean_percent(result["ece_after"]), _percents(result["ece_after"]), _number(result["auc"]),
            notes.mark(result),
        )
        for result in results
    ]  # fmt: skip
    head = ("domain", "prompts", "mean ECE, raw", "mean ECE, calibrated", "by position, calibrated", "AUC of c_k", "")
    return "\n".join([*lines, "ECE: expected calibration error of the survival of the block.", "", _table(head, rows)])


def _training(results: list[dict], notes: _Notes) -> str:
    lines = ["## Training", ""]
    if not results:
        return "\n".join([*lines, NOT_MEASURED.format("training")])
    for result in results:
        facts = {"rows": result["num_rows"], "steps": result["steps"]}
        facts |= {"data": result["data"]} if "data" in result else {}
        facts |= {f"`{name}`": value for name, value in result["arguments"].items()}
        facts |= {f"reported {name}": _number(value, 4) for name, value in result["metrics"].items()}
        lines += [f"{notes.mark(result)}", "", _table(("", ""), facts.items()), ""]
    return "\n".join(lines).rstrip()


def _step_times(profiles: list[ThroughputProfile]) -> str:
    lines = ["## Step times (SPS)", ""]
    if not profiles:
        return "\n".join(
            [
                *lines,
                "**Not measured:** no file of step times was given when this card was made. They describe a machine, "
                "not the draft: `hf_dspark.profile_throughput(target, draft)` measures yours.",
            ]
        )
    for profile in profiles:
        machine = profile.machine
        versions = ", ".join(f"{name} {value}" for name, value in machine.versions.items())
        lines += [f"{_text(machine.device)}; {machine.threads} threads; target in {machine.dtype}; {versions}:", ""]
        rates = zip(profile.table.verify_tokens, profile.table.steps_per_second, strict=True)
        rows = [(tokens, _number(rate, 1)) for tokens, rate in rates]
        lines += [_table(("tokens verified per step", "steps per second"), rows), ""]
    return "\n".join(lines).rstrip()


def _metadata(
    title: str,
    config: PreTrainedConfig,
    target: str | None,
    acceptance: list[dict],
    tags: Sequence[str],
    fields: Mapping[str, Any],
) -> ModelCardData:
    known: dict[str, Any] = {
        "library_name": "hf_dspark",
        "tags": [*dict.fromkeys(["speculative-decoding", kind_of(config), "draft-model", "custom_generate", *tags])],
    }
    if _is_on_hub(target):
        # The closest of the relations that the Hub knows: nothing but this target can use it, and it is no fine-tune.
        known |= {"base_model": target, "base_model_relation": "adapter"}
    if acceptance:
        known |= {"model_name": _last(title), "eval_results": _eval_results(acceptance)}
    return ModelCardData(**(known | dict(fields)))


def _eval_results(acceptance: list[dict]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=domain,
            dataset_name=domain,
            metric_type="tau",
            metric_name=f"tau, tokens per round ({_sampling(result['sampling'])}; {_shortened(result['policy'])})",
            metric_value=part["tau"],
        )
        for result in acceptance
        for domain, part in result["domains"].items()
        if part.get("tau") is not None
    ]


# Words and numbers


def _is_on_hub(name: str | None) -> bool:
    return bool(name) and "/" in name


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_text("–" if cell is None else cell) for cell in line) + " |" for line in lines)


def _text(value: Any) -> str:
    """Return a value as it may stand in a line or a table cell."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _sampling(sampling: Mapping[str, Any]) -> str:
    others = [f"{name} {value}" for name, value in sampling.items() if name != "do_sample" and value is not None]
    return ", ".join(["sampled" if sampling.get("do_sample") else "greedy", *others])


def _shortened(policy: str) -> str:
    shown = short_policy(policy) if "[" in policy else policy  # tables of costs by their hashes are for comparing
    return shown if len(shown) <= 60 else f"{shown[:59]}…"


def _number(value: Any, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _mean_percent(value: float | Sequence[float]) -> str:
    values = value if isinstance(value, Sequence) else [value]
    return f"{100 * sum(values) / len(values):.1f} %"


def _percents(value: float | Sequence[float]) -> str:
    return " ".join(f"{100 * each:.1f}" for each in value) + " %" if isinstance(value, Sequence) else "–"
