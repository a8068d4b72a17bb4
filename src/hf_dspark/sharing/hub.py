"""Sharing a draft: its repository, as a folder or on the Hub.

A repository holds the draft's weights and config, a model card with the result files that it is made of, and one file
of code, with which transformers alone decodes with the draft. There is no `generation_config.json`: how to sample
belongs to the target.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..files import replace_text
from ..models.auto import DRAFTS, load_draft
from ..models.modeling_draft import DraftModel
from ..models.modeling_dspark import DSparkDraftModel
from .model_card import missing_facts, model_card

CODE_FOLDER = "custom_generate"  # where transformers looks for generate.py
DECODER = Path(__file__).parent / CODE_FOLDER / "generate.py"
RESULTS_FOLDER = "results"
CARD_FILE = "README.md"
# All that is published; a training's folder has more in it, pickled arguments among others.
REPOSITORY_FILES = (
    CARD_FILE,
    "config.json",
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    f"{CODE_FOLDER}/{DECODER.name}",
    f"{CODE_FOLDER}/LICENSE",
    f"{RESULTS_FOLDER}/*.json",
)
# What an earlier upload may have left and this one would not replace: other shards, code, results, pickles.
STALE_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", f"{CODE_FOLDER}/*", f"{RESULTS_FOLDER}/*")
UPLOAD_OPTIONS = ("private", "token", "revision", "create_pr", "commit_message", "commit_description")


def push_draft(
    draft: DraftModel | str | Path,
    repo_id: str,
    results: Iterable[str | Path] = (),
    *,
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> str:
    """Publish a draft on the Hub; what its repository held before is replaced in one commit.

    Args:
        draft ([`DraftModel`], `str` or `Path`): The draft, or the folder or repository to load it from.
        repo_id (`str`): The repository, `user/name`; made if it does not exist.
        results (`Iterable`): Result files, or folders of them, that the model card is made of; published, too.
        max_shard_size (`int` or `str`): Bytes of a weight file at most, such as `"500MB"`.
        options: Those of [`upload_repository`]; all others are for [`~model_card.model_card`].

    Returns:
        `str`: URL of the commit.

    Raises:
        ValueError: If a result file is not sound, or belongs to another draft or target; nothing was uploaded.
        OSError: If the upload failed.
    """
    draft = _loaded(draft)
    upload = {name: options.pop(name) for name in UPLOAD_OPTIONS if name in options}
    with tempfile.TemporaryDirectory() as folder:
        save_repository(draft, folder, results, max_shard_size=max_shard_size, **{"repo_id": repo_id} | options)
        return upload_repository(folder, repo_id, **upload)


def save_repository(
    draft: DraftModel | str | Path,
    folder: str | Path,
    results: Iterable[str | Path] = (),
    *,
    max_shard_size: int | str = "5GB",
    **card: Any,
) -> Path:
    """Write everything that [`push_draft`] publishes into a folder.

    Args:
        draft, results, max_shard_size: As for [`push_draft`].
        folder (`str` or `Path`): Where to write; other files in it stay.
        card: For [`~model_card.model_card`].

    Returns:
        `Path`: The folder.

    Raises:
        ValueError: As for [`push_draft`]; nothing was written.
    """
    draft, folder, files = _loaded(draft), Path(folder), result_files(results)
    readme = model_card(draft, files, **card | {"repo_id": card.get("repo_id") or folder.name})
    for fact in missing_facts(readme):
        warnings.warn(f"the model card does not name {fact}", stacklevel=2)
    draft.save_pretrained(folder, max_shard_size=max_shard_size)
    write_remote_code(folder)
    _copy_results(files, folder / RESULTS_FOLDER)
    replace_text(folder / CARD_FILE, str(readme))
    return folder


def write_card(
    draft: DraftModel | str | Path, results: Iterable[str | Path] = (), output: str | Path | None = None, **card: Any
) -> Path:
    """Write the model card of a draft.

    Args:
        draft ([`DraftModel`], `str` or `Path`): The draft, or the folder it is in.
        results (`Iterable`): Result files, or folders of them; without any, the card says that nothing was measured.
        output (`str` or `Path`, *optional*): The file to write; `README.md` in the draft's folder unless given.
        card: For [`~model_card.model_card`].

    Returns:
        `Path`: The file.

    Raises:
        ValueError: If there is nowhere to write to, or a result file is not sound or belongs to another draft or
            target; nothing was written.
    """
    if output is None:
        if isinstance(draft, DraftModel) or not Path(draft).is_dir():
            raise ValueError("a draft that is in no folder here needs a file for its card: pass output")
        output = Path(draft) / CARD_FILE
    folder = Path(output).resolve().parent
    if not card.get("repo_id") and (folder / "config.json").exists():  # the draft that the card lies beside
        card["repo_id"] = folder.name
    text = str(model_card(_loaded(draft), result_files(results), **card))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    replace_text(Path(output), text)
    return Path(output)


def write_remote_code(folder: str | Path) -> Path:
    """Add the one-file decoder to a draft's folder, for decoding where this package is not installed.

    Args:
        folder (`str` or `Path`): A folder that `draft.save_pretrained` has written. Its `config.json` then names the
            file's classes, so that `AutoModel` finds them with `trust_remote_code=True`; the file has none for Eagle3.

    Returns:
        `Path`: The file, the same bytes for the same version of this package.

    Raises:
        ValueError: If there is no draft in the folder.
    """
    folder = Path(folder)
    config, code = _read_config(folder), folder / CODE_FOLDER
    code.mkdir(exist_ok=True)
    for stale in code.glob("*.py"):
        stale.unlink()
    (code / "LICENSE").write_text(_license(), encoding="utf-8")
    model = DRAFTS[config["model_type"]]
    if model is DSparkDraftModel:
        classes = {"AutoConfig": model.config_class.__name__, "AutoModel": model.__name__}
        config["auto_map"] = {auto: f"{CODE_FOLDER}/{DECODER.stem}.{name}" for auto, name in classes.items()}
        replace_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    return Path(shutil.copyfile(DECODER, code / DECODER.name))


def _license() -> str:
    try:
        return distribution("hf_dspark").read_text("licenses/LICENSE")
    except PackageNotFoundError:  # run from its sources
        return (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")


def _read_config(folder: Path) -> dict[str, Any]:
    """Return what the config of one of our drafts says."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} holds no draft ({error!r}): pass a folder that draft.save_pretrained wrote"
        ) from error
    if model_type not in DRAFTS:
        raise ValueError(
            f"{folder} holds a {model_type!r} model, a draft is one of {sorted(DRAFTS)}: convert it with "
            "hf_dspark.convert_checkpoint"
        )
    return config


