"""The target's hidden states on disk: later epochs do not run the target, and a draft can be trained without it.

Beside the shards (`shards`), a folder holds `meta.json`, which says whose states these are, and `target.safetensors`,
the target's embedding and LM head. Rows are found by their token ids, so order and epochs do not matter. Knows nothing
of losses, of the trainer or of `generate()`.
"""

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ..targets.borrowed_weights import BorrowedModules
from ..targets.fingerprint import fingerprint
from .blocks import TargetStates, target_states
from .shards import ShardStore, check_digest, check_size, is_disk_full

FORMAT_VERSION = 1
META_FILE, WEIGHTS_FILE = "meta.json", "target.safetensors"
SHARD_BYTES = 256 * 2**20


def estimate_cache_bytes(num_tokens: int, config: PreTrainedConfig) -> int:
    """Return the bytes that the states of so many tokens take on disk, without the target's embedding and LM head.

    Args:
        num_tokens (`int`): Tokens of all distinct rows.
        config ([`DSparkConfig`]): The draft's: m tapped layers, and the last hidden state, in bfloat16.
    """
    return num_tokens * _width(config) * torch.bfloat16.itemsize


def row_ids(row: Any) -> list[int]:
    """Return the token ids of a row: a list, a tensor `[S]`, or a mapping with `input_ids`.

    Raises:
        ValueError: If these are not one or more integers.
    """
    if isinstance(row, Mapping):
        row = row.get("input_ids")
    ids = row.tolist() if hasattr(row, "tolist") else row
    if not isinstance(ids, Sequence) or not ids or set(map(type, ids)) != {int}:
        raise ValueError(f"a row must be token ids, at least one, or have them under 'input_ids', got {row!r}")
    return list(ids)


