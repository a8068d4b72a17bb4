"""What PEFT adapters add to a target's identity, and which of them rule out a draft. Does not import PEFT."""

import functools
from collections.abc import Iterable

from torch import nn

# Of an adapter layer, what decides about its answers and is no weight.
_FACTS = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")


def adapter_facts(module: nn.Module) -> str | None:
    """Return which adapters of a layer are at work, and how strongly; `None` if it is no adapter layer."""
    if not all(hasattr(module, name) for name in _FACTS[:3]):
        return None
    facts = [getattr(module, name, None) for name in _FACTS]
    return repr([sorted(fact.items()) if isinstance(fact, dict) else fact for fact in facts])


def adapter_obstacle(target: nn.Module) -> str | None:
    """Return why the adapters of a target keep it from being decoded with a draft; `None` if they do not."""
    owner = getattr(getattr(target, "prepare_inputs_for_generation", None), "__self__", target)
    if owner is not target and getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        return (
            f"the adapter is of type {owner.active_peft_config.peft_type.value}, which puts virtual tokens before the "
            "prompt that neither the draft nor the verification sees. Drop assistant_model, or use an adapter inside "
            "the layers, such as LoRA"
        )
    configs = getattr(target, "peft_config", None) or {}
    activated = [name for name, config in configs.items() if getattr(config, "alora_invocation_tokens", None)]
    if activated:
        return (
            f"the adapters {activated} switch themselves on inside the sequence (activated LoRA), at a place counted "
            "from the end of plain decoding's passes. Drop assistant_model"
        )
    return None


def gives_rows_adapters(target: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Tell whether `adapter_names` gives the rows of the running call adapters of their own."""
    return bool(getattr(target, "peft_config", None)) and any(map(_hooks_by_row, modules))


def restore_adapters(modules: Iterable[nn.Module]) -> None:
    """Remove the hooks of `adapter_names`: PEFT does it only after calls that end well."""
    for module in modules:
        for hook_id in _hooks_by_row(module):
            del module._forward_pre_hooks[hook_id]
            module._forward_pre_hooks_with_kwargs.pop(hook_id, None)


def _hooks_by_row(module: nn.Module) -> list[int]:
    hooks = module._forward_pre_hooks.items()
    return [id_ for id_, hook in hooks if isinstance(hook, functools.partial) and "adapter_names" in hook.keywords]
