"""Measure this machine's throughput tables for the package: the shipped pair, or a geometry with random weights.

python benchmarks/profile_machine.py pair
python benchmarks/profile_machine.py qwen3-0.6b --dtype bfloat16
"""

import argparse
import time
from pathlib import Path

import torch
from pair import load_pair
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel, profile_throughput

TABLES = Path(__file__).parent.parent / "src" / "hf_dspark" / "tables"
GEOMETRIES = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
SETTINGS = {
    "pair": {"batch_sizes": (1, 2, 4, 8, 16, 32), "context_lengths": (64, 256), "repetitions": 15},
    "qwen3-0.6b": {"batch_sizes": (1, 2, 4, 8), "context_lengths": (64, 512), "repetitions": 3},
    "qwen3-1.7b": {"batch_sizes": (1, 2, 4), "context_lengths": (32, 256), "repetitions": 3},
    "qwen3-4b": {"batch_sizes": (1, 2, 4), "context_lengths": (32, 128), "repetitions": 2},
}


def random_pair(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, DSparkDraftModel]:
    """Return a Qwen3 target and a draft of the released layout, with random weights: time does not read them."""
    config = Qwen3Config(
        **GEOMETRIES[name], vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        target = Qwen3ForCausalLM(config).eval()
        draft = DSparkDraftModel(DSparkConfig.from_target(config, num_hidden_layers=5, block_size=7)).eval()
    finally:
        torch.set_default_dtype(before)
    return target, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", choices=SETTINGS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="cpu_2_cores", help="of the machine, for the file")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    target, draft = load_pair(dtype)[:2] if options.models == "pair" else random_pair(options.models, dtype)
    target.to(options.device), draft.to(options.device)
    started = time.perf_counter()
    profile = profile_throughput(target, draft, cache=False, **SETTINGS[options.models])
    path = TABLES / f"{options.name}.{options.models}.{options.dtype}.json"
    profile.save(path)
    print(f"{path.name}: {time.perf_counter() - started:.0f} s, R squared {profile.fit}, drafting "
          f"{profile.table.drafting * 1e3:.1f} ms")  # fmt: skip
    for tokens, rate in zip(profile.table.verify_tokens, profile.table.steps_per_second, strict=True):
        print(f"  B {tokens:4d}: {1e3 / rate:8.1f} ms a round")


if __name__ == "__main__":
    main()
