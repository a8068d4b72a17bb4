"""A `generate()` call, the sequences that it decodes, and the rule by which each ends."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StopStringCriteria
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..models.slot_cache import SlotCache
from ..sampling.transfers import to_device
from ..scheduling.options import DecodingOptions
from ..scheduling.policies import Policy
from ..targets.support import TargetSupport
from ..targets.transformers_api import is_users, mask_width, pad_token_id, pop_cache
from .logits_processing import Prefix
from .reversible import FollowingProcessor, reversible

# Evaluated here, not called; a subclass may do anything, and is called.
KNOWN_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)
# Which tokens of a prompt are images, or of which kind they are.
TYPE_ARGUMENTS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
FIELDS = {"mask": "attention_mask", "embeds": "inputs_embeds", "streamer": "streamer"}  # arguments that a `Call` names


@dataclass(frozen=True)
class Call:
    """A `generate()` call, prepared by transformers and found feasible."""

    input_ids: torch.Tensor  # `[B, S]`, left-padded prompts; empty when given as embeddings
    logits_processor: LogitsProcessorList  # stateless, or reversible
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]  # other arguments of the target's `forward`
    policy: Policy
    max_drafts: int | None = None  # draft tokens per round at most, besides γ
    options: DecodingOptions = field(default_factory=DecodingOptions)  # their policy has been resolved to `policy`
    support: TargetSupport | None = None  # of its target, once it was checked
    mask: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    cache: Cache | None = None  # the user's own, or what an earlier call returned
    streamer: BaseStreamer | None = None

    @classmethod
    def of(cls, input_ids: torch.Tensor, prepared: dict[str, Any], **others: Any) -> "Call":
        """Sort what `generate()` passes to a decoding method."""
        names = ("logits_processor", "stopping_criteria", "generation_config")
        processors = (reversible(each, len(input_ids)) for each in prepared["logits_processor"])
        prepared = prepared | {"logits_processor": LogitsProcessorList(processors)}
        model_kwargs = {name: each for name, each in prepared.items() if name not in (*names, "assistant_model")}
        others |= {field: model_kwargs.pop(name, None) for field, name in FIELDS.items()}
        cache = pop_cache(model_kwargs)
        if is_users(cache) or isinstance(cache, SlotCache):  # any other one is new
            others["cache"] = cache
        # Plain decoding puts tokens after the prompts, and makes all of them int64.
        return cls(input_ids.long(), *(prepared[name] for name in names), model_kwargs, **others)

    @property
    def cached(self) -> int:
        """Columns that a cache holds already."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    @property
    def columns(self) -> int:
        """Columns of the prompts."""
        return (self.input_ids if self.embeds is None else self.embeds).shape[1]

    @property
    def width(self) -> int:
        """Columns of the whole, padded sequence that the mask is about; transformers drops one that is all ones."""
        return (mask_width(self.generation_config) or self.columns) if self.mask is None else self.mask.shape[1]

    @property
    def token_types(self) -> torch.Tensor | None:
        """Of the prompts of a target of texts alone, `[B, columns or width]`."""
        types = self.model_kwargs.get("token_type_ids")
        return None if types is None or self.support.is_multimodal else types.expand(len(self.input_ids), -1)

    @property
    def max_length(self) -> int:
        limits = [rule.max_length for rule in self.stopping_criteria if type(rule) is MaxLengthCriteria]
        return math.ceil(min([self.generation_config.max_length, *limits]))

    @property
    def pad_token_id(self) -> int | None:
        return pad_token_id(self.generation_config)

    @property
    def pads_ended_rows(self) -> bool:
        """Whether rows of a batch end one by one, as transformers asks: without an end token all end together."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.stopping_criteria)

    def leaves_to_rows(self, criterion: Any) -> bool:
        """Tell whether by this criterion a row's end depends on the row alone, and on no state."""
        kind = type(criterion)
        return kind in (MaxLengthCriteria, EosTokenCriteria) or (kind is StopStringCriteria and self.pads_ended_rows)

    @property
    def fills_users_cache(self) -> bool:
        """Whether `past_key_values` is the user's, and wanted back."""
        return is_users(self.cache)

    @property
    def keeps_some_logits(self) -> bool:
        """Whether the target's `forward` takes `logits_to_keep`: then transformers has set it."""
        return "logits_to_keep" in self.model_kwargs


