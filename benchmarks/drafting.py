"""What drafting costs: among candidates or over the whole vocabulary, in longer blocks, compiled. In turns.

python benchmarks/drafting.py top_k --output benchmarks/results/top_k.json
python benchmarks/drafting.py candidates --output benchmarks/results/candidates.json
python benchmarks/drafting.py block_sizes --output benchmarks/results/block_sizes.json
python benchmarks/drafting.py compiled --device cuda --modes default reduce-overhead --output ...

`top_k` times the drafting of a block at Qwen3-0.6B's size, random weights and a vocabulary of 152 thousand, with
`draft_top_k` and without: after tokens whose likely successors are known (here: any), and the time to look up a new
one. Aim: at most half the time. Three minutes on two quiet cores, 6 GiB in float32, 3 in bfloat16.

`candidates` measures on the shipped pair, whose vocabulary has 2048 tokens, what tau `draft_top_k` costs, and how many
of the drafted tokens had to be looked up. Aim: at most 2 % of tau. Seven minutes.

`block_sizes` times whole rounds of `generate()` at the same size with blocks of several lengths, and splits what the
longest adds to a round into drafting and verifying. Aim: at most 5 % from 4 to 16. What the sequential head costs is
what DSpark's rounds take beyond those of DFlash, which has none: the paper's measure. With random weights next to
nothing is accepted, so all rounds commit one token. Five minutes in bfloat16, half an hour in float32; CPUs without
bfloat16 units need three hours in bfloat16.

`compiled` times the drafting of a block at the same size with torch.compile and without, after one to eight new tokens
by turns, as rounds have them. On an accelerator the mode reduce-overhead records CUDA graphs. Compiling takes minutes,
and is timed, too. No part resumes.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pair import (
    REGIMES,
    WARM_UP_TOKENS,
    DrawnChains,
    acceptance,
    decoding,
    held_out_prompts,
    load_pair,
    provenance_of,
    random_pair,
    synchronize,
    write_result,
)
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from hf_dspark import DSparkConfig, DSparkDraftModel, FullBlock, fast_linears
from hf_dspark.models.configuration_dspark import WITHOUT_HEADS
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.sampling.drafts import ChainSampler

GEOMETRY = "qwen3-0.6b"
SAMPLERS = {"greedy": ChainSampler, "temperature 1": DrawnChains}
NO_HEAD = "dflash"
HEADS = (NO_HEAD, "vanilla", "rnn")  # of `block_sizes`
NEW_CONTEXT = 3  # tokens committed since the last block
WARM_UP = 2


class Drafting:
    """One draft that draws block after block after the same context.

    Args:
        draft ([`DSparkDraftModel`]): Bound to its target.
        context_length (`int`): Tokens in front of the block.
    """

    def __init__(self, draft: DSparkDraftModel, context_length: int) -> None:
        self.draft, self.context_length, self.cache = draft, context_length, SlotCache()
        self.width = len(draft.config.target_layer_ids) * draft.config.hidden_size
        self.anchor = torch.zeros(1, dtype=torch.long, device=draft.device)
        self._draft_block(context_length, ChainSampler)

    def _draft_block(self, num_features: int, sampler) -> None:
        features = torch.ones(1, num_features, self.width, dtype=self.draft.dtype, device=self.draft.device)
        self.draft.draft_block(self.anchor, features, self.cache, sampler())
        self.cache.truncate(0, self.context_length)

    @torch.inference_mode()
    def seconds(self, sampler, num_new: int = NEW_CONTEXT) -> float:
        """Return the time of one block after `num_new` new tokens."""
        synchronize(self.draft.device)
        started = time.perf_counter()
        self._draft_block(num_new, sampler)
        synchronize(self.draft.device)
        return time.perf_counter() - started


def drafting_costs(
    draft: DSparkDraftModel, candidates: Sequence[int], context_length: int = 256, repetitions: int = 20
) -> dict[str, dict[str, Any]]:
    """Time blocks over the whole vocabulary and among candidates, by turns.

    Args:
        draft ([`DSparkDraftModel`]): Bound to its target.
        candidates (`Sequence[int]`): Values of `draft_top_k`.
        context_length (`int`): Tokens in front of the block.
        repetitions (`int`): Blocks of each kind, after those that warm up.

    Returns:
        `dict`: By way of drawing, the median `full_ms` and, by number of candidates, `ms` and `ratio`; and what the
        successors of a token that is new cost, `new_token_ms`.
    """
    before, drawing = draft.config.draft_top_k, Drafting(draft, context_length)
    new_token_seconds = {k: know_any_successors(draft, k) for k in candidates}
    times: dict[tuple[str, int | None], list[float]] = {
        (name, k): [] for name in SAMPLERS for k in (None, *candidates)
    }
    try:
        for _ in tqdm(range(WARM_UP + repetitions), desc="drafting"):
            for (name, k), seconds in times.items():
                draft.config.draft_top_k = k
                seconds.append(drawing.seconds(SAMPLERS[name]))
    finally:
        draft.config.draft_top_k = before
    medians = {key: 1e3 * statistics.median(seconds[WARM_UP:]) for key, seconds in times.items()}
    return {
        name: {
            "full_ms": medians[name, None],
            "candidates": {
                str(k): {"ms": medians[name, k], "ratio": medians[name, k] / medians[name, None]} for k in candidates
            },
        }
        for name in SAMPLERS
    } | {"new_token_ms": {str(k): 1e3 * seconds for k, seconds in new_token_seconds.items()}}


def know_any_successors(draft: DSparkDraftModel, candidates: int) -> float:
    """Give every token some successors, and return the seconds in which those of one token are computed."""
    draft.config.draft_top_k = candidates
    successors = draft._successors()
    if successors is None:
        return 0.0
    seconds = []
    for token_id in range(WARM_UP + 5):
        synchronize(draft.device)
        started = time.perf_counter()
        successors._compute(torch.tensor([token_id], device=draft.device))
        synchronize(draft.device)
        seconds.append(time.perf_counter() - started)
    successors._table.random_(0, draft.config.vocab_size)
    successors._is_complete = True  # as on an accelerator
    return statistics.median(seconds[WARM_UP:])


def tau_losses(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    prompts: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    candidates: Sequence[int],
    max_new_tokens: int = 128,
    num_seeds: int = 8,
) -> dict[str, dict[str, Any]]:
    """Measure tau with all tokens and among candidates, on the same prompts with the same seeds.

    Args:
        target, draft, prompts, tokenizer: As for `pair.acceptance`.
        candidates (`Sequence[int]`): Values of `draft_top_k`.
        max_new_tokens (`int`): Of an answer.
        num_seeds (`int`): Answers to each prompt where they are sampled: tau of a few hundred rounds is no better
            known than to some per cent.

    Returns:
        `dict`: By regime, `full` and, by number of candidates, `tau`, `loss`, the share of it that is lost, and
        `looked_up`, the share of the drafted tokens of the first answers that were new.
    """
    before, losses = draft.config.draft_top_k, {}
    try:
        for regime, sampling in REGIMES.items():
            draft._successor_tables.clear()  # of the other regime's answers
            seeds = range(num_seeds if sampling["do_sample"] else 1)
            taus, looked_up = {}, {}
            for k in (None, *candidates):
                draft.config.draft_top_k, found = k, []
                for seed in seeds:
                    options = {"max_new_tokens": max_new_tokens, **sampling}
                    found.append(acceptance(target, draft, prompts, tokenizer, seed, **options))
                    if k is not None and seed == 0:
                        looked_up[k] = share_looked_up(draft, found[0]["rounds"])
                rounds = sum(part["rounds"] for part in found)
                taus[k] = sum(part["tau"] * part["rounds"] for part in found) / rounds
            losses[regime] = {
                "full": taus[None],
                "candidates": {
                    str(k): {"tau": taus[k], "loss": 1 - taus[k] / taus[None], "looked_up": looked_up[k]}
                    for k in candidates
                },
            }
    finally:
        draft.config.draft_top_k = before
    return losses


def share_looked_up(draft: DSparkDraftModel, rounds: int) -> float:
    """Return how many of the tokens drafted so far were new, and had their successors computed."""
    successors = draft._successors()
    num_known = 0 if successors is None else int((successors._table[:, 0] >= 0).sum())
    return num_known / (rounds * draft.config.block_size)


def top_k(options: argparse.Namespace) -> dict[str, Any]:
    """What candidates save at a large vocabulary."""
    target, draft = random_pair(GEOMETRY, getattr(torch, options.dtype), options.device, options.rehearse)
    with fast_linears(target, draft, packed=True):
        costs = drafting_costs(draft.bind(target), options.candidates, repetitions=options.repetitions)
    return {"geometry": GEOMETRY, "dtype": options.dtype, "vocab_size": draft.config.vocab_size, "drafting": costs}


def candidates(options: argparse.Namespace) -> dict[str, Any]:
    """What candidates lose on the shipped pair."""
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts()[: options.num_prompts]
    return {
        "vocab_size": draft.config.vocab_size,
        "tau": tau_losses(target, draft, prompts, tokenizer, options.candidates),
    }


# ---- torch.compile


@contextmanager
def compiling(draft: DSparkDraftModel, mode: str) -> Iterator[None]:
    """While entered, a draft's parallel and sequential stage are compiled in this mode of torch.compile."""
    stages = ("backbone", "sample_block")
    try:
        for stage in stages:
            setattr(draft, stage, torch.compile(getattr(draft, stage), mode=mode))
        yield
    finally:
        for stage in stages:
            vars(draft).pop(stage, None)


