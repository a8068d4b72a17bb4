"""More prompts than fit in a batch: a queue keeps the decoding loop full, results come as they finish.
A prompt that fails, fails alone. When memory runs out, the youngest sequences go back to the queue."""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from ..data.prompts import as_chat, several, token_ids
from ..data.prompts import read_prompt as as_prompt
from ..models.auto import require_pair
from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache
from ..scheduling.options import DecodingOptions
from ..targets.support import TargetSupport
from ..targets.transformers_api import CACHE_ARGUMENTS
from .call import effective_config, make_request
from .conversation import read_prompt
from .drafter import Drafter
from .hook import prepare_with
from .logits_processing import NoTokenError
from .loop import DecodingLoop
from .request import Call, Request, copies_of


@dataclass(frozen=True)
class Completion:
    """What became of one prompt."""

    index: int  # of the prompt
    prompt: str | Sequence[int]
    token_ids: torch.Tensor  # `[n]`, generated up to and including the end, or until the prompt failed
    text: str | None = None  # the same decoded without special tokens; with a tokenizer
    error: Exception | None = None  # why it failed


@dataclass
class _Job:
    """A prompt on its way; its request once it is prepared."""

    index: int
    prompt: str | Sequence[int]
    request: Request | None = None
    prompt_length: int = 0
    error: Exception | None = None
    call: Call | None = field(default=None, repr=False)


def generate_many(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Iterable[str | Sequence[int]],
    processing_class: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    progress: bool = True,
    decoding: DecodingOptions | None = None,
    **generate_kwargs: Any,
) -> Iterator[Completion]:
    """Decode any number of prompts, `batch_size` at a time, and yield each as it finishes.

    A row that ends is filled from the queue at once. Each prompt is prepared by `target.generate()` itself, so all its
    options hold, and decodes as if it were alone.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        draft ([`DraftModel`]): Its draft.
        prompts (`Iterable`): Strings, token ids `[n]`, or messages; read as needed. Where the tokenizer has a chat
            template, a string is a user's message, unless it begins with a special token.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The tokenizer; needed for strings and stop strings.
        batch_size (`int`): Sequences decoded together at most.
        progress (`bool`): Whether to show a progress bar; none is shown where stderr is no terminal.
        decoding ([`DecodingOptions`], *optional*): How to decode. Default: `draft.decoding`.
        generate_kwargs: Options of `generate()`.

    Returns:
        An iterator over [`Completion`], in the order of finishing.

    Raises:
        ValueError: If `batch_size` is not positive, or an option does not fit many prompts.
        TypeError: If these are no target and no draft, or `prompts` is a single one.

    Example:

    ```python
    for done in generate_many(target, draft, prompts, tokenizer, batch_size=16, max_new_tokens=64):
        print(done.index, done.text if done.error is None else done.error)
    ```
    """
    require_pair(target, draft)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    several(prompts)
    for name in ("input_ids", "inputs", "inputs_embeds", "attention_mask", *CACHE_ARGUMENTS, "streamer"):
        if generate_kwargs.get(name) is not None:
            raise ValueError(f"generate_many makes {name} itself, prompt by prompt: drop it")
    prepare = prepare_with(draft, batch_size, decoding)
    queue = _Queue(target, prompts, processing_class, generate_kwargs | {"custom_generate": prepare})
    config = queue.prepare([0]).generation_config  # what is wrong with the options is wrong with every prompt
    if config.return_dict_in_generate or config.num_return_sequences != 1:
        raise ValueError(
            "generate_many yields one sequence per prompt: drop num_return_sequences and return_dict_in_generate"
        )
    return _run(queue, draft, batch_size, progress)