class StopRule:
    """Tells at which token a request ends. Lengths and end-of-sequence ids are looked up, the time is asked for once a
    round. Any other criterion is called after every committed token, as plain decoding would, never after the end. It
    is shown the columns of a padded prompt, `[1, S]`, in place of the prompt's tokens."""

    def __init__(
        self, criteria: StoppingCriteriaList, columns: torch.Tensor | None = None, prompt_length: int = 0
    ) -> None:
        self._columns, self._prompt_length = columns, prompt_length
        eos = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
        self.eos_token_ids = {int(token) for ids in eos for token in ids.flatten()}
        self._times = [criterion for criterion in criteria if type(criterion) is MaxTimeCriteria]
        self._others = [criterion for criterion in criteria if type(criterion) not in KNOWN_CRITERIA]

    def guard(self, wrap: Callable) -> None:
        self._others = [wrap(criterion) for criterion in self._others]

    def cut(
        self, token_ids: torch.Tensor, new_tokens: Sequence[int], max_length: int, scores: Sequence[torch.Tensor] = ()
    ) -> tuple[int, bool]:
        """Return how many of the new tokens that end a sequence `[S]` stay, and whether it ends there. `scores` are
        the processed ones of all its tokens, `[V]` each, if they are kept."""
        before = token_ids.shape[0] - len(new_tokens)
        for count, token in enumerate(new_tokens, start=1):
            length, left_out = before + count, len(new_tokens) - count
            ends = token in self.eos_token_ids or length >= max_length
            if self._others:
                ends |= self._any_other(token_ids[None, :length], scores[: len(scores) - left_out])
            if ends:
                return count, True
        return len(new_tokens), any(bool(torch.as_tensor(time(token_ids[None], None)).all()) for time in self._times)

    def _any_other(self, prefix: torch.Tensor, scores: Sequence[torch.Tensor]) -> bool:
        kept = tuple(score[None] for score in scores) if scores else None
        if self._columns is not None:
            prefix = torch.cat([self._columns, prefix[:, self._prompt_length :]], dim=1)
        # Each is called, as transformers does: a criterion may count its calls.
        return bool(torch.stack([answer_of(criterion, prefix, kept) for criterion in self._others]).any())


