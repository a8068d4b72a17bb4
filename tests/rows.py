"""Prompts as batches, answers row by row: what tests of `generate()` share."""

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_dspark import Policy

GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
EOS = 62  # of the trained pair
OPTIONS = {
    "default": {},
    "eos_list": {"eos_token_id": [EOS, 11, 17]},
    "no_eos": {"eos_token_id": None},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 3},
    "min_new_tokens": {"min_new_tokens": 24},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3]},
    "bad_words": {"bad_words_ids": [[5], [7, 8]]},
    "one_token": {"max_new_tokens": 1},
}


def padded(prompts, pad=0):
    """Return left-padded ids and their mask."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(prompt)) + list(map(int, prompt)) for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def alone(target, prompt, **options):
    """Return what plain `generate()` adds to a single prompt."""
    ids = torch.tensor([prompt])
    return target.generate(ids, attention_mask=torch.ones_like(ids), **(GREEDY | options))[0, len(prompt) :].tolist()


def assert_rows(output, width, expected, pad=0):
    """Check that every row is what was expected, and padding after it."""
    for row, tokens in zip(output[:, width:].tolist(), expected, strict=True):
        assert row[: len(tokens)] == tokens
        assert set(row[len(tokens) :]) <= {pad}


def assert_same_tokens(target, draft, ids, drafting=None, **options):
    """Decode with the draft and without it; `drafting` holds options that only the first call takes."""
    plain = target.generate(ids, **(GREEDY | options))
    assert torch.equal(target.generate(ids, assistant_model=draft, **(GREEDY | options | (drafting or {}))), plain)


def assert_as_alone(target, draft, prompts, drafting=None, **options):
    """Decode a batch with the draft: every row is what its prompt gives alone, without it."""
    batch = padded(prompts)
    output = target.generate(**batch, assistant_model=draft, **(GREEDY | options | (drafting or {})))
    expected = [alone(target, prompt, **options) for prompt in prompts]
    assert_rows(output, batch["input_ids"].shape[1], expected)
    return expected


def assert_no_hooks(target):
    for module in target.modules():  # transformers keeps hooks of its own
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not [hook for hook in hooks if hook.__module__.startswith("hf_dspark")]


class EndsAfterTwo(StoppingCriteria):
    """Stops after the second token it is asked about; counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 2)


class Notes(BaseStreamer):
    """Keeps all that it is given."""

    def __init__(self):
        self.tokens, self.puts = [], []

    def put(self, value):
        self.puts.append(value.tolist())
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


class EverySecond(Policy):
    """Drafts in every second round only."""

    def __init__(self):
        self.rounds = 0

    def fresh(self):
        return EverySecond()

    def plan_draft(self, load):
        self.rounds += 1
        return self.rounds % 2 == 0

    def plan_verify(self, confidence, max_lengths, load):
        return max_lengths
