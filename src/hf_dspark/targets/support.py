"""[`TargetSupport`]: what the user's model is. It is read once per model, and anew when the model changes."""

import functools
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.borrowing import input_device, lm_head_of
from ..models.modeling_draft import check_fits
from . import transformers_api
from .adapters import adapter_obstacle, gives_rows_adapters
from .int8_outliers import mixes_tokens
from .recurrent import AttributeMixer, Mixer
from .row_attention import RowAttention

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "dummy", "moe", "mlp"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid"}
INDEXED_LAYERS = {"indexed_attention"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Models that read their whole text again where the frequencies of longrope switch.
READS_AGAIN = {"phi3", "phi4_multimodal", "phimoe"}
# Attention by the interface of transformers, with masks that are made by the model, or not of positions.
OWN_MASKS = {"doge", "kosmos_2_text_model", "kosmos_2_5_text_model"}
OWN_TOKENS = {"cpmant"}
# Their passes over several tokens are not causal.
READ_BOTH_WAYS = set() if transformers_api.is_since("5.18") else {"big_bird", "megatron-bert", "roformer"}
# Models whose masks know no window, and whose caches forget what has left it.
FORGETFUL_CACHES = {"moshi"}
# Models that keep no keys and values, or in a form that cannot be taken back, such as for each pass through a loop.
NO_CACHE = {"blt", "dory", "inkling2_loop_text", "openai-gpt", "reformer", "xlm", "xlnet"}

# Whose hooks around `forward` treat all tokens alike, or are known here.
LIBRARIES = {"accelerate", "bitsandbytes", "hf_dspark", "peft", "torch", "transformers"}


@dataclass(frozen=True)
class _Mixers:
    """What a config does not say of layers that keep a state."""

    paths: tuple[str, ...]  # of the mixer within its decoder layer; a layer has one of them
    takes_chunk_size: bool = False  # whether its forward takes the size of the chunks in which it reads tokens
    attributes: tuple[str, ...] = ()  # that hold its states, where no cache does
    indexed: str | None = None  # path of attention with an indexer of its own, which keeps more than keys and values
    reads_padding: bool = False  # whether it gets no mask, so that padding changes what plain decoding gives


# By `model_type` of the text model. A model with states that is not here is refused by name.
MIXERS: dict[str, _Mixers] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "jamba"), _Mixers(("mamba",))),
    **dict.fromkeys(("zamba", "zamba2"), _Mixers(("mamba", "mamba_decoder.mamba"))),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "nemotron_h"), _Mixers(("mixer",))),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _Mixers(("conv",))),
    **dict.fromkeys(
        ("lara_mini", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        _Mixers(("linear_attn",), takes_chunk_size=True),
    ),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _Mixers(("self_attn",), takes_chunk_size=True)),
    "glm5_next_text": _Mixers(("self_attn",), takes_chunk_size=True, indexed="self_attn"),
    "recurrent_gemma": _Mixers(
        ("temporal_block",), attributes=("conv1d_state", "rg_lru.recurrent_states"), reads_padding=True
    ),
    "zaya": _Mixers(("self_attn.qkv_proj",)),
}


@dataclass(frozen=True)
class Switch:
    """What is switched in one target while a packed pass runs, and the lock of the thread that runs it."""

    lock: Any = field(default_factory=threading.RLock)
    # The attributes of each config, and how it attends by itself: filled before anything is switched, and emptied when
    # all is restored.
    originals: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    @property
    def ignores_caps(self) -> bool:
        """Whether the target leaves out caps of scores, as `sdpa` did before transformers 5.21."""
        return {implementation for _, implementation in self.originals} == {"sdpa"}

    def restore(self) -> None:
        for attributes, implementation in self.originals:
            attributes[transformers_api.ATTENDS] = implementation
        self.originals.clear()


