"""What the benchmarks share: one command line, one clock, models, prompts and result files.

Calls into hf_dspark that are not public, and that several scripts need, stand here. A script is a set of functions,
its parts: their arguments are the options of the command line, and what they return is the result file.
"""

import argparse
import inspect
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from hf_dspark import DecodingOptions, DSparkConfig, DSparkDraftModel, Policy, Rounds, attach, evaluate, fast_linears
from hf_dspark.decoding import loop as decoding_loop
from hf_dspark.models.modeling_draft import DraftModel
from hf_dspark.provenance import provenance
from hf_dspark.sampling.drafts import Verified

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "examples" / "gsm8k_pair"
RESULTS = ROOT / "benchmarks" / "results"
GREEDY = {"do_sample": False}
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0}
REGIMES = {"greedy": GREEDY, "sampled": SAMPLING}
GEOMETRIES = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    # Three of four layers have a recurrent state.
    "qwen3.5-0.8b": {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_value_heads": 16,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
}  # fmt: skip
REHEARSAL = {"num_hidden_layers": 6, "vocab_size": 2048, "intermediate_size": 256}  # of a model that tries a script
UNTIED = {"qwen3-8b"}  # its LM head is a matrix of its own
Dtype = typing.Literal["float32", "bfloat16"]
Result = Mapping[str, Any]
T, K = TypeVar("T"), TypeVar("K")


# ---- command line and result files


def main(description: str | None, *parts: Callable[..., Result | Iterable[Result]]) -> None:
    """Run the part that the command line names, with its options. A part returns the content of the result file, or
    yields it again and again as it grows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True) if len(parts) > 1 else None
    for part in parts:
        command = parser if commands is None else commands.add_parser(part.__name__, description=part.__doc__)
        add_options(command, part)
        command.add_argument("--output", type=Path, help="result file; default: it is printed")
        command.set_defaults(run=part, word="" if commands is None else f" {part.__name__}")
    options = vars(parser.parse_args())
    run, word, output = options.pop("run"), options.pop("word"), options.pop("output")
    defaults = {name: parameter.default for name, parameter in inspect.signature(run).parameters.items()}
    chosen = {name: value for name, value in options.items() if value != defaults[name]}
    found = run(**options)
    origin = provenance(options.get("device", "cpu"), chosen)
    origin["command"] = origin["command"].replace(".py", f".py{word}", 1)
    result: Result = {}
    for result in [found] if isinstance(found, Mapping) else found:
        if output is not None:
            write_result(output, {"provenance": origin, **result})
    if output is None:
        print(json.dumps(result))


def add_options(parser: argparse.ArgumentParser, part: Callable[..., Any]) -> None:
    """Declare the arguments of a function as options, by their types: flags, choices, one value or several."""
    for name, parameter in inspect.signature(part, eval_str=True).parameters.items():
        default, kind, facts = parameter.default, parameter.annotation, {}
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true")
            continue
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            kind = next(each for each in typing.get_args(kind) if each is not type(None))
        if typing.get_origin(kind) in (tuple, list):
            facts["nargs"], kind = "+", typing.get_args(kind)[0]
        if typing.get_origin(kind) is typing.Literal:
            facts["choices"], kind = typing.get_args(kind), type(typing.get_args(kind)[0])
        required = default is inspect.Parameter.empty
        shown = None if required else f"default: {default}"
        parser.add_argument(f"--{name}", type=kind, default=default, required=required, help=shown, **facts)


def write_result(path: str | Path, content: Result) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


# ---- the clock


def timed(run: Callable[[], T], device: torch.device | str = "cpu") -> tuple[float, T]:
    """Return the seconds that a call takes, all work of the device included, and what it returns."""
    synchronize(device)
    started = time.perf_counter()
    found = run()
    synchronize(device)
    return time.perf_counter() - started, found


def synchronize(device: torch.device | str) -> None:
    """Wait until a device has done all its work."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def rotated(items: Sequence[T], turn: int) -> list[T]:
    first = turn % len(items)
    return [*items[first:], *items[:first]]


@dataclass(frozen=True)
class Call:
    """One call of `generate()`: new tokens of each row without padding, its time, and its rounds if drafted."""

    token_ids: list[list[int]]
    seconds: float
    rounds: Rounds | None
    passes: int = 0  # of the target, if they were counted

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.num_tokens


