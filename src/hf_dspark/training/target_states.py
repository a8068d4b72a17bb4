"""The frozen target's states that a draft learns from: computed in process, read from a folder, or both.

A folder holds one safetensors file per document, named by a hash of its token ids. Files are written under another
name and renamed, so a file that is there is finished. `meta.json` says which target and layers they are of, and
`target.safetensors` holds the target's embedding and LM head.
"""

import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ..files import differences
from ..formats.checkpoint import read_json
from ..models.modeling_draft import DraftModel
from ..targets.borrowed_weights import BorrowedModules
from ..targets.feature_capture import FeatureCapture
from ..targets.fingerprint import fingerprint
from ..targets.support import TargetSupport
from .arguments import DSparkTrainingArguments

FORMAT_VERSION = 2
META_FILE, WEIGHTS_FILE, STATES_FOLDER = "meta.json", "target.safetensors", "states"
ROW_PARTS = ("input_ids", "position_ids", "attention_mask")


class TargetStates(NamedTuple):
    features: torch.Tensor  # tapped layers, concatenated, [..., S, m*d]
    last_hidden: torch.Tensor  # after the final norm, [..., S, d]: the LM head's input


@torch.no_grad()
def target_states(
    target: PreTrainedModel,
    target_layer_ids: list[int],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    position_ids: torch.Tensor | None = None,
) -> TargetStates:
    """Run the target without its LM head on right-padded rows `[B, S]`; keep what drafts are trained on.

    `position_ids [B, S]` are those of packed rows. DSpark Section 5.1.
    """
    rows: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if position_ids is not None:
        # transformers keeps documents apart whose positions start again, unless an attention mask is given.
        rows = {"input_ids": input_ids, "position_ids": position_ids}
        # Flash attention is told of documents only in a batch of one; the others would pay for it with a wider mask.
        if "flash" in str(target.config._attn_implementation):
            rows = {name: value.reshape(1, -1) for name, value in rows.items()}
    support = TargetSupport.of(target)
    home, capture = support.input_device, FeatureCapture(support, target_layer_ids)
    try:
        with capture:
            output = support.decoder(use_cache=False, **{name: value.to(home) for name, value in rows.items()})
            features = capture.take(device, dtype)
    finally:
        capture.restore()  # for an interrupt while the capture is left
    last_hidden = output.last_hidden_state.to(device=device, dtype=dtype)
    return TargetStates(*(states.reshape(*input_ids.shape, -1) for states in (features, last_hidden)))


