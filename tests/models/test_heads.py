"""The successors of tokens under a Markov head, which `draft_top_k` adds to its candidates."""

import copy

import pytest
import torch

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.models.heads import Successors, with_successors
from hf_dspark.models.modeling_dspark import MOST_SUCCESSORS
from tests.samplers import ChainSampler

COUNT = 3


@pytest.fixture
def draft(make_target):
    target = make_target()
    config = DSparkConfig.from_target(target.config, block_size=3, markov_rank=4, draft_top_k=8)
    draft = DSparkDraftModel(config).bind(target)
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    return draft


def largest(head, token_ids):
    return (head.markov_w1.weight[token_ids] @ head.markov_w2.weight.T).topk(COUNT, dim=-1).indices


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_successors_have_the_largest_markov_bias(draft, mode):
    head = draft.markov_head
    with mode():
        successors = Successors(head, draft.config.hidden_size, COUNT)
        assert torch.equal(successors(torch.tensor([3, 5, 3])), largest(head, [3, 5, 3]))
    with torch.no_grad():  # rows that are there, and one that is not
        assert torch.equal(successors(torch.tensor([5, 6])), largest(head, [5, 6]))


def test_a_row_is_computed_once_or_with_all_others(draft, monkeypatch):
    asked, bias = [], draft.markov_head.bias
    monkeypatch.setattr(draft.markov_head, "bias", lambda rows: asked.append(len(rows)) or bias(rows))
    monkeypatch.setattr(Successors, "ROWS_AT_A_TIME", 40)
    successors = Successors(draft.markov_head, draft.config.hidden_size, COUNT)
    for token_ids in ([3, 5, 3], [5, 3], [5, 6]):
        successors(torch.tensor(token_ids))
    assert asked == [2, 1]
    every_token = torch.arange(draft.config.vocab_size)
    successors._compute(every_token)  # as on an accelerator
    assert torch.equal(successors(every_token), largest(draft.markov_head, every_token)) and asked[2:] == [40, 8]


def test_candidates_are_distinct_and_the_best_go_first():
    best, successors = torch.tensor([[9, 4, 7, 1], [9, 4, 7, 1]]), torch.tensor([[4, 1], [5, 6]])
    assert with_successors(best, successors).tolist() == [[9, 7, 4, 1], [9, 4, 5, 6]]


def drafted(draft, base):
    return draft.sample_block(torch.zeros(1, 3, draft.config.hidden_size), base, torch.tensor([1]), ChainSampler())


@torch.no_grad()
def test_weights_that_change_change_their_successors(draft):
    base = torch.zeros(1, 3, draft.config.vocab_size)  # the Markov head alone decides

    def check(draft):
        token, tokens = 1, []
        for _ in range(3):
            token = int(largest(draft.markov_head, [token])[0, 0])
            tokens.append(token)
        assert drafted(draft, base).token_ids[0].tolist() == tokens
        return tokens

    before = check(draft)
    draft.markov_head.markov_w2.weight.neg_()
    assert check(draft) != before
    copied = copy.deepcopy(draft)
    copied.markov_head.markov_w1.weight.neg_()
    check(draft), check(copied)


@torch.no_grad()
def test_candidates_find_what_only_the_markov_head_favours(draft):
    """The base logits rank the best token of both together last; without successors no draft would propose it."""
    base = torch.zeros(1, 3, draft.config.vocab_size)
    favoured = int(largest(draft.markov_head, [1])[0, 0])
    base[0, 0, favoured] = -0.01
    assert drafted(draft, base).token_ids[0, 0] == favoured


def test_the_table_does_not_grow_with_the_candidates_that_a_config_asks_for(make_target):
    target = make_target(vocab_size=600)
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, block_size=3, markov_rank=4, draft_top_k=600))
    ids, options = torch.tensor([[5, 6, 8]]), {"do_sample": False, "max_new_tokens": 12}
    drafted = target.generate(ids, assistant_model=draft, **options)
    assert torch.equal(drafted, target.generate(ids, **options))
    (successors,) = draft._successor_tables.values()
    assert successors(torch.tensor([3])).shape == (1, MOST_SUCCESSORS)
