"""Calls of `generate()` by several clients, decoded together: each joins the running batch between two rounds."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from transformers import PreTrainedModel

from .attach import attachment_of
from .batch import MOST_TOGETHER
from .checks import Refused
from .many import NONE_YET, OwnPrompt, generate_many
from .prefixes import PrefixMemory

MOST_IN_A_ROW = 10_000  # rounds and prompts of a queue, which keeps a record of them
KNOWN = {"input_ids", "attention_mask", "generation_config", "tokenizer", "streamer", "logits_processor"}


class Asked:
    """A call of `generate()` for one prompt, and its outcome; calls of one kind are decoded together. A call without a
    streamer may have a `client`, which is one that hears of tokens only while others are decoded with it."""

    def __init__(self, target: PreTrainedModel, client: Any = None, **given: Any) -> None:
        self.target, self.given = target, given
        self.outcome: Future = Future()
        self.outcome.set_running_or_notify_cancel()  # who waits for it may go away
        config, processors = given["generation_config"], given.get("logits_processor", [])
        lengths = {"max_new_tokens": None, "max_length": None}
        self.kind = (target, given.keys() - {"streamer"}, config.to_dict() | lengths)
        if attachment_of(target) is None or not given.keys() <= KNOWN:
            self.kind = None
        own = {"generation_config": config, "logits_processor": processors}
        self.prompt = OwnPrompt(given["input_ids"][0].tolist(), own, given.get("streamer") or client)

    def decode_alone(self) -> None:
        try:
            self.outcome.set_result(self.target.generate(**self.given))
        except Exception as error:  # whatever becomes of it, others wait
            self.outcome.set_exception(error)


def decode_waiting(waiting: deque[Asked], prefixes: PrefixMemory | None = None) -> None:
    """Decode all that waits, and what comes meanwhile, in the order of coming. A call that no draft can assist is
    decoded alone, by the target. Beginnings of prompts are kept in `prefixes`."""
    while waiting:
        first, taken = waiting[0], {}
        if first.kind is None:
            waiting.popleft().decode_alone()
            continue
        try:
            _decode_together(first, waiting, taken, prefixes)
        except Exception as error:
            first.kind = None  # if it still waits, because of its options
            for asked in taken.values():
                asked.outcome.set_exception(error)


def _decode_together(
    first: Asked, waiting: deque[Asked], taken: dict[int, Asked], prefixes: PrefixMemory | None
) -> None:
    attached, kind = attachment_of(first.target), first.kind
    common = first.given.get("tokenizer"), MOST_TOGETHER, False, None, prefixes

    def prompts() -> Iterator[OwnPrompt | object]:
        for index in range(MOST_IN_A_ROW):
            if waiting and waiting[0].kind == kind:
                taken[index] = waiting.popleft()
            yield taken[index].prompt if index in taken else NONE_YET

    for done in generate_many(first.target, attached.draft, prompts(), *common, **first.prompt.options):
        asked = taken.pop(done.index)
        if isinstance(done.error, Refused):
            asked.kind = None
            waiting.appendleft(asked)
        elif done.error is not None:
            asked.outcome.set_exception(done.error)
        else:
            attached.count()
            if asked.prompt.streamer is not None:
                asked.prompt.streamer.end()
            ids = asked.given["input_ids"]
            asked.outcome.set_result(torch.cat([ids, done.token_ids[None].to(ids.device)], dim=1))
