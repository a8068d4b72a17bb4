"""More prompts than fit in a batch: a queue keeps the decoding loop full, results come as they finish.
A prompt that fails, fails alone. When memory runs out, the youngest sequences go back to the queue."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from ..data.conversations import tokenizer_of
from ..data.prompts import FormError, as_chat, several, token_ids
from ..data.prompts import read_prompt as as_prompt
from ..models.auto import require_pair
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache
from ..scheduling.options import DecodingOptions
from ..targets.assistant_draft import as_draft
from ..targets.support import TargetSupport
from ..targets.transformers_api import CACHE_ARGUMENTS
from .attach import attachment_of
from .call import effective_config, make_request
from .conversation import read_prompt
from .drafter import Drafter
from .hook import cutoff_of, prepare_with
from .logits_processing import NoTokenError
from .loop import DecodingLoop
from .prefixes import PrefixMemory
from .request import Call, Request
from .reversible import reversible
from .user_objects import copies_of

MADE_HERE = ("input_ids", "inputs", "inputs_embeds", "attention_mask", *CACHE_ARGUMENTS, "assistant_model", "streamer")


@dataclass(frozen=True)
class Completion:
    """What became of one prompt."""

    index: int  # of the prompt
    prompt: str | Sequence[int]
    token_ids: torch.Tensor  # `[n]`, generated up to and including the end, or until the prompt failed
    text: str | None = None  # the same decoded without special tokens; with a tokenizer
    error: Exception | None = None  # why it failed


def generate_many(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    prompts: Iterable[str | Sequence[int]],
    processing_class: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    progress: bool = True,
    decoding: DecodingOptions | None = None,
    prefixes: PrefixMemory | None = None,
    **generate_kwargs: Any,
) -> Iterator[Completion]:
    """Decode any number of prompts, `batch_size` at a time, and yield each as it finishes.

    A row that ends is filled from the queue at once. Each prompt is prepared by `target.generate()` itself, so all its
    options hold, and decodes as if it were alone.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft (`PreTrainedModel`, *optional*): Its draft, or a causal LM with its tokenizer, see [`AssistantDraft`];
            `None` stands for the one that is attached.
        prompts (`Iterable`): Strings, token ids `[n]`, or messages; read as needed. Where the tokenizer has a chat
            template, a string is a user's message, unless it begins with a special token.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The tokenizer; needed for strings and stop strings.
        batch_size (`int`): Sequences decoded together at most.
        progress (`bool`): Whether to show a progress bar; none is shown where stderr is no terminal.
        decoding ([`DecodingOptions`], *optional*): How to decode. Default: `draft.decoding`.
        prefixes ([`PrefixMemory`], *optional*): What is known of earlier prompts, whose beginnings are not computed
            again; these prompts join it.
        generate_kwargs: Options of `generate()`.

    Returns:
        An iterator over [`Completion`], in the order of finishing.

    Raises:
        ValueError: If `batch_size` is not positive, an option does not fit many prompts, or (with the first result)
            the first prompt is none, or needs a tokenizer.
        TypeError: If these are no target and no draft, or `prompts` is a single one.

    Example:

    ```python
    for done in generate_many(target, draft, prompts, tokenizer, batch_size=16, max_new_tokens=64):
        print(done.index, done.text if done.error is None else done.error)
    ```
    """
    if draft is None and (attached := attachment_of(target)) is not None:
        draft, decoding = attached.draft, decoding or attached.decoding
    if draft is None:
        raise TypeError(
            "generate_many decodes by the rounds of a draft, got draft=None: pass one, or attach it. Without one, "
            "regenerate(target, ...) and evaluate(target, None, ...) decode lists of prompts"
        )
    draft = as_draft(draft, target)
    require_pair(target, draft)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    several(prompts)
    refuse_made_here("generate_many", target, generate_kwargs)
    cutoff = cutoff_of(target, generate_kwargs, generate_kwargs.get("generation_config"))
    options = generate_kwargs | {"custom_generate": prepare_with(draft, batch_size, decoding, cutoff)}
    completions = _Queue(target, draft, prompts, processing_class, batch_size, options, prefixes).run()
    if not progress:  # an interrupt must not leave the lock of all bars held
        return completions
    total = len(prompts) if isinstance(prompts, Sized) else None
    return iter(tqdm(completions, total=total, unit="prompt", disable=None))


def refuse_made_here(caller: str, target: PreTrainedModel, generate_kwargs: Mapping[str, Any], **cures: str) -> None:
    """Raise a `ValueError` for options of `generate()` that the caller makes itself: [`MADE_HERE`], several sequences
    per prompt, outputs as an object, and the names of `cures`, which say what to do instead."""
    config = effective_config(target, generate_kwargs)
    made = {name: generate_kwargs.get(name) is not None for name in (*MADE_HERE, *cures)}
    made["num_return_sequences"] = (config.num_return_sequences or 1) > 1
    made["return_dict_in_generate"] = config.return_dict_in_generate
    for name in [name for name, is_given in made.items() if is_given]:
        raise ValueError(f"{caller} makes {name} itself: {cures.get(name, 'drop it')}")


NONE_YET = object()  # in place of a prompt: the queue asks again after its next round, unless nothing runs


@dataclass(frozen=True)
class OwnPrompt:
    """A prompt whose length, processors and streamer are its own; what else it asks is as for all others."""

    token_ids: Sequence[int]
    options: Mapping[str, Any]  # of `generate()`
    streamer: BaseStreamer | None = None


@dataclass
class _Job:
    """A prompt on its way; its request once it is prepared."""

    index: int
    prompt: str | Sequence[int]
    request: Request | None = None
    prompt_length: int = 0
    error: Exception | None = None
    batch_size: int | None = None  # before the first shortage that it had a part in

    def guarded(self, rule: Callable) -> Callable:
        """Let a user's processor or criterion note whose it was when it fails; a shortage is no prompt's fault."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return rule(*args, **kwargs)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                self.error = error
                raise

        return call


