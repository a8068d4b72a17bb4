"""A checkpoint that a stranger may have made: its `config.json`, and what its safetensors files hold.

Nothing here runs code, unpickles, follows a path out of the checkpoint, or allocates what a file merely claims to
hold: files are measured before they are read, and of the weights only the headers are until tensors are asked for.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, get_session, is_offline_mode
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from ..files import listed, shortened
from .deepseek_v4 import bundled_parts, bundled_shape, bundled_weight, is_bundled, is_of_draft
from .packed import packed_weights, shape_of, unpacked

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
QUANTISATION = "quantization_config"
STS_FILE = "sts.json"  # as SGLang reads it, and with the temperatures of all domains
# Far above what real checkpoints have; parsing takes some thirty times the bytes in memory.
MAX_CONFIG_BYTES, MAX_INDEX_BYTES = 2**20, 2**25
# What d2t says already and what is the target's, in speculators' files, and the configuration, in files of older
# versions of transformers.
_NOT_OURS = re.compile(r"(^|\.)(t2d|verifier_(norm|lm_head)\.weight|rotary_emb\.(inv_freq|(cos|sin)_cached))$")

_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".distcp", ".bin.index.json")
_FLOATING = ("F64", "F32", "F16", "BF16")
_QUANTISED = re.compile(
    r"(?<!d2t)(?<!t2d) (U8|I8|I32|F8_\w+|F4)$|_packed|packed_|qweight|qzeros|weight_scale|input_scale|_amax|absmax"
    r"|quant_state"
)
# Which fields of a configuration decide about tensors, by patterns of their names; the first one that is found.
_FIELDS = {
    "markov": ("markov_rank", "markov_head_type"),
    "eh_proj|enorm": ("mtp",),
    "mask_hidden": ("mask_token_id", "target_layer_ids"),
    r"\.attn\.(w[qo]_|wkv|(q|kv)_norm)|[qo]_[ab]_|kv_(proj|norm)": ("q_lora_rank", "o_lora_rank", "o_groups"),
    r"_hc\.|hc_head": ("hc_mult",),
    r"experts|mlp\.gate\.": ("num_experts", "moe_intermediate_size"),
    "confidence": ("enable_confidence_head", "confidence_head_with_markov"),
    r"\.bias": ("attention_bias", "attention_output_bias", "mlp_bias"),
    r"[qk]_norm": ("qk_norm", "head_dim"),
    r"[qkvo]_proj": ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_k_eq_v"),
    "(up|gate|down)_proj": ("intermediate_size",),
    "feedforward_layernorm": ("sandwich_norms",),
    "layer_scalar": ("layer_scalar",),
    "sink": ("attention_sinks",),
    "lm_head|d2t": ("draft_vocab_size", "vocab_size"),
    "embed": ("vocab_size", "hidden_size"),
    r"(^|\.)fc\.": ("target_layer_ids", "hidden_size"),
    "": ("hidden_size",),
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_STORED_AS = {torch.int64: ("I64", "I32"), torch.bool: ("BOOL",)}


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
        if unknown := sorted(hub_kwargs.keys() - set(HUB_ARGUMENTS)):
            raise TypeError(f"got the arguments {unknown}, known are {', '.join(HUB_ARGUMENTS)}")
        if not isinstance(name_or_path, str | os.PathLike):
            kind = type(name_or_path).__name__
            raise TypeError(f"a draft's folder or repository is needed, got {kind}: save_pretrained() a loaded one")
        self.name, self._hub = os.fspath(name_or_path), hub_kwargs
        is_local = os.path.exists(self.name)
        if os.path.isfile(self.name):
            raise ValueError(f"{self.name} is a file: name the folder that it is in")
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
        """`config.json` as it stands, without how bitsandbytes has quantised the weights, which are read as others."""
        return {key: value for key, value in self._config.items() if key != QUANTISATION or not self.quantisation}

    @property
    def quantisation(self) -> dict[str, Any] | None:
        """How bitsandbytes has quantised the weights, in words of transformers; `None` if it has not."""
        found = self._config.get(QUANTISATION)
        return found if isinstance(found, dict) and found.get("quant_method") == "bitsandbytes" else None

    @cached_property
    def _config(self) -> dict[str, Any]:
        if (path := self._find(CONFIG_FILE)) is None:
            raise ValueError(f"{self.name} has no {CONFIG_FILE} {self._where}: it is no checkpoint, or incomplete")
        return read_json(path)

    @cached_property
    def temperatures(self) -> dict[str, list[float]] | None:
        """The temperatures by domain that lie beside a config without a field for them; `None` without any."""
        if (path := self._find(STS_FILE)) is None:
            return None
        stored = read_json(path)
        return stored.get("by_domain") or {"default": stored.get("temperatures")}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """What the headers of the safetensors files say, by the names of the tensors; packed ones as they are read."""
        parts = {name for names in self._packed.values() for name in names.values()}
        infos = {name: info for name, info in self._stored.items() if name not in parts}
        for weight, names in self._packed.items():
            found = {part: self._stored[name] for part, name in names.items()}
            if is_bundled(self._config):
                shape = bundled_shape({part: (info.dtype, info.shape) for part, info in found.items()})
            elif "quant_state" in names:
                shape = self._read({"quant_state": names["quant_state"]}, shape_of)
            else:
                shape = found["weight"].shape
            infos[weight] = TensorInfo("F32", shape, next(iter(found.values())).file)
        return infos

    @cached_property
    def _packed(self) -> dict[str, dict[str, str]]:
        if is_bundled(self._config):
            return bundled_parts(self._stored)
        return packed_weights(self._stored) if self.quantisation else {}

    @cached_property
    def _stored(self) -> dict[str, TensorInfo]:
        infos, all_count = self._all_stored(), not is_bundled(self._config)
        return {name: info for name, info in infos.items() if all_count or is_of_draft(name)}

    def _all_stored(self) -> dict[str, TensorInfo]:
        if (path := self._find(WEIGHTS_FILE)) is not None:
            return _read_header(path)
        if (index := self._find(INDEX_FILE)) is None:
            names = ["any .bin"] if self._folder is None else sorted(path.name for path in self._folder.iterdir())
            cure = "Save or download it with its weights"
            if any(name.endswith(_PICKLED) for name in names):
                cure = (
                    "Pickled weights (.bin, .pt) can run any code, and are never loaded. Convert them where that does "
                    "no harm: safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')"
                )
            elif other := next((name for name in names if name.endswith(".safetensors")), None):
                one = f"It has {other}: a single file is called {WEIGHTS_FILE}, several need their index"
                cure = f"{one}, and an adapter is merged into its draft first (merge_and_unload)"
            raise ValueError(f"{self.name} has no {WEIGHTS_FILE} and no {INDEX_FILE} {self._where}. {cure}")
        weight_map, infos = _read_index(index), {}
        for file in sorted(set(weight_map.values())):
            if (shard := self._find(file)) is None:
                raise ValueError(f"{index} names {file}, which is not there: download the checkpoint again")
            inside = _read_header(shard)
            if wrong := sorted(inside.keys() ^ {name for name, place in weight_map.items() if place == file}):
                raise ValueError(f"{index} and {file} disagree about {listed(wrong)}: download the checkpoint again")
            infos |= inside
        return infos

    def load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read tensors in the type they are stored in, on the mapped files until they are written to or moved; packed
        ones in float32."""
        loaded = self._load([name for name in names if name not in self._packed])
        read = bundled_weight if is_bundled(self._config) else unpacked
        loaded |= {name: self._read(self._packed[name], read) for name in names if name in self._packed}
        for name, tensor in loaded.items():
            if tensor.is_floating_point() and not all(map(torch.isfinite, tensor.aminmax())):
                fault = f"{name} has values that are not finite"
                raise ValueError(f"the checkpoint {self.name} is damaged: {fault}. Download or train it again")
        return loaded

    def _load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        loaded = {}
        for file in sorted({self._stored[name].file for name in names}):
            try:
                with safe_open(file, framework="pt", device="cpu") as handle:
                    for name in (name for name in names if self._stored[name].file == file):
                        loaded[name] = handle.get_tensor(name)
            except (SafetensorError, OSError, KeyError, AttributeError) as error:
                raise _damaged(file, error) from None
        return loaded

    def _read(self, parts: Mapping[str, str], function: Callable[[Mapping[str, torch.Tensor]], Any]) -> Any:
        stored = self._load(parts.values())
        try:
            return function({part: stored[name] for part, name in parts.items()})
        except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
            raise _damaged(self._stored[next(iter(parts.values()))].file, error) from None

    def compare(self, expected: Mapping[str, torch.Tensor], places: Mapping[str, str] | None = None) -> None:
        """Raise a `ValueError` that lists every tensor that is missing, unexpected, of another shape or type.

        `expected` may be on the meta device; floating-point types stand for each other. `places` maps our fields to
        where they stand in `config.json`, if not under their own names.
        """
        both = {name: (self.tensors[name], tensor) for name, tensor in expected.items() if name in self.tensors}
        faults = {
            "missing": sorted(expected.keys() - both.keys()),
            "unexpected": sorted(name for name in self.tensors.keys() - expected.keys() if not _NOT_OURS.search(name)),
            "of another shape": [
                f"{name} {list(info.shape)} instead of {list(tensor.shape)}"
                for name, (info, tensor) in both.items()
                if info.shape != tensor.shape
            ],
            "of another type": [
                name
                for name, (info, tensor) in both.items()
                if info.dtype not in _STORED_AS.get(tensor.dtype, _FLOATING)
            ],
        }
        if any(faults.values()):
            found = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
            ours, theirs = ({match[1] for name in names if (match := _LAYER.search(name))}
                            for names in (expected, self.tensors))  # fmt: skip
            names = [name for names in faults.values() for name in names]
            whole = [name for name in names if (match := _LAYER.search(name)) and match[1] in ours ^ theirs]
            fields = ["num_hidden_layers"] * bool(whole)
            for name in (name for name in names if name not in whole):
                pattern = next(pattern for pattern in _FIELDS if re.search(pattern, name))
                fields += _FIELDS[pattern] if pattern or name not in faults["unexpected"] else ()
            raise self.misfit(found, [(places or {}).get(field, field) for field in fields])

    def misfit(self, found: str, keys: Collection[str]) -> ValueError:
        """Return the error about tensors that are not those of the config, with the keys that decide about them."""
        stored = (f"{name} {info.dtype}" for name, info in self.tensors.items())
        cure = f"Check {', '.join(dict.fromkeys(keys))} in its {CONFIG_FILE}" if keys else "No key decides about them"
        if any(map(_QUANTISED.search, stored)):
            cure = "Its weights are quantised in a way that is not read: take the draft of full precision"
        return ValueError(f"the checkpoint {self.name} does not match its config. Tensors {found}. {cure}")

    @property
    def _where(self) -> str:
        asked = "on the Hub, or in the local cache where HF_HUB_OFFLINE or local_files_only forbid to ask it"
        return asked if self._folder is None else f"in {self._folder}"

    def _find(self, file: str) -> Path | None:
        """Return where a file of the checkpoint is, `None` if it has none of that name."""
        if self._folder is None:
            return self._find_on_hub(file)
        path = self._folder / file
        if not os.path.lexists(path):
            return None
        _check_inside(path, self._folder)
        if not path.is_file():  # reading a pipe might never end
            raise ValueError(f"{path} is no regular file")
        return path

    def _find_on_hub(self, file: str) -> Path | None:
        hub, fault = dict(self._hub), None
        if not is_offline_mode() and not hub.get("local_files_only"):
            try:
                ask_hub(constants.ENDPOINT)
            except Exception as error:  # of the network, or of the library that talks to it
                hub["local_files_only"], fault = True, shortened(str(error) or type(error).__name__, quote=False)
        found = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False, **hub)
        if found is None and fault is not None:
            raise OSError(
                f"{self.name} is no folder here, its {file} is not in the local cache, and the Hub at "
                f"{constants.ENDPOINT} does not answer ({fault}): check the name, the network and its proxy. "
                "HF_ENDPOINT names another Hub, HF_HUB_OFFLINE=1 asks none"
            )
        if found is None:
            return None
        self._hub["revision"] = extract_commit_hash(found, self._hub.get("revision"))
        return Path(found)


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object, of numbers of 64 bits, from a regular file of limited size, or raise a `ValueError`."""
    try:
        if not path.is_file():
            raise ValueError("it is no regular file" if path.exists() else "there is no such file")
        if path.stat().st_size > max_bytes:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, at most {max_bytes:,} are read")
        content = path.read_text(encoding="utf-8")
        parsed = json.loads(content, parse_int=_bounded, parse_float=_bounded, parse_constant=_bounded)
        if not isinstance(parsed, dict):
            raise ValueError(f"a JSON object is needed, it holds {type(parsed).__name__}")
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    return parsed


def kept_tokens_mask(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which of the target's tokens a pruned vocabulary has, `[V]`: speculators' t2d. Draft id i is the target's
    i + d2t[i]."""
    token_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    known = (token_ids >= 0) & (token_ids < vocab_size)
    if not bool(known.all()) or len(token_ids.unique()) < len(token_ids):
        needed = f"{len(d2t)} distinct tokens of the target's vocabulary of {vocab_size}"
        raise ValueError(f"d2t must name {needed}; it does not: load another checkpoint")
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)