_reading = threading.Lock()
_known: "weakref.WeakKeyDictionary[PreTrainedModel, TargetSupport]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class TargetSupport:
    """What a target is, and what it cannot do, with the reasons. Obstacles are `None` where there are none.

    It holds the target weakly and its submodules strongly. Get it by [`TargetSupport.of`], which is one walk over the
    modules; whoever has it passes it on.
    """

    text: PreTrainedConfig  # of the text model
    kinds: tuple[str, ...]  # of its layers; empty where the config does not list them
    modules: tuple[nn.Module, ...]  # all but the target itself
    configs: tuple[PreTrainedConfig | None, ...]  # the target's, then one for each module
    switch: Switch
    _target: "weakref.ref[PreTrainedModel]"

    @classmethod
    def of(cls, target: PreTrainedModel) -> "TargetSupport":
        """Return what is known of a target, and read it if a module or a config was replaced since.

        Devices, settings of a config and of layers are looked up where they are asked for: they may change in place.
        """
        modules = tuple(target.modules())
        configs = tuple(vars(module).get("config") for module in modules)
        text = target.config.get_text_config(decoder=True)
        kinds = tuple(getattr(text, "layer_types", None) or ())
        with _reading:
            known = _known.get(target)
            if (
                known is None
                or known.text is not text
                or known.kinds != kinds
                or not _are_same(known.modules, modules[1:])
                or not _are_same(known.configs, configs)
            ):
                switch = Switch() if known is None else known.switch
                known = _known[target] = cls(text, kinds, modules[1:], configs, switch, weakref.ref(target))
        return known

    @property
    def target(self) -> PreTrainedModel:
        target = self._target()
        assert target is not None
        return target

    @property
    def name(self) -> str:
        """Of the target in messages."""
        return type(self.target).__name__

    # ---- where things are

    @functools.cached_property
    def decoder(self) -> nn.Module:
        found = self.target.get_decoder()  # of some families the head, which is called decoder
        has_layers = any(isinstance(module, nn.ModuleList) for module in found.modules())
        return found if has_layers else self.target.base_model

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, whatever the family calls them: what a draft taps. A `ValueError` if none are found."""
        decoder, depth = self.decoder, self.text.num_hidden_layers
        lists = {path: module for path, module in decoder.named_modules() if isinstance(module, nn.ModuleList)}
        found = [path for path, module in lists.items() if len(module) == depth]
        if found:
            # A vision tower of that depth is further inside.
            return lists[min(found, key=lambda path: path.count("."))]
        raise ValueError(
            f"no list of {depth} decoder layers found in {type(decoder).__name__}: DSpark taps decoder layers by "
            "forward hooks and does not know where this architecture keeps them"
        )

    @functools.cached_property
    def embedding(self) -> nn.Module:
        return self.target.get_input_embeddings()

    @functools.cached_property
    def lm_head(self) -> nn.Module:
        """A `ValueError` says that there is none."""
        return lm_head_of(self.target)

    @property
    def input_device(self) -> torch.device:
        """Where token ids go; an offloaded target's own device is meta."""
        return input_device(self.embedding)

    @property
    def is_multimodal(self) -> bool:
        """Whether its text model is a part of it."""
        return self.text is not self.target.config

    @property
    def is_spread(self) -> bool:
        """Whether `device_map` has put it on several devices."""
        return len(set(getattr(self.target, "hf_device_map", {}).values())) > 1

    @functools.cached_property
    def leaf_modules(self) -> tuple[nn.Module, ...]:
        """Those without modules of their own, such as linear layers and norms."""
        return tuple(module for module in self.modules if not module._modules)

    @functools.cached_property
    def attention_configs(self) -> tuple[PreTrainedConfig, ...]:
        """The configs that decide how modules attend."""
        return tuple({id(config): config for config in self.configs if config is not None}.values())

    @functools.cached_property
    def cache_argument(self) -> str:
        """Under which name the target takes its cache; Mamba has one of its own."""
        return transformers_api.cache_argument(self.target)

    # ---- what it is

    @functools.cached_property
    def by_rows(self) -> tuple[Mixer | RowAttention, ...]:
        """The layers that packed passes call for some rows at a time."""
        facts, found = MIXERS.get(self.text.model_type), {}
        for number, (kind, layer) in enumerate(zip(self.kinds, self.layers, strict=False) if facts else ()):
            paths = facts.paths if kind in RECURRENT_LAYERS else (facts.indexed,) if kind in INDEXED_LAYERS else ()
            parts = dict(layer.named_modules())
            for path in paths:
                if (module := parts.get(path)) is None or module in found:
                    continue
                name = f"{number}.{path}"
                if kind in INDEXED_LAYERS:
                    found[module] = RowAttention(name, module, self.text)
                elif facts.attributes:
                    found[module] = AttributeMixer(name, module, facts.attributes)
                else:
                    found[module] = Mixer(name, module, kind == "conv", facts.takes_chunk_size)
        return tuple(found.values())

    @property
    def is_stateful(self) -> bool:
        """Whether transformers' own loop cannot take it back: it says so, or a cache of its own (MiniMax) does."""
        return getattr(self.target, "_is_stateful", False) or "linear_attention" in self.kinds

    @property
    def keeps_states(self) -> bool:
        """Whether it has recurrent layers or convolutions: a mask alone cannot take them back."""
        return self.is_stateful or "conv" in self.kinds

    @property
    def reads_padding(self) -> bool:
        """Whether its recurrent layers read the padding of prompts, which our loop takes out."""
        return self.text.model_type in MIXERS and MIXERS[self.text.model_type].reads_padding

    @property
    def cache_window(self) -> int | None:
        """After how many tokens its cache forgets, in plain decoding, what a prompt's tokens all see."""
        return self.text.sliding_window if self.text.model_type in FORGETFUL_CACHES else None

    @property
    def shares_keys(self) -> bool:
        """Whether its last layers read the keys and values of earlier ones, and skip positions without logits."""
        return bool(getattr(self.text, "num_kv_shared_layers", None))

    @property
    def has_outliers(self) -> bool:
        """Whether 8-bit layers mix the tokens of a pass."""
        return any(map(mixes_tokens, self._int8_layers))

    @functools.cached_property
    def _int8_layers(self) -> tuple[nn.Module, ...]:
        return tuple(module for module in self.modules if hasattr(module, "state"))

    @property
    def rope_parameters(self) -> list[dict[str, Any]]:
        """One set, or one per layer type."""
        found = getattr(self.text, "rope_parameters", None) or {}
        return [found, *(value for value in found.values() if isinstance(value, dict))]

    @property
    def rope_switches(self) -> list[int]:
        """The lengths beyond which a pass rotates all its tokens by other frequencies (longrope)."""
        sets = [part for part in self.rope_parameters if part.get("rope_type") == "longrope"]
        return [part["original_max_position_embeddings"] for part in sets]

    @property
    def reads_again(self) -> bool:
        """Whether plain decoding reads the whole text again behind such a length."""
        return self.text.model_type in READS_AGAIN

    @property
    def longest_window(self) -> int:
        """Of sliding layers, which may differ; 0 if there are none."""
        layers = self.text.per_layer_config if getattr(self.text, "is_heterogeneous", False) else [self.text]
        return max(getattr(layer, "sliding_window", None) or 0 for layer in layers)

    @property
    def num_positions(self) -> int | None:
        return getattr(self.text, "max_position_embeddings", None)

    @property
    def is_hooked(self) -> bool:
        """Whether a user's own hooks are around some of its modules."""
        return has_users_hooks((self.target, *self.modules))

    # ---- what it cannot do

    @property
    def slot_obstacle(self) -> str | None:
        """Why it cannot attend to a slot cache, as hf_dspark's own loop has one."""
        for attends in sorted({str(config._attn_implementation) for config in self.attention_configs}):
            if not transformers_api.is_transformers_attention(attends):
                return f"{self.name} attends by {attends!r}, which was registered by somebody else than transformers"
        if (step := transformers_api.own_step(self.target)) is not None:
            return f"{self.name} has a method {step} of its own, which only transformers' loop calls"
        if self.keeps_states:
            return self._state_obstacle
        if self.text.model_type in OWN_MASKS:
            return f"{self.name} makes attention masks of its own, which a slot cache does not know"
        if getattr(self.text, "use_bidirectional_attention", None) in (True, "all"):  # PaliGemma
            return f"{self.name} reads prompts in both directions, and a slot cache in one"
        if not getattr(self.target, "_supports_attention_backend", False):
            return f"{self.name} has attention of its own (ALiBi, for example), which cannot read a slot cache"
        others = sorted({*self.kinds} - ATTENTION_LAYERS)
        return f"{self.name} has layers that are not attention ({', '.join(others)})" if others else None

    @property
    def _state_obstacle(self) -> str | None:
        if (needed := transformers_api.state_cache_obstacle()) is not None:
            return f"{self.name} keeps a recurrent state, which takes {needed}"
        facts = MIXERS.get(self.text.model_type)
        known = ATTENTION_LAYERS | RECURRENT_LAYERS | (INDEXED_LAYERS if facts and facts.indexed else set())
        if facts is None or not self.by_rows or not known.issuperset(self.kinds):
            others = ", ".join(sorted({*self.kinds} - ATTENTION_LAYERS)) or "none in layer_types"
            return (
                f"{self.name} keeps a state that hf_dspark does not know how to keep row by row "
                f"(model_type {self.text.model_type!r}, layers: {others})"
            )
        if any(parameter.device.type == "meta" for layer in self.by_rows for parameter in layer.module.parameters()):
            return f"{self.name} has recurrent layers whose weights are offloaded, and would be loaded twice a round"
        return None

    @property
    def tree_obstacle(self) -> str | None:
        """Why it cannot verify trees of drafts."""
        if self.keeps_states or not ATTENTION_LAYERS.issuperset(self.kinds):
            return f"{self.name} has layers that read a row token by token, and cannot follow several branches"
        return None

    @property
    def batch_obstacle(self) -> str | None:
        """Why rows cannot be packed, though one can."""
        if any(part.get("rope_type") in LENGTH_DEPENDENT_ROPE for part in self.rope_parameters):
            return f"the rotary frequencies of {self.name} depend on the longest row"
        if gives_rows_adapters(self.target, self.modules):
            return "adapter_names gives rows adapters of their own, and layers see all rows as one packed sequence"
        return None

    @property
    def state_obstacle(self) -> str | None:
        """Why no loop can take it back to before a rejected token; transformers' own cannot restore states, either."""
        obstacle = self.slot_obstacle if self.is_stateful else None
        if self.text.model_type in NO_CACHE:
            obstacle = f"{self.name} has no cache of keys and values that could be cut back"
        if self.text.model_type in OWN_TOKENS:
            return f"{self.name} puts tokens of its own before each prompt, which a draft knows nothing of"
        if self.text.model_type in READ_BOTH_WAYS:
            return f"{self.name} reads what is drafted in both directions before transformers 5.18: upgrade it"
        if obstacle is None:
            return None
        return f"{obstacle}, so it cannot go back to before a rejected token: decode it without a draft"

    def draft_obstacles(self, config: PreTrainedConfig, reads_embedding: bool = True) -> list[str]:
        """Return all reasons why it cannot be decoded with a draft of this config."""
        width = getattr(self.embedding, "embedding_dim", config.hidden_size)
        found = [self.state_obstacle, adapter_obstacle(self.target)]
        try:
            check_fits(config, self.target)
            _ = self.lm_head
        except ValueError as error:
            found.append(str(error))
        if reads_embedding and not config.own_embedding and width != self.text.hidden_size:
            found.append(
                f"the embedding of {self.name} has {width} values for a token and its layers {self.text.hidden_size}, "
                "and a draft borrows embeddings of their size: use PromptLookup(target)"
            )
        modules = (self.target, *self.modules)
        if any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in modules):
            found.append(
                f"{self.name} was quantised by torch.ao.quantization, which rounds by the largest value of all tokens "
                "of a pass: quantise it otherwise, or drop assistant_model"
            )
        if self.target.training and any(getattr(module, "gradient_checkpointing", False) for module in modules):
            found.append(
                "a target in train() with gradient checkpointing keeps no keys and values, so nothing can be "
                "verified: call target.eval(), or target.gradient_checkpointing_disable()"
            )
        return [reason for reason in found if reason is not None]


def _are_same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))


def restore(target: PreTrainedModel) -> None:
    """Restore what several interrupts at once may have left switched in a target, unless it is at work."""
    known = _known.get(target)
    if known is not None and known.switch.originals and known.switch.lock.acquire(blocking=False):
        try:
            for layer in known.by_rows:
                layer.restore()
            known.switch.restore()
        finally:
            known.switch.lock.release()


def has_users_hooks(modules: Iterable[nn.Module]) -> bool:
    """Tell whether hooks are around some modules that are not those of a library."""
    hooks = (hook for each in modules for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values()))
    return any(str(getattr(hook, "func", hook).__module__).split(".")[0] not in LIBRARIES for hook in hooks)
