"""The models that a command line names: target, tokenizer, draft and policy, loaded and checked against each other.

Knows nothing of what is done with them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..data.prompts import Prompt, as_chat, token_ids
from ..decoding.hook import default_policy
from ..decoding.step_costs import find_cost
from ..maths.policies import AdaptiveDrafting, ConfidenceThreshold, FullBlock, Policy, PrefixScheduler
from ..models import auto as draft_kinds
from ..models.modeling_draft import DraftModel
from .options import ChatOptions, DraftOptions, PolicyChoice, SamplingOptions, TargetOptions

DESCRIPTIONS = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class LoadedTarget:
    """A target and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_target(options: TargetOptions) -> LoadedTarget:
    """Load a target in the dtype, on the devices and with the quantisation that are asked for.

    Raises:
        ValueError: If a folder is not there, or holds no model.
        OSError: If the Hub has no such model, or is out of reach.
    """
    require_model(options.target, "--target")
    if options.tokenizer is not None:
        require_model(options.tokenizer, "--tokenizer", needed=())
    tokenizer = load_tokenizer(options)
    kwargs: dict[str, Any] = {}
    if options.load_in_8bit or options.load_in_4bit:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=options.load_in_8bit, load_in_4bit=options.load_in_4bit
        )
    device_map = options.device_map
    if device_map is None and torch.accelerator.is_available():
        device_map = str(torch.accelerator.current_accelerator())
    model = AutoModelForCausalLM.from_pretrained(
        options.target, revision=options.target_revision or "main", dtype=options.dtype, device_map=device_map,
        trust_remote_code=options.trust_remote_code, **kwargs,
    )  # fmt: skip
    return LoadedTarget(model.eval(), tokenizer)


def load_tokenizer(options: TargetOptions) -> PreTrainedTokenizerBase:
    """Load the tokenizer alone."""
    name, revision = options.tokenizer, None
    if name is None:
        name, revision = options.target, options.target_revision
    return AutoTokenizer.from_pretrained(
        name, revision=revision or "main", trust_remote_code=options.trust_remote_code
    )


def load_draft(name: str, dtype: str | torch.dtype = "auto", revision: str | None = None) -> DraftModel:
    """Load a draft of whatever kind, of any format that `from_pretrained` reads.

    Raises:
        ValueError: If it is no draft, or its tensors do not fit its config.
        OSError: If the Hub has no such model, or is out of reach.
    """
    require_model(name, "the draft")
    return draft_kinds.load_draft(name, dtype=dtype, revision=revision or "main").eval()


def load_draft_for(target: PreTrainedModel, options: DraftOptions) -> DraftModel:
    """Load the draft of a target, on the target's device.

    Raises:
        ValueError: If it is no draft, or not one for this target.
    """
    draft = load_draft(options.draft, options.draft_dtype, options.draft_revision)
    try:
        return draft.to(target.device).bind(target)
    except ValueError as error:
        raise ValueError(
            f"the draft {options.draft} does not fit the target {target.name_or_path}: {error}"
        ) from error


def load_pair(target_options: TargetOptions, draft_options: DraftOptions) -> tuple[LoadedTarget, DraftModel]:
    """Load a target and its draft.

    Raises:
        ValueError: If one of them is not there, or they do not fit.
        OSError: If the Hub has no such model, or is out of reach.
    """
    require_model(draft_options.draft, "--draft")  # before a big target is read
    target = load_target(target_options)
    return target, load_draft_for(target.model, draft_options)


def all_token_ids(prompts: Iterable[Prompt], target: LoadedTarget, chat: ChatOptions) -> list[list[int]]:
    """Return the tokens of each prompt.

    Raises:
        ValueError: If one needs a chat template and there is none, or has no tokens.
    """
    return [token_ids(prompt, target.tokenizer, chat.thinking) for prompt in as_asked(prompts, target, chat)]


def as_asked(prompts: Iterable[Prompt], target: LoadedTarget, chat: ChatOptions) -> list[Prompt]:
    """Make texts a user's messages, if there is a chat template that may be used."""
    if chat.no_chat_template:
        target.tokenizer.chat_template = None
    return [as_chat(prompt, target.tokenizer) if target.tokenizer.chat_template else prompt for prompt in prompts]


def require_model(name: str, what: str, needed: tuple[str, ...] = DESCRIPTIONS) -> None:
    """Raise a `ValueError` if a name is that of a folder, and the folder is not there or holds no model.

    Args:
        name (`str`): Hub id or folder.
        what (`str`): How the user calls it.
        needed (`tuple[str, ...]`): Files of which one must be there.
    """
    path = Path(name).expanduser()
    is_id = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name
    if not path.is_dir() and (path.exists() or not is_id):
        raise ValueError(f"{what}: there is no folder {name}")
    if path.is_dir() and needed and not any((path / file).is_file() for file in needed):
        raise ValueError(f"{what}: the folder {name} holds no model, which needs a {needed[0]}")


def choose_policy(choice: PolicyChoice, target: PreTrainedModel, draft: DraftModel) -> Policy:
    """Return the policy of a name.

    Raises:
        ValueError: If scheduling lacks a confidence head, or the cost of a step on this machine.
    """
    if choice.name == "default":
        return default_policy(draft, target)
    if choice.name == "full":
        return FullBlock()
    if not draft.config.enable_confidence_head:
        raise ValueError(
            f"--policy {choice.name} needs a draft with a confidence head; this one has none: use --policy full"
        )
    if choice.name == "threshold":
        return ConfidenceThreshold(choice.threshold)
    cost = find_cost(target, draft)
    if cost is None:
        raise ValueError(
            "--policy scheduled needs to know what a step costs here: run hf-dspark profile with this target and draft"
        )
    return AdaptiveDrafting(PrefixScheduler(cost))


def generate_kwargs(sampling: SamplingOptions, target: PreTrainedModel) -> dict[str, Any]:
    """Return the options as `generate()` takes them; what is not given stays as the target recommends.

    transformers samples among the 50 best tokens when nobody says otherwise; here, nobody saying means all.
    """
    kwargs: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens}
    given = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
    given = {name: value for name, value in given.items() if value is not None}
    if sampling.temperature == 0:
        return kwargs | {"do_sample": False}
    if sampling.temperature is not None or given:
        kwargs |= {"do_sample": True} | given
    if sampling.temperature is not None:
        kwargs["temperature"] = sampling.temperature
    if is_sampled(kwargs, target) and "top_k" not in kwargs and target.generation_config.top_k is None:
        kwargs["top_k"] = 0
    return kwargs


def is_sampled(kwargs: dict[str, Any], target: PreTrainedModel) -> bool:
    """Tell whether `generate()` will sample with these options."""
    return bool(kwargs.get("do_sample", target.generation_config.do_sample))
