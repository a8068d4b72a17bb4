"""Peak memory of a batch: plain `generate()` against the decoding loop, each in a process of its own.

python benchmarks/memory.py --output benchmarks/results/memory.json

What a process needs beyond what it held once the models were loaded and run once; the peak is the kernel's.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from pair import decoding, held_out_prompts, load_pair, provenance_of, write_result

from hf_dspark import FullBlock


def resident_bytes() -> int:
    """Return what the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(assisted: bool, rows: int, new_tokens: int) -> dict:
    """Decode one batch; return how much the peak exceeds what was held before, in bytes."""
    target, draft, tokenizer = load_pair()
    tokenizer.padding_side = "left"
    inputs = tokenizer(held_out_prompts()[:rows], return_tensors="pt", padding=True)
    options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    assistant = {"assistant_model": draft} if assisted else {}
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "return_dict_in_generate": True}
    with decoding(draft, FullBlock()):
        one_row = {name: value[:1] for name, value in inputs.items()}
        target.generate(**one_row, max_new_tokens=8, **options, **assistant)
        before = resident_bytes()
        output = target.generate(**inputs, **lengths, **options, **assistant)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    draft_cache = 0
    if assisted:
        stores = output.past_key_values.conversation.draft_cache._stores.values()
        draft_cache = sum(store.nbytes for store in stores)
    return {"peak_bytes": peak - before, "draft_cache_bytes": draft_cache, "tokens": output.sequences.numel()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--only", choices=["plain", "assisted"], help="measure one, in this process")
    parser.add_argument("--output", help="JSON file to write besides printing")
    options = parser.parse_args()
    torch.set_num_threads(2)
    origin = provenance_of(parser, options)
    if options.only:
        print(json.dumps(measure(options.only == "assisted", options.rows, options.new_tokens)))
        return
    cells = {}
    for name in ("plain", "assisted"):
        command = [sys.executable, __file__, "--only", name, "--rows", str(options.rows), "--new_tokens"]
        result = subprocess.run([*command, str(options.new_tokens)], check=True, capture_output=True, text=True)
        cells[name] = json.loads(result.stdout.splitlines()[-1])
    allowed = 1.3 * cells["plain"]["peak_bytes"] + cells["assisted"]["draft_cache_bytes"]
    cells["over_plain"] = cells["assisted"]["peak_bytes"] / cells["plain"]["peak_bytes"]
    cells["over_plain_without_draft_cache"] = (
        cells["assisted"]["peak_bytes"] - cells["assisted"]["draft_cache_bytes"]
    ) / cells["plain"]["peak_bytes"]
    cells["within_limit"] = cells["assisted"]["peak_bytes"] <= allowed
    report = {"provenance": origin, "rows": options.rows, "new_tokens": options.new_tokens, "cells": cells}
    write_result(options.output, report)


if __name__ == "__main__":
    main()
