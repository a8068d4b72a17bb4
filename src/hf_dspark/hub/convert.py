"""Drafts on their way into and out of other projects: `convert_checkpoint`.

Reads and writes the files; what a format says and holds is in the table of `formats/`.
"""

import copy
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..files import listed, naming
from ..formats import translate
from ..formats.checkpoint import CONFIG_FILE, STS_FILE, Checkpoint, kept_tokens_mask
from ..formats.tables import FORMAT_NAMES, FORMATS, OURS
from ..models.auto import DRAFTS, is_draft
from ..models.borrowing import Borrowed, is_same_matrix, lm_head_of
from ..models.configuration_draft import SHAREABLE, DraftConfig, naming_file
from ..models.modeling_draft import DraftModel, check_fits
from ..targets.borrowed_weights import BorrowedModules

Target = str | os.PathLike | PreTrainedConfig | PreTrainedModel
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExportReport:
    """What [`convert_checkpoint`] has written."""

    folder: Path
    format: str
    files: tuple[str, ...]  # their names
    engines: tuple[str, ...]  # programs that can run the draft from it; what each needs was checked
    notes: tuple[str, ...]  # which engines cannot run it and why, and what lies beside it for want of a field
    launch: str | None = None  # the command by which the wanted engine serves it, if it is known


def convert_checkpoint(
    draft: DraftModel | str | os.PathLike,
    output: str | os.PathLike,
    format: str | None = None,
    target: Target | None = None,
    *,
    engine: str | None = None,
    sample_from_anchor: bool | None = None,
    **hub_kwargs: Any,
) -> ExportReport:
    """Write a draft in another project's format, or in ours. Weights are copied bit by bit.

    Args:
        draft ([`DraftModel`], `str` or `PathLike`): A draft in memory, or the folder or the repository on the Hub of
            one in any of [`FORMAT_NAMES`].
        output (`str` or `PathLike`): A folder that does not exist or is empty; not the working folder.
        format (`str`, *optional*): One of [`FORMAT_NAMES`]. Default: the first one that the engine runs.
        target (`str`, `PathLike`, `PreTrainedConfig` or `PreTrainedModel`, *optional*): The draft's target. The
            embedding and the LM head that a draft brings are compared with its own: copies are left out, others are
            kept, or refused by formats without a place for them. DeepSpec's format holds both. speculators' names the
            target, and does not say how deep it is. transformers' says neither that nor its vocabulary.
        engine (`str`, *optional*): An engine that must be able to run the result, such as `vllm`.
        sample_from_anchor (`bool`, *optional*): The layout of the blocks, if the files of the draft do not say it.
        hub_kwargs: `revision`, `token`, `subfolder`, ... of a draft that is read.

    Returns:
        [`ExportReport`]

    Raises:
        ValueError: If the draft cannot be read, the format or the engine cannot hold it (with all reasons), or the
            output folder is not empty, or is the working folder. Nothing is left behind.

    Example:

    ```python
    report = convert_checkpoint("my-draft", "out/for-vllm", "deepspec", target=target, engine="vllm")
    print(report.files, report.engines)
    ```
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} holds something already and is not overwritten: name another folder")
    if output.resolve() == Path.cwd():  # a new folder takes the place of an empty one
        raise ValueError(f"{output} is the working folder, which cannot be replaced: name another folder")
    if not is_draft(draft):
        checkpoint = Checkpoint.open(draft, **hub_kwargs)
        _refuse_quantised(checkpoint.name, checkpoint.quantisation is not None)
        config, tensors = read_checkpoint(checkpoint, target, sample_from_anchor)
    elif hub_kwargs or sample_from_anchor is not None:
        raise ValueError("the draft is loaded already: leave out the arguments that say how to read one")
    else:
        _refuse_quantised(draft.name_or_path, getattr(draft, "is_quantized", False))
        own = draft.brought if target is None else draft.own_weights()
        config, tensors = copy.deepcopy(draft.config), draft.state_dict() | own
        if target is not None:
            check_fits(config, target_config(target))
        if away := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise ValueError(f"the draft's weights are offloaded ({listed(away, 3)}): load it on one device first")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    copies = _take_copies(config, tensors, target)
    format = format or _format_for(engine, config)
    output.parent.mkdir(parents=True, exist_ok=True)
    with naming(output):
        partial = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        if format == OURS:
            engines, notes = _write_ours(config, tensors, partial, engine)
        else:
            engines, notes = _write_foreign(config, tensors, copies, partial, format, target, engine)
        files = tuple(sorted(path.name for path in partial.iterdir()))
        partial.chmod(0o755)  # mkdtemp's are closed to others
        os.replace(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return ExportReport(output, format, files, engines, notes, launch_command(engine, target, output, config))


def _format_for(engine: str | None, config: DraftConfig) -> str:
    if engine is None:
        raise ValueError(f"say the format to write, one of {', '.join(FORMAT_NAMES)}, or an engine such as vllm")
    known = sorted({name for entry in FORMATS for name in entry.engines})
    if engine not in known:
        raise ValueError(f"engine must be one of {', '.join(known)}, got {engine!r}")
    exports = translate.exports_of(config)
    able = [name for name, (engines, _) in exports.items() if engine in engines]
    if not able:
        raise ValueError(f"{engine} runs this draft in no format. {translate.not_exported(exports)}")
    return able[0]


def launch_command(
    engine: str | None, target: Target | None, folder: str | os.PathLike, config: DraftConfig
) -> str | None:
    """Return the command of an engine's server for a DSpark draft; the manual has the same."""
    if not config.markov_rank:
        return None
    model = target if isinstance(target, str | os.PathLike) else getattr(target, "name_or_path", None)
    folder, size = os.fspath(folder), config.block_size
    said = json.dumps({"method": "dspark", "model": folder, "num_speculative_tokens": size})
    flags = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", folder]
    flags += ["--speculative-dspark-block-size", str(size)]
    commands = {
        "vllm": ["vllm", "serve", model, "--speculative-config", said],
        "sglang": ["python", "-m", "sglang.launch_server", "--model-path", model, *flags],
    }
    return shlex.join(str(each or "TARGET") for each in commands[engine]) if engine in commands else None


