"""Calls of several clients in one queue: answers as alone, whoever joins, leaves or fails meanwhile."""

import copy
from collections import deque

import pytest
import torch

from hf_dspark import attach, detach
from hf_dspark.decoding import together
from hf_dspark.decoding.together import Asked, decode_waiting
from tests.rows import EOS, alone

PROMPTS = [[5, 6, 7], [9, 9, 9, 8], [20], [30, 31, 32, 33]]


class Reader:
    """A streamer that notes what it is given, and does something after so many puts."""

    def __init__(self, then=lambda: None, after: int = 2) -> None:
        self.puts, self.ended, self._then, self._after = [], 0, then, after

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())
        if len(self.puts) == self._after:
            self._then()

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def attached(pair):
    yield attach(*pair)
    detach(pair[0])


@pytest.fixture
def call(pair, attached):
    def make(prompt, streamer=None, **options) -> Asked:
        config = copy.deepcopy(pair[0].generation_config)
        config.update(**{"do_sample": False, "max_new_tokens": 12, "eos_token_id": EOS} | options)
        ids = torch.tensor([prompt])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_config": config}
        return Asked(pair[0], **given, **({} if streamer is None else {"streamer": streamer}))

    return make


def answer(asked: Asked) -> list[int]:
    return asked.outcome.result(timeout=0)[0, asked.given["input_ids"].shape[1] :].tolist()


def expected(pair, prompt, **options):
    return alone(pair[0], prompt, **{"max_new_tokens": 12, "eos_token_id": EOS, "assistant_model": None} | options)


def queues(monkeypatch) -> list[int]:
    """Return a list that grows by each queue that is opened."""
    opened, own = [], together.generate_many
    monkeypatch.setattr(together, "generate_many", lambda *args, **kwargs: opened.append(1) or own(*args, **kwargs))
    return opened


def test_calls_of_one_kind_are_decoded_together_to_lengths_of_their_own(pair, attached, call, monkeypatch):
    opened, lengths = queues(monkeypatch), (3, 12, 1, 30)
    waiting = deque(call(prompt, max_new_tokens=length) for prompt, length in zip(PROMPTS, lengths, strict=True))
    asked = list(waiting)
    decode_waiting(waiting)
    for each, prompt, length in zip(asked, PROMPTS, lengths, strict=True):
        assert answer(each) == expected(pair, prompt, max_new_tokens=length)
    assert len(opened) == 1 and (attached.num_assisted, attached.num_plain) == (4, 0)


def test_who_comes_later_joins_between_rounds_and_who_leaves_disturbs_nobody(pair, attached, call, monkeypatch):
    opened, order, waiting = queues(monkeypatch), [], deque()
    late = call(PROMPTS[3], max_new_tokens=3)
    early = call(PROMPTS[0], Reader(lambda: waiting.append(late)), max_new_tokens=40)
    gone = call(PROMPTS[1], Reader(lambda: 1 / 0, after=3), max_new_tokens=40)
    for name, each in (("late", late), ("early", early), ("gone", gone)):
        each.outcome.add_done_callback(lambda _, name=name: order.append(name))
    waiting += [early, gone]
    decode_waiting(waiting)
    assert answer(early) == expected(pair, PROMPTS[0], max_new_tokens=40) and order[-1] == "early"
    assert answer(late) == expected(pair, PROMPTS[3], max_new_tokens=3)
    assert isinstance(gone.outcome.exception(), ZeroDivisionError) and len(opened) == 1
    prompt, *rest = early.given["streamer"].puts
    assert prompt == PROMPTS[0] and sum(rest, []) == answer(early) and early.given["streamer"].ended == 1
    assert gone.given["streamer"].ended == 0 and attached.num_assisted == 2


def test_calls_of_other_kinds_take_turns_and_those_without_a_draft_are_plain(pair, attached, call, monkeypatch):
    opened = queues(monkeypatch)
    long = [5] * (pair[0].config.max_position_embeddings + 4)
    kinds = [{}, {"num_beams": 2}, {"repetition_penalty": 1.3}, {"max_new_tokens": 8}, {"stop_strings": "w"}]
    asked = [call(PROMPTS[0], **options) for options in kinds] + [call(long), call(PROMPTS[2])]
    with pytest.warns(UserWarning, match="num_beams"):
        decode_waiting(deque(asked))
    assert [answer(asked[place]) for place in (0, 1, 2, 3)] == [
        expected(pair, PROMPTS[0], **options) for options in kinds[:4]
    ]
    assert "tokenizer" in str(asked[4].outcome.exception())
    assert answer(asked[5]) == expected(pair, long) and answer(asked[6]) == expected(pair, PROMPTS[2])
    assert attached.num_plain == 2 and len(opened) >= 5


def test_a_first_call_that_is_refused_is_tried_once(pair, attached, call, monkeypatch):
    prepared, own = [], together.OwnPrompt
    long = call([5] * (pair[0].config.max_position_embeddings + 4))
    seen = type("Seen", (own,), {"options": property(lambda self: prepared.append(1) or self.__dict__["options"])})
    object.__setattr__(long.prompt, "__class__", seen)
    with pytest.warns(UserWarning, match="context"):
        decode_waiting(deque([long]))
    assert len(answer(long)) == 12 and len(prepared) <= 2


def test_samples_of_one_kind_are_drawn_together(pair, call, monkeypatch):
    opened = queues(monkeypatch)
    asked = [call(PROMPTS[0], do_sample=True, temperature=1.5) for _ in range(6)]
    decode_waiting(deque(asked))
    assert len(opened) == 1 and len({tuple(answer(each)) for each in asked}) > 2