class _Queue:
    """Prepares prompts one by one, and decodes them together; what could not go on comes first."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        prompts: Iterable[str | Sequence[int]],
        tokenizer: PreTrainedTokenizerBase | None,
        batch_size: int,
        options: dict[str, Any],
        prefixes: PrefixMemory | None,
    ) -> None:
        self._tokenizer = tokenizer = tokenizer_of(tokenizer)
        self._target, self._batch_size = target, batch_size
        self._prompts = enumerate(prompts)
        self._running: list[_Job] = []
        self._returned: deque[_Job] = deque()
        self._options = options
        self._criteria = StoppingCriteriaList(options.pop("stopping_criteria", None) or [])
        self._processors = LogitsProcessorList(map(reversible, options.pop("logits_processor", None) or []))
        if (stop_strings := effective_config(target, options).stop_strings) is not None:
            # transformers keeps the tokenizer from custom methods
            if tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: pass it as processing_class")
            self._criteria.append(StopStringCriteria(tokenizer, stop_strings))
            options["stop_strings"] = None
        call = self._prepare([0], {})  # what is wrong with the options is wrong with every prompt
        self._chunk_size = call.generation_config.prefill_chunk_size
        self._prefixes = prefixes
        drafter, on_end = Drafter(target, draft, call, SlotCache()), None if prefixes is None else self._keep
        self._loop = DecodingLoop(drafter, call, SlotCache(), on_end=on_end)

    def run(self) -> Iterator[Completion]:
        while True:
            new: list[_Job] = []
            while len(self._running) + len(new) < self._batch_size and (job := self._take()) is not None:
                if job.error is None:
                    new.append(job)
                else:
                    yield self._completion(job)
            if not self._running and not new:
                return
            self._running += new
            if (shortage := self._advance(new)) is not None:
                self._make_room(shortage)
            for job in [job for job in self._running if job.request.ended]:
                self._running.remove(job)
                yield self._completion(job)

    def _take(self) -> _Job | None:
        """Return the next prompt, prepared or with its error; `None` when there is none, at present or at all."""
        if self._returned:
            return self._returned.popleft()
        index, prompt = next(self._prompts, (None, None))
        if index is None or prompt is NONE_YET:
            return None
        job = _Job(index, prompt)
        try:
            if isinstance(prompt, OwnPrompt):
                ids, options = prompt.token_ids, prompt.options
            else:
                chat = as_chat(as_prompt(prompt, several_turns=False), self._tokenizer)
                ids, options = token_ids(chat, self._tokenizer), {}
            call = self._prepare(ids, options)
            read = read_prompt(call, 0, SlotCache())
            job.prompt_length = len(read.token_ids)
            job.request = make_request(call, 0, index, read)
            job.request.processors = LogitsProcessorList(map(job.guarded, job.request.processors))
            job.request.stop_rule.guard(job.guarded)
            if (streamer := getattr(prompt, "streamer", None)) is not None:
                streamer.put(call.input_ids)
                job.request.streamer = SimpleNamespace(put=job.guarded(streamer.put))
        except Exception as error:  # whatever is wrong with a prompt, the others go on
            if index == 0 and isinstance(error, FormError):  # with them all
                raise
            job.error = error
        return job

    def _prepare(self, token_ids: Sequence[int], own: Mapping[str, Any]) -> Call:
        ids = torch.as_tensor(token_ids, dtype=torch.long, device=TargetSupport.of(self._target).input_device)[None]
        options = self._options | {
            "stopping_criteria": StoppingCriteriaList(copies_of(self._criteria)),
            "logits_processor": LogitsProcessorList(copies_of(self._processors)),
        }
        return self._target.generate(ids, attention_mask=torch.ones_like(ids), **options | own)

    def _advance(self, new: Sequence[_Job]) -> str | None:
        """Admit new sequences, or run a round; return what an error says if memory runs out."""
        try:
            if new:
                for cache in (self._loop.cache, self._loop.drafter.cache):
                    if cache.num_rows < len(self._running):
                        cache.resize(min(self._batch_size, 2 * len(self._running)))
                requests = [job.request for job in new]
                prompts = [request.token_ids for request in requests]
                if self._prefixes is not None:
                    prompts = self._prefixes.restore(self._loop, requests, self._chunk_size)
                self._loop.admit(requests, prompts, self._chunk_size)
            else:
                self._loop.run_round()
        except (MemoryError, torch.OutOfMemoryError) as error:
            return str(error)  # the error itself would keep the failed pass in memory
        except Exception as error:
            if isinstance(error, NoTokenError):
                next(job for job in self._running if job.request.id == error.request_id).error = error
            failed = [job for job in self._running if job.error]
            if not failed:
                raise
            for job in failed:
                job.request.ended = True
            self._return_unadmitted()
            self._loop.release_ended()
        return None

    def _keep(self, loop: DecodingLoop, row: int, request: Request) -> None:
        if not any(job.batch_size for job in self._running):  # nothing was short
            self._prefixes.keep(loop, row, request)

    def _return_unadmitted(self) -> int:
        """Take back jobs that failed to be admitted only because of others; return how many."""
        inside = {request.id for request in self._loop.requests}
        waiting = [job for job in self._running if job.request.id not in inside and not job.request.ended]
        self._take_back(waiting)
        return len(waiting)

    def _take_back(self, leaving: list[_Job]) -> None:
        for job in leaving:
            self._running.remove(job)
            job.request.ended = False
            job.request.features.clear()  # the tokens will be prefilled again
        self._returned.extendleft(reversed(leaving))

    def _make_room(self, shortage: str) -> None:
        """Send sequences back to the queue, the youngest first; fewer run together from now on. A prompt that does
        not fit even alone fails, and as many as before its first shortage run together again."""
        for job in self._running:
            job.batch_size = job.batch_size or self._batch_size
        if self._prefixes is not None:
            self._prefixes.clear()
        num_waiting = self._return_unadmitted()
        together, hopeless = len(self._running), None
        if not (num_waiting and together):
            together = (together + num_waiting) // 2
        if together == 0:
            if not self._running:
                self._running.append(self._take())
            hopeless, together = self._running[0], 1
            hopeless.error = MemoryError(f"prompt {hopeless.index} does not fit into memory alone: {shortage}")
            hopeless.request.ended = True
        leaving = self._running[together:]
        for job in leaving:
            job.request.ended = True
        self._loop.release_ended()
        self._take_back(leaving)
        if hopeless is None:
            for cache in (self._loop.cache, self._loop.drafter.cache):
                cache.resize(together)
        else:  # the others need not be fewer; nothing is left in the caches
            together = hopeless.batch_size
            self._loop.cache, self._loop.drafter.cache = SlotCache(), SlotCache()
        self._batch_size = together
        told = f"out of memory: {together} sequences are decoded together from now on ({shortage})"
        warnings.warn(told, stacklevel=3)

    def _completion(self, job: _Job) -> Completion:
        if job.request is None:
            return Completion(job.index, job.prompt, torch.empty(0, dtype=torch.long, device="cpu"), error=job.error)
        token_ids = job.request.token_ids[job.prompt_length :]
        text = None if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return Completion(job.index, job.prompt, token_ids, text, job.error)
