"""The models that a command line names, loaded and checked against each other; its policy and sampling."""

import os
import warnings
from argparse import Namespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from hf_dspark.cpu.small_batch_gemm import lacks_bfloat16
from hf_dspark.decoding.hook import default_policy
from hf_dspark.models.auto import load_draft, names_a_draft
from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.scheduling.policies import ConfidenceThreshold, FullBlock, Policy
from hf_dspark.scheduling.scheduler import Scheduler
from hf_dspark.scheduling.step_costs import experience_of


def require_revisions(options: Namespace) -> None:
    """Raise a `ValueError` for a revision of what is no repository on the Hub, which transformers would ignore."""
    for role in ("target", "draft"):
        revision, name = getattr(options, f"{role}_revision", "main"), getattr(options, role)
        if revision != "main" and (name is None or os.path.isdir(name)):
            raise ValueError(f"--{role}_revision {revision} is of a repository on the Hub, got {role}={name}: drop it")


def require_roles(options: Namespace) -> None:
    """Raise a `ValueError` if `--target` names a draft, or a revision is of none; nothing but a config is read."""
    require_revisions(options)
    if names_a_draft(options.target, revision=options.target_revision):
        exchanged = options.draft is not None and not names_a_draft(options.draft)
        cure = "the wrong way round, exchange them" if exchanged else "the target decodes, and --draft names its draft"
        raise ValueError(f"--target {options.target} is a draft, --draft is {options.draft}: {cure}")


def load_models(options: Namespace) -> tuple[PreTrainedModel, Tokenizer, DraftModel | None]:
    """Load what `--target` and `--draft` name. The draft is small, so that mistakes show soon."""
    require_roles(options)
    if options.draft is None:
        return *load_target(options), None
    draft = load_draft(options.draft, dtype=options.dtype, revision=options.draft_revision).eval()
    target, tokenizer = load_target(options)
    try:
        return target, tokenizer, draft.to(target.device).bind(target)
    except ValueError as error:
        raise ValueError(f"the draft {options.draft} does not fit the target {options.target}: {error}") from error


def load_target(options: Namespace) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a target as it is asked for, and its tokenizer. An error names it, as those of libraries need not."""
    try:
        return _load_target(options)
    except Exception as error:  # a ValueError is of what was given
        kind = OSError if isinstance(error, OSError | MemoryError) else ValueError
        raise kind(f"--target {options.target} cannot be used: {str(error) or type(error).__name__}") from error


def _load_target(options: Namespace) -> tuple[PreTrainedModel, Tokenizer]:
    hub = {"revision": options.target_revision, "trust_remote_code": options.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(options.target, **hub)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError("it has no tokenizer files, such as tokenizer.json: add its own")
    if getattr(options, "no_chat_template", False):
        tokenizer.chat_template = None
    if options.load_in_8bit or options.load_in_4bit:
        bits = values_of(options, "load_in_8bit", "load_in_4bit")
        hub["quantization_config"] = BitsAndBytesConfig(**bits)
    device_map = options.device_map
    here = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    if (kind := str(device_map).partition(":")[0]) in {"cuda", "meta", "mps", "xpu"} - {here}:
        cure = "give cpu, or install PyTorch's build for your accelerator"
        raise ValueError(f"--device_map {device_map}: PyTorch {torch.__version__} finds no {kind} device here: {cure}")
    if device_map is None and here != "cpu":
        device_map = here
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype, device_map=device_map, **hub)
    if target.device.type == "cpu" and target.dtype == torch.bfloat16 and lacks_bfloat16():
        slow = "products of several rows take 4 to 7 times as long as in float32"
        warnings.warn(f"this processor has no units for bfloat16: {slow}. Give --dtype float32", stacklevel=2)
    return target.eval(), tokenizer


def values_of(options: Namespace, *names: str) -> dict[str, Any]:
    """Return the options that were given, or have a default, by their names."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def choose_policy(policy: tuple[str, float | None], target: PreTrainedModel, draft: DraftModel | None) -> Policy:
    """Return the policy of a name and its number; a `ValueError` if a step's cost on this machine is not known."""
    name, number = policy
    if draft is None:
        raise ValueError(f"--policy {name} needs --draft: give it, or drop --policy")
    if name == "scheduled":
        return Scheduler(experience_of(target, draft), trees=False)
    if name == "threshold":
        return ConfidenceThreshold(number)
    if name == "tree":
        return Scheduler(num_nodes=number)
    return FullBlock() if name == "full" else default_policy(draft, target)


def generate_kwargs(options: Namespace, target: PreTrainedModel) -> dict[str, Any]:
    """Return the options as `generate()` takes them; what is not given stays as the target recommends."""
    kwargs: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.temperature == 0:
        return kwargs | {"do_sample": False}
    if given := values_of(options, "temperature", "top_k", "top_p", "min_p"):
        kwargs |= {"do_sample": True} | given
    # transformers would sample among the 50 best tokens if nothing is said.
    is_sampled = kwargs.get("do_sample", target.generation_config.do_sample)
    if is_sampled and "top_k" not in kwargs and target.generation_config.top_k is None:
        kwargs["top_k"] = 0
    return kwargs
