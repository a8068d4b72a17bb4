"""The decoding loop for any number of requests: draft, cut, verify, commit. A request that ends leaves it at once.
Every pass through the target is packed: it costs what its tokens cost, however uneven blocks and rows are."""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cpu import fast_linears
from ..models.modeling_draft import input_device
from ..models.slot_cache import SlotCache, SlotLayout
from ..sampling.block_verification import verify_block
from ..sampling.distributions import TokenDistribution, VerifiedBlock, draw, verify_greedily
from ..sampling.noise import BlockNoise
from ..sampling.trees import DraftTree, verify_tree, walk_greedily
from ..scheduling.rounds import RoundSeconds
from ..targets.feature_capture import FeatureCapture
from ..targets.int8_outliers import forget_groups, has_outliers, outliers_of_each
from ..targets.slot_attention import PackedTarget
from .drafter import Drafter, Proposal
from .logits_processing import BlockProcessor, Scores, require_token
from .outputs import Recording, TargetOutput
from .request import Call, Request


def _at_work(step: Callable[..., None]) -> Callable[..., None]:
    """Make the CPU's products fast for one step: between two, models are the caller's. Other threads wait."""

    @functools.wraps(step)
    def method(loop: "DecodingLoop", *args: Any) -> None:
        gradients = torch.is_grad_enabled()
        with loop._packed_target.lock:
            try:
                with torch.no_grad(), loop._fast_linears:
                    step(loop, *args)
            finally:  # for an interrupt while these are left
                loop._fast_linears.close()
                forget_groups()
                torch.set_grad_enabled(gradients)

    return method


