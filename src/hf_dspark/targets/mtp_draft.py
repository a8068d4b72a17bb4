"""A target's own multi-token prediction (MTP) module as a draft: what transformers' `use_mtp` decodes with.

Its layer is one of the target's own class, built and loaded by transformers. Here it attends as the layers of other
autoregressive drafts do, by an attention implementation of ours: so it drafts for batches, and grows trees.
"""

import copy
import re
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import MtpModel

from ..files import one_line
from ..models.auto import holds_tensors, require_target
from ..models.block_attention import CachedPass, SlidingWindow
from ..models.configuration_draft import text_config
from ..models.configuration_eagle3 import Eagle3Config
from ..models.layers import Rotary, take_rows
from ..models.modeling_eagle3 import Eagle3DraftModel
from ..models.slot_cache import SlotCache, SlotLayout
from .support import TargetSupport

ATTENTION = "hf_dspark_mtp"


@dataclass
class _Pass:
    attending: CachedPass
    num_calls: int = 0


_running: ContextVar[_Pass] = ContextVar("hf_dspark_mtp_pass")


def mtp_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attend as the running pass says; the signature is that of transformers' attention functions."""
    if given.get("softcap") is not None or given.get("position_bias") is not None:
        raise ValueError("it attends with position biases or a cap of scores")
    running, size = _running.get(), given.get("sliding_window")
    running.num_calls += 1
    window = None if size is None else SlidingWindow(size, causal=True)
    facts = {"scaling": given.get("scaling"), "attention_sink_bias": given.get("s_aux")}
    layer = SimpleNamespace(layer_idx=0, window=window, **facts)
    return running.attending.attend(layer, query, key, value), None


AttentionInterface.register(ATTENTION, mtp_attention)


class MTPDraft(Eagle3DraftModel):
    """A target's own MTP module, from the target's repository, as a draft of one token or more.

    `generate(use_mtp=True)` of transformers reads the same weights. Here they decode batches, sample exactly, and
    follow policies. Of several modules the first one is used; for more than one token it reads its own output, pass by
    pass. To train one, take an [`Eagle3Config`] with `mtp=True`.

    Args:
        target (`PreTrainedModel`): The causal LM, loaded from its repository; it is not changed.
        block_size (`int`): γ, the tokens that are drafted in a round at most.

    Raises:
        ValueError: If the repository holds no MTP module, or one that transformers or this package cannot run.

    Example:

    ```python
    attached = attach(target, "mtp")  # or: target.generate(**inputs, assistant_model=MTPDraft(target))
    ```
    """

    unsaved = "an MTPDraft is a part of its target's repository: there is nothing to save or publish"

    def __init__(self, target: PreTrainedModel, block_size: int = 1) -> None:
        require_target(target)
        config = Eagle3Config.from_target(target, mtp=True, block_size=block_size)
        module = _load(target)
        with torch.device("meta"):
            super().__init__(config)
        self.layers, self.norm = nn.ModuleList([_OwnLayer(module)]), nn.Identity()
        self.rotary = _Rotary(module)
        self.name_or_path = f"the MTP module of {target.name_or_path}"
        self.to(TargetSupport.of(target).input_device, target.dtype).requires_grad_(False).eval()
        self._try(target)

    @torch.no_grad()
    def _try(self, target: PreTrainedModel) -> None:
        """Draft after two tokens; a `ValueError` says why the module's layer cannot."""
        layout = SlotLayout((0,), (2,))
        drafting = CachedPass(SlotCache(), (layout,), layout, is_causal=True)
        states = torch.zeros(1, 2, self.config.hidden_size, device=self.device, dtype=self.dtype)
        try:
            rotary = self.rotary(drafting.position_ids(self.device), self.dtype)
            self.layers[0](states, states, rotary, drafting)
        except Exception as error:  # of code that is not ours
            raise ValueError(f"{self.name_or_path} cannot be run: {one_line(error)}. {_CURE}") from error

    def teacher_forced(self, *args: Any) -> NoReturn:
        """Raise a `TypeError`: a module like it can be trained."""
        raise TypeError("an MTPDraft is not trained: use Eagle3DraftModel(Eagle3Config.from_target(target, mtp=True))")


class _OwnLayer(nn.Module):
    """A module of transformers, called as an [`Eagle3Layer`] is."""

    def __init__(self, module: MtpModel) -> None:
        super().__init__()
        self.layer = module.layers[0]
        self.post_norm = getattr(module, "shared_post_norm", None) or nn.Identity()  # else the layer has it

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, rotary: Rotary | None, attending: CachedPass
    ) -> tuple[torch.Tensor, None, None]:
        rows = attending.queries
        running = _Pass(attending if rows is None else replace(attending, rows=attending.written[0], masks={}))
        token = _running.set(running)
        try:
            states = self.layer(embeds, hidden, rotary, None, None, None)  # no mask, positions or cache
        finally:
            _running.reset(token)
        if running.num_calls != 1:
            raise ValueError("its layer does not attend by the attention interface of transformers")
        return take_rows(self.post_norm(states), rows), None, None


class _Rotary:
    """The target's rotary embedding. A copy, which stands outside of the draft: its frequencies stay in float32."""

    def __init__(self, module: MtpModel) -> None:
        self._module = copy.deepcopy(module.rotary_emb)
        per_layer = getattr(module, "has_per_layer_rope", False)
        self._kind = {"layer_type": module.config.layer_types[0]} if per_layer else {}

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Rotary | None:
        if self._module is None:
            return None
        like = torch.empty(0, device=position_ids.device, dtype=dtype)
        return self._module.to(position_ids.device)(like, position_ids, **self._kind)


_CURE = "Take a draft that was trained for this target, or attach(target, 'ngram')"


def _load(target: PreTrainedModel) -> MtpModel:
    """Load the first MTP module of a target's repository, attending as ours does."""
    text, name = text_config(target), target.config.name_or_path
    kept = re.compile(rf"(^|\.)(layers\.{text.num_hidden_layers}|mtp|mtp_layers)\.")
    revision = getattr(target.config, "_commit_hash", None)
    if not name or not holds_tensors(name, kept, revision=revision):
        where = f"its repository, {name}, holds no tensors" if name else "it was loaded from none, so there are none"
        names = f"mtp.* or layers.{text.num_hidden_layers}.*"
        raise ValueError(f"{type(target).__name__} has no MTP module: {where} of {names}. {_CURE}")
    if getattr(target.config, "quantization_config", None) is not None:
        raise ValueError(f"the MTP module of {name} is quantised in a way that is not read. {_CURE}")
    # Of some types, transformers knows neither how many modules there are nor where: it looks at these two.
    view = copy.copy(target)
    view._keys_to_ignore_on_load_unexpected = [kept.pattern]
    view.config = copy.deepcopy(target.config)
    text = view.config.get_text_config(decoder=True)
    text.num_mtp_layers = 1
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(text, kinds, None) and not getattr(text, f"mtp_{kinds}", None):
            setattr(text, f"mtp_{kinds}", getattr(text, kinds)[-1:])
    try:
        module = MtpModel.from_pretrained(view, device_map={"": TargetSupport.of(target).input_device})
    except Exception as error:  # of code that is not ours
        raise ValueError(f"the MTP module of {name} cannot be loaded: {one_line(error)}. {_CURE}") from error
    for part in module.layers.modules():  # others are of the target
        if hasattr(part, "config"):
            part.config._attn_implementation = ATTENTION
    return module
