"""Drafts for a target: asked for on the Hub, by what their cards say, or looked for in the local cache."""

import os
from pathlib import Path

from huggingface_hub import CacheNotFound, HfApi, ModelCard, constants, scan_cache_dir
from transformers import PreTrainedModel

from ..files import one_line
from ..formats.checkpoint import ask_hub
from ..models.auto import names_a_draft
from .card import is_on_hub

CARD_FILE, RESULTS_FOLDER = "README.md", "results"
TAG = "speculative-decoding"  # our cards have it, and most of others
WORDS = ("dspark", "dflash", "eagle3", "speculator")  # in names, where a card has no tags
MOST = 20  # of each question


FoundDraft = tuple[str, str | None, str]  # its name, its revision, and why it is offered


def find_drafts(target: PreTrainedModel, token: str | bool | None = None) -> tuple[str, list[FoundDraft]]:
    """Return where drafts for a target were looked for, and those that may be some, the best first.

    On the Hub, a card must name the target as `base_model`; drafts with measured results come first, then those that
    are downloaded most. Without the Hub, or for a target from a folder, the local cache is searched: first drafts
    whose card names the target, then those without a card.
    """
    name = target.name_or_path
    if os.path.exists(name) or not is_on_hub(name):
        return f"in the local cache ({name or 'the target'} is no name on the Hub)", _in_cache(None)
    try:
        ask_hub(constants.ENDPOINT)
        return "on the Hub", _on_hub(name, token)
    except Exception as error:  # of the network, or of the library that talks to it
        return f"in the local cache (the Hub does not answer: {one_line(error)})", _in_cache(name)


def _on_hub(target_name: str, token: str | bool | None) -> list[FoundDraft]:
    tag, asked = f"base_model:{target_name}", {"sort": "downloads", "limit": MOST, "full": True}
    questions = [{"filter": [tag, TAG]}, *({"filter": [tag], "search": word} for word in WORDS)]
    found = {}
    for info in (info for question in questions for info in HfApi(token=token).list_models(**question, **asked)):
        measured = any(file.rfilename.startswith(f"{RESULTS_FOLDER}/") for file in info.siblings or ())
        found[info.id] = measured, info.downloads or 0, info.sha
    return [
        (name, sha, f"its card names {target_name}{', with results' * measured}, {downloads} downloads")
        for name, (measured, downloads, sha) in sorted(found.items(), key=lambda each: each[1][:2], reverse=True)
    ]


def _in_cache(target_name: str | None) -> list[FoundDraft]:
    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions]
    except CacheNotFound:
        return []
    named, others = [], []
    for repo in sorted(repos, key=lambda repo: repo.last_modified, reverse=True):
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        bases = _targets_of(newest.snapshot_path / CARD_FILE)
        if (not bases or target_name in (None, *bases)) and names_a_draft(newest.snapshot_path):
            why = f"its card names {', '.join(bases)}" if bases else "it fits, and no card says for which target it is"
            (named if bases else others).append((repo.repo_id, newest.commit_hash, why))
    return named + others


def _targets_of(card: Path) -> list[str]:
    """Return the targets that a card names: none if there is no card, or one that cannot be read."""
    try:
        bases = ModelCard.load(card).data.base_model
    except Exception:  # whatever its author wrote
        bases = None
    return [bases] if isinstance(bases, str) else bases or []
