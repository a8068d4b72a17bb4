"""A pytest plugin: repeats each plain `generate()` call of a test with drafts, and compares. See `make test-upstream`.

The test itself goes on with what its own call returned: what it passes is copied before, and random numbers are put
back after. The session fails if any repeated call differs, or ends in an error that is not this package's.
"""

import copy
import functools
import json
import os
import re
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

import hf_dspark
from hf_dspark.decoding.drafter import Drafter, Proposal
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.targets.support import TargetSupport

try:
    from .comparison import Expected, cache_of, differences, sequences_of
except ImportError:  # the plugin was named by its path
    from comparison import Expected, cache_of, differences, sequences_of

OUR_FOLDER = str(Path(hf_dspark.__file__).parent)
REFUSALS = (ValueError, TypeError, NotImplementedError)
FAULTS = ("different", "foreign error")
DRAFTS = ("draft", "prompt lookup")
SHARED = (torch.nn.Module, PreTrainedTokenizerBase)
TINY = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4}


@dataclass(frozen=True)
class Outcome:
    """Of one repeated call."""

    kind: str  # identical, tie, refused, transformers' loop, different, foreign error
    reason: str = ""
    draft: str = ""
    model: str = ""
    test: str = ""


@dataclass
class Repeater:
    """Repeats calls with drafts, and keeps what came of it."""

    path: str | None = None  # of a file that gets each outcome as it comes
    outcomes: list[Outcome] = field(default_factory=list)
    not_repeated: Counter[str] = field(default_factory=Counter)
    _at_work: bool = False
    _drafts: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            if self._at_work or not _is_plain(model, args, kwargs):
                return original(model, *args, **kwargs)
            try:
                given = _copied((args, kwargs))
            except Exception as error:  # whatever an argument does when it is copied
                self.not_repeated[f"{type(error).__name__}: {error}"] += 1
                return original(model, *args, **kwargs)
            result = original(model, *args, **kwargs)
            self._at_work = True
            try:
                with torch.random.fork_rng():
                    self.repeat(original, model, given, _copied(result))
            except Exception as error:  # of this plugin: the test goes on
                self.not_repeated[f"{type(error).__name__}: {error}"[:200]] += 1
            finally:
                self._at_work = False
            return result

        return generate

    def repeat(self, original: Callable[..., Any], model: PreTrainedModel, given: tuple, result: Any) -> None:
        """Repeat one call with each kind of draft, and once more without what would be refused."""
        self._compare(original, model, given, result)
        changes, one_row = _accepted(given[1]), _first_row(given)
        together = "cannot be decoded together" in self.outcomes[-len(DRAFTS)].reason
        for args, kwargs in ([given] if changes else []) + ([one_row] if together and one_row else []):
            changed = args, kwargs | _accepted(kwargs)
            try:
                args, kwargs = _copied(changed)
                result = original(model, *args, **kwargs)
            except Exception:  # what plain does not decode says nothing
                continue
            self._compare(original, model, changed, result)

    def _compare(self, original: Callable[..., Any], model: PreTrainedModel, given: tuple, result: Any) -> None:
        expected = _expected(model, given, result)
        for name in DRAFTS:
            outcome = self._outcome(original, model, given, expected, name)
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
            self.outcomes.append(replace(outcome, draft=name, model=type(model).__name__, test=test))
            if self.path is not None:
                with open(self.path, "a") as file:
                    file.write(json.dumps(asdict(self.outcomes[-1])) + "\n")

    def _outcome(
        self, original: Callable[..., Any], model: PreTrainedModel, given: tuple, expected: Expected, name: str
    ) -> Outcome:
        implementation = model.config._attn_implementation
        try:
            draft = self._draft(model, name)
            args, kwargs = _copied(given)
            with warnings.catch_warnings(record=True) as caught, _rigged(expected, enabled=name == "draft"):
                warnings.simplefilter("always")
                torch.manual_seed(0)
                found = original(model, *args, assistant_model=draft, **kwargs)
            wrong, ties = differences(expected, found)
            if wrong and not expected.scores and not expected.is_sampled:  # two tokens may be equally good
                args, kwargs = _copied(given)
                scored = original(model, *args, **kwargs | {"return_dict_in_generate": True, "output_scores": True})
                wrong, ties = differences(replace(expected, scores=scored.scores), found)
            if not wrong and not ties and not expected.is_sampled:
                wrong = list(_continued(original, model, given, draft, expected, found))
        except Exception as error:
            return _of_error(error)
        if model.config._attn_implementation != implementation:
            wrong.append("the target's attention stays switched")
        if wrong:
            return Outcome("different", "; ".join(wrong))
        told = [str(each.message) for each in caught if "transformers' assisted loop" in str(each.message)]
        if draft.last_stats is not None and draft.last_stats.loop == "transformers":
            reason = told[0] if told else "without a word"
            return Outcome("transformers' loop" if len(told) == 1 else "different", reason)
        if ties:
            return Outcome("tie")
        return Outcome("identical", "sampled: the shapes" if expected.is_sampled else "")

    def _draft(self, model: PreTrainedModel, name: str) -> Any:
        drafts = self._drafts.setdefault(model, {})
        if name not in drafts:
            if name == "prompt lookup":
                drafts[name] = hf_dspark.PromptLookup(model)
            else:
                torch.manual_seed(0)
                draft = hf_dspark.DSparkDraftModel(hf_dspark.DSparkConfig.from_target(model, **TINY)).eval()
                draft.decoding = hf_dspark.DecodingOptions(policy=hf_dspark.FullBlock())
                drafts[name] = draft.to(model.device, model.dtype)
        return drafts[name]

    # ---- the report

    @property
    def faults(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind in FAULTS]

    def table(self) -> Iterator[str]:
        """Yield the outcomes by kind and reason, numbers and names left out, and then each fault by its test."""
        counted = Counter((outcome.kind, _general(outcome)) for outcome in self.outcomes)
        for (kind, reason), count in sorted(counted.items(), key=lambda item: (item[0][0], -item[1])):
            yield f"{count:6}  {kind:18}  {reason}"
        yield f"{len(self.outcomes):6}  calls in all, of {len({outcome.model for outcome in self.outcomes})} classes"
        for reason, count in self.not_repeated.items():
            yield f"{count:6}  not repeated: {reason}"
        for outcome in self.faults:
            yield f"{outcome.kind.upper()} [{outcome.draft}] {outcome.test}: {outcome.reason}"