def decode(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seed: int = 0,
    assistant: Any = None,
    without_prefill: bool = False,
    count_passes: bool = False,
    **options: Any,
) -> Call:
    """Decode some prompts, padded on the left. `without_prefill` takes off the time of a call for a single token, and
    that token."""
    eos, pad = target.generation_config.eos_token_id, target.generation_config.pad_token_id
    pad = options.setdefault("pad_token_id", 0 if pad is None else pad)
    ends = set(eos if isinstance(eos, list) else [eos])
    width, device = max(map(len, prompts)), target.device
    ids = torch.tensor([[pad] * (width - len(row)) + [*row] for row in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
    inputs = {"attention_mask": mask, **options} | ({} if assistant is None else {"assistant_model": assistant})
    prefill = 0.0
    if without_prefill:
        prefill, _ = timed(lambda: target.generate(ids, **inputs | {"max_new_tokens": 1}), device)
    passes: list[int] = []
    hook = target.register_forward_hook(lambda *_: passes.append(1)) if count_passes else None
    torch.manual_seed(seed)
    seconds, output = timed(lambda: target.generate(ids, **inputs), device)
    if hook is not None:
        hook.remove()
    new = [ended(row, ends) for row in output[:, width + without_prefill :].tolist()]
    return Call(new, seconds - prefill, getattr(assistant, "last_stats", None), len(passes))


def ended(token_ids: list[int], ends: set[int | None]) -> list[int]:
    """Return the tokens up to the first one that ends a sequence."""
    last = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
    return token_ids[: last + 1]


def median_per_token(calls: Iterable[Call]) -> float:
    return statistics.median(call.seconds_per_token for call in calls)


def per_token_of_all(calls: Sequence[Call]) -> float:
    return sum(call.seconds for call in calls) / sum(call.num_tokens for call in calls)


def joined(calls: Iterable[Call]) -> Rounds:
    return Rounds.joined(call.rounds for call in calls)


# ---- ways to decode


@dataclass(frozen=True)
class Way:
    """A way to decode: plainly or with an assistant, which the call is given or which is attached; options of the
    draft and of `generate()`; and whether weights are packed."""

    assistant: Any = None
    policy: Policy | None = None  # the default one for `None`
    decoding: Mapping[str, Any] = field(default_factory=dict)  # other options of a draft
    options: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    attached: bool = False

    @contextmanager
    def entered(self, target: PreTrainedModel) -> Iterator[None]:
        """While entered, calls decode in this way, if they are given [`Way.given`]."""
        draft = self.assistant if isinstance(self.assistant, DraftModel) else None
        how = nullcontext() if draft is None else decoding(draft, self.policy, **self.decoding)
        assisting = attach(target, draft) if self.attached else nullcontext()
        models = [model for model in (target, self.assistant) if isinstance(model, nn.Module)]
        kernels = fast_linears(*models, packed=True) if self.packed else nullcontext()
        with kernels, how, assisting:
            yield

    @property
    def given(self) -> dict[str, Any]:
        """What [`decode`] is given."""
        return {"assistant": None if self.attached else self.assistant, **self.options}


def ways_of(
    draft: Any, policies: Mapping[str, Policy | None], device: torch.device | str = "cpu", compiled: bool = False
) -> dict[tuple[str, str | None], Way]:
    """Return plain decoding, and the draft under each policy: as users run them; on a CPU with packed weights, which
    are both baselines' kernels; and compiled, plain decoding by transformers with a static cache."""
    kinds = ["", *(["_packed"] if torch.device(device).type == "cpu" else []), *(["_compiled"] if compiled else [])]
    found: dict[tuple[str, str | None], Way] = {}
    for kind in kinds:
        packed, compiles = kind == "_packed", kind == "_compiled"
        found[f"plain{kind}", None] = Way(options=compiled_plain() if compiles else {}, packed=packed)
        for name, policy in policies.items():
            found[f"own{kind}", name] = Way(draft, policy, {"compile": compiles}, packed=packed)
    return found


def compiled_plain() -> dict[str, Any]:
    config = CompileConfig(mode="default" if not torch.cuda.is_available() else "reduce-overhead")
    config._compile_all_devices = True  # transformers does so by itself on GPUs alone
    return {"cache_implementation": "static", "compile_config": config}


def decode_in_turns(
    target: PreTrainedModel,
    ways: Mapping[K, Way],
    batches: Iterable[Sequence[Sequence[int]]],
    warm_up: int = 0,
    label: str = "",
    **options: Any,
) -> dict[K, list[Call]]:
    """Decode batches of prompts in every way, one after the other, beginning with another one each time; the place of
    a batch is its seed. Return the calls of each way, without the first `warm_up` of them."""
    calls: dict[K, list[Call]] = {key: [] for key in ways}
    for index, prompts in enumerate(tqdm(list(batches), desc=label)):
        for key in rotated(list(ways), index):
            with ways[key].entered(target):
                call = decode(target, prompts, **{"seed": index} | options | ways[key].given)
            calls[key] += [call] if index >= warm_up else []
    return calls


def by_way(calls: Mapping[tuple[str, str | None], list[Call]], policy: str | None) -> dict[str, list[Call]]:
    """Return the calls of one policy, and the plain ones, by the way's name."""
    return {way: found for (way, name), found in calls.items() if name in (None, policy)}


def identical(calls: Iterable[Call], others: Iterable[Call]) -> int:
    """Return how many rows have the same tokens."""
    pairs = zip(calls, others, strict=True)
    return sum(a == b for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=True))


def round_parts(rounds: Rounds) -> dict[str, float]:
    """Return what the parts of a round take, in milliseconds."""
    seconds = {"draft": rounds.draft_seconds, "verify": rounds.verify_seconds, "rest": rounds.rest_seconds}
    return {part: 1e3 * value / rounds.rounds for part, value in seconds.items()}


def speedups(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the speed-ups over plain `generate()` as users run it, of the draft with packed weights or compiled if
    that was measured, and over plain `generate()` in the same way."""
    own = seconds.get("own_packed", seconds["own"])
    found = {"speedup": seconds["plain"] / own}
    if "own_compiled" in seconds:
        found |= {"speedup_compiled": seconds["plain"] / seconds["own_compiled"]}
        found |= {"speedup_over_compiled": seconds["plain_compiled"] / seconds["own_compiled"]}
    if "plain_packed" in seconds:
        found |= {"speedup_unpacked": seconds["plain"] / seconds["own"]}
        found |= {"speedup_same_kernels": seconds["plain_packed"] / own}
    return found


@contextmanager
def decoding(draft: Any, policy: Policy | None = None, **options: Any) -> Iterator[None]:
    """While entered, a draft is verified as a policy says: the default one for `None`."""
    before, draft.decoding = draft.decoding, DecodingOptions(policy, **options)
    try:
        yield
    finally:
        draft.decoding = before


def acceptance(
    target: PreTrainedModel, draft: Any, prompts: Iterable[Any], tokenizer: Any, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Return what whole blocks reach: `tau`, `acceptance` by position, and counts of prompts, rounds and tokens."""
    texts = [row["prompt"] if isinstance(row, Mapping) else row for row in prompts]
    found = evaluate(target, draft, {"prompts": texts}, tokenizer, batch_size=32, seed=seed, **options)
    if found.failed:
        raise ValueError(f"{len(found.failed)} prompts failed; the first: {found.failed[0].error}")
    metrics = asdict(found.metrics["prompts"])
    rates = [None if rate is None else round(rate, 4) for rate in metrics["acceptance"]]
    counts = {name: metrics[name] for name in ("prompts", "rounds", "tokens")}
    return {"tau": round(metrics["tau"], 4), "acceptance": rates, **counts}


# ---- models and prompts


def load_target(folder: Path, dtype: str = "float32") -> tuple[PreTrainedModel, Any]:
    """Return a target and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)


def load_pair(dtype: str = "float32", folder: Path = PAIR) -> tuple[PreTrainedModel, DSparkDraftModel, Any]:
    """Return target, draft and tokenizer of the shipped pair, or of one in another folder's `target` and `draft`."""
    target, tokenizer = load_target(folder / "target", dtype)
    return target, DSparkDraftModel.from_pretrained(folder / "draft", dtype=dtype).eval(), tokenizer


def growth_of_peak(run: Callable[[], T], device: torch.device | str = "cpu") -> tuple[int, T]:
    """Return by how many bytes the peak of this process exceeds what it held before a call, and what that returns."""
    if torch.device(device).type == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = run()
        return torch.cuda.max_memory_allocated() - held, found
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    held = resident("VmRSS")
    found = run()
    return resident("VmHWM") - held, found


def resident(name: str) -> int:
    """Return a field of this process's status in bytes: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def in_process(*words: Any) -> Any:
    """Return what another part prints that runs in a process of its own."""
    done = subprocess.run(map(str, (sys.executable, *words)), check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def random_pair(
    geometry: str, dtype: str, device: str = "cpu", rehearse: bool = False
) -> tuple[PreTrainedModel, DSparkDraftModel]:
    """Return a target of one of the [`GEOMETRIES`] and a draft of the released layout, with random weights, which take
    the same time. `rehearse` makes both tiny, to try a script."""
    facts = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
    facts |= GEOMETRIES[geometry] | (REHEARSAL if rehearse else {})
    config_class = Qwen3_5TextConfig if "linear_num_key_heads" in facts else Qwen3Config
    config = config_class(**facts, tie_word_embeddings=geometry not in UNTIED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            target = AutoModelForCausalLM.from_config(config).eval()
            layers = {"num_hidden_layers": 1 if rehearse else 5, "block_size": 7}
            draft = DSparkDraftModel(DSparkConfig.from_target(config, **layers)).eval()
    finally:
        torch.set_default_dtype(before)
    target.generation_config.eos_token_id = None
    return target.to(device), draft.to(device)  # what was made elsewhere all the same


def held_out_prompts(count: int | None = None) -> list[str]:
    """Return the shipped prompts, 50 at most: questions of GSM8K's test file that no fit has seen."""
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines][:count]


def held_out_ids(tokenizer: PreTrainedTokenizerBase, count: int | None = None) -> list[list[int]]:
    return [tokenizer(prompt)["input_ids"] for prompt in held_out_prompts(count)]


def calibration_prompts(test_file: str, count: int) -> list[str]:
    """Return evenly spread prompts from GSM8K's test file that are not among the held-out ones."""
    questions = [json.loads(line)["question"] for line in Path(test_file).read_text().splitlines()]
    reserved, prompts = set(held_out_prompts()), [f"Question: {question}\nAnswer:" for question in questions]
    others = [prompt for prompt in prompts if prompt not in reserved]
    return others[:: max(1, len(others) // count)][:count]


# ---- replayed acceptance


def recorded_acceptance() -> list[int]:
    """Return how many drafts each recorded round of the shipped pair accepted at temperature 1."""
    recording = json.loads((RESULTS / "pair_rounds.json").read_text())
    return [number for request in recording["requests"] for number in request["accepted"]]


def representative(accepted: Sequence[int], tokens: int, rows: int, seed: int) -> list[int]:
    """Return recorded rounds in random order that give each row so many tokens, and have the mean of all."""
    count = max(1, rows * round(tokens / (1 + statistics.mean(accepted))))
    ordered, source = sorted(accepted), random.Random(seed)
    place = source.random()  # the same in each part: otherwise the mean would vary
    chosen = [ordered[int((part + place) * len(ordered) / count)] for part in range(count)]
    source.shuffle(chosen)
    return chosen


@contextmanager
def replaying(rounds: Sequence[int]) -> Iterator[None]:
    """While entered, the loop does all its work and then accepts as many drafts of its chains as recorded rounds did,
    which the requests of a batch take in turn. Random weights accept nothing by themselves."""
    honest, recorded = decoding_loop.verify, itertools.cycle(rounds)

    def verify(drafts: Any, *args: Any) -> Verified:
        verified = honest(drafts, *args)
        if drafts.token_ids.shape[1] == 0:
            return verified
        lengths = drafts.lengths.to(verified.num_accepted.device)
        accepted = torch.tensor([next(recorded) for _ in range(len(lengths))], device=lengths.device)
        return replace(verified, num_accepted=accepted.minimum(lengths))

    decoding_loop.verify = verify
    try:
        yield
    finally:
        decoding_loop.verify = honest
