"""Turns of a conversation: what of a prompt an earlier call has left in a cache, and what this one leaves.
A returned cache carries a [`Conversation`]. Caches of plain `generate()` carry none, and are continued, too."""

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..models.modeling_draft import DraftModel
from ..models.slot_cache import SlotCache, layers_of
from .request import Call, Request


@dataclass(frozen=True)
class PromptRow:
    """One row of a call, without its padding."""

    columns: torch.Tensor  # where its positions, cached ones included, stand in the whole, padded sequence
    width: int  # columns of that sequence
    padding: int  # columns of `input_ids` that are not its own
    token_ids: torch.Tensor  # `[S]`; empty when it is given as embeddings alone
    fed: torch.Tensor  # ids `[n]` or embeddings `[n, d]` that the target has to see
    cached: int = 0  # positions before `fed`, in the cache already
    earlier_ids: torch.Tensor | None = None  # of positions that `token_ids` does not have, if known
    token_types: torch.Tensor | None = None  # of what is fed

    @property
    def length(self) -> int:
        return self.cached + len(self.fed)

    @property
    def hidden(self) -> int:
        """Positions of the prompt that have no id in `token_ids`."""
        return self.length - len(self.token_ids)

    def known_ids(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the ids of all positions, given those after the hidden ones; `None` if some are not known."""
        if self.hidden == 0:
            return token_ids
        return None if self.earlier_ids is None else torch.cat([self.earlier_ids.to(token_ids.device), token_ids])

    def columns_of(self, length: int) -> torch.Tensor:
        """Return the columns of the first positions, generated ones after the prompt included, `[length]`."""
        generated = self.width + torch.arange(max(0, length - len(self.columns)), device="cpu")
        return torch.cat([self.columns, generated])[:length]


def open_cache(given: Cache | None, batch_size: int) -> SlotCache:
    """Return the cache that a call decodes with: the given one if an earlier call returned it, else a new one."""
    if isinstance(given, SlotCache):
        num_rows = given.num_rows
    else:
        filled = [] if given is None else [*layers_of(given).values()]
        num_rows = filled[0].keys.shape[0] if filled else batch_size
    if num_rows != batch_size:
        raise ValueError(f"past_key_values holds {num_rows} sequences, the prompts are {batch_size}")
    if not isinstance(given, SlotCache):
        return SlotCache(batch_size)
    if given.conversation is None or given.conversation.in_progress:  # an earlier turn was interrupted
        given.reset()
    return given


def read_prompt(call: Call, row: int, cache: SlotCache) -> PromptRow:
    """Take one row out of its padding, and find out what of it is cached."""
    input_ids, embeds, types, given, width = call.input_ids, call.embeds, call.token_types, call.cache, call.width
    real = torch.ones(width, dtype=torch.bool, device="cpu") if call.mask is None else call.mask[row].bool().cpu()
    before, own = real[: width - call.columns], real[width - call.columns :]
    has_ids = input_ids.shape[1] == call.columns  # of embeddings, all are known or none
    token_ids = input_ids[row][own.to(input_ids.device)] if has_ids else input_ids[row]
    padding, columns = call.columns - int(own.sum()) if has_ids else 0, real.nonzero()[:, 0]
    cached, earlier_ids = int(before.sum()), None
    if len(before) > 0:  # only what is new was given
        if isinstance(given, SlotCache):
            earlier_ids = _earlier_ids(row, cached, cache)
        elif call.cached > 0:
            cache.take_row(given, row, before.nonzero()[:, 0])
        fed = token_ids
    else:
        if call.cached > 0 and given is not cache:  # the features are not known: the draft starts after it
            cache.take_row(given, row, real[: call.cached].nonzero()[:, 0])
            cached = cache.lengths[row]
        elif call.cached > 0:
            cached = _common_prefix(row, token_ids, cache) if embeds is None else _cached_columns(row, columns, cache)
        fed = token_ids[cached:] if embeds is None else embeds[row][own.to(embeds.device)][cached:]
    if types is not None:
        types = types[row, -call.columns :][own.to(types.device)][-len(fed) :]
    return PromptRow(columns, width, padding, token_ids, fed, cached, earlier_ids, types)


def _cached_columns(row: int, columns: torch.Tensor, cache: SlotCache) -> int:
    """Return how much is cached of a row that is given as embeddings: all that the latest call has left."""
    length, known = cache.lengths[row], cache.columns
    if known is None or length >= len(columns) or not torch.equal(known[row], columns[:length]):
        raise ValueError(
            f"past_key_values holds {length} tokens of sequence {row}, in other columns than those of the embeddings: "
            "pass embeddings and an attention_mask of the whole conversation with something new after it"
        )
    return length


def _earlier_ids(row: int, claimed: int, cache: SlotCache) -> torch.Tensor | None:
    """Return the cached ids of a row of which only what is new was given."""
    if claimed != cache.lengths[row]:
        raise ValueError(
            f"past_key_values holds {cache.lengths[row]} tokens of sequence {row}, the attention mask says {claimed} "
            "before the new ones: pass the whole conversation as input_ids instead"
        )
    return None if cache.conversation is None else cache.conversation.token_ids[row]


def _common_prefix(row: int, token_ids: torch.Tensor, cache: SlotCache) -> int:
    """Return how much is still true of a cached row, given the whole conversation."""
    if cache.lengths[row] == 0:
        return 0
    known = cache.conversation.token_ids[row]
    if known is None:
        raise ValueError(
            f"the tokens that past_key_values holds of sequence {row} are not known (they came as embeddings, or from "
            "another cache): pass only what is new, with an attention_mask over everything"
        )
    shortest, same = min(len(known), len(token_ids)), num_equal(known, token_ids)
    # The template may have dropped an answer's reasoning since. If less than half of the last prompt matches, this is
    # another conversation, or only the new turn was given.
    expected = min(len(token_ids), cache.conversation.prompt_lengths[row]) // 2
    if same < shortest and len(token_ids) < len(known) and same < expected:
        raise ValueError(
            f"past_key_values holds {len(known)} tokens of sequence {row}, and of the {len(token_ids)} given only the "
            f"first {same} are the same: for another conversation pass no past_key_values; to continue this one pass "
            "all of it, or only what is new with an attention_mask over everything"
        )
    return continued(row, same, token_ids, cache)


def num_equal(known: torch.Tensor, token_ids: torch.Tensor) -> int:
    """Return how many tokens two sequences have in common from the first one on."""
    shortest = min(len(known), len(token_ids))
    return int((known.to(token_ids.device)[:shortest] == token_ids[:shortest]).long().cumprod(dim=0).sum())


def continued(row: int, same: int, token_ids: torch.Tensor, cache: SlotCache) -> int:
    """Return how much of a cached row can be used for tokens of which so many are the same."""
    if same < cache.lengths[row]:
        same = max(0, same - 1)  # an autoregressive draft read the last one together with a token that is gone
    same = min(same, len(token_ids) - 1)  # at least one position has to give logits
    return cache.reachable(row, same)


def restore_context(
    cache: SlotCache, draft_cache: SlotCache, row: int, request: Request, waiting: Sequence[torch.Tensor]
) -> None:
    """Give a request what is left of its row's context in a draft's cache: what the target's cache still holds."""
    known, context = cache.lengths[row] - draft_cache.offsets[row], draft_cache.lengths[row]
    draft_cache.offsets[row] = min(draft_cache.offsets[row], cache.lengths[row])
    draft_cache.truncate(row, max(0, min(known, context)))
    if known > context:
        request.features.append(torch.cat([*waiting])[: known - context])


@dataclass
class Conversation:
    """What a call leaves to the next turn of its sequences, row by row, beside their keys and values."""

    draft_cache: SlotCache  # the draft's context of the same rows
    drafted_by: "weakref.ref[DraftModel]"  # whose context that is
    dtype: torch.dtype  # of that draft
    # The tokens in the committed slots, by which a later turn is recognised; `None` where they are not known.
    token_ids: list[torch.Tensor | None] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)  # how many of them were given with the latest call
    # Tapped target layers of committed tokens that are not in the draft's context yet.
    waiting_features: list[list[torch.Tensor]] = field(default_factory=list)
    in_progress: bool = False  # or interrupted: then it is not known what rows hold

    @classmethod
    def begin_turn(cls, cache: SlotCache, draft: DraftModel, requests: Sequence[Request]) -> "Conversation":
        """Give the requests what an earlier turn left of the draft's context, as far as its tokens are still there."""
        conversation = cache.conversation
        if conversation is None or not conversation.is_of(draft):
            draft_cache, of = SlotCache(cache.num_rows), weakref.ref(draft)
            draft_cache.offsets = list(cache.lengths)  # of a cache from elsewhere it never saw anything
            conversation = cache.conversation = cls(draft_cache, of, draft.dtype)
        conversation.in_progress, cache.columns = True, None
        draft_cache = conversation.draft_cache
        draft_cache.limit = cache.limit + draft.config.num_slots
        for row, request in enumerate(requests):
            waiting = conversation.waiting_features[row] if conversation.waiting_features else ()
            restore_context(cache, draft_cache, row, request, waiting)
        return conversation

    def is_of(self, draft: DraftModel) -> bool:
        return self.drafted_by() is draft and self.dtype == draft.dtype

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"drafted_by": type(None)}  # in another process it belongs to no draft

    def __deepcopy__(self, memo: dict[int, Any]) -> "Conversation":
        return Conversation(**copy.deepcopy(vars(self), memo))

    def end_turn(
        self, cache: SlotCache, rows: Mapping[int, int], requests: Sequence[Request], prompts: Sequence[PromptRow]
    ) -> None:
        """Bring the rows of both caches, given by request id, into the order of the prompts; note what they hold."""
        places = [rows[request.id] for request in requests]
        for place in range(len(places)):
            while places[place] != place:
                other = places[place]
                for each in (cache, self.draft_cache):
                    each.swap_rows(place, other)
                holder = places.index(place)
                places[place], places[holder] = place, other
        cache.columns = [prompt.columns_of(length) for prompt, length in zip(prompts, cache.lengths, strict=True)]
        self.token_ids = [
            prompt.known_ids(request.token_ids[:-1]) for request, prompt in zip(requests, prompts, strict=True)
        ]
        self.prompt_lengths = [prompt.length for prompt in prompts]
        self.waiting_features = [list(request.features) for request in requests]
        self.in_progress = False
