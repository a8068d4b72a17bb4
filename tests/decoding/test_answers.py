"""Earlier answers as drafts: the same tokens in far fewer rounds, the target's distribution, nothing that stays."""

import copy
import pickle
from collections import Counter

import pytest
import torch

from hf_dspark import DecodingOptions, FullBlock, PromptLookup, Scheduler, attach, detach, generate_many
from hf_dspark.decoding import loop as loop_module
from hf_dspark.sampling.noise import CallKeys
from hf_dspark.scheduling.prompt_lookup import LONGEST, AnswerMemory, MatchAcceptance, NgramMatcher
from tests.decoding.test_lossless_batches import enumerate_rounds
from tests.distributions import PROMPT, chi_square_p_value, distribution_of_call, make_pair
from tests.rows import GREEDY, alone, assert_rows, padded


def remembered(answers, prompt, answer):
    matcher = NgramMatcher(answers)
    matcher.find(torch.tensor([*prompt, *answer[:1]]), 4)  # of some round
    matcher.remember(torch.tensor([*prompt, *answer]), len(prompt))


def found(answers, tokens, most=40):
    return list(NgramMatcher(answers).find(torch.tensor(tokens), most).token_ids)


def test_the_same_prompt_finds_its_answer_and_others_what_looks_like_their_end():
    answers, end = AnswerMemory(), [90, 91, 92, 93, 94, 95]
    remembered(answers, [1, 2, 3, *end], [10, 11, 12, 13, 14, 15])
    remembered(answers, [4, 5, 6, *end], [20, 21, 22, 13, 14, 25])
    assert found(answers, [1, 2, 3, *end]) == [10, 11, 12, 13, 14, 15]
    assert found(answers, [1, 2, 3, *end, 10, 11]) == [12, 13, 14, 15]
    assert found(answers, [1, 2, 3, *end], most=2) == [10, 11] and found(answers, [1, 2, 3, *end], most=0) == []
    assert found(answers, [7, 8, 9, *end]) == [20, 21, 22, 13, 14, 25]  # the latest
    assert found(answers, [7, 8, 9, *end[1:], 20, 21, 22]) == [13, 14, 25]
    assert found(answers, [7, 8, 93, 94, 95]) == [] and found(answers, [*end, 10, 11, 99]) == []  # three tokens, none
    assert found(answers, [1, 2, 3, *end, 10, 11, 12, 13, 14, 15]) == []  # nothing stood behind it
    answers.clear()
    assert found(answers, [1, 2, 3, *end]) == []


def test_the_more_reliable_of_two_matches_is_taken():
    answers, prompt = AnswerMemory(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    remembered(answers, prompt, [30, 31, 32, 33])
    matcher = NgramMatcher(answers)
    assert matcher.find(torch.tensor(prompt), 1).token_ids == [30]
    tokens = [*prompt, 6]  # which the prompt itself would have proposed
    assert matcher.find(torch.tensor(tokens), 2).token_ids == [7, 8]
    assert matcher._of_answers.of(LONGEST) < 0.9 and matcher._acceptance.of(5) > 0.4


def test_a_memory_keeps_its_size_and_the_latest_answers():
    answers = AnswerMemory(500)
    sizes = answers._tokens.nbytes, answers._places.nbytes
    assert sum(sizes) <= 20 * 500
    for number in range(200):
        remembered(answers, [7, 1000 * number], range(1000 * number + 1, 1000 * number + 41))
    assert (answers._tokens.nbytes, answers._places.nbytes) == sizes
    kept = [number for number in range(200) if found(answers, [7, 1000 * number])]
    assert len(kept) >= 7 and min(kept) >= 188 and {198, 199} <= {*kept}  # places in the table are shared
    assert all(len(found(answers, [7, 1000 * number])) == 40 for number in kept)
    remembered(answers, [1, 2, 3], range(10_000, 12_000))  # longer than all of it: its end
    assert found(answers, [5, 6, *range(11_900, 11_950)], 4) == [11_950, 11_951, 11_952, 11_953]
    for wrong in (0, 63, 2**31, 100.0):
        with pytest.raises(ValueError, match="num_tokens must be"):
            AnswerMemory(wrong)


def test_copies_and_pickles_hold_no_answers():
    answers = AnswerMemory(500)
    remembered(answers, [1, 2, 3], [10, 11, 12])
    for other in (copy.deepcopy(answers), pickle.loads(pickle.dumps(answers))):
        assert other.num_tokens == 500 and not other._tokens.any() and not other._places.any()
    assert found(answers, [1, 2, 3]) == [10, 11, 12]


# ---- calls


@pytest.fixture(params=["ngram", "draft"])
def attached(request, target, draft):
    """What is attached, with trees wherever they pay from the first round on."""
    attached = attach(target, "ngram" if request.param == "ngram" else draft)
    attached.draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=31), answers=AnswerMemory())
    yield attached
    detach(target)