def row_key(ids: Sequence[int]) -> str:
    """Return the name of a row in every cache: 32 hexadecimal digits of the SHA-256 of its token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]


class FeatureCache:
    """Rows of target states in a folder. Reading needs no target; adding does, and creates the folder.

    Opening writes nothing. Several processes may use one folder if each has its own rank; each sees what the others
    have finished from [`~FeatureCache.refresh`] on. Use it as a context manager, or call [`~FeatureCache.flush`] at
    the end.

    Args:
        folder (`str` or `Path`): Where the cache is, or will be.
        draft_config ([`DSparkConfig`]): Of the draft to be trained; says which layers are tapped.
        target (`PreTrainedModel`, *optional*): Whose states these are; checked against those in the folder.
        rank (`int`): Number of this process among those that write.
        shard_bytes (`int`): Rows are kept in memory until they fill a shard of this size.
        verify (`bool`): Compare a shard's SHA-256 when it is first read; sizes are compared always.

    Raises:
        ValueError: If the folder holds the states of another model, revision or layers, or is damaged; if there is no
            cache and no target to make one.
    """

    def __init__(
        self,
        folder: str | Path,
        draft_config: PreTrainedConfig,
        target: PreTrainedModel | None = None,
        rank: int = 0,
        shard_bytes: int = SHARD_BYTES,
        verify: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.draft_config = draft_config
        self._target = target
        self._facts = {
            "target_layer_ids": list(draft_config.target_layer_ids),
            "hidden_size": draft_config.hidden_size,
            "vocab_size": draft_config.vocab_size,
            "num_target_layers": draft_config.num_target_layers,
        }
        if target is not None:
            self._facts["target_fingerprint"] = fingerprint(target)
        if self._read_meta() is None and target is None:
            raise ValueError(
                f"there is no feature cache in {self.folder} ({META_FILE} is missing): fill one with "
                "cache_features(), or pass the target"
            )
        self._store = ShardStore(self.folder, rank, shard_bytes, verify)
        self._prepared = False

    def __enter__(self) -> "FeatureCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_disk_full(error):  # flushing again would only hide the first error
            self.flush()
        self.close()

    def close(self) -> None:
        """Close all files, and let others write under this rank. Reading and writing open them again."""
        self._store.close()

    # ---- what is there

    def refresh(self) -> None:
        """See what other processes have finished since; forget rows whose shard was deleted.

        Raises:
            ValueError: If an index or a shard is damaged.
        """
        self._store.refresh()

    def __len__(self) -> int:
        """Number of rows, those not yet written included."""
        return len(self._store.lengths())

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self._store.lengths().values())

    def __contains__(self, row: Any) -> bool:
        """Whether the states of a row (see [`row_ids`]) can be read."""
        return row_key(row_ids(row)) in self._store

    def missing(self, rows: Iterable[Any]) -> list[list[int]]:
        """Return the token ids of the rows that are not there, each once, in their order.

        Raises:
            ValueError: If a row has no tokens, or one outside of the vocabulary.
        """
        found: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            ids = row_ids(row)
            if min(ids) < 0 or max(ids) >= self.draft_config.vocab_size:
                raise ValueError(
                    f"row {number} has token ids in [{min(ids)}, {max(ids)}], the target's vocabulary ends at "
                    f"{self.draft_config.vocab_size - 1}: tokenise with the target's tokenizer"
                )
            key = row_key(ids)
            if key not in self._store:
                found[key] = ids
        return list(found.values())

    def require_space(self, num_tokens: int) -> None:
        """Print what the states of so many new tokens need on disk, and what is free.

        Raises:
            ValueError: If it is not enough.
        """
        needed = estimate_cache_bytes(num_tokens, self.draft_config)
        what = f"{num_tokens:,} tokens x {_width(self.draft_config):,} values in bfloat16"
        if self._target is not None and self._read_meta() is None:
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

    def _read_meta(self) -> dict[str, Any] | None:
        """Return what the folder says of itself, checked; `None` if nothing is there yet."""
        path = self.folder / META_FILE
        if not path.exists():
            if any(self.folder.glob("index-*.jsonl")):  # not to be adopted: nothing says whose states these are
                raise ValueError(f"{self.folder} has shards but no {META_FILE}: delete the folder, or use another one")
            return None
        try:
            meta = json.loads(path.read_text())
            version, found = meta["format"], dict(meta["facts"])
            sane = version != FORMAT_VERSION or list(map(type, meta["weights"].values())) == [int, str]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            sane = False
        if not sane:
            raise ValueError(f"{path} is damaged: delete the folder and fill the cache again")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format {version!r}, this version of hf_dspark reads {FORMAT_VERSION}: use another "
                "folder, or the version that wrote it"
            )
        wrong = [
            f"{name}: cache {found.get(name)!r}, here {value!r}"
            for name, value in self._facts.items()
            if found.get(name) != value
        ]
        if wrong:
            raise ValueError(
                f"the feature cache in {self.folder} was made with another target or for another draft "
                f"({'; '.join(wrong)}). Fingerprints differ when any weight or the dtype does, as between two "
                "revisions. Load the target it was made with, give the draft its target_layer_ids, or use another "
                "folder"
            )
        return meta

    # ---- reading

    def read(
        self,
        rows: Sequence[Any],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        documents: Sequence[int] | None = None,
    ) -> TargetStates:
        """Return the states of a batch of rows, zeros behind their ends.

        Args:
            rows (`Sequence`): Token ids without padding; see [`row_ids`].
            device, dtype: Where the draft lives, and its dtype.
            documents (`Sequence[int]`, *optional*): How many of `rows` stand one behind the other in each packed row
                of the batch; `None` means one.

        Returns:
            [`TargetStates`] of shape `[B, S, ...]`, S the length of the longest row of the batch.

        Raises:
            KeyError: If a row is not there.
            ValueError: If a shard is damaged, or `documents` does not add up.
        """
        ids = [row_ids(row) for row in rows]
        counts = [1] * len(ids) if documents is None else list(documents)
        if not counts or min(counts) < 1 or sum(counts) != len(ids):
            raise ValueError(f"documents {counts} must be positive and add up to {len(ids)} rows, at least one")
        packed = [ids[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
        length = max(sum(map(len, row)) for row in packed)
        sizes = [_width(self.draft_config) - self.draft_config.hidden_size, self.draft_config.hidden_size]
        device = torch.device(device)
        # To an accelerator travels what is on the disk; memory on the CPU is touched once only.
        on_cpu = dtype if device.type == "cpu" else torch.bfloat16
        batch = [torch.zeros(len(packed), length, size, dtype=on_cpu) for size in sizes]
        for index, row in enumerate(packed):
            start = 0
            for document in row:
                for whole, part in zip(batch, self._row_states(document).split(sizes, dim=-1), strict=True):
                    whole[index, start : start + len(document)] = part
                start += len(document)
        return TargetStates(*(whole.to(device=device, dtype=dtype) for whole in batch))

    def _row_states(self, ids: list[int]) -> torch.Tensor:
        key = row_key(ids)
        if key not in self._store:
            raise KeyError(f"a row of {len(ids)} tokens ({ids[:8]}...) is not in the cache {self.folder}")
        return self._store.get(key, (len(ids), _width(self.draft_config)))

    def borrowed(self, device: torch.device | str = "cpu") -> BorrowedModules:
        """Return the target's embedding and LM head, frozen, to bind a draft without the target.

        Raises:
            ValueError: If they were not written yet, or the file is damaged.
        """
        meta, path = self._read_meta(), self.folder / WEIGHTS_FILE
        if meta is None or not path.exists():
            raise ValueError(f"{path} is not there: fill the cache with the target, or bind the draft to the target")
        check_size(path, meta["weights"]["bytes"])
        check_digest(path, meta["weights"]["sha256"])
        return BorrowedModules.load(path, device)

    # ---- writing

    def prepare(self) -> None:
        """Write the target's embedding and LM head, if they are missing. The first row added does it otherwise.

        Raises:
            ValueError: If the cache was opened without the target, or its embedding or LM head cannot be read.
            OSError: If the disk is full.
        """
        if self._prepared:
            return
        if self._target is None:
            raise ValueError("only a cache that was opened with the target can be written: pass target=...")
        self._store.remove_leftovers()
        if self._read_meta() is None or not (self.folder / WEIGHTS_FILE).exists():
            size, digest = self._store.write(WEIGHTS_FILE, BorrowedModules.copy_of(self._target).save)
            meta = {"format": FORMAT_VERSION, "facts": self._facts, "weights": {"bytes": size, "sha256": digest}}
            self._store.write(META_FILE, lambda path: path.write_text(json.dumps(meta, indent=2) + "\n"))
        self._prepared = True

    def add(self, row: Any, features: torch.Tensor, last_hidden: torch.Tensor) -> None:
        """Keep the states of a row, rounded to bfloat16; a row that is there already stays as it is.

        The row can be read at once; it is on disk when its shard is full or flushed.

        Args:
            row: Token ids without padding; see [`row_ids`].
            features (`torch.Tensor` of shape `[S, m*d]`): Tapped layers.
            last_hidden (`torch.Tensor` of shape `[S, d]`): After the final norm.

        Raises:
            ValueError: If shapes do not fit, or the cache was opened without the target.
            OSError: If the disk is full. Rows in memory stay there: free some space and call `flush()`.
        """
        ids = row_ids(row)
        size = self.draft_config.hidden_size
        needed = (len(ids), _width(self.draft_config) - size), (len(ids), size)
        if (tuple(features.shape), tuple(last_hidden.shape)) != needed:
            raise ValueError(
                f"features and last_hidden of a row of {len(ids)} tokens must have shapes {needed[0]} and "
                f"{needed[1]}, got {tuple(features.shape)} and {tuple(last_hidden.shape)}: cut off the padding"
            )
        if row_key(ids) in self._store:
            return
        self.prepare()
        states = torch.cat([part.detach().to("cpu", torch.bfloat16) for part in (features, last_hidden)], dim=-1)
        self._store.put(row_key(ids), states)

    def flush(self) -> None:
        """Write the rows in memory as one shard.

        Raises:
            OSError: If the disk is full; see [`~FeatureCache.add`].
        """
        self._store.flush()


def cache_features(
    target: PreTrainedModel,
    draft_config: PreTrainedConfig,
    rows: Iterable[Any],
    folder: str | Path,
    batch_size: int = 8,
    rank: int = 0,
    num_ranks: int = 1,
    shard_bytes: int = SHARD_BYTES,
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
        shard_bytes (`int`): Size of the files.
        progress (`bool`): Show a progress bar.

    Returns:
        [`FeatureCache`]

    Raises:
        ValueError: If the disk is too small, before anything is computed; if the folder belongs to another model.
        OSError: If the disk fills up all the same. What was finished stays.

    DSpark Section 5.1.
    """
    if batch_size < 1 or not 0 <= rank < num_ranks:
        raise ValueError(
            f"batch_size must be positive and rank lie in [0, num_ranks), got {batch_size=}, {rank=}, {num_ranks=}"
        )
    cache = FeatureCache(folder, draft_config, target, rank, shard_bytes)
    missing = cache.missing(rows)
    cache.require_space(sum(map(len, missing)))
    cache.prepare()
    # By key, not by place: processes that start at different times see different rows missing.
    missing = [row for row in missing if int(row_key(row), 16) % num_ranks == rank]
    missing.sort(key=len, reverse=True)  # if memory is short, it shows at once
    target.eval()
    bar = tqdm(total=sum(map(len, missing)), desc="caching features", unit="token", disable=not progress)
    with cache, bar:
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            input_ids = pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
            lengths = torch.tensor([len(row) for row in batch])
            attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
            states = target_states(
                target, draft_config.target_layer_ids, input_ids, attention_mask, torch.device("cpu"), torch.bfloat16
            )
            for row, features, last_hidden in zip(batch, states.features, states.last_hidden, strict=True):
                cache.add(row, features[: len(row)], last_hidden[: len(row)])
            bar.update(int(lengths.sum()))
    return cache


def _width(config: PreTrainedConfig) -> int:
    return (len(config.target_layer_ids) + 1) * config.hidden_size


def _readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