def answer_of(criterion: Any, token_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """Ask a criterion about rows `[R, S]`; returns whether each is done, `[R]`. One answer is for all of them."""
    answer = torch.as_tensor(criterion(token_ids, scores)).flatten().bool().cpu()
    if len(answer) not in (1, len(token_ids)):
        name, rows = type(criterion).__name__, len(token_ids)
        raise ValueError(f"a stopping criterion answered for {len(answer)} rows and was given {rows} ({name})")
    return answer.expand(len(token_ids))


class BatchRule:
    """Criteria of several rows, asked about all of them together, one step after the other, as plain decoding asks:
    they may answer for the whole batch, and keep state. A row that is ahead waits for no other, and is cut if it was
    to end earlier.

    As in plain decoding, rows that are done go on until all are where no end-of-sequence token is known.
    """

    def __init__(self, call: Call, requests: Sequence["Request"]) -> None:
        criteria = call.stopping_criteria if len(requests) > 1 else ()
        self._pads = call.pads_ended_rows
        self._criteria = [criterion for criterion in criteria if not call.leaves_to_rows(criterion)]
        self._requests, self._input_ids, self._pad_token_id = requests, call.input_ids, call.pad_token_id or 0
        self._prompts = [request.length for request in requests]
        self._done: set[int] = set()
        self._asked = 0

    def ask(self, scores: Mapping[int, Sequence[torch.Tensor]], end: Callable[["Request", int], None]) -> None:
        """Ask about each step that all rows have reached by now; `end` is called with a request and the length at
        which it ends. `scores` are as for [`StopRule`], by request id."""
        while self._criteria and self._asked < self._reached():
            self._asked += 1
            step = self._step(scores)
            answers = [answer_of(criterion, *step) for criterion in self._criteria]
            self._done |= set(torch.stack(answers).any(dim=0).nonzero()[:, 0].tolist())
            over = {row for row, each in enumerate(self._requests) if each.ended and self._new(row) <= self._asked}
            all_done = len(over | self._done) == len(self._requests)
            for row, request in enumerate(self._requests):
                if row not in over and (all_done or (self._pads and row in self._done)):
                    end(request, self._prompts[row] + self._asked)

    def _new(self, row: int) -> int:
        return self._requests[row].length - self._prompts[row]

    def _reached(self) -> int:
        going = [self._new(row) for row, request in enumerate(self._requests) if not request.ended]
        return min(going, default=max(map(self._new, range(len(self._requests)))))

    def _step(
        self, scores: Mapping[int, Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        stretches = zip(self._requests, self._prompts, strict=True)
        new = [request.token_ids[first : first + self._asked] for request, first in stretches]
        new = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=self._pad_token_id)
        token_ids = torch.cat([self._input_ids, new.to(self._input_ids.device)], dim=1)
        if not scores:
            return token_ids, None
        rows = [torch.stack(list(scores[request.id])) for request in self._requests]
        return token_ids, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)[:, : self._asked].unbind(dim=1)


@dataclass
class Request:
    """One sequence that is being decoded."""

    id: int  # key of its noise, distinct among all requests of a call
    token_ids: torch.Tensor  # `[S]`, prompt and committed tokens; the last one is the anchor
    max_length: int  # tokens at which it ends
    processors: LogitsProcessorList  # as for this sequence alone
    stop_rule: StopRule
    hidden_prompt: int = 0  # prompt positions that have no id in `token_ids`
    earlier_ids: torch.Tensor | None = None  # their ids, if known
    token_types: torch.Tensor | None = None  # of the prompt's tokens that are fed; later ones are of the last type
    blocks: int = 0  # drawn so far: the counter of its noise
    # Tapped target layers of committed tokens that the draft has not seen, `[n, m*d]` each; the anchor excluded.
    features: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False
    streamer: BaseStreamer | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.token_ids)
        self._following = [each for each in self.processors if isinstance(each, FollowingProcessor)]

    @property
    def length(self) -> int:
        return self.token_ids.shape[0]

    @property
    def anchor(self) -> torch.Tensor:
        return self.token_ids[-1:]

    @property
    def anchor_position(self) -> int:
        """Position of the anchor, which is the number of committed slots in the target's cache."""
        return self.hidden_prompt + self.length - 1

    def types_of(self, first: int, count: int) -> torch.Tensor:
        """Return the types of tokens, counted from the first one that is fed."""
        last = len(self.token_types) - 1
        places = min(first, last) + torch.arange(count, device=self.token_types.device)
        return self.token_types[places.clamp(max=last)]

    def append(self, new_tokens: Sequence[int]) -> None:
        self.token_ids = self._with(new_tokens)
        self.blocks += 1

    def commit(self, new_tokens: Sequence[int], scores: Sequence[torch.Tensor] = ()) -> int:
        """Add tokens up to the sequence's end, and return how many were added; none if a criterion raises."""
        longer = self._with(new_tokens)
        kept, self.ended = self.stop_rule.cut(longer, new_tokens, self.max_length, scores)
        self.token_ids = longer[: self.length + kept]
        self.blocks += 1
        return kept

    def prefix(self, drafts: Sequence[int] = (), parent: int | None = None) -> Prefix | None:
        """Return what stands before the position after some drafts; `None` if the sequence ends among them. `parent`
        is the position after all drafts but the last, where that may have forbidden it."""
        is_full = self.length + len(drafts) >= self.max_length
        if drafts and (is_full or not self.stop_rule.eos_token_ids.isdisjoint(drafts)):
            return None
        return Prefix(self._with(drafts)[None], self.processors, parent)

    def forced(self, drafts: Sequence[int], most: int) -> list[int]:
        """Return the tokens after some drafts that are the only possible ones, at most so many."""
        prefix = self._with(drafts)[None] if self._following else None
        return next((found for each in self._following if (found := each.forced(prefix, most))), [])

    def last_ids(self, count: int) -> torch.Tensor:
        """Return the last committed tokens, the anchor included, `[count]`; 0 where the id is not known."""
        hidden = count - self.length
        if hidden <= 0:
            return self.token_ids[self.length - count :]
        earlier = self.token_ids.new_zeros(hidden) if self.earlier_ids is None else self.earlier_ids[-hidden:]
        return torch.cat([earlier.to(self.token_ids.device), self.token_ids])

    def _with(self, more: Sequence[int]) -> torch.Tensor:
        return torch.cat([self.token_ids, to_device(more, self.token_ids.device, self.token_ids.dtype)])
