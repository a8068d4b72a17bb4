"""The models that a command line names, loaded and checked against each other; its prompts, policy and sampling."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dspark.data.prompts import Prompt, PromptFile, as_chat, token_ids
from hf_dspark.decoding.hook import default_policy
from hf_dspark.decoding.step_costs import find_cost
from hf_dspark.formats.files import read_config
from hf_dspark.formats.tables import draft_model_type
from hf_dspark.maths.policies import AdaptiveDrafting, ConfidenceThreshold, FullBlock, Policy, PrefixScheduler
from hf_dspark.models.auto import DRAFTS, load_draft
from hf_dspark.models.modeling_draft import DraftModel

from . import Console
from .words import THRESHOLD


@dataclass(frozen=True)
class Models:
    """A target, its tokenizer, and its draft if there is one."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: DraftModel | None = None


def load_models(options: Namespace) -> Models:
    """Load what `--target` and `--draft` name. The draft is small, so that mistakes show soon.

    Raises:
        ValueError: If one is not what it should be, or they do not fit.
        OSError: If the Hub has no such model, or is out of reach.
    """
    if options.draft is None:
        return load_target(options)
    draft = load_draft(options.draft, dtype=options.draft_dtype, revision=options.draft_revision).eval()
    models = load_target(options)
    try:
        draft = draft.to(models.target.device).bind(models.target)
    except ValueError as error:
        raise ValueError(f"the draft {options.draft} does not fit the target {options.target}: {error}") from error
    return Models(models.target, models.tokenizer, draft)


def load_target(options: Namespace) -> Models:
    """Load a target in the dtype, on the devices and with the quantisation that are asked for, and its tokenizer."""
    _refuse_draft(options.target, options.target_revision)
    tokenizer = load_tokenizer(options)
    if getattr(options, "no_chat_template", False):
        tokenizer.chat_template = None
    quantised: dict[str, Any] = {}
    if options.load_in_8bit or options.load_in_4bit:
        bits = BitsAndBytesConfig(load_in_8bit=options.load_in_8bit, load_in_4bit=options.load_in_4bit)
        quantised["quantization_config"] = bits
    device_map = options.device_map
    if device_map is None and torch.accelerator.is_available():
        device_map = str(torch.accelerator.current_accelerator())
    target = AutoModelForCausalLM.from_pretrained(
        options.target,
        revision=options.target_revision,
        dtype=options.dtype,
        device_map=device_map,
        trust_remote_code=options.trust_remote_code,
        **quantised,
    )
    return Models(target.eval(), tokenizer)


def _refuse_draft(name: str, revision: str) -> None:
    try:
        kind = draft_model_type(read_config(name, revision=revision))
    except (OSError, ValueError):  # of an adapter, say: transformers knows better
        return
    if kind in DRAFTS:
        raise ValueError(f"--target {name} is a draft: the target decodes, and its draft is named by --draft")


def load_tokenizer(options: Namespace) -> PreTrainedTokenizerBase:
    """Load the tokenizer alone."""
    name, revision = (options.tokenizer, "main") if options.tokenizer else (options.target, options.target_revision)
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=options.trust_remote_code)


def note_faults(console: Console, *files: PromptFile) -> list[str]:
    """Name the lines that are left out."""
    faults = [str(fault) for file in files for fault in file.faults]
    for fault in faults:
        console.note(f"skipped {fault}")
    return faults


def as_asked(prompts: Iterable[Prompt], models: Models) -> list[Prompt]:
    """Make texts a user's messages, if there is a chat template that may be used."""
    has_template = models.tokenizer.chat_template is not None
    return [as_chat(prompt, models.tokenizer) if has_template else prompt for prompt in prompts]


def all_token_ids(prompts: Iterable[Prompt], models: Models, options: Namespace) -> list[list[int]]:
    """Return the tokens of each prompt.

    Raises:
        ValueError: If one needs a chat template and there is none, or has no tokens.
    """
    return [token_ids(prompt, models.tokenizer, options.enable_thinking) for prompt in as_asked(prompts, models)]


def choose_policy(name: str, models: Models) -> Policy:
    """Return the policy of a name.

    Raises:
        ValueError: If scheduling lacks a confidence head, or the cost of a step on this machine.
    """
    if name == "default":
        return default_policy(models.draft, models.target)
    if name == "full":
        return FullBlock()
    if not models.draft.config.enable_confidence_head:
        raise ValueError(f"--policy {name} needs a draft with a confidence head; this one has none: use full")
    if name.startswith(THRESHOLD):
        return ConfidenceThreshold(float(name.removeprefix(THRESHOLD)))
    cost = find_cost(models.target, models.draft)
    if cost is None:
        raise ValueError(
            "--policy scheduled needs to know what a step costs here: run hf-dspark profile with this target and draft"
        )
    return AdaptiveDrafting(PrefixScheduler(cost))


def generate_kwargs(options: Namespace, target: PreTrainedModel) -> dict[str, Any]:
    """Return the options as `generate()` takes them; what is not given stays as the target recommends."""
    kwargs: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.temperature == 0:
        return kwargs | {"do_sample": False}
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if given:
        kwargs |= {"do_sample": True} | given
    # transformers would sample among the 50 best tokens if nothing is said.
    if is_sampled(kwargs, target) and "top_k" not in kwargs and target.generation_config.top_k is None:
        kwargs["top_k"] = 0
    return kwargs


def is_sampled(kwargs: dict[str, Any], target: PreTrainedModel) -> bool:
    """Tell whether `generate()` will sample with these options."""
    return bool(kwargs.get("do_sample", target.generation_config.do_sample))
