"""The frozen target's states that a draft learns from: computed in process, or read from a folder.

A folder holds one safetensors file per document, named by a hash of its token ids. Files are written under another
name and renamed, so a file that is there is finished. `meta.json` says which target and layers they are of, and
`target.safetensors` holds the target's embedding and LM head.
"""

import errno
import hashlib
import itertools
import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ..files import differences, naming, replacing
from ..formats.checkpoint import read_json
from ..models.auto import require_target
from ..models.modeling_draft import DraftModel, check_fits
from ..targets.borrowed_weights import BorrowedModules
from ..targets.feature_capture import FeatureCapture
from ..targets.fingerprint import fingerprint
from ..targets.support import TargetSupport
from .arguments import DSparkTrainingArguments

FORMAT_VERSION = 2
META_FILE, WEIGHTS_FILE, STATES_FOLDER = "meta.json", "target.safetensors", "states"
ROW_PARTS = ("input_ids", "position_ids", "attention_mask")
_MAKE_ROOM = "Make room, or use fewer examples, a shorter max_length, fewer target_layer_ids or another disk"
STREAM_CHECK = 100  # rows of a stream whose states are asked for before training


class TargetStates(NamedTuple):
    features: torch.Tensor  # tapped layers, concatenated, [..., S, m*d]
    last_hidden: torch.Tensor  # after the final norm, [..., S, d]: the LM head's input


@contextmanager
def evaluating(target: PreTrainedModel) -> Iterator[None]:
    """Run a target without dropout, and leave each module in the mode that it was in."""
    training = [module for module in target.modules() if module.training]
    try:
        target.eval()
        yield
    finally:
        for module in training:
            module.training = True


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
        with evaluating(target), capture:
            output = support.decoder(use_cache=False, **{name: value.to(home) for name, value in rows.items()})
            features = capture.take(device, dtype)
    finally:
        capture.restore()  # for an interrupt while the capture is left
    last_hidden = output.last_hidden_state.to(device=device, dtype=dtype)
    return TargetStates(*(states.reshape(*input_ids.shape, -1) for states in (features, last_hidden)))


