"""A draft that assists all calls of `generate()` of one model, and what becomes of calls that it cannot assist."""

import contextlib
import os
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..files import one_line
from ..models import publisher
from ..models.auto import carries_a_draft, load_draft, loader_of, require_draft, require_target
from ..models.modeling_draft import DraftModel
from ..models.prompt_lookup import PromptLookup
from ..scheduling.options import DecodingOptions
from ..scheduling.prompt_lookup import AnswerMemory
from ..targets.assistant_draft import AssistantDraft, as_draft
from ..targets.mtp_draft import MTPDraft
from ..targets.support import TargetSupport
from .checks import refuse
from .hook import plan_call

AUTO, NGRAM, MTP = "auto", "ngram", "mtp"
QUOTED = re.compile(r"\(.*\)|\d+", re.DOTALL)  # of a reason: numbers, and the words of a user's error
logger = logging.get_logger(__name__)


class Attachment:
    """What [`attach`] returns. As a context manager it ends with the block.

    Attributes:
        draft ([`DraftModel`], *optional*): It assists the target's calls; `None` if none was found.
        num_assisted, num_plain (`int`): Calls that were decoded with it, and that could not be.
        plain_calls (`Counter`): The latter by reason; a call may have several.
        answers ([`AnswerMemory`], *optional*): The latest answers of assisted calls, if they are remembered.
    """

    def __init__(self, target: PreTrainedModel, draft: DraftModel | None, remember: bool = True) -> None:
        self.draft, self.answers = draft, AnswerMemory() if remember else None
        self.num_assisted = self.num_plain = 0
        self.plain_calls: Counter[str] = Counter()
        self._target = weakref.ref(target)
        self._reasons: dict[str, str] = {}  # as first met, by what they say without what they quote
        self._is_entered = False
        self._before = _attached.get(target)  # comes back after a `with` block
        if self._before is not None and not self._before._is_entered:
            self._before._before = None
        _attached[target] = self

    def __repr__(self) -> str:
        name = getattr(self.draft, "name_or_path", "no draft") or type(self.draft).__name__
        return f"Attachment({name}: {self.num_assisted} calls assisted, {self.num_plain} plain)"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_target": type(None), "_before": None}  # a copy assists no model

    def __enter__(self) -> "Attachment":
        self._is_entered = True
        return self

    def __exit__(self, *error: Any) -> None:
        target = self._target()
        if target is not None and _attached.get(target) is self:
            detach(target)
            if self._before is not None:
                _attached[target] = self._before

    @property
    def decoding(self) -> DecodingOptions:
        """How calls are decoded: a policy of the user's own, and the answers that it may know, stay as they are."""
        own = self.draft.decoding
        return own if own.policy or own.answers else replace(own, answers=self.answers)

    def count(self, reasons: Iterable[str] = ()) -> None:
        """Count a call, which is decoded without the draft for some reasons, and warn of those that are new."""
        reasons = [reason.replace("drop assistant_model", "leave it plain") for reason in reasons]
        with _counting:
            names = [self._reasons.setdefault(QUOTED.sub("", reason), reason) for reason in reasons]
            new = [name for name in names if not self.plain_calls[name]]
            self.plain_calls.update(names)
            self.num_plain += bool(names)
            self.num_assisted += not names
        self._before = self._before if self._is_entered else None
        if new:
            said = "this call of generate(), and others like it, are decoded without the attached draft"
            warnings.warn(f"{said}: {'; '.join(new)}", stacklevel=4)


_counting = threading.Lock()
_attached: "weakref.WeakKeyDictionary[PreTrainedModel, Attachment]" = weakref.WeakKeyDictionary()


def attachment_of(target: Any) -> Attachment | None:
    attached = _attached.get(_called(target))
    return None if attached is None or attached.draft is None else attached