def read_checkpoint(
    source: str | os.PathLike, target: Target | None = None, sample_from_anchor: bool | None = None, **hub_kwargs: Any
) -> tuple[DraftConfig, Tensors]:
    """Read the configuration and the tensors, by our names, of a draft of any format, with what may be copies of the
    target's weights.

    It is read from safetensors alone, and checked against its own configuration before it is loaded. Of the target,
    only the config is read. The arguments are those of [`convert_checkpoint`].
    """
    checkpoint = Checkpoint.open(source, **hub_kwargs)
    kind = translate.draft_model_type(checkpoint.config)
    if kind not in DRAFTS:
        named = f"model_type {kind!r}, architectures {checkpoint.config.get('architectures')!r}"
        known = f"the formats {', '.join(FORMAT_NAMES)}"
        raise ValueError(f"{checkpoint.name}/{CONFIG_FILE} ({named}) is no draft in one of {known}")
    known = target_config(target)
    with naming_file(checkpoint):
        ours = translate.read_draft_config(checkpoint, known, sample_from_anchor)
        ours.pop("auto_map", None)  # code that a repository carries is not used, nor copied
        config = DRAFTS[kind].config_class.from_dict(ours)
    if known is not None:
        check_fits(config, known)
    return config, DRAFTS[kind].read_tensors(config, checkpoint)


def _refuse_quantised(name: str, is_quantised: bool) -> None:
    if is_quantised:
        raise ValueError(f"the draft {name} is quantised, which no format holds: convert the one of full precision")


def target_config(target: Target | None) -> PreTrainedConfig | None:
    """Return the configuration of a target. No remote code is run."""
    if isinstance(target, (str, os.PathLike)):
        return AutoConfig.from_pretrained(target, trust_remote_code=False)
    return getattr(target, "config", target)


def _take_copies(config: DraftConfig, tensors: Tensors, target: Target | None) -> Tensors:
    """Take copies of a target's weights out of a draft's tensors, and let its configuration say what is left."""
    copies, brought = [], [name for name in config.shareable if name in tensors]
    if isinstance(target, PreTrainedModel):
        lent = Borrowed(target.get_input_embeddings(), lm_head_of(target), target.dtype)
        copies = [name for name in brought if lent.equals(name, tensors[name])]
    elif brought and isinstance(target, (str, os.PathLike)):
        theirs, has_bias = _target_weights(target)
        copies = [name for name in brought if is_same_matrix(tensors[name], theirs[name])]
        copies = [name for name in copies if not (has_bias and "head" in name)]  # which is a part of that head
    for name, field in config.shareable.items():
        setattr(config, field, name in brought and name not in copies)
    return {name: tensors.pop(name) for name in copies}