def _is_plain(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call is one of a decoder-only model by `generate()` itself, without an assistant."""
    others = ("assistant_model", "custom_generate", "prompt_lookup_num_tokens", "assistant_early_exit")
    is_decoder = isinstance(model, PreTrainedModel) and not getattr(model.config, "is_encoder_decoder", False)
    return is_decoder and len(args) < 7 and all(kwargs.get(name) is None for name in others)


def _accepted(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return other values for arguments that many tests pass and that are refused: padding on the right, say."""
    changes, mask = {}, kwargs.get("attention_mask")
    if (kwargs.get("num_beams") or 1) > 1:
        return {}
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask[:, -1].all()):
        changes["attention_mask"] = mask.flip(-1)
    if kwargs.get("output_attentions"):
        changes["output_attentions"] = False
    if kwargs.get("use_cache") is False:
        changes["use_cache"] = True
    return changes


def _first_row(given: tuple) -> tuple | None:
    """Return a call for the first row alone; `None` if it has one, or a cache of several."""
    args, kwargs = given
    inputs = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    if not isinstance(inputs, torch.Tensor) or len(inputs) < 2 or kwargs.get("past_key_values") is not None:
        return None

    def first(value: Any) -> Any:  # images of a row, too, if each row has as many
        is_of_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) % len(inputs) == 0
        return value[: len(value) // len(inputs)] if is_of_rows else value

    return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}


def _expected(model: PreTrainedModel, given: tuple, result: Any) -> Expected:
    sequences, option = sequences_of(result), functools.partial(_option, model, given[1])
    is_sampled = bool(option("do_sample")) or (option("num_beams") or 1) > 1
    prompt = _prompt_length(given, sequences)
    ends = option("eos_token_id")
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    lengths = []
    for row in sequences[:, prompt:].tolist():
        lengths.append(next((place + 1 for place, token in enumerate(row) if token in ends), len(row)))
    dtype = model.dtype if model.dtype in (torch.float16, torch.bfloat16) else torch.float32
    return Expected(result, getattr(result, "scores", None) or (), prompt, lengths, is_sampled, dtype)