def upload_repository(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
) -> str:
    """Upload what [`save_repository`] wrote, in one commit that also removes what it replaces.

    Args:
        folder (`str` or `Path`): The folder; files that do not belong to a draft's repository stay here.
        repo_id (`str`): The repository, `user/name`; made if it does not exist.
        private (`bool`, *optional*): Of a repository that is made now.
        token (`str` or `bool`, *optional*): Of the user; the one that `hf auth login` has saved unless given.
        revision (`str`, *optional*): Branch to commit to.
        create_pr (`bool`): Open a pull request instead.
        commit_message, commit_description (`str`, *optional*): Of the commit.

    Returns:
        `str`: URL of the commit.

    Raises:
        OSError: If the upload failed; the repository is as it was, or new and empty.
    """
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=os.fspath(folder),
            revision=revision,
            create_pr=create_pr,
            allow_patterns=list(REPOSITORY_FILES),
            delete_patterns=list(STALE_FILES),
            commit_message=commit_message or "Upload draft",
            commit_description=commit_description,
        )
    except Exception as error:  # of the server, the network or the disk; their classes have no common base
        raise OSError(
            f"the draft could not be uploaded to {repo_id}, whose files are as they were: {error}. Check the name, "
            "the network, and that the token may write (`hf auth login`), and push again."
        ) from error
    return commit.pr_url or commit.commit_url


def _loaded(draft: DraftModel | str | Path) -> DraftModel:
    """Return the draft of a folder or repository, in the dtype it was saved in; a draft is returned as it is."""
    return draft if isinstance(draft, DraftModel) else load_draft(draft, dtype="auto")


def result_files(results: Iterable[str | Path]) -> list[Path]:
    """Return the files that paths of files and folders name."""
    paths = [Path(path) for path in results]
    return [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


def _copy_results(files: list[Path], folder: Path) -> None:
    """Copy result files under names of their own."""
    contents = {file: file.read_bytes() for file in files}
    for file, content in contents.items():
        folder.mkdir(exist_ok=True)
        same_name = [other for other in files if other.name == file.name]
        name = file.name if len(same_name) == 1 else f"{file.stem}_{same_name.index(file) + 1}.json"
        (folder / name).write_bytes(content)