def attach(
    target: PreTrainedModel, draft: PreTrainedModel | str | os.PathLike = AUTO, remember: bool = True, **options: Any
) -> Attachment:
    """Let all later calls of `target.generate()` decode with a draft, whoever makes them: `pipeline`, TRL, lm-eval.

    The output stays that of plain `generate()`. A call that a draft cannot assist (beams, a static cache, ...) is
    decoded without it; each reason is warned about once, and counted. A call's own `assistant_model` or
    `prompt_lookup_num_tokens` goes before, and `assistant_model=None` decodes without a draft. Nothing of it is saved,
    pickled or copied with the model: a copy has no draft attached.

    Args:
        target (`PreTrainedModel`): The causal LM, or what PEFT or `torch.compile` made of it.
        draft (`PreTrainedModel`, `str` or `PathLike`): A draft, which replaces one that is attached, or a causal LM
            with the target's tokenizer (an [`AssistantDraft`]); the folder or repository of one; `"ngram"` for
            [`PromptLookup`]; `"mtp"` for the target's own [`MTPDraft`]; or `"auto"` for a draft that is found on the
            Hub, by the `base_model` of its card, or in the local cache. A log line says what was taken; if nothing is
            found, calls stay plain.
        remember (`bool`): Whether prompt lookup also searches the latest answers ([`AnswerMemory`]), until it is
            detached. Not where several people use the model. Without effect where `draft.decoding` has a policy.
        options: For loading a draft by its name, as in `from_pretrained`; `block_size` of `"mtp"`. Default: dtype and
            device of the target.

    Returns:
        [`Attachment`], also as a context manager: after the block, what was attached before is so again.

    Raises:
        TypeError: If these are no target and no draft.
        ValueError: If the draft does not fit the target, or there is none of that name.

    Example:

    ```python
    attached = attach(target, draft)
    output = target.generate(**inputs, max_new_tokens=64)
    print(attached.draft.last_stats.tau, attached.plain_calls)
    ```
    """
    target = _called(target)
    if draft == NGRAM:
        draft = PromptLookup(target)
    elif draft == MTP:
        name, revision = target.config.name_or_path, getattr(target.config, "_commit_hash", None)
        where = {"revision": revision} | options
        is_there = False
        with contextlib.suppress(OSError):  # its files were moved, or the Hub is not reached
            is_there = bool(name) and carries_a_draft(name, where)
        if is_there:
            draft, options = name, where
        else:
            draft, options = MTPDraft(target, **options), {}
    if isinstance(draft, str | os.PathLike):
        name = os.fspath(draft)
        draft = _found(target, options) if name == AUTO else _named(target, name, options)
    elif options:
        raise TypeError(f"{', '.join(options)} are for loading a draft by its name, got a {type(draft).__name__}")
    else:
        draft = _require_fit(target, as_draft(draft, target))
    return Attachment(target, draft, remember)


def detach(target: PreTrainedModel) -> None:
    """Let `target.generate()` decode without a draft again. Nothing happens if none is attached.

    Args:
        target (`PreTrainedModel`): As for [`attach`].

    Example:

    ```python
    detach(target)
    ```
    """
    attached = _attached.pop(_called(target), None)
    if attached is not None and attached.answers is not None:
        attached.answers.clear()


def _called(target: Any) -> PreTrainedModel:
    """Return the model whose `generate()` is called in the end, also of wrappers by PEFT and `torch.compile`."""
    require_target(target)
    inner = target.get_base_model() if hasattr(target, "get_base_model") else target
    return getattr(inner.generate, "__self__", inner)


def _named(target: PreTrainedModel, name: str, options: dict[str, Any]) -> DraftModel:
    if not os.path.exists(name) and (near := get_close_matches(name.lower(), (AUTO, NGRAM, MTP), 1, 0.7)):
        raise ValueError(f"there is no draft {name!r}; did you mean {near[0]!r}?")
    return _loaded(target, name, options, loader_of(name, options, AssistantDraft.from_pretrained))


def _loaded(
    target: PreTrainedModel, name: str, options: dict[str, Any], load: Callable[..., DraftModel] = load_draft
) -> DraftModel:
    device = TargetSupport.of(target).input_device
    draft = load(name, target=target, **{"dtype": target.dtype} | options)
    is_there = "device_map" in options or draft.device == device
    return _require_fit(target, draft if is_there else draft.to(device))


def _found(target: PreTrainedModel, options: dict[str, Any]) -> DraftModel | None:
    """Return the first draft that is found and fits, and say which and why; `None`, and say that, if there is none."""
    where, candidates = publisher.load().find_drafts(target, options.get("token"))
    name, passed_over = target.name_or_path or type(target).__name__, ""
    for found, revision, why in candidates:
        try:
            draft = _loaded(target, found, options | {"revision": revision})
        except (OSError, ValueError, TypeError) as error:
            passed_over += f"; passed over {found}: {one_line(error)}"
        else:
            logger.warning(f"attached the draft {found}, found {where}: {why}")
            return draft
    cure = "generate() stays plain. Name one, or pass 'ngram' where answers repeat their prompts"
    logger.warning(f"no draft for {name} was found {where}: {cure}{passed_over}")
    return None


def _require_fit(target: PreTrainedModel, draft: DraftModel) -> DraftModel:
    """Return the draft, bound, or raise the error of an ordinary call with it."""
    require_draft(draft)
    usual = GenerationConfig(use_cache=True, do_sample=False, num_beams=1)
    refuse(plan_call(target, draft, draft.decoding, usual, {})[1])
    draft.bind(target)
    return draft
