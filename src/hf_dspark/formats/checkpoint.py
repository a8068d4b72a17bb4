"""A checkpoint that a stranger may have made: its `config.json`, and what its safetensors files hold.

Nothing here runs code, unpickles, follows a path out of the checkpoint, or allocates what a file merely claims to
hold: JSON is parsed under limits, and of the weights only the headers are read until tensors are asked for.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, get_session, is_offline_mode
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from ..files import listed, shortened

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
STS_FILE = "sts.json"  # as SGLang reads it, and with the temperatures of all domains
# Far above what real checkpoints have; parsing takes some thirty times the bytes in memory.
MAX_CONFIG_BYTES, MAX_INDEX_BYTES, MAX_HEADER_BYTES = 2**20, 2**25, 2**22
MAX_JSON_DEPTH, MAX_SHARDS = 32, 1000
# DeepSpec stores copies of the target's tensors, speculators what d2t says already; neither is the draft's own.
NOT_OURS = ("embed_tokens.weight", "lm_head.weight", "t2d")

_ANSWERED: set[str] = set()  # Hubs that have answered once
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp", ".bin.index.json")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_HUB_SNAPSHOT = re.compile(r"(.*)/((?:models|datasets|spaces|kernels)--[^/]+)/snapshots/.+")
_CONVERT = (
    "pickled weights can run any code when they are read, and are never loaded. Convert them where that does no harm: "
    "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
)
_FLOATING = ("F64", "F32", "F16", "BF16")
_STORED_AS = {torch.int64: ("I64",), torch.bool: ("BOOL",)}


class TensorInfo(NamedTuple):
    """What the header of a safetensors file says of one tensor."""

    dtype: str  # as safetensors writes it, such as `BF16`
    shape: tuple[int, ...]  # checked against the bytes that the file has
    file: Path


class Checkpoint(os.PathLike):
    """A folder, or a repository on the Hub, of which each file is read once, when it is asked for.

    It can be passed wherever its name can. All files come from one commit, whatever is pushed in between. What is
    missing, damaged, too big, pickled, or outside of the checkpoint raises a `ValueError`.
    """

    def __init__(self, name_or_path: str | os.PathLike, **hub_kwargs: Any) -> None:
        if not isinstance(name_or_path, (str, os.PathLike)):
            raise TypeError(
                f"a checkpoint is named by a folder or a repository on the Hub, got {type(name_or_path).__name__}"
            )
        if unknown := sorted(hub_kwargs.keys() - set(HUB_ARGUMENTS)):
            raise TypeError(f"got the arguments {unknown}, known are {', '.join(HUB_ARGUMENTS)}")
        self.name, self._hub = os.fspath(name_or_path), hub_kwargs
        is_local = os.path.exists(self.name)
        if not is_local and (self.name.startswith((".", "~", os.sep)) or self.name.count("/") > 1):
            raise ValueError(f"there is no folder {self.name}, and no repository on the Hub has such a name")
        self._folder = Path(self.name, hub_kwargs.get("subfolder") or "") if is_local else None

    @classmethod
    def open(cls, source: "str | os.PathLike | Checkpoint", **hub_kwargs: Any) -> "Checkpoint":
        """Return a checkpoint by its name, or as it is."""
        return source if isinstance(source, Checkpoint) else cls(source, **hub_kwargs)

    def __fspath__(self) -> str:
        return self.name

    __str__ = __fspath__

    @property
    def revision(self) -> str | None:
        """The Hub's commit, once a file was read; `None` for a folder."""
        return None if self._folder is not None else self._hub.get("revision")

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json` as it stands; the file itself may be named in place of its folder."""
        path = self._find(CONFIG_FILE)
        if path is None:
            raise ValueError(f"{self.name} has no {CONFIG_FILE}{self._where}: it is no checkpoint, or incomplete")
        return read_json(path)

    @cached_property
    def temperatures(self) -> dict[str, list[float]] | None:
        """The temperatures by domain that lie beside a config without a field for them; `None` without any."""
        path = self._find(STS_FILE)
        if path is None:
            return None
        stored = read_json(path)
        return stored.get("by_domain") or {"default": stored.get("temperatures")}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """What the headers of the safetensors files say, by the names of the tensors."""
        path = self._find(WEIGHTS_FILE)
        if path is not None:
            return _read_header(path)
        index = self._find(INDEX_FILE)
        if index is None:
            beside = self._folder.glob("*") if self._folder else ()
            pickles = sorted(path.name for path in beside if path.name.endswith(_PICKLES))
            found = f", only {listed(pickles)}: " if pickles else ". If it has others, "
            raise ValueError(f"{self.name} has no {WEIGHTS_FILE} and no {INDEX_FILE}{self._where}{found}{_CONVERT}")
        weight_map, infos = _read_index(index), {}
        for name in sorted(set(weight_map.values())):
            shard = self._find(name)
            if shard is None:
                raise ValueError(f"{index} names {name}, which is not there: download the checkpoint again")
            inside = _read_header(shard)
            if strange := sorted(key for key in inside if weight_map.get(key) != name):
                raise ValueError(f"{name} holds tensors that {index} does not list there: {listed(strange)}")
            infos |= inside
        if missing := sorted(weight_map.keys() - infos.keys()):
            raise ValueError(f"{index} lists tensors that no file holds: {listed(missing)}")
        return infos

    def load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read tensors in the type they are stored in, on the mapped files until they are written to or moved."""
        loaded = {}
        for file in sorted({self.tensors[name].file for name in names}):
            try:
                with safe_open(file, framework="pt", device="cpu") as handle:
                    for name in (name for name in names if self.tensors[name].file == file):
                        loaded[name] = handle.get_tensor(name)
            except (SafetensorError, OSError, KeyError, AttributeError) as error:
                raise _damaged(file, error) from None
        for name, tensor in loaded.items():
            if tuple(tensor.shape) != self.tensors[name].shape:
                raise ValueError(f"{self.name} has changed while it was being read: load the checkpoint again")
            if tensor.is_floating_point() and not all(map(torch.isfinite, tensor.aminmax())):
                raise ValueError(
                    f"the checkpoint {self.name} is damaged: {name} has values that are not finite. Download or train "
                    "it again"
                )
        return loaded

    def compare(self, expected: Mapping[str, torch.Tensor], ignored: Collection[str] = NOT_OURS) -> None:
        """Raise a `ValueError` that lists every tensor that is missing, unexpected, of another shape or type.

        `expected` may be on the meta device; floating-point types stand for each other. `ignored` may be there, too.
        """
        found = {name: info for name, info in sorted(self.tensors.items()) if name in expected}
        shapes = {name: (list(info.shape), list(expected[name].shape)) for name, info in found.items()}
        types = {name: _STORED_AS.get(expected[name].dtype, _FLOATING) for name in found}
        faults = {
            "missing": sorted(expected.keys() - found.keys()),
            "unexpected": sorted(self.tensors.keys() - expected.keys() - set(ignored)),
            "of another shape": [
                f"{name} {has} instead of {need}" for name, (has, need) in shapes.items() if has != need
            ],
            "of another type": [name for name, info in found.items() if info.dtype not in types[name]],
        }
        if any(faults.values()):
            raise self.misfit("; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names))

    def misfit(self, found: str) -> ValueError:
        """Return the error about tensors that are not those of the configuration."""
        return ValueError(
            f"the checkpoint {self.name} does not match its config. Tensors {found}. Check markov_rank, "
            "markov_head_type, enable_confidence_head, num_hidden_layers and the norms in config.json."
        )

    def _find(self, file: str) -> Path | None:
        """Return where a file of the checkpoint is, `None` if it has none of that name."""
        if self._folder is not None and self._folder.is_file():
            return self._folder if file == CONFIG_FILE else None
        if self._folder is not None:
            path = self._folder / file
            if not os.path.lexists(path):
                return None
            _check_inside(path, self._folder)
            return path
        fault = None if self._only_cached else _hub_fault()
        hub = self._hub | ({} if fault is None else {"local_files_only": True})
        found = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False, **hub)
        if found is None:
            if fault is not None:
                raise OSError(
                    f"{self.name} is no folder here, its {file} is not in the local cache, and the Hub at "
                    f"{constants.ENDPOINT} does not answer ({fault}): check the name, the network and its proxy. "
                    "HF_ENDPOINT names another Hub, HF_HUB_OFFLINE=1 asks none"
                )
            return None
        if (commit := extract_commit_hash(found, None)) is not None:
            self._hub["revision"] = commit
        return Path(found)

    @property
    def _only_cached(self) -> str | None:
        """What forbids to ask the Hub, if anything does."""
        local = "local_files_only" if self._hub.get("local_files_only") else None
        return "HF_HUB_OFFLINE" if is_offline_mode() else local

    @property
    def _where(self) -> str:
        if self._folder is not None:
            return f" in {self._folder}"
        return f" in the local cache ({self._only_cached} asks no Hub)" if self._only_cached else " on the Hub"


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file in UTF-8, under limits of its size, depth and numbers."""
    try:
        content, number = _read_bytes(path, max_bytes).decode("utf-8"), _bounded
        parsed = json.loads(
            content, object_pairs_hook=_unique, parse_int=number, parse_float=number, parse_constant=number
        )
        if not isinstance(parsed, dict):
            raise ValueError(f"a JSON object is needed, it holds {type(parsed).__name__}")
        if _depth(parsed) > MAX_JSON_DEPTH:
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{path} cannot be used: it is nested deeper than {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    return parsed


def kept_token_ids(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the target's token of each draft logit, `[V_d]`: speculators' draft id i is the target's i + d2t[i]."""
    token_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    known = (token_ids >= 0) & (token_ids < vocab_size)
    if not bool(known.all()) or len(token_ids.unique()) < len(token_ids):
        raise ValueError(
            f"d2t must name {len(d2t)} distinct tokens of the target's vocabulary of {vocab_size}; it does not: load "
            "another checkpoint"
        )
    return token_ids


def kept_tokens_mask(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which of the target's tokens a pruned vocabulary has, `[V]`: speculators' t2d."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept_token_ids(d2t, vocab_size), True)


def _hub_fault() -> str | None:
    """Return why the Hub does not answer, `None` if it does; the Hub's own library would try for half a minute."""
    if constants.ENDPOINT not in _ANSWERED:
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:  # of the network, or of the library that talks to it
            return shortened(str(error) or type(error).__name__, quote=False)
        _ANSWERED.add(constants.ENDPOINT)
    return None


def _check_inside(path: Path, folder: Path) -> None:
    """Raise a `ValueError` if a link leads out of the folder; those of the Hub's cache to its own blobs are fine."""
    allowed = [folder.resolve()]
    if snapshot := _HUB_SNAPSHOT.fullmatch(allowed[0].as_posix()):
        allowed += [f"{snapshot[1]}/{snapshot[2]}/blobs", f"{snapshot[1]}/blobs"]
    if not any(path.resolve().is_relative_to(root) for root in allowed):
        raise ValueError(
            f"{path} is a link that leads out of the checkpoint's folder: put the file itself there, or pass the "
            "folder that holds it"
        )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} cannot be used: weight_map must name the file of each tensor")
    for file in weight_map.values():
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise ValueError(
                f"{path} cannot be used: weight_map names {shortened(file)}, which is no name of a safetensors file "
                "in the same folder"
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise ValueError(f"{path} cannot be used: weight_map names more than {MAX_SHARDS} files")
    return weight_map


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        length = int.from_bytes(_read_bytes(path, None, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header claims {length:,} bytes, at most {MAX_HEADER_BYTES:,} are read")
        # The library checks the rest: types, shapes and offsets against each other and against the file's size.
        with safe_open(path, framework="pt", device="cpu") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
            return {name: TensorInfo(part.get_dtype(), tuple(part.get_shape()), path) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError, OverflowError, AttributeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is no intact safetensors file ({shortened(str(error), quote=False)}): download or write it again"
    )


def _read_bytes(path: Path, max_bytes: int | None, count: int = -1) -> bytes:
    """Return the first bytes of a regular file; nothing else is opened, since reading it might never end."""
    try:
        if not path.is_file():
            raise ValueError("it is no regular file" if path.exists() else "there is no such file")
        if max_bytes is not None and path.stat().st_size > max_bytes:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, at most {max_bytes:,} are read")
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as error:
        raise ValueError(f"it could not be read: {error.strerror}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shortened(twice)} stands there twice")
    return found


def _bounded(number: str) -> int | float:
    is_integer = number.lstrip("-").isdigit()
    if not abs(float(number)) < (2**63 if is_integer else math.inf):  # NaN compares false
        raise ValueError(f"it holds the number {number[:30]}, which is not finite or has more than 64 bits")
    return int(number) if is_integer else float(number)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)