def test_prompts_again_take_far_fewer_rounds(target, attached, prompts):
    batch, expected = padded(prompts), [alone(target, prompt, assistant_model=None) for prompt in prompts]
    rounds = []
    for _ in range(3):
        assert_rows(target.generate(**batch, **GREEDY), batch["input_ids"].shape[1], expected)
        rounds.append(attached.draft.last_stats.rounds)
    assert max(rounds[1:]) <= 2 * len(prompts) + 1 and rounds[0] > 1.5 * rounds[1]  # of all rows


def test_answers_of_a_queue_help_those_that_wait(target, attached, prompts):
    expected = [alone(target, prompt, assistant_model=None) for prompt in prompts[:2]]
    done = list(generate_many(target, None, prompts[:2] * 8, batch_size=2, progress=False, **GREEDY))
    assert [each.token_ids.tolist() for each in sorted(done, key=lambda each: each.index)] == expected * 8
    first = attached.draft.last_stats.rounds
    attached.draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=31))
    list(generate_many(target, None, prompts[:2] * 8, batch_size=2, progress=False, **GREEDY))
    assert first < 0.8 * attached.draft.last_stats.rounds


def test_a_conversation_again_takes_far_fewer_rounds(target, attached, prompts):
    rounds, answers = [], []
    for _ in range(2):
        ids, cache, count = torch.tensor(prompts[:1]), None, 0
        for turn in (prompts[1], prompts[2], []):
            output = target.generate(ids, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
            count, cache = count + attached.draft.last_stats.rounds, output.past_key_values
            ids = torch.cat([output.sequences, torch.tensor([turn], dtype=torch.long)], dim=1)
        rounds.append(count)
        answers.append(ids.tolist())
    assert answers[0] == answers[1] and rounds[1] <= 12 and rounds[0] > 2 * rounds[1]


def test_only_attached_drafts_remember_and_only_by_the_default_policy(target, draft, prompts):
    ids = torch.tensor(prompts[:1])
    target.generate(ids, assistant_model=draft, **GREEDY)
    with attach(target, draft) as attached:
        kept = attached.answers
        target.generate(ids, assistant_model=draft, **GREEDY)
        draft.decoding = DecodingOptions(policy=FullBlock())
        target.generate(ids, **GREEDY)
        draft.decoding = DecodingOptions(prompt_lookup=False)
        target.generate(ids, **GREEDY)
        assert not kept._tokens.any() and attached.num_assisted == 2
        draft.decoding = DecodingOptions()
        target.generate(ids, **GREEDY)
        assert kept._tokens.any()
    assert not kept._tokens.any()
    with attach(target, draft, remember=False) as attached:
        assert attached.answers is None and attached.decoding.answers is None
        target.generate(ids, **GREEDY)
    own = AnswerMemory()
    draft.decoding = DecodingOptions(answers=own)
    target.generate(ids, assistant_model=draft, **GREEDY)
    assert own._tokens.any()
    with attach(target, draft) as attached:
        assert attached.decoding.answers is own


def test_answers_are_kept_of_chains_and_found_by_others(target, draft, prompts):
    """A policy of chains looks up nothing, and its answers are known nevertheless."""
    answers, ids = AnswerMemory(), torch.tensor(prompts[:1])
    draft.decoding = DecodingOptions(policy=FullBlock(), answers=answers)
    output = target.generate(ids, assistant_model=draft, **GREEDY)
    other = PromptLookup(target)
    other.decoding = DecodingOptions(answers=answers)
    assert torch.equal(target.generate(ids, assistant_model=other, **GREEDY), output)
    assert other.last_stats.rounds <= 6 and answers._tokens.any()


# ---- distributions


EARLIER = [[0, 2, 2, 1, 0, 1, 2, 0], [1, 1, 2, 0, 0, 2, 1, 0], [2, 0, 1, 2, 2, 1, 0, 0]]


def distance(monkeypatch, pair, policy, **options):
    answers = AnswerMemory(500)
    for answer in EARLIER:  # by earlier calls
        remembered(answers, PROMPT[0].tolist(), answer)
    monkeypatch.setattr(MatchAcceptance, "of", lambda self, length: 0.9)
    monkeypatch.setattr(CallKeys, "__call__", lambda self: 0)  # each path is a call of its own
    options = {"prompts": PROMPT.tolist(), "length": 6, "answers": answers} | options
    found, counts = enumerate_rounds(monkeypatch, *pair, policy, **options)
    return found, max(map(max, counts))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_rounds_with_earlier_answers_have_the_targets_distribution(make_target, monkeypatch, kind, rounds):
    target, draft = make_pair(make_target, seed=3)
    pair = target, draft if kind == "draft" else PromptLookup(target)
    found, most = distance(monkeypatch, pair, Scheduler(num_nodes=2 if rounds == 2 else 4), rounds=rounds)
    assert found < 5e-6 and most > 1


def test_enumeration_catches_matches_that_are_tried_until_one_is_right(make_target, monkeypatch):
    honest = loop_module.verify

    def again(drafts, *args):
        verified = honest(drafts, *args)
        return verified if int(verified.num_accepted[0]) else honest(drafts, *args)

    monkeypatch.setattr(loop_module, "verify", again)
    target, _ = make_pair(make_target, seed=3)
    assert distance(monkeypatch, (target, PromptLookup(target)), Scheduler(num_nodes=2))[0] > 0.005


def second_calls(target, draft, seeds, length):
    """Count what calls draw that know the answer of a call with the same seed."""
    counts = Counter()
    for seed in range(seeds):
        draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=4), answers=AnswerMemory(500))
        for _ in range(2):
            torch.manual_seed(seed)
            output = target.generate(
                PROMPT, attention_mask=torch.ones_like(PROMPT), assistant_model=draft, do_sample=True, top_k=0,
                max_new_tokens=length, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        counts[tuple(output[0, PROMPT.shape[1] :].tolist())] += 1
    return chi_square_p_value(counts, distribution_of_call(target, length))


@pytest.mark.parametrize("is_honest", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_seed_that_returns_does_not_bring_its_noise_back(make_target, monkeypatch, is_honest):
    target, _ = make_pair(make_target, seed=1, depth=4)
    if not is_honest:
        monkeypatch.setattr(CallKeys, "__call__", lambda self: 0)
    p_value = second_calls(target, PromptLookup(target), seeds=70, length=3)
    assert p_value > 1e-3 if is_honest else p_value < 1e-6


@pytest.mark.slow
def test_samples_that_know_those_of_their_neighbours_have_the_targets_distribution(make_target):
    """Rows of a queue find what ended before them in the same call."""
    target, _ = make_pair(make_target, seed=3)
    draft, counts, length = PromptLookup(target), Counter(), 4
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=4), answers=AnswerMemory(500))
    torch.manual_seed(7)
    for done in generate_many(
        target, draft, PROMPT.tolist() * 300, batch_size=20, progress=False, do_sample=True, top_k=0,
        max_new_tokens=length, pad_token_id=0, eos_token_id=None,
    ):  # fmt: skip
        counts[tuple(done.token_ids.tolist())] += 1
    assert chi_square_p_value(counts, distribution_of_call(target, length)) > 1e-3
    assert sum(draft.last_stats.accepted) > 0