def require_separable_documents(target: PreTrainedModel, target_layer_ids: list[int]) -> None:
    """Raise a `ValueError` if a document in a packed row sees the one before it.

    Compares the second documents of two packed rows with the same documents alone.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    packed = torch.randint(0, vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    lengths = (7, 11)  # of the first document in each row
    positions = torch.stack([torch.cat([torch.arange(first), torch.arange(16 - first)]) for first in lengths])
    device, dtype = torch.device("cpu"), torch.float32
    together = target_states(target, target_layer_ids, packed, torch.ones_like(packed), device, dtype, positions)
    difference = torch.zeros(())
    for row, first in enumerate(lengths):
        second = packed[row : row + 1, first:]
        alone = target_states(target, target_layer_ids, second, torch.ones_like(second), device, dtype).last_hidden
        difference = torch.maximum(difference, (together.last_hidden[row, first:] - alone).norm() / alone.norm())
    if not difference < 0.05:  # rounding in bfloat16 is well below, a foreign document far above
        raise ValueError(
            f"{type(target).__name__} does not keep the documents of a packed row apart (its states differ by "
            f"{difference:.0%}): use packing=False"
        )


@torch.no_grad()
def require_same_logits(target: PreTrainedModel, draft: DraftModel) -> None:
    """Raise a `ValueError` if a bound draft computes other logits from the target's last hidden states.

    Families differ in what they do around the LM head. With a factor that the draft's config does not know, the draft
    would learn, and draft from, a wrong distribution.
    """
    home, vocab_size = TargetSupport.of(target).input_device, draft.config.vocab_size
    input_ids = torch.arange(1, 9, device=home)[None] % vocab_size
    logits = target(input_ids=input_ids, use_cache=False).logits.float().cpu()
    states = target_states(
        target, draft.config.target_layer_ids, input_ids, torch.ones_like(input_ids), draft.device, torch.float32
    )
    ours = draft.target_logits(states.last_hidden).float().cpu()
    difference = ((ours - logits).norm() / logits.norm()).item()
    if not difference < 0.1:  # rounding of half-precision and quantised heads is well below
        raise ValueError(
            f"{type(target).__name__} does something to its logits that this draft's config does not say (they differ "
            f"by {difference:.0%}): set logit_scale={draft.config.logit_scale}, final_logit_softcapping="
            f"{draft.config.final_logit_softcapping} to what the target does"
        )


# On disk


class FeatureCache:
    """Target states of documents in a folder. Reading needs no target; adding does, and creates the folder.

    Several processes may read and write one folder. The target and the layers of `draft_config` are checked against
    those that the folder was made with.
    """

    def __init__(
        self, folder: str | Path, draft_config: PreTrainedConfig, target: PreTrainedModel | None = None
    ) -> None:
        self.folder, self._config, self._target = Path(folder), draft_config, target
        self._width = (len(draft_config.target_layer_ids) + 1) * draft_config.hidden_size
        names = ("target_layer_ids", "hidden_size", "vocab_size", "num_target_layers")
        self._facts = {name: getattr(draft_config, name) for name in names}
        if target is not None:
            self._facts["target_fingerprint"] = fingerprint(target)
        self._is_prepared = False
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

    def _is_there(self) -> bool:
        """Tell whether the folder holds a cache; raise a `ValueError` if it is not one of these facts."""
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

    def prepare(self, num_tokens: int) -> None:
        """Print what the states of so many new tokens need on disk, and write the target's embedding and LM head.

        Raises a `ValueError` if the disk has not so much room, and writes nothing then.
        """
        needed = num_tokens * self._width * torch.bfloat16.itemsize
        what = f"{num_tokens:,} tokens x {self._width:,} values in bfloat16"
        if self._target is not None and not self._is_there():
            text = self._target.config.get_text_config(decoder=True)
            matrices = 1 if text.tie_word_embeddings else 2
            needed += matrices * text.vocab_size * text.hidden_size * self._target.dtype.itemsize
            what += ", and the target's embedding and LM head"
        place = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        sizes = f"{what}: {needed / 2**20:,.2f} MiB needed, {free / 2**20:,.2f} MiB free"
        if needed > free:
            raise ValueError(
                f"the feature cache does not fit into {self.folder}: {sizes}. Use fewer rows, a shorter max_length, "
                "fewer target_layer_ids or another disk, or run the target while training"
            )
        print(f"feature cache {self.folder}: {sizes}", flush=True)
        self._prepare()

    def _prepare(self) -> None:
        if self._target is None:
            raise ValueError("only a cache that was opened with the target can be written: pass target=...")
        if not self._is_prepared and not (self._is_there() and (self.folder / WEIGHTS_FILE).exists()):
            meta = json.dumps({"format": FORMAT_VERSION, "facts": self._facts}, indent=2) + "\n"
            self._write(self.folder / WEIGHTS_FILE, BorrowedModules.copy_of(self._target).save)
            self._write(self.folder / META_FILE, lambda path: path.write_text(meta))
        self._is_prepared = True

    def add(self, row: Any, states: TargetStates) -> None:
        """Keep the states of a document, `[S, m*d]` and `[S, d]`, in bfloat16. One that is there stays as it is."""
        ids = row_ids(row)
        kept = torch.cat([part.detach().to("cpu", torch.bfloat16) for part in states], dim=-1)
        if kept.shape != (len(ids), self._width):
            raise ValueError(
                f"states of a row of {len(ids)} tokens must have {len(ids)} x {self._width} values, got "
                f"{' x '.join(map(str, kept.shape))}: cut off the padding"
            )
        self._prepare()
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


def row_ids(row: Any) -> list[int]:
    """Return the token ids of a row: a list, a tensor `[S]`, or a mapping with `input_ids`."""
    if isinstance(row, Mapping):
        row = row.get("input_ids")
    ids = row.tolist() if hasattr(row, "tolist") else row
    if not isinstance(ids, Sequence) or not ids or set(map(type, ids)) != {int}:
        raise ValueError(f"a row must be token ids, at least one, or have them under 'input_ids', got {row!r}")
    return list(ids)


def _damaged(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path} is damaged ({found}): delete it, and fill the cache with the target, which computes it again"
    )


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
    cache.prepare(sum(map(len, missing)))
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
            for ids, *parts in zip(batch, *states, strict=True):
                cache.add(ids, TargetStates(*(part[: len(ids)] for part in parts)))
            bar.update(int(lengths.sum()))
    return cache


# In training


class TargetSource:
    """Gives the states of batches, and binds the draft to the target, or to what the cache keeps of it.

    With a target, what is missing in the cache is computed and added.
    """

    def __init__(self, draft: DraftModel, target: PreTrainedModel | None, args: DSparkTrainingArguments) -> None:
        folder, device = args.feature_cache_dir, args.device
        if target is None and folder is None:
            raise ValueError("the target's states are needed: pass target=..., or args.feature_cache_dir with them")
        self._target, self._target_layer_ids, self._packing = target, draft.config.target_layer_ids, args.packing
        self._has_room = True
        self.cache = None if folder is None else FeatureCache(folder, draft.config, target)
        if target is None:
            lent = self.cache.borrowed(device)
            draft.bind_parts(lent.embedding, lent.lm_head, lent.dtype)
            return
        # One that was spread over devices or quantised is where it must be.
        if getattr(target, "hf_device_map", None) is None and not getattr(target, "is_quantized", False):
            target.to(device)
        draft.bind(target.eval())
        require_same_logits(target, draft)
        if args.packing:
            require_separable_documents(target, self._target_layer_ids)

    def require_rows(self, sets: Sequence[Sequence[Any]], announce: bool = True) -> None:
        """Raise a `ValueError` if states are neither cached nor can be computed, or the disk is too small for them.

        Rows of the data sets hold one document each. `announce` prints what they need on disk, in one process of all.
        """
        if self.cache is None:
            return
        missing = self.cache.missing(itertools.chain.from_iterable(sets))
        if missing and self._target is None:
            raise ValueError(
                f"{len(missing)} of {sum(map(len, sets))} rows are not in the feature cache {self.cache.folder}, "
                "and there is no target to compute them: pass target=..., or fill the cache with the same data, "
                "tokenizer and max_length"
            )
        if missing and announce:
            self.cache.prepare(sum(map(len, missing)))

    def states(self, batch: dict[str, torch.Tensor], draft: DraftModel) -> TargetStates:
        """Return the target's states of a batch, on the draft's device, in its dtype."""
        if self.cache is None:
            return self._compute(batch, draft)
        rows = [_documents(*row) for row in zip(*(batch[name].cpu() for name in ROW_PARTS), strict=True)]
        missing = [number for number, row in enumerate(rows) if not all(ids in self.cache for _, ids in row)]
        if self._target is None:
            missing = []  # a `KeyError` will name the row
        # To an accelerator travels what is on the disk; memory on the CPU is touched once only.
        dtype = draft.dtype if draft.device.type == "cpu" else torch.bfloat16
        sizes = (len(self._target_layer_ids) * draft.config.hidden_size, draft.config.hidden_size)
        states = [torch.zeros(*batch["input_ids"].shape, size, dtype=dtype) for size in sizes]
        for number in set(range(len(rows))).difference(missing):
            for place, ids in rows[number]:
                for whole, part in zip(states, self.cache.read(ids), strict=True):
                    whole[number, place] = part
        states = TargetStates(*(part.to(draft.device, draft.dtype) for part in states))
        if missing:
            computed = self._compute({name: batch[name][missing] for name in ROW_PARTS}, draft)
            self._keep([rows[number] for number in missing], computed)
            # As they will be read: what a batch sees must not depend on what was cached before it.
            for whole, part in zip(states, computed, strict=True):
                whole[missing] = part.to(torch.bfloat16).to(draft.dtype)
        return states

    def _compute(self, batch: dict[str, torch.Tensor], draft: DraftModel) -> TargetStates:
        return target_states(
            self._target, self._target_layer_ids, batch["input_ids"], batch["attention_mask"], draft.device,
            draft.dtype, batch["position_ids"] if self._packing else None,
        )  # fmt: skip

    def _keep(self, rows: list[list[tuple[slice, list[int]]]], states: TargetStates) -> None:
        """Add the states of a batch to the cache; training goes on without it when the disk is full."""
        if not self._has_room:
            return
        try:
            for index, row in enumerate(rows):
                for place, ids in row:
                    self.cache.add(ids, TargetStates(*(part[index, place] for part in states)))
        except OSError as error:
            self._has_room = False
            warnings.warn(f"training goes on, but nothing more is added to the cache: {error}", stacklevel=2)


def _documents(
    input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor
) -> list[tuple[slice, list[int]]]:
    """Return where each document of a row stands, and its token ids; padding is none."""
    length = int(attention_mask.sum())
    starts = [*(position_ids[:length] == 0).nonzero()[:, 0].tolist(), length]
    return [(slice(*ends), input_ids[slice(*ends)].tolist()) for ends in itertools.pairwise(starts)]