def require_separable_documents(target: PreTrainedModel, target_layer_ids: list[int]) -> None:
    """Raise a `ValueError` if a document in a packed row sees the one before it."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    packed = torch.randint(0, vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    lengths, differences = (7, 11), []  # of the first document in each row
    positions = torch.stack([torch.cat([torch.arange(first), torch.arange(16 - first)]) for first in lengths])

    def last_hidden(ids: torch.Tensor, *positions: torch.Tensor) -> torch.Tensor:
        how = torch.ones_like(ids), torch.device("cpu"), torch.float32
        return target_states(target, target_layer_ids, ids, *how, *positions).last_hidden

    together = last_hidden(packed, positions)
    for row, first in enumerate(lengths):
        alone = last_hidden(packed[row : row + 1, first:])
        differences.append((together[row, first:] - alone).norm() / alone.norm())
    difference = torch.stack(differences).max()
    if not difference < 0.05:  # rounding in bfloat16 is well below, a foreign document far above
        fault = f"does not keep the documents of a packed row apart (its states differ by {difference:.0%})"
        raise ValueError(f"{type(target).__name__} {fault}: use packing=False")


@torch.no_grad()
def require_same_logits(target: PreTrainedModel, draft: DraftModel) -> None:
    """Raise a `ValueError` if a bound draft computes other logits from the target's last hidden states.

    With a factor that its config does not know, it would learn, and draft from, a wrong distribution.
    """
    layer_ids, home = draft.config.target_layer_ids, TargetSupport.of(target).input_device
    input_ids = torch.arange(1, 9, device=home)[None] % draft.config.vocab_size
    with evaluating(target):
        logits = target(input_ids=input_ids, use_cache=False).logits.float().cpu()
    states = target_states(target, layer_ids, input_ids, torch.ones_like(input_ids), draft.device, torch.float32)
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
        self.folder, self._target = Path(folder), target
        if target is not None:
            require_target(target)
            check_fits(draft_config, target)
        elif draft_config.target_layer_ids is None:
            raise ValueError("which layers the draft taps goes by its target's depth: pass target=...")
        self._vocab_size, self._hidden_size = draft_config.vocab_size, draft_config.feature_size
        self._width = (len(draft_config.target_layer_ids) + 1) * self._hidden_size
        names = ("target_layer_ids", "hidden_size", "vocab_size", "num_target_layers")
        self._facts = {name: getattr(draft_config, name) for name in names}
        if target is not None:
            self._facts["target_fingerprint"] = fingerprint(target)
        if not self._is_there() and target is None:
            cure = "fill one with cache_features(), or pass the target"
            raise ValueError(f"there is no feature cache in {self.folder} ({META_FILE} is missing): {cure}")

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob(f"{STATES_FOLDER}/*/*.safetensors"))

    def _path(self, ids: Sequence[int]) -> Path:
        key = hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]
        return self.folder / STATES_FOLDER / key[:2] / f"{key}.safetensors"

    def _is_there(self) -> bool:
        """Tell whether the folder holds a cache; raise a `ValueError` if it is another one."""
        path = self.folder / META_FILE
        if not path.exists() and not (self.folder / STATES_FOLDER).exists():
            return False
        meta = read_json(path)  # states without it could be anybody's
        facts = meta["facts"] if isinstance(meta.get("facts"), dict) else {}
        found = {"format": meta.get("format")} | {name: facts.get(name) for name in self._facts}
        if wrong := differences(found, {"format": FORMAT_VERSION} | self._facts):
            raise ValueError(
                f"the feature cache in {self.folder} was made with another target, revision or dtype, or for another "
                f"draft, which differs in {wrong}. Load the target it was made with, give the draft its "
                "target_layer_ids, or use another folder"
            )
        return True

    def missing(self, rows: Iterable[Any]) -> list[list[int]]:
        """Return the token ids of the documents that are not there, each once; they must be the target's."""
        found: dict[Path, list[int]] = {}
        for number, row in enumerate(rows):
            ids = row_ids(row)
            if min(ids) < 0 or max(ids) >= self._vocab_size:
                span = f"[{min(ids)}, {max(ids)}], the vocabulary ends at {self._vocab_size - 1}"
                raise ValueError(f"example {number} has token ids in {span}: use the target's tokenizer")
            found.setdefault(self._path(ids), ids)
        return [ids for path, ids in found.items() if not path.exists()]

    def prepare(self, num_tokens: int) -> None:
        """Write the target's embedding and LM head, and what the folder holds, unless they are there.

        Raises a `ValueError` if the disk has no room for the states of so many new tokens, and writes nothing then.
        """
        assert self._target is not None, "only a cache that was opened with the target can be written"
        needed = num_tokens * self._width * torch.bfloat16.itemsize
        place = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.exists())
        if needed > (free := shutil.disk_usage(place).free):
            raise ValueError(
                f"the feature cache does not fit into {self.folder}: {num_tokens:,} tokens x {self._width:,} values "
                f"in bfloat16 need {needed / 2**20:,.2f} MiB, {free / 2**20:,.2f} MiB are free. {_MAKE_ROOM}"
            )
        if not (self._is_there() and (self.folder / WEIGHTS_FILE).exists()):
            meta = json.dumps({"format": FORMAT_VERSION, "facts": self._facts}, indent=2) + "\n"
            self._write(self.folder / WEIGHTS_FILE, BorrowedModules.copy_of(self._target).save)
            self._write(self.folder / META_FILE, lambda path: path.write_text(meta))

    def add(self, row: Any, states: TargetStates) -> None:
        """Keep the states of a document, `[S, m*d]` and `[S, d]`, in bfloat16, in a folder that is prepared."""
        ids = row_ids(row)
        kept = torch.cat([part.detach().to("cpu", torch.bfloat16) for part in states], dim=-1)
        assert kept.shape == (len(ids), self._width)
        self._write(self._path(ids), lambda unfinished: save_file({"states": kept}, unfinished))

    def _write(self, path: Path, write: Callable[[Path], Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(path) as unfinished:
                write(unfinished)
        except (OSError, SafetensorError) as error:
            raise OSError(
                getattr(error, "errno", errno.EIO),
                f"{path} could not be written ({error}). The {len(self):,} examples written before stay. {_MAKE_ROOM}",
            ) from error

    def fill(
        self, rows: Iterable[Any], batch_size: int = 8, rank: int = 0, num_ranks: int = 1, progress: bool = True
    ) -> None:
        """Compute what is missing of a process's share, as [`cache_features`] says."""
        missing = self.missing(rows)
        self.prepare(sum(map(len, missing)))
        # By content, not by place: processes that start at different times see different rows missing.
        missing = [ids for ids in missing if hash(tuple(ids)) % num_ranks == rank]
        missing.sort(key=len, reverse=True)  # if memory is short, it shows at once
        hidden = None if progress else True  # None: where stderr is no terminal
        with tqdm(total=sum(map(len, missing)), desc="caching features", unit="token", disable=hidden) as bar:
            for start in range(0, len(missing), batch_size):
                batch = [torch.tensor(ids) for ids in missing[start : start + batch_size]]
                padded = pad_sequence(batch, batch_first=True)
                mask = pad_sequence([torch.ones_like(ids) for ids in batch], batch_first=True)
                how = self._facts["target_layer_ids"], padded, mask, torch.device("cpu"), torch.bfloat16
                for ids, *parts in zip(batch, *target_states(self._target, *how), strict=True):
                    self.add(ids, TargetStates(*(part[: len(ids)] for part in parts)))
                bar.update(int(mask.sum()))

    def read(self, row: Any) -> TargetStates:
        """Return the states of a document as they were kept, in bfloat16, `[S, m*d]` and `[S, d]`."""
        ids = row_ids(row)
        path, shape = self._path(ids), [len(ids), self._width]
        if not path.exists():
            raise KeyError(f"a row of {len(ids)} tokens ({ids[:8]}...) is not in the cache {self.folder}")
        with _undamaged(path), safe_open(path, framework="pt") as file:
            part = file.get_slice("states")  # looks at the header only
            if part.get_shape() != shape or part.get_dtype() != "BF16":
                raise ValueError(f"shape {part.get_shape()} {part.get_dtype()}, not {shape} BF16")
            states = file.get_tensor("states")
        return TargetStates(*states.split([self._width - self._hidden_size, self._hidden_size], dim=-1))

    def borrowed(self, device: torch.device | str = "cpu") -> BorrowedModules:
        """Return the target's embedding and LM head, frozen, to bind a draft without the target."""
        path = self.folder / WEIGHTS_FILE
        if not path.exists():
            raise ValueError(f"{path} is not there: fill the cache with the target")
        with _undamaged(path):
            return BorrowedModules.load(path, device)


def row_ids(row: Any) -> list[int]:
    """Return the token ids of a row: a list, a tensor `[S]`, or a mapping with `input_ids`."""
    if isinstance(row, Mapping):
        row = row.get("input_ids")
    ids = row.tolist() if hasattr(row, "tolist") else row
    if not isinstance(ids, Sequence) or not ids or set(map(type, ids)) != {int}:
        raise ValueError(f"a row must be token ids, at least one, or have them under 'input_ids', got {row!r}")
    return list(ids)


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    try:
        with naming(path):
            path.open("rb").close()  # safetensors says of any file that it cannot open that it is not there
            yield
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        cure = "delete it, and fill the cache with the target, which computes it again"
        raise ValueError(f"{path} is damaged ({error}): {cure}") from error


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
    """Run the target over examples and keep its states on disk; those that are there are not computed again.

    Args:
        target (`PreTrainedModel`): The causal LM.
        draft_config ([`DSparkConfig`]): Of the draft to be trained.
        rows (`Iterable`): Token ids, or examples with `input_ids`, such as a `datasets.Dataset`.
        folder (`str` or `Path`): The cache.
        batch_size (`int`): Examples of similar length that the target reads together.
        rank, num_ranks (`int`): This process fills its share of the examples.
        progress (`bool`): Show a progress bar.

    Returns:
        [`FeatureCache`]

    Raises:
        ValueError: If the disk is too small, before anything is computed; if the folder belongs to another model.
        OSError: If the disk fills up all the same. What was finished stays.

    Example:

    ```python
    examples = [tokenizer(text)["input_ids"] for text in prompts]
    states = cache_features(target, draft.config, examples, "out/states")
    arguments = DSparkTrainingArguments("out/draft", feature_cache_dir="out/states")
    ```

    DSpark Section 5.1.
    """
    if batch_size < 1 or not 0 <= rank < num_ranks:
        given = f"{batch_size=}, {rank=}, {num_ranks=}"
        raise ValueError(f"batch_size must be positive and rank lie in [0, num_ranks), got {given}")
    cache = FeatureCache(folder, draft_config, target)
    cache.fill(rows, batch_size, rank, num_ranks, progress)
    return cache


# In training


class TargetSource:
    """Gives the states of batches, and binds the draft to the target, or to what the cache keeps of it."""

    def __init__(self, draft: DraftModel, target: PreTrainedModel | None, args: DSparkTrainingArguments) -> None:
        folder, device = args.feature_cache_dir, args.device
        if target is None and folder is None:
            raise ValueError("the target's states are needed: pass target=..., or args.feature_cache_dir with them")
        self._target, self._args = target, args
        self.cache = None if folder is None else FeatureCache(folder, draft.config, target)
        if target is None:
            lent = self.cache.borrowed(device)
            draft.bind_parts(lent.embedding, lent.lm_head, lent.dtype)
            return
        require_target(target)
        # One that was spread over devices or quantised is where it must be.
        if getattr(target, "hf_device_map", None) is None and not getattr(target, "is_quantized", False):
            target.to(device)
        draft.bind(target)
        require_same_logits(target, draft)
        if args.packing:
            require_separable_documents(target, draft.config.target_layer_ids)

    def fill(self, sets: Iterable[Iterable[Any]]) -> None:
        """Compute the states of data sets, and of the first rows of streams, that the cache lacks.

        Rows hold one document each. All processes do a share, and wait for each other. Without a target, a
        `ValueError` counts what is missing.
        """
        if self.cache is None:
            return
        sets = [part if hasattr(part, "__len__") else list(itertools.islice(part, STREAM_CHECK)) for part in sets]
        rows, args = itertools.chain.from_iterable(sets), self._args
        if self._target is not None:
            share = {"rank": args.process_index, "num_ranks": args.world_size, "progress": not args.disable_tqdm}
            self.cache.fill(rows, **share)
            if args.world_size > 1:
                torch.distributed.barrier()
        elif missing := self.cache.missing(rows):
            raise ValueError(
                f"{len(missing)} of {sum(map(len, sets))} examples are not in the feature cache {self.cache.folder}: "
                "pass target=..., or fill the cache with the same data, tokenizer and max_length"
            )

    def states(self, batch: dict[str, torch.Tensor], draft: DraftModel) -> TargetStates:
        """Return the target's states of a batch, on the draft's device, in its dtype."""
        layer_ids, size = draft.config.target_layer_ids, draft.config.feature_size
        input_ids, position_ids, attention_mask = (batch[name] for name in ROW_PARTS)
        if self.cache is None:
            positions = position_ids if self._args.packing else None
            return target_states(
                self._target, layer_ids, input_ids, attention_mask, draft.device, draft.dtype, positions
            )
        # To an accelerator travels what is on the disk; memory on the CPU is touched once only.
        dtype = draft.dtype if draft.device.type == "cpu" else torch.bfloat16
        states = [torch.zeros(*input_ids.shape, width, dtype=dtype) for width in (len(layer_ids) * size, size)]
        rows = [_documents(*row) for row in zip(*(batch[name].cpu() for name in ROW_PARTS), strict=True)]
        # Those of a stream, or of another process's share in a folder that is not this machine's.
        if self._target is not None and (missing := self.cache.missing(ids for row in rows for _, ids in row)):
            self.cache.fill(missing, progress=False)
        for number, row in enumerate(rows):
            for place, ids in row:
                for whole, part in zip(states, self.cache.read(ids), strict=True):
                    whole[number, place] = part
        return TargetStates(*(part.to(draft.device, draft.dtype) for part in states))


def _documents(
    input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor
) -> list[tuple[slice, list[int]]]:
    """Return where each document of a row stands, and its token ids; padding is none."""
    length = int(attention_mask.sum())
    starts = [*(position_ids[:length] == 0).nonzero()[:, 0].tolist(), length]
    return [(slice(*ends), input_ids[slice(*ends)].tolist()) for ends in itertools.pairwise(starts)]