def compiled_costs(
    draft: DSparkDraftModel, modes: Sequence[str], context_length: int = 256, repetitions: int = 20
) -> dict[str, dict[str, float]]:
    """Time blocks as they are and compiled. Each mode is timed between two runs without one: they cannot take turns.

    Args:
        draft ([`DSparkDraftModel`]): Bound to its target.
        modes (`Sequence[str]`): Of torch.compile.
        context_length (`int`): Tokens in front of the block.
        repetitions (`int`): Blocks after each number of new tokens, after those that warm up.

    Returns:
        `dict`: By mode, the median `ms` of a block, that without compiling, `eager_ms`, their `ratio`, and
        `seconds_to_compile`: what the first blocks took.
    """
    counts = range(1, 2 + draft.config.block_size)  # as a round may commit

    def blocks(drawing: Drafting, times: int) -> list[float]:
        return [drawing.seconds(ChainSampler, count) for _ in range(times) for count in counts]

    found = {}
    for mode in modes:
        eager = Drafting(draft, context_length)
        blocks(eager, WARM_UP)
        before = blocks(eager, repetitions)
        with compiling(draft, mode):
            started = time.perf_counter()
            drawing = Drafting(draft, context_length)
            blocks(drawing, WARM_UP)
            seconds = time.perf_counter() - started
            inside = statistics.median(blocks(drawing, repetitions))
        outside = statistics.median(before + blocks(eager, repetitions))
        found[mode] = {
            "ms": 1e3 * inside, "eager_ms": 1e3 * outside, "ratio": inside / outside, "seconds_to_compile": seconds,
        }  # fmt: skip
    return found