def _option(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    """Return an option of generation as it holds for a call: its own, its configuration's, the model's."""
    sources = [kwargs, *(vars(each) for each in (kwargs.get("generation_config"), model.generation_config) if each)]
    return next((source[name] for source in sources if source.get(name) is not None), None)


def _prompt_length(given: tuple, sequences: torch.Tensor) -> int:
    args, kwargs = given
    for inputs in (args[0] if args else None, kwargs.get("inputs"), kwargs.get("input_ids")):
        if isinstance(inputs, torch.Tensor) and inputs.dim() == 2:
            return inputs.shape[1]
    return 0 if kwargs.get("inputs_embeds") is not None else 1  # the begin-of-sequence token


@contextmanager
def _rigged(expected: Expected, enabled: bool) -> Iterator[None]:
    """Let drafts propose plain's answer, with an error now and then: so tokens are accepted, and rejected."""
    if not enabled or expected.is_sampled:
        yield
        return
    propose, first_lengths, generator = Drafter.propose, {}, torch.Generator().manual_seed(0)

    def rigged(self: Drafter, requests: list, noise: Any) -> Proposal:
        proposal = propose(self, requests, noise)
        if not proposal.drafted:
            return proposal
        token_ids = proposal.drafts.token_ids.clone()
        for row, request in enumerate(requests):
            first = first_lengths.setdefault(request.id, request.length)
            coming = expected.generated(request.id)[1 + request.length - first :][: token_ids.shape[1]]
            token_ids[row, : len(coming)] = coming.clamp(min=0).to(token_ids.device)
        wrong = torch.rand(token_ids.shape, generator=generator).to(token_ids.device) > 0.8
        token_ids = torch.where(wrong, (token_ids + 1) % self.draft.config.vocab_size, token_ids)
        return replace(proposal, drafts=replace(proposal.drafts, token_ids=token_ids, rows=token_ids.tolist()))

    Drafter.propose = rigged
    try:
        yield
    finally:
        Drafter.propose = propose


def _continued(
    original: Callable[..., Any], model: PreTrainedModel, given: tuple, draft: Any, expected: Expected, found: Any
) -> Iterator[str]:
    """Let plain decoding go on from the cache of each call, and the draft from its own, and compare."""
    theirs, ours = cache_of(expected.result), cache_of(found)
    if ours is None or expected.prompt_length == 0:
        return
    sequences, mask = expected.sequences, _mask_of_all(model, given, expected)
    if bool((sequences < 0).any()) or mask is None:
        return
    options = {
        "max_new_tokens": 3, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0,
        "return_dict_in_generate": True, "output_scores": True, "attention_mask": mask,
    }  # fmt: skip
    name = TargetSupport.of(model).cache_argument
    padded = [length < max(expected.lengths) for length in expected.lengths]
    if any(padded):
        return
    try:
        known = {} if _is_read_over(theirs) else {name: copy.deepcopy(theirs)}
        result = original(model, sequences, **known, **_copied(options))
    except Exception:
        return  # plain cannot go on, either
    before = sequences.shape[1]
    after = Expected(result, result.scores, before, [result.sequences.shape[1] - before] * len(sequences), False,
                     expected.dtype)  # fmt: skip
    for who, assistant in (("plain", {}), ("draft", {"assistant_model": draft})):
        cache = copy.deepcopy(ours) if not isinstance(ours, SlotCache) else ours
        if isinstance(ours, SlotCache) and not assistant:
            if any(ours.row_states):
                continue  # refused by name: the states are not those of a DynamicCache
            cache = ours.to_dynamic_cache()
        try:
            again = original(model, sequences, **{name: cache}, **assistant, **_copied(options))
        except REFUSALS as error:
            if _is_ours(error):
                continue
            raise
        for wrong in differences(after, again)[0]:
            yield f"{who} goes on from the returned {type(ours).__name__}: {wrong}"


def _is_read_over(cache: Any) -> bool:
    """Tell whether plain decoding reads the whole text again over the states that a cache holds: it counts nothing."""
    try:
        return cache.get_seq_length() == 0
    except ValueError:  # of recurrent layers alone
        return True


def _mask_of_all(model: PreTrainedModel, given: tuple, expected: Expected) -> torch.Tensor | None:
    """Return the mask of a call and what it generated; `None` if plain has made it up from padding tokens."""
    prompt, pad = expected.sequences[:, : expected.prompt_length], _option(model, given[1], "pad_token_id")
    mask = given[1].get("attention_mask")
    if mask is None and pad is not None and bool((prompt == pad).any()):
        return None
    mask = torch.ones_like(prompt) if mask is None else mask.repeat_interleave(len(prompt) // len(mask), dim=0)
    missing = expected.sequences.shape[1] - mask.shape[1]
    return torch.cat([mask, mask.new_ones(len(mask), missing)], dim=1)


def _is_ours(error: Exception) -> bool:
    """Tell whether an error was raised by this package, and not by a call in it that went wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(OUR_FOLDER) and frames[-1].line.startswith("raise ")


def _of_error(error: Exception) -> Outcome:
    if isinstance(error, REFUSALS) and _is_ours(error):
        return Outcome("refused", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    ours = [place for place, frame in zip(places, frames, strict=True) if frame.filename.startswith(OUR_FOLDER)]
    return Outcome("foreign error", f"{type(error).__name__} at {places[-1]} from {ours[-1:]}: {error}"[:500])


def _general(outcome: Outcome) -> str:
    """Return a reason without what differs from call to call: numbers, and the name of the model."""
    reason = outcome.reason.partition("\n")[0] if outcome.kind in FAULTS else outcome.reason.replace("\n- ", " | ")
    reason = re.sub(r"\d+", "N", reason.replace(outcome.model, "MODEL") if outcome.model else reason)
    return re.sub(r"\[[N, ]*\]", "[N]", reason)[:240]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, BaseStreamer):
        raise TypeError("a streamer is not copied")
    if isinstance(value, SHARED) or isinstance(value, type) or callable(value) and not hasattr(value, "__dict__"):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {name: _copied(each) for name, each in value.items()}
    held = [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, SHARED)]
    return copy.deepcopy(value, {id(each): each for each in held})


# ---- pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="write what came of each repeated call to this file, one JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPEATER] = Repeater(config.getoption("--outcomes"))
    GenerationMixin.generate = config.stash[REPEATER].wrap(GenerationMixin.generate)


REPEATER = pytest.StashKey[Repeater]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the outcomes decide: a test that fails by itself says nothing about drafts."""
    repeater = session.config.stash[REPEATER]
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        failed = repeater.faults or not repeater.outcomes
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.section("calls repeated with a draft")
    for line in config.stash[REPEATER].table():
        terminalreporter.write_line(line)