Written = tuple[tuple[str, ...], tuple[str, ...]]  # engines and notes of an ExportReport


def _write_ours(config: DraftConfig, tensors: Tensors, folder: Path, engine: str | None) -> Written:
    if engine is not None:
        raise ValueError(f"the format {OURS!r} is read by this package only, not by {engine!r}: leave engine out")
    config = copy.deepcopy(config)
    config.dtype = tensors["fc.weight"].dtype
    config.architectures = [DRAFTS[config.model_type].__name__]
    config.save_pretrained(folder)
    save_torch_state_dict(tensors, folder)
    return (OURS,), ()


def _write_foreign(
    config: DraftConfig,
    tensors: Tensors,
    copies: Tensors,
    folder: Path,
    format: str,
    target: Target | None,
    engine: str | None,
) -> Written:
    entry, has_weights = translate.find_format(format, config), isinstance(target, (str, os.PathLike, PreTrainedModel))
    held = tensors | {name: each for name, each in copies.items() if entry.renamed.get(name, name) in entry.copies}
    theirs = {entry.renamed.get(name, name): tensor for name, tensor in held.items()}
    lacking = {*entry.copies} - theirs.keys()
    if lacking and not has_weights:
        held = "copies of the target's embedding and LM head"
        raise ValueError(f"the format {entry.name!r} holds {held}: pass target=..., the model or where it is")
    known = target_config(target)
    if entry.names_target and not (known and known.name_or_path):
        cure = "pass target=..., its folder or name on the Hub, or set target.config.name_or_path"
        raise ValueError(f"the format {entry.name!r} says where the target is: {cure}")
    written = translate.config_to_format(config, entry, known)
    engines, notes = translate.engines_of(config, entry, engine)
    if lacking:
        weights, has_bias = _target_weights(target)
        if has_bias:
            cure = "choose a format without copies of the target's weights"
            raise ValueError(f"the format {entry.name!r} has no place for the bias of the target's LM head: {cure}")
        names = {entry.renamed.get(name, name): name for name in SHAREABLE}
        theirs |= {name: weights[names[name]] for name in lacking}
    if "d2t" in tensors:
        theirs["t2d"] = kept_tokens_mask(tensors["d2t"], config.vocab_size)
    written["dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    written["transformers_version"] = transformers.__version__
    _write_json(folder / CONFIG_FILE, written)
    save_torch_state_dict(theirs, folder)
    if entry.names_target and Path(known.name_or_path).is_dir():
        notes += (
            f"it names its target by the local path {known.name_or_path}: to share it, convert with the name that the "
            "target has on the Hub",
        )
    if config.sts_temperatures is not None:
        temperatures = {"temperatures": config.sts_temperatures["default"], "by_domain": config.sts_temperatures}
        _write_json(folder / STS_FILE, temperatures)
        notes += (
            f"the format has no field for the temperatures of the confidence head: they are in {STS_FILE}, as SGLang "
            "reads them (--speculative-dspark-confidence-sts-path). Slopes and offsets (confidence_fits) are left out",
        )
    return engines, notes


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _target_weights(target: PreTrainedModel | str | os.PathLike) -> tuple[Tensors, bool]:
    """Return a target's embedding and LM head by our names, in its own type, and whether the head has a bias."""
    if isinstance(target, PreTrainedModel):
        borrowed = BorrowedModules.copy_of(target)
        found, has_bias = [borrowed.embedding.weight, borrowed.lm_head.weight], borrowed.lm_head.bias is not None
    else:
        files = Checkpoint(target)
        embeddings, heads, biases = (
            [name for name in files.tensors if f".{name}".endswith(f".{ending}")]
            for ending in (*SHAREABLE, "lm_head.bias")
        )
        heads = heads or embeddings  # a tied head is not stored
        if len(embeddings) != 1 or len(heads) != 1:
            unclear = f"the embedding and the LM head of {files.name} cannot be told by their names"
            raise ValueError(f"{unclear}: pass the loaded model")
        stored = files.load({*embeddings, *heads})
        found, has_bias = [stored[embeddings[0]], stored[heads[0]]], bool(biases)
    # Copies of their own: a target may keep both in one tensor, of which a file would hold one.
    return {name: tensor.detach().clone() for name, tensor in zip(SHAREABLE, found, strict=True)}, has_bias