@functools.cache  # of answers, not of errors
def ask_hub(endpoint: str) -> None:
    """Raise an error if the Hub does not answer; its own library would try for half a minute."""
    get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)


def _check_inside(path: Path, folder: Path) -> None:
    """Raise a `ValueError` if a link leads out of the folder. Those of the Hub's cache to its blobs are fine, wherever
    the folder of blobs, or a blob, has been moved."""
    home, place = folder.resolve(), path.resolve()
    named = Path(home, os.readlink(path)).parent.resolve() if path.is_symlink() else home
    stores = [
        (parent / "blobs").resolve()
        for snapshots in home.parents if snapshots.name == "snapshots"
        for parent in (snapshots.parent, snapshots.parent.parent)
    ]  # fmt: skip
    if not place.is_relative_to(home) and not any(where.is_relative_to(s) for s in stores for where in (place, named)):
        raise ValueError(f"{path} is a link that leads out of the folder, to {place}: put the file itself there")
    if not place.exists():
        raise ValueError(f"{path} is a link to {place}, which is not there: mount its disk, or download it again")


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    for file in files or [[weight_map]]:
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            needed = "weight_map must name a safetensors file in the same folder for each tensor"
            raise ValueError(f"{path} cannot be used: {needed}, got {shortened(file)}")
    return weight_map


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:  # the library checks types, shapes and offsets against each other and against the file's size
        with safe_open(path, framework="pt", device="cpu") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
            return {name: TensorInfo(part.get_dtype(), tuple(part.get_shape()), path) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError, OverflowError, AttributeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is no intact safetensors file ({shortened(str(error), quote=False)}): download or write it again"
    )


def _bounded(number: str) -> int | float:
    if not abs(float(number)) < 2**63:  # NaN compares false
        raise ValueError(f"it holds the number {number[:30]}, which is not finite or has more than 64 bits")
    return int(number) if number.lstrip("-").isdigit() else float(number)
