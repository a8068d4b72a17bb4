"""The decoding loop for any number of requests: draft, cut, verify, commit.

Every pass through the target is packed: it costs what its tokens cost, however unevenly the policy cut the blocks and
however long the rows are. A request that ends leaves the batch at once. Knows nothing of `generate()` or of how
requests come to be.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..cpu import fast_linears
from ..maths.noise import BlockNoise
from ..maths.sampling import VerifiedBlock, draw, verify_block, verify_greedily
from ..models.modeling_draft import input_device
from ..models.slot_cache import SlotCache, SlotLayout
from ..targets.int8_outliers import has_outliers, outliers_of_each
from ..targets.slot_attention import attending_by_slots, packed_pass
from .drafter import DSparkCandidateGenerator, Proposal
from .processing import Prefix, Scores
from .request import Request


@dataclass
class Recording:
    """What a call asked to get back besides tokens; one entry per generated token of each request, by its id.

    Args:
        wants_scores, wants_logits, wants_hidden_states (`bool`): What to keep.
    """

    wants_scores: bool = False
    wants_logits: bool = False
    wants_hidden_states: bool = False
    scores: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    # Of each pass, by layer, `[tokens, d]`; the prompt's first, then one entry per generated token.
    hidden_states: dict[int, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """What one packed forward pass through the target gave.

    Attributes:
        layout ([`SlotLayout`]): Where its tokens lie.
        logits (`torch.Tensor` of shape `[n, V]`): At the wanted tokens.
        features (`torch.Tensor` of shape `[T, m*d]`): Tapped layers.
        hidden_states (`tuple[torch.Tensor, ...]`, *optional*): Of all layers, `[T, d]` each.
    """

    layout: SlotLayout
    logits: torch.Tensor
    features: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None


class DecodingLoop:
    """Decodes requests together, each accepting its own number of tokens per round.

    Args:
        target (`PreTrainedModel`): The model that decodes.
        generator ([`DSparkCandidateGenerator`]): Drafts; has the draft's cache.
        cache ([`SlotCache`]): The target's; row i belongs to `requests[i]`.
        recording ([`Recording`], *optional*): Keeps scores and hidden states.
        keeps_rows (`bool`): Whether caches of requests that ended are needed afterwards.
        keeps_some_logits (`bool`): Whether the target's `forward` takes `logits_to_keep`.
        on_commit (`Callable`, *optional*): Is called with a request and its new tokens.

    Attributes:
        requests (`list[Request]`): Those that go on, in the order of the caches' rows.
        ended_rows (`dict[int, int]`): The cache row of each request that ended, by its id; with `keeps_rows`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        generator: DSparkCandidateGenerator,
        cache: SlotCache,
        recording: Recording | None = None,
        keeps_rows: bool = False,
        keeps_some_logits: bool = True,
        on_commit: Callable[[Request, list[int]], None] | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.ended_rows: dict[int, int] = {}
        self.generator = generator
        self.cache = cache
        self.recording = recording or Recording()
        self._target = target
        self._keeps_rows = keeps_rows
        self._keeps_some_logits = keeps_some_logits
        # accelerate would bring an index to another device than the head's; a number stays what it is.
        self._is_spread = len(set(getattr(target, "hf_device_map", {}).values())) > 1
        self._on_commit = on_commit
        self._device = generator.draft.device
        self._input_device = input_device(target.get_input_embeddings())
        self._has_outliers = has_outliers(target)
        self._fast_linears = fast_linears(target, generator.draft)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Switch and hook the target for one step: between two, it is the caller's."""
        with torch.no_grad(), attending_by_slots(self._target), self._fast_linears, self.generator:
            yield

    def run_round(self) -> None:
        """One decoding round of all requests. DSpark Section 3.1 and Algorithm 1."""
        self.generator.start_round()
        with self._at_work():
            self._run_round()

    def _run_round(self) -> None:
        requests, noise = list(self.requests), self.generator.noise(self.requests)
        for request in requests:
            request.make_room(self.generator.draft.config.block_size + 1)
        proposal = self.generator.propose(requests, noise)
        verified_pass = self._forward(self._block_ids(requests, proposal), self._block_layout(requests, proposal))
        scores = self._process(requests, proposal, verified_pass)
        verified = self._verify(proposal, scores, verified_pass.layout, noise)
        num_committed = self._commit(requests, proposal, verified, verified_pass, scores)
        self.release_ended()
        self._learn(requests, proposal, verified, scores, num_committed)

    def _block_layout(self, requests: Sequence[Request], proposal: Proposal) -> SlotLayout:
        counts = tuple(1 + length for length in proposal.lengths.tolist())
        return SlotLayout(tuple(request.anchor_position for request in requests), counts)

    def _block_ids(self, requests: Sequence[Request], proposal: Proposal) -> torch.Tensor:
        """Return anchor and scheduled drafts of each request, packed `[T]`."""
        anchors = torch.cat([request.anchor for request in requests])
        if proposal.block is None:
            return anchors
        columns = torch.cat([anchors.to(self._device)[:, None], proposal.block.token_ids], dim=1)
        sent = torch.arange(columns.shape[1], device="cpu") <= proposal.lengths[:, None]
        return columns[sent.to(self._device)]

    def _forward(self, token_ids: torch.Tensor, layout: SlotLayout, wanted: Sequence[int] | None = None) -> Pass:
        """Run packed tokens `[T]`, or embeddings `[T, d]`, through the target; logits at the `wanted` ones, or all."""
        packed = token_ids.to(self._input_device)[None]
        inputs = {"input_ids": packed} if token_ids.dim() == 1 else {"inputs_embeds": packed}
        wanted_last = wanted == [len(token_ids) - 1]
        picks = self._keeps_some_logits and wanted is not None and (wanted_last or not self._is_spread)
        if picks:
            inputs["logits_to_keep"] = 1 if wanted_last else torch.tensor(wanted, device=self._input_device)
        elif self._keeps_some_logits:
            inputs["logits_to_keep"] = 0  # all of them
        # As plain decoding would show them to 8-bit layers: a prompt whole, what follows token by token.
        together = () if wanted is None else layout.counts
        apart = outliers_of_each(together) if self._has_outliers else nullcontext()
        with packed_pass(self.cache, layout), apart:
            outputs = self._target(
                **inputs,
                position_ids=layout.position_ids(self._input_device),
                past_key_values=self.cache,
                use_cache=True,
                output_hidden_states=self.recording.wants_hidden_states,
                return_dict=True,
            )
        logits = outputs.logits[0]
        if wanted is not None and not picks:
            logits = logits[torch.tensor(wanted, device=logits.device)]
        hidden_states = outputs.hidden_states if self.recording.wants_hidden_states else None
        return Pass(
            layout,
            logits.to(self._device),
            self.generator.take_features()[0],
            None if hidden_states is None else tuple(states[0] for states in hidden_states),
        )

    def _process(self, requests: Sequence[Request], proposal: Proposal, verified_pass: Pass) -> Scores:
        """Process the target's logits at all positions, each behind its own prefix."""
        if self.generator.processor.reads_prefixes and proposal.block is not None:
            for request, drafts in zip(requests, proposal.block.token_ids, strict=True):
                request.token_ids[request.length : request.length + len(drafts)] = drafts
        lengths = proposal.lengths.tolist()

        def prefix_of(index: int) -> Prefix | None:
            row = 0
            while index > lengths[row]:
                index, row = index - lengths[row] - 1, row + 1
            return requests[row].prefix(index)

        return self.generator.processor(verified_pass.logits, None, prefix_of)

    def _verify(
        self, proposal: Proposal, scores: Scores, layout: SlotLayout, noise: BlockNoise | None
    ) -> VerifiedBlock:
        if proposal.block is None:
            tokens = scores.best() if noise is None else draw(scores.law(), noise.following)
            return VerifiedBlock(torch.zeros_like(tokens), tokens)
        lengths = proposal.lengths.to(self._device)
        first_rows = torch.tensor(layout.first_tokens, device=self._device)
        if noise is None:
            return verify_greedily(proposal.block, lengths, scores.best(), first_rows)
        return verify_block(proposal.block, lengths, scores.law(), first_rows, noise.coins, noise.following)

    def _commit(
        self, requests: Sequence[Request], proposal: Proposal, verified: VerifiedBlock, done: Pass, scores: Scores
    ) -> list[int]:
        """Append what was verified up to each request's end; return how many tokens each one gained."""
        drafts = [] if proposal.block is None else [proposal.block.token_ids]
        columns = [verified.num_accepted[:, None], verified.next_token_ids[:, None], *drafts]
        num_committed = []
        on_host = torch.cat(columns, dim=1).tolist()  # the round's one synchronisation
        for row, (accepted, following, *drafted) in enumerate(on_host):
            request, first = requests[row], done.layout.first_tokens[row]
            new_tokens = [*drafted[:accepted], following]
            noted = torch.tensor(new_tokens, device="cpu")
            request.token_ids[request.length : request.length + len(new_tokens)] = noted
            self._record(request, scores, done, slice(first, first + len(new_tokens)))
            kept, ends = request.stop_rule.cut(request, new_tokens, self.recording.scores.get(request.id, ()))
            self._forget(request, len(new_tokens) - kept)
            # The old anchor and all but the last new token are in the cache now; the last one is the new anchor.
            request.features.append(done.features[first : first + kept])
            request.length += kept
            request.blocks += 1
            self.cache.lengths[row] = request.anchor_position
            num_committed.append(kept)
            request.ended = ends
            if self._on_commit is not None:
                self._on_commit(request, new_tokens[:kept])
        return num_committed

    def _record(self, request: Request, scores: Scores, done: Pass, rows: slice) -> None:
        recording = self.recording
        if recording.wants_scores:
            kept = Scores(scores.values[rows], None if scores.candidate_ids is None else scores.candidate_ids[rows])
            vocab_size = self.generator.draft.config.vocab_size
            recording.scores.setdefault(request.id, []).extend(kept.dense(vocab_size))
        if recording.wants_logits:
            recording.logits.setdefault(request.id, []).extend(done.logits[rows].float())
        if recording.wants_hidden_states and done.hidden_states is not None:  # the prompt's are kept by the prefill
            for token in range(rows.start, rows.stop):
                states = tuple(layer[token : token + 1] for layer in done.hidden_states)
                recording.hidden_states[request.id].append(states)

    def _forget(self, request: Request, count: int) -> None:
        """Drop the records of tokens behind the end."""
        for kept in (self.recording.scores, self.recording.logits, self.recording.hidden_states):
            if count and request.id in kept:
                del kept[request.id][-count:]

    def _learn(
        self,
        requests: Sequence[Request],
        proposal: Proposal,
        verified: VerifiedBlock,
        scores: Scores,
        num_committed: Sequence[int],
    ) -> None:
        logits = None
        if self.generator.draft.observer is not None:
            dense = scores.dense(self.generator.draft.config.vocab_size)
            rows = dense.split([1 + length for length in proposal.lengths.tolist()])
            logits = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self.generator.learn(requests, proposal, verified.num_accepted.cpu(), num_committed, logits)

    def release_ended(self) -> None:
        """Take ended requests out of the batch; the last rows fill their places in the caches."""
        for row in reversed(range(len(self.requests))):
            if self.requests[row].ended:
                last = len(self.requests) - 1
                for cache in (self.cache, self.generator.cache):
                    if self._keeps_rows:
                        cache.swap_rows(row, last)
                    elif row == last:
                        cache.free_row(row)
                    else:
                        cache.move_row(last, row)
                if self._keeps_rows:
                    self.ended_rows[self.requests[row].id] = last
                self.requests[row] = self.requests[last]
                self.requests.pop()

    def shrink(self, num_rows: int) -> None:
        """Give the memory of rows back that are not in use."""
        for cache in (self.cache, self.generator.cache):
            cache.shrink(num_rows)

    def admit(
        self, requests: Sequence[Request], prompts: Sequence[torch.Tensor], chunk_size: int | None = None
    ) -> None:
        """Prefill new requests and draw the first token of each.

        Args:
            requests (`Sequence[Request]`): They get the rows behind those in use; `cache.lengths` says what is there
                already.
            prompts (`Sequence[torch.Tensor]`): The part of each prompt that is not cached: ids `[n]` or embeddings
                `[n, d]`, at least one position.
            chunk_size (`int`, *optional*): Positions of each prompt per forward pass at most.
        """
        with self._at_work():
            self._admit(requests, prompts, chunk_size)

    def _admit(self, requests: Sequence[Request], prompts: Sequence[torch.Tensor], chunk_size: int | None) -> None:
        self.generator.start_prefill()
        noise = self.generator.noise(requests)
        first_row = len(self.requests)
        starts = [self.cache.lengths[first_row + row] for row in range(len(requests))]
        longest = max(map(len, prompts))
        step = chunk_size or longest
        logits: list[torch.Tensor | None] = [None] * len(requests)
        for offset in range(0, longest, step):
            parts = [prompt[offset : offset + step] for prompt in prompts]
            layout = SlotLayout(
                tuple(start + min(offset, len(prompt)) for start, prompt in zip(starts, prompts, strict=True)),
                tuple(map(len, parts)),
                first_row,
            )
            last = [end - 1 for end, part in zip(_ends(layout), parts, strict=True) if len(part)]
            done = self._forward(torch.cat(parts), layout, wanted=last)
            self._take_prompt(requests, parts, done, logits)
        prefilled = Pass(
            SlotLayout((0,) * len(requests), (1,) * len(requests)), torch.stack(logits), done.features[:0], None
        )
        nothing = Proposal(torch.zeros(len(requests), dtype=torch.long, device="cpu"))
        scores = self._process(requests, nothing, prefilled)
        verified = self._verify(nothing, scores, prefilled.layout, noise)
        self.requests.extend(requests)
        self._commit_first(requests, first_row, verified, prefilled, scores)
        self.release_ended()

    def _take_prompt(
        self, requests: Sequence[Request], parts: Sequence[torch.Tensor], done: Pass, logits: list[torch.Tensor | None]
    ) -> None:
        """Hand the features, logits and hidden states of one stretch of the prompts to their requests."""
        some_logits = iter(done.logits)
        for row, (request, part) in enumerate(zip(requests, parts, strict=True)):
            if not len(part):
                continue
            tokens = slice(done.layout.first_tokens[row], done.layout.first_tokens[row] + len(part))
            request.features.append(done.features[tokens])
            logits[row] = next(some_logits)
            if done.hidden_states is not None:
                states = tuple(layer[tokens] for layer in done.hidden_states)
                before = self.recording.hidden_states.get(request.id)
                if before:
                    states = tuple(torch.cat(pair) for pair in zip(before[0], states, strict=True))
                self.recording.hidden_states[request.id] = [states]

    def _commit_first(
        self, requests: Sequence[Request], first_row: int, verified: VerifiedBlock, done: Pass, scores: Scores
    ) -> None:
        """Append the first token of each request; its prompt is in the cache, and its features are noted."""
        tokens = verified.next_token_ids.tolist()
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            request.token_ids[request.length] = token
            request.length += 1
            request.blocks += 1
            self.cache.lengths[first_row + row] = request.anchor_position
        # All rows are in order before any criterion is asked: one that fails must not leave others behind.
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            self._record(request, scores, done, slice(row, row + 1))
            request.ended = request.stop_rule.ends(request, self.recording.scores.get(request.id, ()))
            if self._on_commit is not None:
                self._on_commit(request, [token])


def _ends(layout: SlotLayout) -> list[int]:
    """Return where each row ends in the packed sequence."""
    return [first + count for first, count in zip(layout.first_tokens, layout.counts, strict=True)]