def compiled(options: argparse.Namespace) -> dict[str, Any]:
    """What torch.compile saves of drafting."""
    target, draft = random_pair(GEOMETRY, getattr(torch, options.dtype), options.device, options.rehearse)
    draft.config.draft_top_k = options.draft_top_k
    know_any_successors(draft.bind(target), options.draft_top_k)
    with fast_linears(target, draft, packed=True):
        costs = compiled_costs(draft, options.modes, repetitions=options.repetitions)
    return {"geometry": GEOMETRY, "dtype": options.dtype, "draft_top_k": options.draft_top_k, "modes": costs}


# ---- block sizes


class StopsAt(StoppingCriteria):
    """Ends a sequence at a length. A limit of `generate()` would cut the last blocks; this one does not.

    Args:
        length (`int`): In tokens, the prompt's among them.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


def whole_rounds(target: PreTrainedModel, draft: DSparkDraftModel, ids: torch.Tensor, num_rounds: int) -> list:
    """Return the times of the rounds that verified a whole block, but the first, which also reads the prompt."""
    options = {
        "max_new_tokens": 2 + num_rounds + max(draft.config.block_size + 1, WARM_UP_TOKENS),
        "do_sample": False,
        "pad_token_id": 0,
        "stopping_criteria": StoppingCriteriaList([StopsAt(ids.shape[1] + 2 + num_rounds)]),
    }
    with decoding(draft, FullBlock()):
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
    stats, gamma = draft.last_stats, draft.config.block_size
    rounds = list(zip(stats.proposed, stats.seconds, strict=True))
    return [seconds for proposed, seconds in rounds[1:] if proposed == gamma]


def block_size_rows(
    target: PreTrainedModel,
    drafts: Sequence[DSparkDraftModel],
    context_length: int = 256,
    num_rounds: int = 8,
    repetitions: int = 5,
) -> list[dict[str, Any]]:
    """Time rounds with drafts of several block sizes and heads by turns, beginning with another draft each time.

    Args:
        target (`PreTrainedModel`): The model that decodes, without an end token.
        drafts (`Sequence`): Of any block sizes, with and without sequential heads.
        context_length (`int`): Tokens of the prompt.
        num_rounds (`int`): Of each call, if nothing is accepted.
        repetitions (`int`): Calls with each draft, after one that warms up.

    Returns:
        `list[dict]`: A row per draft, as Figure 4 reads it, and the number of rounds.

    Raises:
        ValueError: If no round verified a whole block.
    """
    ids = torch.arange(context_length, device=target.device)[None] % target.config.vocab_size
    found: list[list] = [[] for _ in drafts]
    for repetition in tqdm(range(1 + repetitions), desc="block sizes"):
        for turn in range(len(drafts)):
            index = (repetition + turn) % len(drafts)
            timed = whole_rounds(target, drafts[index], ids, num_rounds)
            found[index] += timed if repetition else []
    if not all(found):
        raise ValueError(f"no round after the first verified a whole block: raise num_rounds, got {num_rounds}")
    return [block_size_row(draft.config, rounds) for draft, rounds in zip(drafts, found, strict=True)]


def block_size_row(config: DSparkConfig, rounds: Sequence[Any]) -> dict[str, Any]:
    """Return the medians of some rounds with what tells their draft."""
    parts = {name: [getattr(part, name) for part in rounds] for name in ("draft", "verify", "total")}
    return {
        "kind": "dspark" if config.markov_rank else "dflash",
        "layers": config.num_hidden_layers,
        "head": config.markov_head_type if config.markov_rank else None,
        "block_size": config.block_size,
        "batch_size": 1,
        "num_rounds": len(rounds),
        **{f"{name}_ms": 1e3 * statistics.median(seconds) for name, seconds in parts.items()},
    }


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, by head, what the longest block adds to the shortest's round, as shares of it, whole and by part."""
    found = {}
    for head in dict.fromkeys(row["head"] for row in rows):
        by_size = sorted((row for row in rows if row["head"] == head), key=lambda row: row["block_size"])
        shortest, longest = by_size[0], by_size[-1]
        found[head or NO_HEAD] = {
            name: (longest[f"{part}_ms"] - shortest[f"{part}_ms"]) / shortest["total_ms"]
            for name, part in (("round", "total"), ("drafting", "draft"), ("verifying", "verify"))
        }
    return found