class DecodingLoop:
    """Decodes requests together, each accepting its own number of tokens per round.

    Row i of the target's cache and of the drafter's belongs to `requests[i]`. Rows of requests that ended are kept if
    the recording wants them: `ended_rows`, by request id.
    """

    def __init__(
        self, target: PreTrainedModel, drafter: Drafter, call: Call, cache: SlotCache, record: Recording | None = None
    ) -> None:
        self.requests: list[Request] = []
        self.ended_rows: dict[int, int] = {}
        self.drafter = drafter
        self.cache = cache
        self.recording = record or Recording()
        self._keeps_some_logits = call.keeps_some_logits
        self._streamer = call.streamer
        self._processor = BlockProcessor(call.logits_processor, drafter.draft.config.vocab_size)
        self._capture = FeatureCapture(target, drafter.draft.config.target_layer_ids)
        self._packed_target = PackedTarget(target, self._capture)
        # accelerate would bring an index to another device than the head's; a number stays what it is.
        self._is_spread = len(set(getattr(target, "hf_device_map", {}).values())) > 1
        self._device = drafter.draft.device
        self._input_device = input_device(target.get_input_embeddings())
        self._has_outliers = has_outliers(target)
        self._fast_linears = fast_linears(target, drafter.draft)

    @_at_work
    def run_round(self) -> None:
        """One decoding round of all requests. DSpark Section 3.1 and Algorithm 1."""
        started = time.perf_counter()
        requests, noise = list(self.requests), self.drafter.noise(self.requests)
        proposal = self.drafter.propose(requests, noise)  # a parallel pass, draws from left to right, a cut
        verifying = time.perf_counter()
        output = self._forward(*self._packed_blocks(requests, proposal), verifying=True)
        verify_seconds = time.perf_counter() - verifying
        scores = self._process(requests, proposal, output.logits)
        verified = self._verify(proposal, scores, output.layout, noise)
        num_committed = self._commit(proposal, verified, scores, output)
        self.release_ended()
        seconds = RoundSeconds(len(requests), proposal.seconds, verify_seconds, time.perf_counter() - started)
        self.drafter.learn(requests, proposal, verified, num_committed, scores, seconds)

    def _packed_blocks(self, requests: Sequence[Request], proposal: Proposal) -> tuple[torch.Tensor, SlotLayout]:
        starts = tuple(request.anchor_position for request in requests)
        counts = tuple(1 + length for length in proposal.lengths.tolist())
        anchors = torch.cat([request.anchor for request in requests])
        if proposal.trees is not None:
            rows = zip(anchors.tolist(), proposal.trees, strict=True)
            tokens = [token for anchor, tree in rows for token in (anchor, *tree.token_ids)]
            parents = tuple((0, *tree.parents) for tree in proposal.trees)
            return torch.tensor(tokens, device="cpu"), SlotLayout(starts, counts, parents=parents)
        layout = SlotLayout(starts, counts)
        if proposal.block is None:
            return anchors, layout
        columns = torch.cat([anchors.to(self._device)[:, None], proposal.block.token_ids], dim=1)
        sent = torch.arange(columns.shape[1], device="cpu") <= proposal.lengths[:, None]
        return columns[sent.to(self._device)], layout

    def _forward(
        self, tokens: torch.Tensor, layout: SlotLayout, *, logits_at: Sequence[int] | None = None, verifying: bool
    ) -> TargetOutput:
        """Run packed tokens, ids `[T]` or embeddings `[T, d]`, through the target; logits at some of them, or at all.
        `verifying` says that these are blocks, not prompts: plain decoding would see them token by token."""
        inputs = {"input_ids" if tokens.dim() == 1 else "inputs_embeds": tokens.to(self._input_device)[None]}
        only_last = logits_at == [len(tokens) - 1]
        target_picks = self._keeps_some_logits and logits_at is not None and (only_last or not self._is_spread)
        if target_picks:
            inputs["logits_to_keep"] = 1 if only_last else torch.tensor(logits_at, device=self._input_device)
        elif self._keeps_some_logits:
            inputs["logits_to_keep"] = 0  # all of them
        # LLM.int8 looks for outliers in a whole prompt, but in each generated token by itself.
        outliers = outliers_of_each(() if verifying else layout.counts) if self._has_outliers else nullcontext()
        with outliers:
            outputs = self._packed_target(
                self.cache,
                layout,
                **inputs,
                position_ids=layout.position_ids(self._input_device),
                output_hidden_states=self.recording.wants_hidden_states,
            )
        logits = outputs.logits[0]
        if logits_at is not None and not target_picks:
            logits = logits[torch.tensor(logits_at, device=logits.device)]
        states = tuple(layer[0] for layer in outputs.hidden_states) if self.recording.wants_hidden_states else None
        features = self._capture.take(self._device, self.drafter.draft.dtype)[0]
        return TargetOutput(layout, logits.to(self._device), features, states)

    def _process(self, requests: Sequence[Request], proposal: Proposal, logits: torch.Tensor) -> Scores:
        """Process the target's logits after anchors and drafts, each after its own prefix."""
        prefixes = []
        if self._processor.reads_prefixes:
            for row, (request, length) in enumerate(zip(requests, proposal.lengths.tolist(), strict=True)):
                if proposal.trees is not None:
                    tree, anchor = proposal.trees[row], len(prefixes)
                    prefixes.append(request.prefix())
                    for place, parent in enumerate(tree.parents, start=1):
                        tokens = torch.tensor(tree.tokens(tree.path(place)), device="cpu")
                        prefixes.append(request.prefix(tokens, anchor + parent))
                    continue
                drafts = proposal.block.token_ids[row] if length else request.token_ids[:0]
                prefixes += [request.prefix(drafts[:count]) for count in range(1 + length)]
        return self._processor(logits, None, prefixes)

    def _verify(
        self, proposal: Proposal, scores: Scores, layout: SlotLayout, noise: BlockNoise | None
    ) -> VerifiedBlock:
        """Accept a prefix of each block, then draw from the residual, or the bonus token."""
        if proposal.trees is not None:
            return self._verify_trees(proposal.trees, scores, layout, noise)
        block, lengths = proposal.block, proposal.lengths.to(self._device)
        if block is None:
            return VerifiedBlock(lengths, _next_tokens(scores, noise))  # nothing was drafted: lengths are 0
        first_rows = torch.tensor(layout.first_tokens, device=self._device)
        if noise is None:
            return verify_greedily(block, lengths, scores.best(), first_rows)
        accept_uniforms = noise.accept_uniforms[:, : block.token_ids.shape[1]]
        return verify_block(block, lengths, scores.distribution(), first_rows, accept_uniforms, noise.next_uniforms)

    def _verify_trees(
        self, trees: Sequence[DraftTree], scores: Scores, layout: SlotLayout, noise: BlockNoise | None
    ) -> VerifiedBlock:
        spans = [slice(first, first + count) for first, count in zip(layout.first_tokens, layout.counts, strict=True)]
        if noise is None:
            best = scores.best().tolist()
            walks = [walk_greedily(tree, best[span]) for tree, span in zip(trees, spans, strict=True)]
            paths, following = [path for path, _ in walks], torch.tensor([token for _, token in walks], device="cpu")
        else:
            distribution, accept_uniforms = scores.distribution(), noise.accept_uniforms.tolist()
            walks = [
                verify_tree(*row)
                for row in zip(trees, (distribution[span] for span in spans), accept_uniforms, strict=True)
            ]
            paths, distributions = (
                [path for path, _ in walks],
                TokenDistribution.stack([each[None] for _, each in walks])[0],
            )
            following = draw(distributions, noise.next_uniforms)
        return VerifiedBlock(torch.tensor(list(map(len, paths)), device="cpu"), following, paths)

    def _commit(self, proposal: Proposal, verified: VerifiedBlock, scores: Scores, output: TargetOutput) -> list[int]:
        """Append what was verified up to each request's end; return how many tokens each one gained."""
        columns = [verified.num_accepted[:, None], verified.next_token_ids[:, None]]
        if proposal.block is not None:
            columns.append(proposal.block.token_ids)
        num_committed = []
        on_host = torch.cat(columns, dim=1).tolist()  # the round's one synchronisation
        for row, (accepted, following, *drafted) in enumerate(on_host):
            request, first = self.requests[row], output.layout.first_tokens[row]
            require_token(request.id, following)
            columns, tokens = range(1 + accepted), slice(first, first + 1 + accepted)
            if verified.paths is not None:
                drafted = proposal.trees[row].tokens(verified.paths[row])
                columns = [0, *verified.paths[row]]
                tokens = [first + column for column in columns]
            new_tokens = [*drafted[:accepted], following]
            if self.recording.wants_steps:
                self.recording.add(request.id, output.logits[tokens], scores[tokens], output.states_of(tokens))
            # What takes memory comes first: a shortage must not leave tokens that the cache does not know.
            self.cache.gather(row, columns)
            features = output.features[tokens]
            kept = request.commit(new_tokens, self.recording.scores.get(request.id, ()))
            self.recording.forget(request.id, len(new_tokens) - kept)
            # The old anchor and all but the last new token are in the cache now; the last one is the new anchor.
            self.cache.commit(row, kept)
            request.features.append(features[:kept])
            num_committed.append(kept)
            self._stream(new_tokens[:kept])
        return num_committed

    def _stream(self, new_tokens: list[int]) -> None:
        if self._streamer is not None:
            self._streamer.put(torch.tensor(new_tokens, device="cpu"))

    def release_ended(self) -> None:
        """Take ended requests out of the batch; the last rows fill their places in the caches."""
        for row in reversed(range(len(self.requests))):
            if not self.requests[row].ended:
                continue
            last = len(self.requests) - 1
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
            self.drafter.forget(self.requests[row].id)
            self.requests[row] = self.requests[last]
            self.requests.pop()

    @_at_work
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
        logits = self._read_prompts(requests, prompts, chunk_size or max(map(len, prompts)))
        self.drafter.statistics.prefill_seconds += time.perf_counter() - started
        scores = self._processor(logits, None, [request.prefix() for request in requests])
        tokens = _next_tokens(scores, self.drafter.noise(requests)).tolist()
        for request, token in zip(requests, tokens, strict=True):
            require_token(request.id, token)
        # All rows are in order before any criterion is asked: one that fails must not leave others unfinished.
        for request, prompt, token in zip(requests, prompts, tokens, strict=True):
            self.cache.commit(len(self.requests), len(prompt))
            self.requests.append(request)
            request.append([token])
        failed = None
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            self.recording.add(request.id, logits[row : row + 1], scores[row : row + 1])
            kept = self.recording.scores.get(request.id, ())
            try:
                request.ended = request.stop_rule.cut(request.token_ids, [token], request.max_length, kept)[1]
            except Exception as error:  # whatever a user's criterion does
                failed = failed or error
            else:
                self._stream([token])
        if failed is not None:
            raise failed
        self.release_ended()

    def _read_prompts(
        self, requests: Sequence[Request], prompts: Sequence[torch.Tensor], chunk_size: int
    ) -> torch.Tensor:
        """Run prompts through the target, and return the logits at the last position of each, `[R, V]`."""
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
            output = self._forward(torch.cat(parts), layout, logits_at=last, verifying=False)
            logits |= dict(zip(rows, output.logits, strict=True))
            for row in rows:
                requests[row].features.append(output.features[tokens[row]])
                self.recording.add_prompt(requests[row].id, output, tokens[row])
        return torch.stack([logits[row] for row in range(len(requests))])


def _next_tokens(scores: Scores, noise: BlockNoise | None) -> torch.Tensor:
    """Draw the token at each position from the target alone, `[n]`."""
    return scores.best() if noise is None else draw(scores.distribution(), noise.next_uniforms)