class _Queue:
    """Prepares prompts one by one; what could not go on comes first."""

    def __init__(
        self,
        target: PreTrainedModel,
        prompts: Iterable[str | Sequence[int]],
        tokenizer: PreTrainedTokenizerBase | None,
        generate_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.total = len(prompts) if isinstance(prompts, Sized) else None
        self._prompts = enumerate(prompts)
        self._returned: deque[_Job] = deque()
        self._options = generate_kwargs
        self._criteria = StoppingCriteriaList(self._options.pop("stopping_criteria", None) or [])
        self._processors = LogitsProcessorList(self._options.pop("logits_processor", None) or [])
        stop_strings = effective_config(target, self._options).stop_strings
        if stop_strings is not None:  # transformers keeps the tokenizer from custom methods
            if tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: pass it as processing_class")
            self._options.pop("stop_strings", None)
            if self._options.get("generation_config") is not None:
                self._options["generation_config"] = copy.deepcopy(self._options["generation_config"])
                self._options["generation_config"].stop_strings = None
            if target.generation_config.stop_strings is not None:
                self._options["stop_strings"] = None
            self._criteria.append(StopStringCriteria(tokenizer, stop_strings))

    def prepare(self, token_ids: Sequence[int]) -> Call:
        ids = torch.as_tensor(token_ids, dtype=torch.long, device=TargetSupport.of(self.target).input_device)
        own = {
            "stopping_criteria": StoppingCriteriaList(copies_of(self._criteria)),
            "logits_processor": LogitsProcessorList(copies_of(self._processors)),
        }
        return self.target.generate(ids[None], attention_mask=torch.ones_like(ids[None]), **own, **self._options)

    def take_back(self, running: list[_Job], leaving: list[_Job]) -> None:
        for job in leaving:
            running.remove(job)
            job.request.ended = False
            job.request.features.clear()  # the tokens will be prefilled again
        self._returned.extendleft(reversed(leaving))

    def take(self) -> _Job | None:
        """Return the next prompt, prepared or with its error; `None` when there is none."""
        if self._returned:
            return self._returned.popleft()
        index, prompt = next(self._prompts, (None, None))
        if index is None:
            return None
        job = _Job(index, prompt)
        try:
            self._prepare(job)
        except Exception as error:  # whatever is wrong with a prompt, the others go on
            job.error = error
        return job

    def _prepare(self, job: _Job) -> None:
        chat = as_chat(as_prompt(job.prompt, several_turns=False), self.tokenizer)
        job.call = self.prepare(token_ids(chat, self.tokenizer))
        prompt = read_prompt(job.call, 0, SlotCache())
        job.prompt_length = len(prompt.token_ids)
        job.request = make_request(job.call, 0, job.index, prompt)
        job.request.processors = LogitsProcessorList(_Guarded(rule, job) for rule in job.request.processors)
        job.request.stop_rule.guard(lambda criterion: _Guarded(criterion, job))


class _Guarded:
    """Calls a user's processor or criterion, and notes whose it was when it fails."""

    def __init__(self, inner: Callable, job: _Job) -> None:
        self._inner = inner
        self._job = job

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._inner(*args, **kwargs)
        except (MemoryError, torch.OutOfMemoryError):  # a shortage is not the prompt's fault
            raise
        except Exception as error:
            self._job.error = error
            raise


def _run(queue: _Queue, draft: DraftModel, batch_size: int, progress: bool) -> Iterator[Completion]:
    running: list[_Job] = []
    loop: DecodingLoop | None = None
    with tqdm(total=queue.total, disable=None if progress else True, unit="prompt") as bar:
        while True:
            new: list[_Job] = []
            while len(running) + len(new) < batch_size and (job := queue.take()) is not None:
                if job.error is not None:
                    bar.update()
                    yield _completion(job, queue.tokenizer)
                    continue
                new.append(job)
            if not running and not new:
                return
            if loop is None:
                target, call = queue.target, new[0].call
                caches = [SlotCache(batch_size) for _ in (target, draft)]
                loop = DecodingLoop(Drafter(target, draft, call, caches[1]), call, caches[0])
            running += new
            shortage = None
            try:
                if new:
                    chunk_size = new[0].call.generation_config.prefill_chunk_size
                    loop.admit([job.request for job in new], [job.request.token_ids for job in new], chunk_size)
                else:
                    loop.run_round()
            except (MemoryError, torch.OutOfMemoryError) as error:
                shortage = str(error)  # the error itself would keep the failed pass in memory
            except Exception as error:
                if isinstance(error, NoTokenError):
                    next(job for job in running if job.request.id == error.request_id).error = error
                if not any(job.error for job in running):
                    raise
                for job in running:
                    job.request.ended = job.request.ended or job.error is not None
                _return_unadmitted(queue, loop, running)
                loop.release_ended()
            if shortage is not None:
                batch_size = _make_room(queue, loop, running, shortage)
            for job in [job for job in running if job.request.ended]:
                running.remove(job)
                bar.update()
                yield _completion(job, queue.tokenizer)


def _return_unadmitted(queue: _Queue, loop: DecodingLoop, running: list[_Job]) -> int:
    """Put jobs back to the queue that failed to be admitted only because of others; return how many."""
    inside = {request.id for request in loop.requests}
    waiting = [job for job in running if job.request.id not in inside and not job.request.ended]
    queue.take_back(running, waiting)
    return len(waiting)


def _make_room(queue: _Queue, loop: DecodingLoop, running: list[_Job], shortage: str) -> int:
    """Send sequences back to the queue, the youngest first; return how many run together from now on."""
    num_waiting = _return_unadmitted(queue, loop, running)
    together = len(running) if num_waiting and running else (len(running) + num_waiting) // 2
    if together == 0:
        if not running:
            running.append(queue.take())
        hopeless, together = running[0], 1
        hopeless.error = MemoryError(f"prompt {hopeless.index} does not fit into memory alone: {shortage}")
        hopeless.request.ended = True
    leaving = running[together:]
    for job in leaving:
        job.request.ended = True
    loop.release_ended()
    queue.take_back(running, leaving)
    for cache in (loop.cache, loop.drafter.cache):
        cache.shrink(together)
    warnings.warn(f"out of memory: {together} sequences are decoded together from now on ({shortage})", stacklevel=2)
    return together


def _completion(job: _Job, tokenizer: PreTrainedTokenizerBase | None) -> Completion:
    if job.request is None:
        return Completion(job.index, job.prompt, torch.empty(0, dtype=torch.long), error=job.error)
    token_ids = job.request.token_ids[job.prompt_length :]
    text = None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)
    return Completion(job.index, job.prompt, token_ids, text, job.error)
