"""The decoding loop for any number of requests: draft, cut, verify, commit. A request that ends leaves it at once.
Every pass through the target is packed: it costs what its tokens cost, however uneven blocks and rows are."""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..cpu import fast_linears
from ..models.slot_cache import SlotCache, SlotLayout
from ..sampling.drafts import Drafts, Verified
from ..sampling.noise import BlockNoise
from ..sampling.transfers import joined, to_device
from ..sampling.verification import next_tokens, verify
from ..scheduling.rounds import RoundSeconds
from ..targets import int8_outliers
from ..targets.feature_capture import FeatureCapture
from ..targets.int8_outliers import outliers_of_each
from ..targets.slot_attention import PackedTarget
from .drafter import Drafter
from .logits_processing import BlockProcessor, Prefix, require_token
from .outputs import Recording, TargetOutput
from .request import Call, Request


def _locked(step: Callable[..., None]) -> Callable[..., None]:
    """Run one step under `no_grad` with the draft's fast CPU GEMMs, holding the target's lock. Between steps the
    models are the caller's."""

    @functools.wraps(step)
    def method(loop: "DecodingLoop", *args: Any) -> None:
        gradients = torch.is_grad_enabled()
        with loop._packed_target.lock:
            try:
                # A cache may be continued outside of the caller's inference mode.
                with torch.inference_mode(False), torch.no_grad(), loop._draft_linears:
                    step(loop, *args)
            finally:  # for an interrupt while these are left
                loop._target_linears.restore()
                loop._draft_linears.restore()
                int8_outliers.restore()
                torch.set_grad_enabled(gradients)

    return method


