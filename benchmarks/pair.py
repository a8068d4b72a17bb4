"""What the benchmarks share: the shipped pair, models of other sizes, prompts, result files.

Every call into hf_dspark that is not part of its public interface, and that several scripts need, stands here.
"""

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from hf_dspark import (
    DecodingOptions,
    DSparkConfig,
    DSparkDraftModel,
    Policy,
    Scheduler,
    evaluate,
    fast_linears,
)
from hf_dspark.decoding import loop as loop_module
from hf_dspark.decoding.hook import default_policy as default_policy
from hf_dspark.measuring.profile import DrawnChains as DrawnChains
from hf_dspark.measuring.profile import _passes_by_columns as passes_by_columns  # noqa: F401
from hf_dspark.measuring.profile import _passes_by_slots as passes_by_slots  # noqa: F401
from hf_dspark.provenance import provenance
from hf_dspark.sampling.drafts import DraftTree, DraftTrees, Verified
from hf_dspark.scheduling.costs import ThroughputTable

PAIR = Path(__file__).parent.parent / "examples" / "gsm8k_pair"
RESULTS = Path(__file__).parent / "results"
GREEDY = {"do_sample": False}
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0}
REGIMES = {"greedy": GREEDY, "sampled": SAMPLING}
GEOMETRIES = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
# Three of four layers have a recurrent state.
HYBRID_GEOMETRIES = {
    "qwen3.5-0.8b": {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_value_heads": 16,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
}  # fmt: skip
REHEARSAL = {"num_hidden_layers": 6, "vocab_size": 2048, "intermediate_size": 256}  # of a model that tries a script
UNTIED = {"qwen3-8b"}  # its LM head is a matrix of its own
WARM_UP_TOKENS = 16  # of a call that is not timed
Pair = tuple[PreTrainedModel, DSparkDraftModel]


@dataclass(frozen=True)
class Way:
    """A way to decode: with the draft or plainly, with packed copies of the weights or as users run it."""

    name: str
    drafted: bool
    packed: bool
    meaning: str  # for readers of a result file


WAYS = (
    Way("plain", False, False, "plain generate() as users run it"),
    Way("plain_packed", False, True, "plain generate() inside fast_linears(packed=True): the drafts' kernels"),
    Way("own", True, False, "with the draft, as users run it"),
    Way("own_packed", True, True, "with the draft, inside fast_linears(packed=True)"),
)
BASELINES = ("as_it_is", "both")


# ---- models


def load_pair(
    dtype: torch.dtype = torch.float32, folder: Path = PAIR
) -> tuple[PreTrainedModel, DSparkDraftModel, PreTrainedTokenizerBase]:
    """Return target, draft and tokenizer of the shipped pair, or of one in another folder's `target` and `draft`."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype).eval()
    draft = DSparkDraftModel.from_pretrained(folder / "draft", dtype=dtype).eval()
    return target, draft, AutoTokenizer.from_pretrained(folder / "target")


def random_pair(geometry: str, dtype: torch.dtype, device: str = "cpu", rehearse: bool = False) -> Pair:
    """Return a target and a draft of the released layout with random weights, which take the same time.

    Args:
        geometry (`str`): One of [`GEOMETRIES`], which are Qwen3's, or of [`HYBRID_GEOMETRIES`], which are Qwen3.5's.
        dtype (`torch.dtype`): Of both.
        device (`str`): Of both; the weights are made there.
        rehearse (`bool`): Make both tiny, to try a script.
    """
    facts = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
    facts |= (GEOMETRIES | HYBRID_GEOMETRIES)[geometry] | (REHEARSAL if rehearse else {})
    config_class = Qwen3_5TextConfig if geometry in HYBRID_GEOMETRIES else Qwen3Config
    config = config_class(**facts, tie_word_embeddings=geometry not in UNTIED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            target = AutoModelForCausalLM.from_config(config).eval()
            num_layers = 1 if rehearse else 5
            draft_config = DSparkConfig.from_target(config, num_hidden_layers=num_layers, block_size=7)
            draft = DSparkDraftModel(draft_config).eval()
    finally:
        torch.set_default_dtype(before)
    return target.to(device), draft.to(device)  # what was made elsewhere all the same


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- prompts and results


def held_out_prompts() -> list[str]:
    """Return the 50 shipped prompts: questions of GSM8K's test file that no fit has seen."""
    return [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().strip().split("\n")]


def calibration_prompts(test_file: str, count: int) -> list[str]:
    """Return evenly spread prompts from GSM8K's test file that are not among the held-out ones.

    Raises:
        ValueError: If a line is no question, naming it.
    """
    reserved, prompts = set(held_out_prompts()), []
    for number, line in enumerate(Path(test_file).read_text().strip().split("\n"), start=1):
        try:
            prompt = f"Question: {json.loads(line)['question']}\nAnswer:"
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{test_file}, line {number}: not a JSON object with a 'question'") from error
        if prompt not in reserved:
            prompts.append(prompt)
    return prompts[:: max(1, len(prompts) // count)][:count]


def recorded_acceptance(rounds_file: str | Path = RESULTS / "pair_rounds.json") -> list[int]:
    """Return how many drafts each recorded round of the shipped pair accepted at temperature 1."""
    recording = json.loads(Path(rounds_file).read_text())
    return [number for request in recording["requests"] for number in request["accepted"]]


def write_result(path: str | Path | None, content: Mapping[str, Any]) -> None:
    """Write a result file if a path is given, and print it as one line of JSON otherwise."""
    if path is None:
        print(json.dumps(content))
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    print(f"wrote {path}")


# ---- decoding


def ways_of(baseline: str, device: torch.device | str = "cpu") -> list[Way]:
    """Return the ways to decode in turns: packed copies only for both baselines, and only on a CPU."""
    both = baseline == "both" and torch.device(device).type == "cpu"
    return [way for way in WAYS if both or not way.packed]


def speedups(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the speed-ups that the times of some ways allow.

    `speedup` is over plain `generate()` as users run it, of the draft with packed weights if they were measured;
    `speedup_same_kernels` is of the same over plain `generate()` with packed weights.
    """
    own = seconds.get("own_packed", seconds["own"])
    found = {"speedup": seconds["plain"] / own}
    if "plain_packed" in seconds:
        found |= {"speedup_unpacked": seconds["plain"] / seconds["own"]}
        found |= {"speedup_same_kernels": seconds["plain_packed"] / own}
    return found


def kernels(target: PreTrainedModel, draft: nn.Module | None, packed: bool) -> AbstractContextManager:
    """Return a context in which calls have packed copies of the weights, or are as users run them."""
    models = [model for model in (target, draft) if model is not None]
    return fast_linears(*models, packed=True) if packed else nullcontext()


def provenance_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return the provenance of a run, with the options that are not defaults. Take it before options are changed."""
    chosen = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    part = chosen.pop("part", None)  # a word of its own, not an option
    found = provenance(device, chosen)
    return found if part is None else found | {"command": found["command"].replace(".py", f".py {part}", 1)}


def scheduler(cost: ThroughputTable) -> Policy:
    """Return the default policy: draft when it pays, and verify the prefixes that pay."""
    return Scheduler(cost, trees=False)


@contextmanager
def decoding(draft: DSparkDraftModel, policy: Policy | None = None, transformers_loop: bool = False) -> Iterator[None]:
    """While entered, a draft is verified as a policy says (the default one for `None`), in either loop."""
    before, draft.decoding = draft.decoding, DecodingOptions(policy, use_transformers_loop=transformers_loop)
    try:
        yield
    finally:
        draft.decoding = before


def acceptance(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    prompts: Iterable[str],
    processing_class: PreTrainedTokenizerBase,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Return what whole blocks reach: `tau`, `acceptance` by position, and counts of prompts, rounds and tokens."""
    texts = [row["prompt"] if isinstance(row, Mapping) else row for row in prompts]
    found = evaluate(target, draft, {"prompts": texts}, processing_class, batch_size=32, seed=seed, **options)
    if found.failed:
        raise ValueError(f"{len(found.failed)} prompts failed; the first: {found.failed[0].error}")
    metrics = found.metrics["prompts"].to_dict()
    rates = [None if rate is None else round(rate, 4) for rate in metrics["acceptance"]]
    counts = {name: metrics[name] for name in ("prompts", "rounds", "tokens")}
    return {"tau": round(metrics["tau"], 4), "acceptance": rates, **counts}


# ---- replayed acceptance


def representative(accepted: Sequence[int], count: int, seed: int) -> list[int]:
    """Return `count` recorded rounds in random order that have the mean of all: one from each of `count` parts."""
    ordered, source = sorted(accepted), random.Random(seed)
    place = source.random()  # the same in each part: otherwise the mean would vary
    chosen = [ordered[int((part + place) * len(ordered) / count)] for part in range(count)]
    source.shuffle(chosen)
    return chosen


def num_rounds_for(tokens: int, accepted: Sequence[int]) -> int:
    """Return how many recorded rounds give a request this number of tokens."""
    return round(tokens / (1 + statistics.mean(accepted)))


def path_of(tree: DraftTree, depth: int) -> list[int]:
    """Return a path of a tree that is so deep, or as deep as the tree is."""
    places = (place for place in range(1, 1 + tree.num_nodes) if tree.depth_of(place) == min(depth, tree.depth))
    return tree.path(next(places, 0))


@contextmanager
def replaying(rounds: Sequence[int]) -> Iterator[None]:
    """While entered, the loop does all its work and then accepts as many drafts as recorded rounds did.

    Random weights accept nothing by themselves. The requests of a batch take rounds in turn.
    """
    honest, recorded = loop_module.verify, itertools.cycle(rounds)

    def verify(drafts, *args):
        verified = honest(drafts, *args)
        if isinstance(drafts, DraftTrees):
            paths = [path_of(tree, next(recorded)) for tree in drafts.trees]
            return Verified(torch.tensor(list(map(len, paths))), verified.next_token_ids, paths)
        if drafts.token_ids.shape[1] == 0:
            return verified
        lengths = drafts.lengths.to(verified.num_accepted.device)
        accepted = torch.tensor([next(recorded) for _ in range(len(lengths))], device=lengths.device)
        return Verified(accepted.minimum(lengths), verified.next_token_ids)

    loop_module.verify = verify
    try:
        yield
    finally:
        loop_module.verify = honest
