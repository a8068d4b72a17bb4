"""Prompt lookup: no draft, exact, for batches."""

import pytest
import torch

from hf_dspark import (
    DecodingOptions,
    FullBlock,
    PromptLookup,
    Scheduler,
    ThroughputTable,
    attach,
)
from tests.rows import padded

GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": 7}


ROWS = [[5, 9, 30, 12, 5, 9], [8, 8, 8, 8], [11, 3, 40, 22, 17, 9, 5, 11, 3]]


@pytest.fixture
def loop_target(make_target):
    """Each token is followed by what follows it in a cycle of nine."""
    target = make_target()
    honest = target.forward

    def forward(input_ids=None, **kwargs):
        output = honest(input_ids=input_ids, **kwargs)
        for row, tokens in enumerate(input_ids[:, -output.logits.shape[1] :].tolist()):
            for place, token in enumerate(tokens):
                output.logits[row, place, 20 + (token + 1) % 9] += 1e3
        return output

    target.forward = forward
    return target


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "policy",
    [None, Scheduler(num_nodes=31), Scheduler(ThroughputTable((1, 8, 64), (95, 94, 80)), trees=True, skip=False)],
)
@pytest.mark.parametrize("attached", [False, True])
def test_batches_are_those_of_plain_decoding_in_fewer_rounds(loop_target, policy, attached):
    plain, batch = loop_target.generate(**padded(ROWS), **GREEDY), padded(ROWS)
    lookup = attach(loop_target, "ngram").draft if attached else PromptLookup(loop_target)
    lookup.decoding = DecodingOptions(policy=policy)
    given = {} if attached else {"assistant_model": lookup}
    assert torch.equal(loop_target.generate(**batch, **given, **GREEDY), plain)
    stats = lookup.last_stats
    assert stats.rounds < 0.5 * sum(stats.committed) and max(stats.accepted) > 3


def test_a_scheduler_that_sees_no_gain_copies_nothing(loop_target):
    """A pass that costs what its tokens cost."""
    lookup = PromptLookup(loop_target)
    steep = ThroughputTable((1, 2, 64), (64.0, 32.0, 1.0))
    lookup.decoding = DecodingOptions(policy=Scheduler(steep, trees=True, skip=False))
    options = GREEDY | {"max_new_tokens": 200}
    output = loop_target.generate(torch.tensor([ROWS[0]]), assistant_model=lookup, **options)
    assert output.shape[1] == 206 and sum(lookup.last_stats.proposed) == 0


@pytest.mark.parametrize(
    ("options", "policy", "message"),
    [
        ({"num_assistant_tokens": 4}, None, "trees by prompt lookup alone, got num_assistant_tokens=4"),
        ({}, FullBlock(), "trees by prompt lookup alone, got FullBlock"),
        ({"assistant_confidence_threshold": 0.5}, None, "trees by prompt lookup alone, got ConfidenceThreshold"),
    ],
)
def test_what_asks_for_blocks_is_refused(make_target, options, policy, message):
    target = make_target()
    lookup = PromptLookup(target)
    lookup.decoding = DecodingOptions(policy=policy)
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([ROWS[0]]), assistant_model=lookup, **options | GREEDY)


def test_calls_for_transformers_loop_are_refused(make_target):
    target = make_target()
    lookup = PromptLookup(target)
    lookup.decoding = DecodingOptions(use_transformers_loop=True)
    with pytest.raises(ValueError, match="own loop"):
        target.generate(torch.tensor([ROWS[0]]), assistant_model=lookup, **GREEDY)


def test_there_is_nothing_to_save(make_target, tmp_path):
    with pytest.raises(TypeError, match="no weights"):
        PromptLookup(make_target()).save_pretrained(tmp_path)
