"""Reading a checkpoint that a stranger may have made: its `config.json`, and what its safetensors files hold.

Nothing here runs code, unpickles, follows a path out of the checkpoint, or allocates what a file merely claims to
hold: JSON is parsed under limits, and only the headers of the weights are read until [`load_tensors`] is called.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, is_offline_mode
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from ..messages import listed, shortened

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
STS_FILE = "sts.json"  # as SGLang reads it, and with the temperatures of all domains
# Far above what real checkpoints have; parsing takes some thirty times the bytes in memory.
MAX_CONFIG_BYTES = 2**20
MAX_INDEX_BYTES = 2**25
MAX_HEADER_BYTES = 2**22
MAX_JSON_DEPTH = 32
MAX_JSON_DIGITS = 19
MAX_SHARDS = 1000

_ANSWERED: set[str] = set()  # Hubs that have answered once
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_HUB_REPOSITORY = re.compile(r"(models|datasets|spaces|kernels)--.+")
_CONVERT = (
    "pickled weights can run any code when they are read, and are never loaded. Convert them where that does no harm: "
    "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
)


@dataclass(frozen=True)
class TensorInfo:
    """What the header of a safetensors file says of one tensor."""

    dtype: str  # as safetensors writes it, such as `BF16`
    shape: tuple[int, ...]  # checked against the bytes that the file has
    file: Path


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint that was looked at, not loaded."""

    name: str  # as it was asked for
    folder: Path  # where `config.json` is
    revision: str | None  # the Hub's commit; `None` for a folder
    config: dict[str, Any]  # `config.json` as it stands
    tensors: dict[str, TensorInfo]  # all of them by name


