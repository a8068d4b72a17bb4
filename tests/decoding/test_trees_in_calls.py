"""Trees in every kind of call: conversations, queues, several sequences, stop rules, streams, and what is refused."""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from hf_dspark import (
    DecodingOptions,
    FullBlock,
    PromptLookup,
    Scheduler,
    generate_many,
)
from hf_dspark.decoding.hook import default_policy
from hf_dspark.scheduling.costs import Load, ThroughputTable
from hf_dspark.targets.support import TargetSupport
from tests.hybrids import make_own_draft
from tests.rows import Notes, padded

PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5], [11, 4, 8, 8, 25, 13, 17, 31, 22, 6, 5, 39]]
GREEDY = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}


@pytest.fixture
def target(make_target):
    return make_target(seed=4)


@pytest.fixture
def draft(target):
    draft = make_own_draft(target)
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=14))
    return draft


def test_a_queue_of_requests_is_answered_as_each_alone(target, draft):
    plain = [target.generate(torch.tensor([row]), **GREEDY)[0, len(row) :].tolist() for row in PROMPTS * 2]
    answers = generate_many(target, draft, PROMPTS * 2, batch_size=2, progress=False, **GREEDY)
    assert [answer.token_ids.tolist() for answer in answers] == plain
    assert max(draft.last_stats.proposed) > 4


def test_a_conversation_goes_on_in_the_cache_of_its_trees(target, draft):
    first = target.generate(torch.tensor(PROMPTS[:1]), assistant_model=draft, return_dict_in_generate=True, **GREEDY)
    longer = torch.cat([first.sequences, torch.tensor([[8, 2, 40]])], dim=1)
    second = target.generate(longer, assistant_model=draft, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(second, target.generate(longer, **GREEDY))


def test_a_tree_does_not_depend_on_its_neighbours(target, draft):
    """The first row draws the same tokens, whoever stands beside it."""
    options, answers = GREEDY | {"do_sample": True, "top_k": 0}, []
    for others in ([], PROMPTS[1:2], PROMPTS[2:3]):
        torch.manual_seed(3)
        answers.append(target.generate(**padded([PROMPTS[0], *others]), assistant_model=draft, **options)[0, -20:])
    assert all(torch.equal(answers[0], other) for other in answers[1:])


def test_trees_follow_token_0_where_every_token_is_forbidden(target):
    class FiveThenNothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 5] = 0.0 if input_ids.shape[1] == 6 else -torch.inf
            return scores

    ids, options = torch.tensor([[5, 0, 0, 0, 9, 4]]), GREEDY | {"logits_processor": [FiveThenNothing()]}
    output = target.generate(ids, assistant_model=PromptLookup(target), eos_token_id=None, **options)
    assert output[0, 6:].tolist() == [5] + [0] * 19
    assert torch.equal(output, target.generate(ids, eos_token_id=None, **options))


class AtToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([row[-1] == self.token for row in input_ids.tolist()])


def test_criteria_and_streams_see_the_accepted_path_alone(target, draft):
    ids, seen = torch.tensor(PROMPTS[:1]), Notes()
    plain = target.generate(ids, **GREEDY)
    stop = StoppingCriteriaList([AtToken(int(plain[0, ids.shape[1] + 6]))])
    expected = target.generate(ids, stopping_criteria=stop, **GREEDY)
    output = target.generate(ids, stopping_criteria=stop, assistant_model=draft, streamer=seen, **GREEDY)
    assert torch.equal(output, expected) and seen.tokens == [*expected[0].tolist(), "end"]


def test_a_number_of_assistant_tokens_means_a_chain(target, draft):
    target.generate(torch.tensor(PROMPTS[:1]), assistant_model=draft, num_assistant_tokens=3, **GREEDY)
    assert max(draft.last_stats.proposed) <= 3 and draft.last_stats.depths == draft.last_stats.proposed


def test_transformers_own_loop_decodes_chains(target, draft):
    ids = torch.tensor(PROMPTS[:1])
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=3), use_transformers_loop=True)
    assert torch.equal(target.generate(ids, assistant_model=draft, **GREEDY), target.generate(ids, **GREEDY))
    assert max(draft.last_stats.proposed) <= 3


def test_trees_are_the_default_where_draft_and_machine_are_measured(target, draft, monkeypatch):
    monkeypatch.setattr("hf_dspark.scheduling.step_costs.find_cost", lambda *_: ThroughputTable((1, 64), (100, 99)))
    may_grow = lambda do_sample, **how: (  # noqa: E731
        default_policy(draft, target, **how).plan_tree(draft.config.siblings_for(do_sample), Load()) is not None
    )
    assert not may_grow(False)
    usual = draft.config.siblings_for(do_sample=False)
    fitted = {name: list(getattr(usual, name)) for name in ("fits", "means", "best", "chain")}
    draft.config.sibling_acceptance = {"greedy": fitted}
    assert may_grow(False) and not may_grow(True)
    assert not may_grow(False, trees=False) and may_grow(True, trees=True)


def test_options_that_contradict_each_other_are_refused(draft):
    with pytest.raises(ValueError, match="trees=True chooses the default policy, got policy="):
        DecodingOptions(trees=True, policy=FullBlock())


def test_trees_of_a_target_with_recurrent_states_are_refused(make_target, monkeypatch):
    target = make_target()
    draft = make_own_draft(target)
    monkeypatch.setattr(TargetSupport, "tree_obstacle", "it reads rows token by token")
    with pytest.raises(ValueError, match=r"DecodingOptions\(trees=True\) asks for trees of drafts, but it reads"):
        draft.decoding = DecodingOptions(trees=True)
        target.generate(torch.tensor(PROMPTS[:1]), assistant_model=draft, **GREEDY)


@pytest.mark.filterwarnings("ignore:the draft .* NaN or infinite")
def test_a_draft_that_overflows_leaves_plain_decoding(target, draft):
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.fill_(torch.nan)
    ids = torch.tensor(PROMPTS[:1])
    for options in (GREEDY, GREEDY | {"do_sample": True, "top_k": 1}):
        output = target.generate(ids, assistant_model=draft, **options)
        assert torch.equal(output, target.generate(ids, **GREEDY))
