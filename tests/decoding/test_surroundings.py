"""What surrounds a call: autocast, inference mode, other threads that use the same target, and what they leave."""

import threading
import warnings
from contextlib import nullcontext

import pytest
import torch

from hf_dspark import DecodingOptions, FullBlock
from hf_dspark.targets.support import TargetSupport
from tests.hybrids import HAVE_PROTOCOL, build, make_own_draft
from tests.upstream.comparison import Expected, cache_of, differences

IDS = torch.tensor([[3, 4, 5, 6, 7, 3, 4, 5]])
GREEDY = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
RECORDED = {"return_dict_in_generate": True, "output_scores": True}
RECURRENT = pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")


def draft_of(target, by_transformers=False):
    draft = make_own_draft(target)
    policy = None if by_transformers else FullBlock()
    draft.decoding = DecodingOptions(policy=policy, use_transformers_loop=by_transformers)
    return draft


def autocast(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@pytest.fixture(
    params=[
        "qwen3",
        pytest.param("mamba2", marks=[RECURRENT, pytest.mark.slow]),
        pytest.param("lfm2", marks=RECURRENT),
    ]
)
def any_target(request, make_target):
    return make_target() if request.param == "qwen3" else build(request.param)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_calls_under_autocast_are_plain_ones_to_its_rounding(any_target, num_rows):
    draft, ids = draft_of(any_target), torch.cat([IDS, IDS.flip(1)])[:num_rows]
    with autocast():
        plain = any_target.generate(ids, **GREEDY, **RECORDED)
        ours = any_target.generate(ids, assistant_model=draft, **GREEDY, **RECORDED)
    expected = Expected(plain, plain.scores, ids.shape[1], [16] * num_rows, False, torch.bfloat16)
    assert differences(expected, ours)[0] == []


@pytest.mark.parametrize("first", [True, False])
def test_a_turn_goes_on_where_autocast_began_or_ended_since(target, first):
    """Keys and values of both turns keep the more exact of their types, as plain decoding concatenates them."""
    draft, answers, caches = draft_of(target), [], []
    later = torch.cat([target.generate(IDS, **GREEDY | {"max_new_tokens": 1}), IDS], dim=1)
    for assistant in ({}, {"assistant_model": draft}):
        with autocast(first):
            turn = target.generate(IDS, **GREEDY | {"max_new_tokens": 1}, **RECORDED, **assistant)
        with autocast(not first):
            options = GREEDY | RECORDED | assistant
            answers.append(target.generate(later, past_key_values=cache_of(turn), **options))
        caches.append(cache_of(answers[-1]))
    expected = Expected(answers[0], answers[0].scores, later.shape[1], [16], False, torch.bfloat16)
    assert differences(expected, answers[1])[0] == []
    assert caches[1].to_dynamic_cache().layers[0].values.dtype == caches[0].layers[0].values.dtype == torch.float32


def test_a_cache_of_inference_mode_is_continued_outside_of_it(any_target):
    draft = draft_of(any_target)
    with torch.inference_mode():
        turn = any_target.generate(IDS, assistant_model=draft, **GREEDY, **RECORDED)
        later = torch.cat([turn.sequences, IDS], dim=1)
        expected = any_target.generate(later, **GREEDY)
    later = later.clone()
    cache = {TargetSupport.of(any_target).cache_argument: cache_of(turn)}
    assert torch.equal(any_target.generate(later, **cache, assistant_model=draft, **GREEDY), expected)


def answers_of(target, assistants, calls=6):
    """Let threads generate at once; returns the answers and errors of each."""
    answers, barrier = [[] for _ in assistants], threading.Barrier(len(assistants))

    def generate(own, assistant):
        barrier.wait()
        for _ in range(calls):
            try:
                own.append(target.generate(IDS, assistant_model=assistant, **GREEDY))
            except Exception as error:
                own.append(error)

    threads = [threading.Thread(target=generate, args=each) for each in zip(answers, assistants, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that transformers' loop is used
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return answers


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shared", [True, False])
def test_threads_that_draft_for_one_target_wait_for_each_other(any_target, shared):
    drafts = [draft_of(any_target)] * 2 if shared else [draft_of(any_target), draft_of(any_target)]
    plain = any_target.generate(IDS, **GREEDY)
    for answers in answers_of(any_target, drafts):
        assert all(torch.equal(answer, plain) for answer in answers), answers


@pytest.mark.slow
def test_threads_may_use_transformers_loop_at_once(target):
    plain, drafts = target.generate(IDS, **GREEDY), [draft_of(target, by_transformers=True) for _ in range(2)]
    for answers in answers_of(target, [*drafts, None]):
        assert all(torch.equal(answer, plain) for answer in answers), answers


def test_plain_decoding_beside_a_draft_is_right_or_refused_by_name(any_target):
    plain, draft = any_target.generate(IDS, **GREEDY), draft_of(any_target)
    drafted, beside = answers_of(any_target, [draft, None])
    assert all(torch.equal(answer, plain) for answer in drafted), drafted
    for answer in beside:
        if isinstance(answer, Exception):
            assert "is decoding with a DSpark draft in another thread" in str(answer)
        else:
            assert torch.equal(answer, plain)
    assert torch.equal(any_target.generate(IDS, **GREEDY), plain)


@pytest.mark.one_in(2)
@RECURRENT
@pytest.mark.parametrize("kind", ["qwen3", "lfm2", "mamba2"])
def test_positions_of_ones_own_are_followed_or_refused(kind, make_target):
    target = make_target() if kind == "qwen3" else build(kind)
    draft, positions = draft_of(target), torch.arange(IDS.shape[1])[None]
    for shift in (0, 3):
        given = {"position_ids": positions + shift, **GREEDY}
        if shift and kind == "mamba2":
            with pytest.raises(ValueError, match="position_ids are not those that follow from the attention mask"):
                target.generate(IDS, assistant_model=draft, **given)
            continue
        with pytest.warns(UserWarning, match="position_ids are not those") if shift else nullcontext():
            found = target.generate(IDS, assistant_model=draft, **given)
        assert torch.equal(found, target.generate(IDS, **given))