def over_dflash(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return, by head and block size, what a round takes beyond one without a sequential head, as a share of it."""
    without = {row["block_size"]: row["total_ms"] for row in rows if row["head"] is None}
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["head"] is not None and row["block_size"] in without:
            share = row["total_ms"] / without[row["block_size"]] - 1
            found.setdefault(row["head"], {})[row["block_size"]] = share
    return found


def draft_of_size(target: PreTrainedModel, size: int, head: str, draft_top_k: int) -> DSparkDraftModel:
    """Return a draft of five layers for blocks of a size, with a sequential head, or, without one, DFlash."""
    heads = WITHOUT_HEADS if head == NO_HEAD else {"markov_head_type": head}
    config = DSparkConfig.from_target(target.config, num_hidden_layers=5, block_size=size, **heads)
    config.draft_top_k = draft_top_k
    return DSparkDraftModel(config).to(target.device, target.dtype).eval()


def block_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds with blocks of 4, 8 and 16 tokens."""
    target, _ = random_pair(GEOMETRY, getattr(torch, options.dtype), options.device, options.rehearse)
    target.generation_config.eos_token_id = None
    drafts = [
        draft_of_size(target, size, head, options.draft_top_k) for size in options.sizes for head in options.heads
    ]
    with fast_linears(target, *drafts, packed=True):
        rows = block_size_rows(target, drafts, repetitions=options.repetitions)
    return {
        "target": f"{GEOMETRY}, random weights, {options.dtype}",
        "regime": "greedy",
        "draft_top_k": options.draft_top_k,
        "block_sizes": rows,
        "growth": growth(rows),
        "over_dflash": over_dflash(rows),
    }


PARTS = {"top_k": top_k, "candidates": candidates, "block_sizes": block_sizes, "compiled": compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--candidates", type=int, nargs="+", default=[64, 128, 256], help="values of draft_top_k")
    parser.add_argument("--draft_top_k", type=int, default=64, help="of `block_sizes` and `compiled`")
    parser.add_argument("--modes", nargs="+", default=["default"], help="of torch.compile, for `compiled`")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--num_prompts", type=int, default=50, help="of `candidates`")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16], help="of `block_sizes`")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS, help=f"of `block_sizes`; {NO_HEAD}: none")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, once: tries the script")
    parser.add_argument("--output", help="JSON file to write instead of printing")
    options = parser.parse_args()
    origin = provenance_of(parser, options, options.device)
    options.repetitions = 1 if options.rehearse else options.repetitions
    write_result(options.output, {"provenance": origin, **PARTS[options.part](options)})


if __name__ == "__main__":
    main()
