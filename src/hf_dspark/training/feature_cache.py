"""The target's hidden states on disk: later epochs do not run the target, and a draft can be trained without it.

A folder holds one safetensors file per document, named by a hash of its token ids. Files are written under another
name and renamed, so a file that is there is finished. `meta.json` says which target and layers they are of, and
`target.safetensors` holds the target's embedding and LM head.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ..files import differences
from ..formats.checkpoint import read_json
from ..targets.borrowed_weights import BorrowedModules
from ..targets.fingerprint import fingerprint
from .target_states import TargetStates, target_states

FORMAT_VERSION = 2
META_FILE, WEIGHTS_FILE, STATES_FOLDER = "meta.json", "target.safetensors", "states"


def row_ids(row: Any) -> list[int]:
    """Return the token ids of a row: a list, a tensor `[S]`, or a mapping with `input_ids`."""
    if isinstance(row, Mapping):
        row = row.get("input_ids")
    ids = row.tolist() if hasattr(row, "tolist") else row
    if not isinstance(ids, Sequence) or not ids or set(map(type, ids)) != {int}:
        raise ValueError(f"a row must be token ids, at least one, or have them under 'input_ids', got {row!r}")
    return list(ids)


class FeatureCache:
    """Target states of documents in a folder. Reading needs no target; adding does, and creates the folder.

    Several processes may read and write one folder. The target and the layers of `draft_config` are checked against
    those that the folder was made with.
    """

    def __init__(
        self, folder: str | Path, draft_config: PreTrainedConfig, target: PreTrainedModel | None = None
    ) -> None:
        self.folder = Path(folder)
        self._config = draft_config
        self._target = target
        self._width = (len(draft_config.target_layer_ids) + 1) * draft_config.hidden_size
        names = ("target_layer_ids", "hidden_size", "vocab_size", "num_target_layers")
        self._facts = {name: getattr(draft_config, name) for name in names}
        if target is not None:
            self._facts["target_fingerprint"] = fingerprint(target)
        self._writable = False
        if not self._is_there() and target is None:
            raise ValueError(
                f"there is no feature cache in {self.folder} ({META_FILE} is missing): fill one with "
                "cache_features(), or pass the target"
            )

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob(f"{STATES_FOLDER}/*/*.safetensors"))

    def __contains__(self, row: Any) -> bool:
        return self._path(row_ids(row)).exists()

    def _path(self, ids: Sequence[int]) -> Path:
        key = hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]
        return self.folder / STATES_FOLDER / key[:2] / f"{key}.safetensors"

    def missing(self, rows: Iterable[Any]) -> list[list[int]]:
        """Return the token ids of the documents that are not there, each once; they must be the target's."""
        found: dict[Path, list[int]] = {}
        for number, row in enumerate(rows):
            ids = row_ids(row)
            if min(ids) < 0 or max(ids) >= self._config.vocab_size:
                raise ValueError(
                    f"row {number} has token ids in [{min(ids)}, {max(ids)}], the target's vocabulary ends at "
                    f"{self._config.vocab_size - 1}: tokenise with the target's tokenizer"
                )
            found.setdefault(self._path(ids), ids)
        return [ids for path, ids in found.items() if not path.exists()]

    def require_space(self, num_tokens: int) -> None:
        """Print what the states of so many new tokens need on disk; raise a `ValueError` if it is not free."""
        needed = num_tokens * self._width * torch.bfloat16.itemsize
        what = f"{num_tokens:,} tokens x {self._width:,} values in bfloat16"
        if self._target is not None and not self._is_there():
            text = self._target.config.get_text_config(decoder=True)
            matrices = 1 if text.tie_word_embeddings else 2
            needed += matrices * text.vocab_size * text.hidden_size * self._target.dtype.itemsize
            what += ", and the target's embedding and LM head"
        place = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        sizes = f"{what}: {_readable(needed)} needed, {_readable(free)} free"
        if needed > free:
            raise ValueError(
                f"the feature cache does not fit into {self.folder}: {sizes}. Use fewer rows, a shorter max_length, "
                "fewer target_layer_ids or another disk, or run the target while training"
            )
        print(f"feature cache {self.folder}: {sizes}", flush=True)

    def _is_there(self) -> bool:
        """Whether the folder holds a cache; raises a `ValueError` if it is another one than this."""
        path = self.folder / META_FILE
        if not path.exists():
            if (self.folder / STATES_FOLDER).exists():  # nothing says whose states these are
                raise ValueError(f"{self.folder} has states but no {META_FILE}: delete the folder, or use another one")
            return False
        meta = read_json(path)
        if meta.get("format") != FORMAT_VERSION or not isinstance(meta.get("facts"), dict):
            raise ValueError(
                f"{path} has format {meta.get('format')!r}, this version of hf_dspark reads {FORMAT_VERSION}: delete "
                "the folder and fill the cache again, or use another one"
            )
        wrong = differences({name: meta["facts"].get(name) for name in self._facts}, self._facts)
        if wrong:
            raise ValueError(
                f"the feature cache in {self.folder} was made with another target or for another draft, which differs "
                f"in {wrong}. Fingerprints differ when any weight or the dtype does, as between two revisions. Load "
                "the target it was made with, give the draft its target_layer_ids, or use another folder"
            )
        return True

    def read(self, row: Any) -> TargetStates:
        """Return the states of a document as they were kept, in bfloat16, `[S, m*d]` and `[S, d]`."""
        ids = row_ids(row)
        path, shape = self._path(ids), [len(ids), self._width]
        if not path.exists():
            raise KeyError(f"a row of {len(ids)} tokens ({ids[:8]}...) is not in the cache {self.folder}")
        try:
            with safe_open(path, framework="pt") as file:
                part = file.get_slice("states")  # looks at the header only
                if part.get_shape() != shape or part.get_dtype() != "BF16":
                    raise _damaged(path, f"shape {part.get_shape()} {part.get_dtype()}, not {shape} BF16")
                states = file.get_tensor("states")
        except SafetensorError as error:
            raise _damaged(path, str(error)) from error
        return TargetStates(*states.split([self._width - self._config.hidden_size, self._config.hidden_size], dim=-1))

    def borrowed(self, device: torch.device | str = "cpu") -> BorrowedModules:
        """Return the target's embedding and LM head, frozen, to bind a draft without the target."""
        path = self.folder / WEIGHTS_FILE
        if not self._is_there() or not path.exists():
            raise ValueError(f"{path} is not there: fill the cache with the target, or bind the draft to the target")
        try:
            return BorrowedModules.load(path, device)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise _damaged(path, str(error)) from error

    def prepare(self) -> None:
        """Write the target's embedding and LM head, if they are missing; the first document added does it, too."""
        if self._writable:
            return
        if self._target is None:
            raise ValueError("only a cache that was opened with the target can be written: pass target=...")
        if not self._is_there() or not (self.folder / WEIGHTS_FILE).exists():
            meta = json.dumps({"format": FORMAT_VERSION, "facts": self._facts}, indent=2) + "\n"
            self._write(self.folder / WEIGHTS_FILE, BorrowedModules.copy_of(self._target).save)
            self._write(self.folder / META_FILE, lambda path: path.write_text(meta))
        self._writable = True

    def add(self, row: Any, states: TargetStates) -> None:
        """Keep the states of a document, `[S, m*d]` and `[S, d]`, in bfloat16. One that is there stays as it is."""
        ids = row_ids(row)
        parts = [part.detach().to("cpu", torch.bfloat16) for part in (states.features, states.last_hidden)]
        kept = torch.cat(parts, dim=-1)
        if kept.shape != (len(ids), self._width):
            raise ValueError(
                f"states of a row of {len(ids)} tokens must have {len(ids)} x {self._width} values, got "
                f"{' x '.join(map(str, kept.shape))}: cut off the padding"
            )
        self.prepare()
        path = self._path(ids)
        if not path.exists():
            self._write(path, lambda unfinished: save_file({"states": kept}, unfinished))

    def _write(self, path: Path, write: Callable[[Path], Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            write(unfinished)
            os.replace(unfinished, path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            if not isinstance(error, (OSError, SafetensorError)):
                raise
            raise OSError(
                getattr(error, "errno", errno.EIO),
                f"{path} could not be written ({error}). The {len(self):,} rows written before can be read. If the "
                "disk is full, free some space and go on (they are not computed again), or use fewer rows, a shorter "
                "max_length or fewer target_layer_ids",
            ) from error


def cache_features(
    target: PreTrainedModel,
    draft_config: PreTrainedConfig,
    rows: Iterable[Any],
    folder: str | Path,
    batch_size: int = 8,
    rank: int = 0,
    num_ranks: int = 1,
    progress: bool = True,
) -> FeatureCache:
    """Run the target over rows and keep its states on disk; rows that are there are not computed again.

    Args:
        target (`PreTrainedModel`): The causal LM.
        draft_config ([`DSparkConfig`]): Of the draft to be trained.
        rows (`Iterable`): Token ids, or rows with `input_ids`, such as a `datasets.Dataset`.
        folder (`str` or `Path`): The cache.
        batch_size (`int`): Rows of similar length that the target reads together.
        rank, num_ranks (`int`): This process fills its share of the rows.
        progress (`bool`): Show a progress bar.

    Returns:
        [`FeatureCache`]

    Raises:
        ValueError: If the disk is too small, before anything is computed; if the folder belongs to another model.
        OSError: If the disk fills up all the same. What was finished stays.

    Example:

    ```python
    rows = [tokenizer(text)["input_ids"] for text in prompts]
    states = cache_features(target, draft.config, rows, "out/states")
    arguments = DSparkTrainingArguments("out/draft", feature_cache_dir="out/states")
    ```

    DSpark Section 5.1.
    """
    if batch_size < 1 or not 0 <= rank < num_ranks:
        raise ValueError(
            f"batch_size must be positive and rank lie in [0, num_ranks), got {batch_size=}, {rank=}, {num_ranks=}"
        )
    cache = FeatureCache(folder, draft_config, target)
    missing = cache.missing(rows)
    cache.require_space(sum(map(len, missing)))
    cache.prepare()
    # By content, not by place: processes that start at different times see different rows missing.
    missing = [ids for ids in missing if hash(tuple(ids)) % num_ranks == rank]
    missing.sort(key=len, reverse=True)  # if memory is short, it shows at once
    target.eval()
    hidden = None if progress else True  # None: where stderr is no terminal
    with tqdm(total=sum(map(len, missing)), desc="caching features", unit="token", disable=hidden) as bar:
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            input_ids = pad_sequence([torch.tensor(ids) for ids in batch], batch_first=True)
            lengths = torch.tensor([len(ids) for ids in batch])
            attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
            states = target_states(
                target, draft_config.target_layer_ids, input_ids, attention_mask, torch.device("cpu"), torch.bfloat16
            )
            for ids, features, last_hidden in zip(batch, states.features, states.last_hidden, strict=True):
                cache.add(ids, TargetStates(features[: len(ids)], last_hidden[: len(ids)]))
            bar.update(int(lengths.sum()))
    return cache


def _damaged(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path} is damaged ({found}): delete it, and fill the cache with the target, which computes it again"
    )


def _readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
