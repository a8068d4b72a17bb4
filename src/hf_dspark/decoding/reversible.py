"""Logits processors whose state can go back, as that of a grammar can: each sequence has one of its own, which follows
whatever prefix it is asked about, with drafts that are rejected later, or on another branch of a tree."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..files import one_line


class ReversibleProcessor(LogitsProcessor, ABC):
    """Base class of logits processors that keep a state of what was generated, and can take it back.

    With a draft, they are asked about tokens that may be rejected. They work in batches, queues and plain generate(),
    too. A grammar of xgrammar needs no class: pass its own `xgrammar.contrib.hf.LogitsProcessor`.

    Example:

    ```python
    class AtMostTwo(ReversibleProcessor):
        def __init__(self, token_id):
            self.token_id, self.seen = token_id, []
        def fork(self, row):
            return AtMostTwo(self.token_id)
        def accept(self, token_id):
            self.seen.append(token_id)
            return True
        def rollback(self, num_tokens):
            del self.seen[-num_tokens:]
        def mask(self, scores):
            scores[:, [self.token_id] * (self.seen.count(self.token_id) >= 2)] = -torch.inf
            return scores

    output = target.generate(**inputs, assistant_model=draft, logits_processor=[AtMostTwo(5)], max_new_tokens=64)
    ```
    """

    _prompts = torch.empty(0, 0, device="cpu")  # of the sequences that are decoded without a draft, `[B, S]`
    _longest = -1
    _rows: Sequence["FollowingProcessor"] = ()

    @abstractmethod
    def fork(self, row: int) -> "ReversibleProcessor":
        """Return one for a sequence of which nothing is generated yet, by its number in the batch."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Go on by a token, and return `True`; or leave the state as it is where the token is not possible."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""

    @abstractmethod
    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Process the scores `[1, V]` of the next token, which may be written to."""

    def forced(self) -> int | None:
        """Return the next token if it is the only possible one, and this is easily known: it need not be drafted."""
        return None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        start, length = self._prompts.shape[1], input_ids.shape[1]
        # It goes on with the same prompts, by one token at most.
        if not start < length <= self._longest + 1 or not torch.equal(input_ids[:, :start], self._prompts):
            self._prompts, self._longest = input_ids, length
            self._rows = [FollowingProcessor(self.fork(row), length) for row in range(len(input_ids))]
        self._longest = max(self._longest, length)
        rows = zip(self._rows, input_ids.split(1), scores.split(1), strict=True)
        return torch.cat([processor(ids, own) for processor, ids, own in rows])


class FollowingProcessor(LogitsProcessor):
    """A reversible processor at any prefixes of one sequence, in any order; its prompt has `start` tokens."""

    def __init__(self, processor: ReversibleProcessor, start: int) -> None:
        self._processor, self._start = processor, start
        self._accepted: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._follow(input_ids[0, self._start :].tolist())
        return self._processor.mask(scores)

    def forced(self, input_ids: torch.Tensor, most: int) -> list[int]:
        """Return the tokens after a prefix `[1, S]` that are the only possible ones, at most so many."""
        tokens, found = input_ids[0, self._start :].tolist(), []
        while len(found) < most and self._follow(tokens + found) and (token := self._processor.forced()) is not None:
            found.append(token)
        return found

    def _follow(self, tokens: list[int]) -> bool:
        """Bring the state to a prefix, or to the last possible token of it; tell whether that is all of it."""
        known = min(len(tokens), len(self._accepted))
        while tokens[:known] != self._accepted[:known]:
            known -= 1
        if rejected := len(self._accepted) - known:
            self._processor.rollback(rejected)
            del self._accepted[known:]
        for token in tokens[known:]:
            if not self._processor.accept(token):
                return False
            self._accepted.append(token)
        return True


class XGrammarProcessor(ReversibleProcessor):
    """A matcher of xgrammar for a row's grammar: there is one for all rows, or one for each."""

    def __init__(self, grammars: Sequence[Any], row: int = 0) -> None:
        import xgrammar

        self._grammars, grammar = grammars, grammars[row % len(grammars)]
        self._matcher, self._is_filled = xgrammar.GrammarMatcher(grammar), False
        self._bits = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)

    def fork(self, row: int) -> "XGrammarProcessor":
        return XGrammarProcessor(self._grammars, row)

    def accept(self, token_id: int) -> bool:
        if token_id in self._matcher.stop_token_ids:
            self._mask()  # after the end the last one stays, as in xgrammar's own processor
        is_possible = not self._matcher.is_terminated() and self._matcher.accept_token(token_id)
        self._is_filled &= not is_possible or self._matcher.is_terminated()
        return is_possible

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._is_filled = False

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        bits = np.unpackbits(self._mask().numpy().view(np.uint8), bitorder="little")[: scores.shape[-1]]
        scores[:, : len(bits)].masked_fill_(torch.from_numpy(bits == 0).to(scores.device), -torch.inf)
        return scores

    def forced(self) -> int | None:
        possible = int.from_bytes(self._mask().numpy().tobytes(), "little")
        is_forced = possible.bit_count() == 1 and not self._matcher.is_terminated()
        return possible.bit_length() - 1 if is_forced else None

    def _mask(self) -> torch.Tensor:
        if not self._is_filled:
            self._matcher.fill_next_token_bitmask(self._bits)
            self._is_filled = True
        return self._bits


class JsonGrammars:
    """Makes processors of JSON schemas, for one model and its tokenizer; compiled grammars are kept, up to 64 MiB."""

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        import xgrammar

        size, ends = target.config.get_text_config().vocab_size, target.generation_config.eos_token_id
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=ends)
        self._compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=2**26)

    def __call__(self, schema: Mapping[str, Any]) -> XGrammarProcessor:
        """Return a processor that lets JSON of a schema through, on one line: its spaces are forced tokens, too."""
        try:
            return XGrammarProcessor([self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)])
        except (RuntimeError, ValueError) as error:
            said = re.sub(r"^\[\S+ \S+:\d+: ", "", one_line(error))  # where in its own code
            raise ValueError(f"the JSON schema cannot be followed: {said}") from error


# Where others keep the grammars of a matcher of xgrammar.
GRAMMARS = {"xgrammar.contrib.hf": "compiled_grammars", "outlines.backends.xgrammar": "compiled_grammar"}


def reversible(processor: LogitsProcessor, num_rows: int = 1) -> LogitsProcessor:
    """Return a processor, or a reversible one in its place that does the same in so many sequences."""
    grammars = getattr(processor, GRAMMARS.get(type(processor).__module__, ""), None)
    if grammars is None:
        return processor
    grammars = grammars if isinstance(grammars, list) else [grammars]
    grammars = grammars if len(set(map(id, grammars))) > 1 else grammars[:1]
    if len(grammars) not in (1, num_rows):
        raise ValueError(f"got {len(grammars)} grammars for {num_rows} sequences: pass one for each, or one for all")
    return XGrammarProcessor(grammars)