class DecodingLoop:
    """Decodes requests together, each accepting its own number of tokens per round.

    Row i of the target's cache and of the drafter's belongs to `requests[i]`. Rows of requests that ended are kept if
    the recording wants them: `ended_rows`, by request id.
    """

    def __init__(
        self,
        drafter: Drafter,
        call: Call,
        cache: SlotCache,
        record: Recording | None = None,
        on_end: Callable[["DecodingLoop", int, Request], None] | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.ended_rows: dict[int, int] = {}
        self.drafter = drafter
        self.cache = cache
        self.recording = record or Recording()
        self._on_end = on_end  # called with a row that is about to be given up
        self._keeps_some_logits = call.keeps_some_logits
        self._processor = BlockProcessor(call.logits_processor, drafter.draft.config.vocab_size)
        support = drafter.support
        self._capture = FeatureCapture(support, drafter.draft.config.target_layer_ids)
        self._packed_target = PackedTarget(support, self._capture, drafter.compiled_target)
        # accelerate would bring an index to another device than the head's; a number stays what it is.
        self._is_spread = support.is_spread
        self._shares_keys = support.shares_keys
        self._device, self._dtype = drafter.device, drafter.dtype
        self._input_device = support.input_device
        self._has_outliers = support.has_outliers
        self._draft_linears = fast_linears(drafter.draft, support.lm_head)  # which it borrows
        self._target_linears = fast_linears(*support.leaf_modules)

    @_locked
    def run_round(self) -> None:
        """One decoding round of all requests. DSpark Section 3.1 and Algorithm 1."""
        started = time.perf_counter()
        requests, noise = list(self.requests), self.drafter.noise(self.requests)
        proposal = self.drafter.propose(requests, noise)  # a parallel pass, draws from left to right, a cut
        verifying = time.perf_counter()
        tokens, layout = self._packed(requests, proposal.drafts)
        output, verified = self._verify(proposal.drafts, noise, tokens, layout)
        overflows = layout.width > 1 and verified.has_nan
        if overflows:  # the NaN of a draft has spread to tokens that do not see it
            output, verified = self._verify(verified.drafts, noise, tokens, replace(layout, singly=True))
        verify_seconds = time.perf_counter() - verifying
        num_committed = self._commit(verified, output)
        if overflows:
            self.cache.clear_stale()
        self.release_ended()
        seconds = RoundSeconds(len(requests), proposal.seconds, verify_seconds, time.perf_counter() - started)
        self.drafter.learn(requests, proposal, verified, num_committed, seconds)

    def _verify(
        self, drafts: Drafts, noise: BlockNoise | None, tokens: torch.Tensor, layout: SlotLayout
    ) -> tuple[TargetOutput, Verified]:
        output = self._forward(tokens, layout, self._types(layout, self.requests), verifying=True)
        scores = self._processor(output.logits, None, self._prefixes(self.requests, drafts))
        return output, verify(drafts, scores, layout.first_tokens, noise, output.logits[:, 0])

    def _packed(self, requests: Sequence[Request], drafts: Drafts) -> tuple[torch.Tensor, SlotLayout]:
        """Return anchors and drafts of all rows, `[T]`, and the slots that they are written to."""
        starts = tuple(request.anchor_position for request in requests)
        counts = tuple(1 + length for length in drafts.lengths.tolist())
        tokens = drafts.packed(joined([request.anchor for request in requests]))
        return tokens, SlotLayout(starts, counts, parents=drafts.parents)

    def _types(self, layout: SlotLayout, requests: Sequence[Request], first: int = sys.maxsize) -> torch.Tensor | None:
        """Return the types of packed tokens, `[T]`, where the call gave some: those of a stretch of the prompts, or of
        all that comes after them."""
        if requests[0].token_types is None:
            return None
        stretches = zip(requests, layout.counts, strict=True)
        return joined([request.types_of(first, count) for request, count in stretches])

    def _prefixes(self, requests: Sequence[Request], drafts: Drafts) -> list[Prefix | None]:
        """Return what processors read before each packed token's successor, if any of them reads it."""
        prefixes = []
        for row, request in enumerate(requests if self._processor.reads_prefixes else ()):
            anchor = len(prefixes)
            for tokens, parent in drafts.prefixes(row):
                prefixes.append(request.prefix(tokens, None if parent is None else anchor + parent))
        return prefixes

    def _forward(
        self,
        tokens: torch.Tensor,
        layout: SlotLayout,
        types: torch.Tensor | None,
        *,
        logits_at: Sequence[int] | None = None,
        verifying: bool,
    ) -> TargetOutput:
        """Run packed tokens, ids `[T]` or embeddings `[T, d]`, through the target; logits at some of them, or at all.
        `verifying` says that these are blocks, not prompts: plain decoding would see them token by token."""
        inputs = {"input_ids" if tokens.dim() == 1 else "inputs_embeds": tokens.to(self._input_device)[None]}
        if types is not None:
            inputs["token_type_ids"] = types.to(self._input_device)[None]
        # By a number, a target whose layers share keys would compute features of these positions alone.
        only_last = logits_at == [len(tokens) - 1] and not self._shares_keys
        target_picks = self._keeps_some_logits and logits_at is not None and (only_last or not self._is_spread)
        if target_picks:
            inputs["logits_to_keep"] = 1 if only_last else to_device(logits_at, self._input_device)
        elif self._keeps_some_logits:
            inputs["logits_to_keep"] = 0  # all of them
        # LLM.int8 looks for outliers in a whole prompt, but in each generated token by itself.
        outliers = outliers_of_each(() if verifying else layout.counts) if self._has_outliers else nullcontext()
        linears = self._target_linears
        if self.drafter.compiled_target is None:  # whose graphs are of layers that are routed
            linears = linears.of_rows(len(tokens))
        with outliers, linears:
            outputs = self._packed_target(
                self.cache,
                layout,
                **inputs,
                position_ids=layout.position_ids(self._input_device),
                output_hidden_states=self.recording.wants_hidden_states,
            )
        logits = outputs.logits[0]
        if logits_at is not None and not target_picks:
            logits = logits[to_device(logits_at, logits.device)]
        states = self.recording.by_token(outputs.hidden_states, len(tokens))
        features = self._capture.take(self._device, self._dtype)[0]
        return TargetOutput(layout, logits.to(self._device), features, states)

    def _commit(self, verified: Verified, output: TargetOutput) -> list[int]:
        """Append what was verified up to each request's end; return how many tokens each one gained."""
        num_committed = []
        for row, (places, new_tokens) in enumerate(verified.drafts.accepted(verified)):
            request, first = self.requests[row], output.layout.first_tokens[row]
            require_token(request.id, new_tokens[-1])
            columns = [0, *places]
            tokens = slice(first, first + len(columns)) if columns[-1] == len(places) else [first + c for c in columns]
            if self.recording.wants_steps:
                self.recording.add(
                    request.id, output.logits[tokens], verified.scores[tokens], output.states_of(tokens)
                )
            # What takes memory comes first: a shortage must not leave tokens that the cache does not know.
            self.cache.gather(row, columns)
            features = output.features[tokens if isinstance(tokens, slice) else to_device(tokens, self._device)]
            kept = request.commit(new_tokens, self.recording.scores.get(request.id, ()))
            self.recording.drop(request.id, len(new_tokens) - kept)
            # The old anchor and all but the last new token are in the cache now; the last one is the new anchor.
            self.cache.commit(row, kept)
            self.drafter.keep(row, request, features[:kept], request.anchor_position)
            num_committed.append(kept)
            self._stream(request, new_tokens[:kept])
        return num_committed

    def _stream(self, request: Request, new_tokens: list[int]) -> None:
        for token in new_tokens if request.streamer is not None else ():  # one by one, as in plain decoding
            request.streamer.put(torch.tensor([token], device="cpu"))

    def end(self, request: Request, length: int) -> None:
        """End a request at an earlier length than it has reached, or at this one."""
        self.recording.drop(request.id, request.length - length)
        request.token_ids, request.ended = request.token_ids[:length], True
        rows = {each.id: row for row, each in enumerate(self.requests)} | self.ended_rows
        if (row := rows.get(request.id)) is not None:  # a state that cannot go back is read anew in the next turn
            self.cache.truncate(row, self.cache.reachable(row, min(request.anchor_position, self.cache.lengths[row])))
        self.release_ended()

    def release_ended(self) -> None:
        """Take ended requests out of the batch; the last rows fill their places in the caches."""
        for row in reversed(range(len(self.requests))):
            if not self.requests[row].ended:
                continue
            last = len(self.requests) - 1
            if self._on_end is not None:
                self._on_end(self, row, self.requests[row])
            for cache in (self.cache, self.drafter.cache):
                if self.recording.wants_rows:
                    cache.swap_rows(row, last)
                elif row == last:
                    cache.truncate(row, 0)
                else:
                    cache.move_row(last, row)
            if self.recording.wants_rows:
                self.ended_rows[self.requests[row].id] = last
            else:
                self.requests[row].features.clear()
            self.drafter.drop(self.requests[row])
            self.requests[row] = self.requests[last]
            self.requests.pop()

    @_locked
    def admit(
        self, requests: Sequence[Request], prompts: Sequence[torch.Tensor], chunk_size: int | None = None
    ) -> None:
        """Prefill new requests, in the rows after those in use, and draw the first token of each. `prompts` are their
        parts that are not cached, ids `[n]` or embeddings `[n, d]`; a pass gets `chunk_size` positions of each."""
        started = time.perf_counter()
        for row in range(len(self.requests), len(self.requests) + len(requests)):
            for cache in (self.cache, self.drafter.cache):
                if cache.lengths[row] == 0:  # it may hold an earlier sequence, or a part of one that was not admitted
                    cache.clear(row)
        found = self._read_prompts(requests, prompts, chunk_size or max(map(len, prompts)))
        logits = torch.stack([found[row] for row in range(len(requests))])
        self.drafter.statistics.prefill_seconds += time.perf_counter() - started
        scores = self._processor(logits, None, [request.prefix() for request in requests]).sure()
        tokens = next_tokens(scores, self.drafter.noise(requests)).tolist()
        for request, token in zip(requests, tokens, strict=True):
            require_token(request.id, token)
        # All rows are in order before any criterion is asked: one that fails must not leave others unfinished.
        for request, prompt, token in zip(requests, prompts, tokens, strict=True):
            self.cache.commit(len(self.requests), len(prompt))
            self.requests.append(request)
            request.append([token])
            self.drafter.make_room(len(self.requests) - 1, request, request.anchor_position)
        failed = None
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            self.recording.add(request.id, logits[row : row + 1], scores[row : row + 1])
            kept = self.recording.scores.get(request.id, ())
            try:
                request.ended = request.stop_rule.cut(request.token_ids, [token], request.max_length, kept)[1]
                self._stream(request, [token])
            except Exception as error:  # whatever a user's criterion or streamer does
                failed = failed or error
        if failed is not None:
            raise failed
        self.release_ended()

    @_locked
    def read(self, requests: Sequence[Request], parts: Sequence[torch.Tensor], chunk_size: int | None = None) -> None:
        """Prefill beginnings of prompts, ids `[n]`, in the rows after those in use, before `admit` gets the rest."""
        self._read_prompts(requests, parts, chunk_size or max(map(len, parts)))
        for row, part in enumerate(parts, start=len(self.requests)):
            self.cache.commit(row, len(part))

    def _read_prompts(
        self, requests: Sequence[Request], prompts: Sequence[torch.Tensor], chunk_size: int
    ) -> dict[int, torch.Tensor]:
        """Run prompts through the target, and return the logits at the last position of each, `[V]`."""
        first_row = len(self.requests)
        cached = self.cache.lengths[first_row : first_row + len(requests)]
        logits: dict[int, torch.Tensor] = {}
        for offset in range(0, max(map(len, prompts)), chunk_size):
            parts = [prompt[offset : offset + chunk_size] for prompt in prompts]
            starts = [start + min(offset, len(prompt)) for start, prompt in zip(cached, prompts, strict=True)]
            layout = SlotLayout(tuple(starts), tuple(map(len, parts)), first_row, is_prefill=True)
            rows = [row for row, part in enumerate(parts) if len(part)]
            tokens = {row: slice(layout.first_tokens[row], layout.first_tokens[row] + len(parts[row])) for row in rows}
            last = [tokens[row].stop - 1 for row in rows]
            types = self._types(layout, requests, offset)
            output = self._forward(joined(parts), layout, types, logits_at=last, verifying=False)
            logits |= dict(zip(rows, output.logits, strict=True))
            for row in rows:
                end = starts[row] + len(parts[row])
                self.drafter.keep(first_row + row, requests[row], output.features[tokens[row]], end)
                self.recording.add_prompt(requests[row].id, output, tokens[row])
        return logits