def open_checkpoint(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> CheckpointFiles:
    """Read `config.json` and the headers of the safetensors files in a folder or a repository on the Hub.

    A `ValueError` says what is missing, damaged, too big, pickled, or outside of the checkpoint.
    """
    place = _Place.of(name_or_path, hub_kwargs)
    path = place.require(CONFIG_FILE)
    config = read_json(path)
    # All files from one commit, whatever is pushed in between.
    place = place.pinned(path)
    return CheckpointFiles(place.name, path.parent, place.revision, config, _read_headers(place))


def read_config(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> dict[str, Any]:
    """Read a checkpoint's `config.json` alone, or a JSON file of any name; see [`open_checkpoint`]."""
    path = Path(name_or_path)
    return read_json(path if path.is_file() else _Place.of(name_or_path, hub_kwargs).require(CONFIG_FILE))


def read_temperatures(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> dict[str, list[float]] | None:
    """Read the temperatures by domain that lie beside a checkpoint without a field for them; `None` without any."""
    path = None if os.path.isfile(name_or_path) else _Place.of(name_or_path, hub_kwargs).find(STS_FILE)
    if path is None:
        return None
    stored = read_json(path)
    return stored.get("by_domain") or {"default": stored.get("temperatures")}


def read_tensor_infos(name_or_path: str | os.PathLike, **hub_kwargs: Any) -> dict[str, TensorInfo]:
    """Read what the headers of a checkpoint's safetensors files say; see [`open_checkpoint`]."""
    return _read_headers(_Place.of(name_or_path, hub_kwargs))


def load_tensors(infos: Mapping[str, TensorInfo], names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read the named tensors, or all, in the type they are stored in.

    They lie on the mapped files until they are written to or moved.
    """
    wanted = infos.keys() if names is None else names
    loaded = {}
    for file in sorted({infos[name].file for name in wanted}):
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name in (name for name in wanted if infos[name].file == file):
                    loaded[name] = handle.get_tensor(name)
                    if tuple(loaded[name].shape) != infos[name].shape:
                        raise ValueError(f"{file} has changed while it was being read: load the checkpoint again")
        except (SafetensorError, OSError, KeyError, AttributeError) as error:
            raise _damaged(file, error) from None
    return loaded


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file in UTF-8, under limits of its size, depth and numbers."""
    try:
        content = _read_bytes(path, max_bytes).decode("utf-8")
        parsed = json.loads(
            content, object_pairs_hook=_unique, parse_int=_bounded_int, parse_float=_finite, parse_constant=_finite
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


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint's files are: a folder, or a repository on the Hub."""

    name: str
    folder: Path | None
    hub: dict[str, Any]

    @classmethod
    def of(cls, name_or_path: str | os.PathLike, hub_kwargs: dict[str, Any]) -> "_Place":
        if not isinstance(name_or_path, (str, os.PathLike)):
            raise TypeError(
                f"a checkpoint is named by a folder or a repository on the Hub, got {type(name_or_path).__name__}"
            )
        if unknown := sorted(hub_kwargs.keys() - set(HUB_ARGUMENTS)):
            raise TypeError(f"got the arguments {unknown}, known are {', '.join(HUB_ARGUMENTS)}")
        name = os.fspath(name_or_path)
        if os.path.isfile(name):
            raise ValueError(f"{name} is a file: pass the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}")
        if not os.path.isdir(name) and (name.startswith((".", "~", os.sep)) or name.count("/") > 1):
            raise ValueError(f"there is no folder {name}, and no repository on the Hub has such a name")
        subfolder = hub_kwargs.get("subfolder") or ""
        return cls(name, Path(name, subfolder) if os.path.isdir(name) else None, hub_kwargs)

    @property
    def revision(self) -> str | None:
        return None if self.folder is not None else self.hub.get("revision")

    def pinned(self, path: Path) -> "_Place":
        """Return the same place at the commit that a file of it came from."""
        commit = None if self.folder is not None else extract_commit_hash(str(path), None)
        return self if commit is None else _Place(self.name, None, self.hub | {"revision": commit})

    def find(self, file: str) -> Path | None:
        """Return a file of the checkpoint, `None` if it has none of that name."""
        if self.folder is None:
            fault = None if self.only_cached else _hub_fault()
            hub = self.hub | ({} if fault is None else {"local_files_only": True})
            found = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False, **hub)
            if found is None and fault is not None:
                raise OSError(
                    f"{self.name} is no folder here, its {file} is not in the local cache, and the Hub at "
                    f"{constants.ENDPOINT} does not answer ({fault}): check the name, the network and its proxy. "
                    "HF_ENDPOINT names another Hub, HF_HUB_OFFLINE=1 asks none"
                )
            return None if found is None else Path(found)
        path = self.folder / file
        if not os.path.lexists(path):
            return None
        _check_inside(path, self.folder)
        return path

    def require(self, file: str) -> Path:
        path = self.find(file)
        if path is None:
            raise ValueError(f"{self.name} has no {file}{self.where}: it is no checkpoint, or is not all there")
        return path

    def pickles(self) -> list[str]:
        """Return files that hold pickled weights by their names; of a repository on the Hub none is known."""
        names = os.listdir(self.folder) if self.folder is not None else ()
        return sorted(name for name in names if name.endswith((*_PICKLE_SUFFIXES, ".bin.index.json")))

    @property
    def only_cached(self) -> str | None:
        """Return what forbids to ask the Hub, if anything does."""
        return (
            "HF_HUB_OFFLINE" if is_offline_mode() else "local_files_only" if self.hub.get("local_files_only") else None
        )

    @property
    def where(self) -> str:
        if self.folder is not None:
            return f" in {self.folder}"
        return f" in the local cache ({self.only_cached} asks no Hub)" if self.only_cached else " on the Hub"


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
    root, real = folder.resolve(), path.resolve()
    roots = [root]
    for parent in root.parents:
        if _HUB_REPOSITORY.fullmatch(parent.name) and (parent / "snapshots") in (root, *root.parents):
            roots += [parent / "blobs", parent.parent / "blobs"]
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise ValueError(
            f"{path} is a link that leads out of the checkpoint's folder: put the file itself there, or pass the "
            "folder that holds it"
        )


def _read_headers(place: _Place) -> dict[str, TensorInfo]:
    path = place.find(WEIGHTS_FILE)
    if path is not None:
        return _read_header(path)
    index = place.find(INDEX_FILE)
    if index is None:
        pickles = place.pickles()
        found = f", only {listed(pickles)}: " if pickles else ". If it has others, "
        raise ValueError(f"{place.name} has no {WEIGHTS_FILE} and no {INDEX_FILE}{place.where}{found}{_CONVERT}")
    place = place.pinned(index)  # whatever is pushed in between
    weight_map = _read_index(index)
    infos: dict[str, TensorInfo] = {}
    for name in sorted(set(weight_map.values())):
        shard = place.find(name)
        if shard is None:
            raise ValueError(f"{index} names {name}, which is not there: download the checkpoint again")
        inside = _read_header(shard)
        if strange := sorted(key for key in inside if weight_map.get(key) != name):
            raise ValueError(f"{name} holds tensors that {index} does not list there: {listed(strange)}")
        infos |= inside
    if missing := sorted(weight_map.keys() - infos.keys()):
        raise ValueError(f"{index} lists tensors that no file holds: {listed(missing)}")
    return infos


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


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits):,} digits")
    return int(digits)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"it holds the number {number[:30]}, which is not finite")
    return value


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)
