"""Beginnings of prompts that a queue has read before: they are copied into its caches, and not computed again."""

import weakref
from collections.abc import Sequence

import torch

from ..models.slot_cache import SlotCache, is_shortage
from ..targets.support import TargetSupport
from .conversation import Conversation, continued, num_equal, restore_context
from .loop import DecodingLoop
from .request import Request

WORTHWHILE = 32  # tokens; fewer are read again as fast


class PrefixMemory:
    """What targets and drafts have computed of the latest sequences, for later prompts that begin like them.

    Targets with 8-bit outliers, with rotary tables that change with the length, or with indexed attention read anew.
    A recurrent layer cannot go back, so a sequence of its target is continued from the end alone. Where a prompt
    departs from an earlier one, it is read in two parts, and the states between them are kept for the next one.

    Of a target whose weights change, `clear` it. Who can measure how long a prompt takes can tell whether another one
    began like it.

    Args:
        max_bytes (`int`): Memory for keys, values and states. Sequences whose last use is longest ago leave it.

    Raises:
        ValueError: If that is negative.

    Example:

    ```python
    prefixes = PrefixMemory(2**30)
    for done in generate_many(target, draft, prompts, tokenizer, prefixes=prefixes, max_new_tokens=64):
        print(done.text)
    print(prefixes.num_reused, prefixes.num_bytes)
    ```
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be 0 or more, got {max_bytes}")
        self.max_bytes = max_bytes
        self.num_reused = 0  # tokens that were not computed again
        # One sequence each; the latest used stands last.
        self._rows: list[tuple[weakref.ref[TargetSupport], SlotCache]] = []

    @property
    def num_bytes(self) -> int:
        """What is used of `max_bytes`."""
        return sum(_bytes_of(kept) for _, kept in self._rows)

    def clear(self) -> None:
        self._rows.clear()

    def keep(self, loop: DecodingLoop, row: int, request: Request) -> None:
        """Keep what the caches hold of a row, in place of its beginnings that were kept before."""
        support, draft, length = loop.drafter.support, loop.drafter.draft, loop.cache.lengths[row]
        # Some targets read a prompt otherwise in two passes than in one.
        is_exact = not support.has_outliers and not support.rope_switches and loop.cache.can_copy(row)
        if length < WORTHWHILE or not is_exact or loop.drafter.has_given_up(request):
            return
        try:
            kept, of_draft = (cache.copy_of_row(row) for cache in (loop.cache, loop.drafter.cache))
            features = [part.clone() for part in request.features]
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            self.clear()
            return
        token_ids = request.token_ids[:length]
        kept.conversation = Conversation(of_draft, weakref.ref(draft), draft.dtype, [token_ids], [length], [features])
        if _bytes_of(kept) > self.max_bytes:
            return
        self._rows = [(of, each) for of, each in self._rows if of() is not None]
        if not loop.cache.row_states[row]:
            self._rows = [(of, kept) for of, kept in self._rows
                          if self._num_equal(loop, of, kept, token_ids) < kept.lengths[0]]  # fmt: skip
        self._rows.append((weakref.ref(support), kept))
        while self.num_bytes > self.max_bytes:
            self._rows.pop(0)

    def restore(self, loop: DecodingLoop, requests: Sequence[Request], chunk_size: int | None) -> list[torch.Tensor]:
        """Fill the rows after those in use with what is known of new requests; return the rest of their prompts."""
        parts = []
        for row, request in enumerate(requests, start=len(loop.requests)):
            loop.cache.clear(row)
            loop.drafter.cache.clear(row)
            loop.drafter.cache.offsets[row] = 0
            found, length, branch = self._find(loop, request.token_ids)
            if self._keep_running(loop, request.token_ids, length):
                found, length, branch = self._find(loop, request.token_ids)
            if found is not None:
                loop.cache.put_row(row, found, length)
                loop.drafter.cache.put_row(row, found.conversation.draft_cache)
                waiting = found.conversation.waiting_features[0]
                restore_context(loop.cache, loop.drafter.cache, row, request, waiting)
                self.num_reused += length
            parts.append(request.token_ids[length:branch])
        first = len(loop.requests)
        if any(map(len, parts)):
            loop.read(requests, parts, chunk_size)
        for row, (request, part) in enumerate(zip(requests, parts, strict=True), start=first):
            if len(part):
                loop.drafter.make_room(row, request, loop.cache.lengths[row])
                self.keep(loop, row, request)
        lengths = loop.cache.lengths[first : first + len(requests)]
        return [request.token_ids[length:] for request, length in zip(requests, lengths, strict=True)]

    def _keep_running(self, loop: DecodingLoop, token_ids: torch.Tensor, length: int) -> bool:
        """Keep a sequence that is being decoded, if it has more than a length in common with the tokens; tell so."""
        for row, request in enumerate(loop.requests):
            equal = num_equal(request.token_ids[:-1], token_ids)
            if equal >= length + WORTHWHILE and not loop.cache.row_states[row]:
                self.keep(loop, row, request)
                return True
        return False

    def _find(self, loop: DecodingLoop, token_ids: torch.Tensor) -> tuple[SlotCache | None, int, int]:
        """Return a sequence that begins like the tokens, how much of it can be used, and up to where the tokens should
        be read for later ones."""
        found, length, branch = None, 0, 0
        for place, (of, kept) in enumerate(self._rows):
            equal = self._num_equal(loop, of, kept, token_ids)
            usable = continued(0, equal, token_ids, kept)
            branch = max(branch, min(equal, len(token_ids) - 1))
            if usable >= max(WORTHWHILE, length):
                found, length, last = kept, usable, place
        if found is not None:
            self._rows.append(self._rows.pop(last))
        return found, length, branch if branch >= length + WORTHWHILE else length

    def _num_equal(
        self, loop: DecodingLoop, of: weakref.ref[TargetSupport], kept: SlotCache, token_ids: torch.Tensor
    ) -> int:
        conversation, draft = kept.conversation, loop.drafter.draft
        known = of() is loop.drafter.support and conversation.is_of(draft)
        return num_equal(conversation.token_ids[0], token_ids) if known else 0


def _bytes_of(kept: SlotCache) -> int:
    of_draft, features = kept.conversation.draft_cache, kept.conversation.waiting_features[0]
    return kept.num_bytes + of_draft.num_bytes + sum(part.nbytes for part in features)
