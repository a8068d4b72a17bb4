"""Drafts for a target: asked for on the Hub, by what their cards say, or looked for in the local cache."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, HfApi, ModelCard, constants, scan_cache_dir
from transformers import PreTrainedModel

from ..files import one_line
from ..formats.checkpoint import ask_hub
from ..models.auto import names_a_draft
from .card import is_on_hub

CARD_FILE, ADAPTER_FILE, RESULTS_FOLDER = "README.md", "adapter_config.json", "results"
TAG = "speculative-decoding"  # our cards have it, and most of others
WORDS = ("dspark", "dflash", "eagle3", "speculator")  # in names, where a card has no tags
MOST = 20  # of each question
FOR_BASE = ", which this target was made from: it may accept less"


FoundDraft = tuple[str, str | None, str]  # its name, its revision, and why it is offered


def find_drafts(target: PreTrainedModel, token: str | bool | None = None) -> tuple[str, list[FoundDraft]]:
    """Return where drafts for a target were looked for, and those that may be some, the best first.

    On the Hub, a card must name the target as `base_model`; drafts with measured results come first, then those that
    are downloaded most. If there is none, those for the target's own base count, as its card or adapter names it.
    Without the Hub, or for a target that nothing names there, the local cache is searched: drafts whose card names the
    target, then those for its base, then those without a card.
    """
    name, adapters = target.name_or_path, list((getattr(target, "peft_config", None) or {}).values())
    own = [name] if _is_name(name) and not adapters else []
    bases = [] if own else _bases_of(name, adapters)
    if not own and not bases:
        return f"in the local cache ({name or 'the target'} is no name on the Hub)", _in_cache([], [])
    try:
        ask_hub(constants.ENDPOINT)
        return "on the Hub", _on_hub(own, token) or _on_hub(bases or _bases_of(name, adapters), token, FOR_BASE)
    except Exception as error:  # of the network, or of the library that talks to it
        where = f"in the local cache (the Hub does not answer: {one_line(error)})"
        return where, _in_cache(own, bases or _bases_of(name, adapters))


def _on_hub(target_names: Sequence[str], token: str | bool | None, more: str = "") -> list[FoundDraft]:
    asked, found = {"sort": "downloads", "limit": MOST, "full": True}, {}
    for target_name in target_names:
        tag = f"base_model:{target_name}"
        questions = [{"filter": [tag, TAG]}, *({"filter": [tag], "search": word} for word in WORDS)]
        for info in (info for question in questions for info in HfApi(token=token).list_models(**question, **asked)):
            measured = any(file.rfilename.startswith(f"{RESULTS_FOLDER}/") for file in info.siblings or ())
            found[info.id] = measured, info.downloads or 0, info.sha, target_name
    return [
        (name, sha, f"its card names {base}{more}{', with results' * measured}, {downloads} downloads")
        for name, (measured, downloads, sha, base) in sorted(found.items(), key=lambda each: each[1][:2], reverse=True)
    ]


def _in_cache(own: Sequence[str], target_bases: Sequence[str]) -> list[FoundDraft]:
    """Return cached drafts for the target, for its bases, and without a card; of any card if nothing is known."""
    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions]
    except CacheNotFound:
        return []
    found: tuple[list[FoundDraft], ...] = [], [], []
    for repo in sorted(repos, key=lambda repo: repo.last_modified, reverse=True):
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        bases = _targets_of(newest.snapshot_path / CARD_FILE)
        is_own = not bases or not {*own, *target_bases} or not {*own}.isdisjoint(bases)
        if (is_own or not {*target_bases}.isdisjoint(bases)) and names_a_draft(newest.snapshot_path):
            more = "" if is_own else FOR_BASE
            why = f"its card names {', '.join(bases)}{more}" if bases else "it fits, and no card says for which target"
            found[1 - is_own if bases else 2].append((repo.repo_id, newest.commit_hash, why))
    return [each for part in found for each in part]


def _bases_of(name: str, adapters: Sequence[Any]) -> list[str]:
    """Return what a target was made from: as its adapters say, else its card and the adapter in its folder."""
    bases = [adapter.base_model_name_or_path for adapter in adapters]
    if not adapters and os.path.isdir(name):
        bases = _targets_of(Path(name) / CARD_FILE)
        with suppress(OSError, ValueError):
            bases.append(json.loads((Path(name) / ADAPTER_FILE).read_text()).get("base_model_name_or_path"))
    elif not adapters and _is_name(name):
        bases = [base for base in _targets_of(name) if base != name]
    return list(dict.fromkeys(filter(_is_name, bases)))


def _is_name(name: str | None) -> bool:
    return is_on_hub(name) and not os.path.exists(name)


def _targets_of(card: str | Path) -> list[str]:
    """Return the targets that a card names: none if there is no card, or one that cannot be read."""
    try:
        bases = ModelCard.load(card).data.base_model
    except Exception:  # whatever its author wrote
        bases = None
    return [bases] if isinstance(bases, str) else bases or []
