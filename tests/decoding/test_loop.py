"""Rounds: the same tokens as without a draft, whatever the target, its dtype and the processors.

The pair under `fixtures/deepspec/trained` accepts most of its drafts, so acceptance, cut-off and rollback all happen.
"""

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList

from hf_dspark import ConfidenceThreshold, DecodingOptions, FullBlock, Policy
from tests.rows import (
    EOS,
    GREEDY,
    OPTIONS,
    Notes,
    assert_as_alone,
    assert_no_hooks,
    assert_same_tokens,
)

DRAFTED = OPTIONS | {
    "threshold": {"assistant_confidence_threshold": 0.6},
    "threshold_zero": {"assistant_confidence_threshold": 0.0},
    "one_draft": {"num_assistant_tokens": 1},
    "three_drafts": {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    "threshold_and_three_drafts": {"assistant_confidence_threshold": 0.4, "num_assistant_tokens": 3},
    "forced_eos": {"forced_eos_token_id": EOS},
    "two_tokens": {"max_new_tokens": 2},
    "max_length": {"max_new_tokens": None, "max_length": 30},
    "max_time": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(600.0)])},
    "constrained": {"prefix_allowed_tokens_fn": lambda batch, ids: [1 + len(ids) % 3, 20, 30]},
}


@pytest.mark.one_in(15)
@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("options", DRAFTED.values(), ids=DRAFTED)
def test_greedy_output_is_identical_to_plain_generate(target, draft, prompt_ids, options):
    plain = {key: value for key, value in options.items() if "assistant" not in key}
    for prompt in prompt_ids[::2]:
        assert_same_tokens(target, draft, prompt, options, **plain)
    assert_no_hooks(target)


@pytest.mark.usefixtures("either_loop")
def test_accepted_end_of_sequence_is_counted_as_accepted_and_followed_by_no_bonus_token(target, draft, prompt_ids):
    ended_by_draft = 0
    for prompt in prompt_ids:
        plain = target.generate(prompt, **GREEDY)[0, prompt.shape[1] :]
        for end in {*plain.tolist()[2:]}:
            ids = target.generate(prompt, assistant_model=draft, **GREEDY, eos_token_id=end)
            stats = draft.last_stats
            assert ids.shape[1] - prompt.shape[1] == 1 + sum(stats.committed)
            if stats.rounds and stats.committed[-1] == stats.accepted[-1]:
                assert stats.proposed[-1] == stats.accepted[-1]  # nothing is sent after it
                ended_by_draft += 1
    assert ended_by_draft > 3


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8])
def test_rounds_reproduce_the_reference_decoder(target, draft, reference, threshold):
    case = next(case for case in reference["cases"] if case["confidence_threshold"] == threshold)
    for prompt, expected in zip(reference["prompts"], case["outputs"], strict=True):
        # The reference counts its last block whole and cuts the text afterwards: so generate a block more.
        options = GREEDY | {"max_new_tokens": reference["max_new_tokens"] + 7}
        options["assistant_confidence_threshold"] = threshold
        ids = target.generate(torch.tensor([prompt]), assistant_model=draft, **options)
        stats, rounds = draft.last_stats, len(expected["acceptance_lengths"])
        assert ids[0, : len(expected["output_ids"])].tolist() == expected["output_ids"]
        assert [accepted + 1 for accepted in stats.accepted[:rounds]] == expected["acceptance_lengths"]
        assert stats.proposed[:rounds] == expected["proposal_lengths"]


def test_padding_on_the_left_changes_nothing(target, draft, prompt_ids):
    prompt, draft.decoding = prompt_ids[1], DecodingOptions(policy=FullBlock())  # which learns nothing meanwhile
    ids, mask = torch.nn.functional.pad(prompt, (5, 0)), torch.nn.functional.pad(torch.ones_like(prompt), (5, 0))
    plain = target.generate(prompt, assistant_model=draft, **GREEDY)
    accepted = draft.last_stats.accepted
    assisted = target.generate(ids, attention_mask=mask, assistant_model=draft, **GREEDY)
    assert assisted[0, 5:].tolist() == plain[0].tolist()
    assert draft.last_stats.accepted == accepted  # padding is no context for the draft either


def test_sampling_stops_exactly_at_the_first_eos_and_the_length_limit(target, draft, prompt_ids):
    options = GREEDY | {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 30}
    for seed in range(12):
        torch.manual_seed(seed)
        output = target.generate(prompt_ids[0], assistant_model=draft, eos_token_id=[EOS, 5, 9], **options)
        ids = output[0, prompt_ids[0].shape[1] :].tolist()
        stops = [index for index, token in enumerate(ids) if token in (EOS, 5, 9)]
        assert stops == [len(ids) - 1] or (stops == [] and len(ids) == 30)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.9}, {"repetition_penalty": 1.2}]
)
def test_sampled_tokens_stay_in_the_processed_support(target, draft, prompt_ids, options):
    """With return_dict, every returned token has a finite processed score: drafts cannot leave the allowed set."""
    torch.manual_seed(0)
    options = GREEDY | {"do_sample": True, "return_dict_in_generate": True, "output_scores": True} | options
    output = target.generate(prompt_ids[0], assistant_model=draft, **options)
    new_ids = output.sequences[0, prompt_ids[0].shape[1] :]
    assert len(output.scores) == len(new_ids)
    assert all(scores[0, token] > -torch.inf for scores, token in zip(output.scores, new_ids, strict=True))
    assert sum(draft.last_stats.accepted) > 0


@pytest.mark.usefixtures("either_loop")
def test_returned_scores_and_hidden_states_are_those_of_plain_generate(target, draft, prompt_ids):
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    plain = target.generate(prompt_ids[0], **GREEDY, **ask)
    assisted = target.generate(prompt_ids[0], assistant_model=draft, **GREEDY, **ask)
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.cat(assisted.scores), torch.cat(plain.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(assisted.logits), torch.cat(plain.logits), atol=1e-4, rtol=1e-4)
    assert len(assisted.hidden_states[1]) == target.config.num_hidden_layers + 1


class Interrupts(Notes):
    def put(self, value):
        super().put(value)
        if len(self.tokens) > 20:
            raise KeyboardInterrupt


def test_interruption_leaves_target_and_draft_usable(target, draft, prompt_ids):
    with pytest.raises(KeyboardInterrupt):
        target.generate(prompt_ids[0], assistant_model=draft, streamer=Interrupts(), **GREEDY)
    assert_no_hooks(target)
    assert draft.last_stats.rounds > 0  # what had happened until then
    assert_same_tokens(target, draft, prompt_ids[0])


def test_foreign_default_device_changes_nothing(target, draft, prompt_ids):
    batch = torch.cat([prompt_ids[0][:, :3], prompt_ids[1][:, :3]])
    sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "pad_token_id": 0}
    draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.5))
    ways = [(prompt_ids[0], GREEDY | {"eos_token_id": 63}), (batch, GREEDY), (batch, sampled)]

    def run():
        torch.manual_seed(0)
        return [target.generate(ids, assistant_model=draft, **options).tolist() for ids, options in ways]

    here = run()
    try:
        torch.set_default_device("meta")  # where nothing can be computed
        there = run()
    finally:
        torch.set_default_device(None)
    assert there == here


def test_an_enormous_limit_takes_no_memory(target, draft, prompt_ids):
    end = int(target.generate(prompt_ids[0], **GREEDY)[0, -1])
    assert_same_tokens(target, draft, prompt_ids[0], max_new_tokens=10**13, eos_token_id=end)


def test_ended_rows_leave_the_batch(target, draft, prompts):
    """The later rounds are about fewer rows: padding is never decoded."""
    seen = []
    draft.decoding = DecodingOptions(observer=lambda outcome: seen.append(outcome.request_ids))
    lengths = list(map(len, assert_as_alone(target, draft, prompts, eos_token_id=[EOS, 11, 17, 42])))
    assert len(set(lengths)) > 1
    assert sum(map(len, seen)) < len(prompts) * len(seen)
    assert set(seen[-1]) <= {row for row, length in enumerate(lengths) if length > 1}


def test_rows_share_one_verification_budget(target, draft, prompts):
    class FiveInAll(Policy):
        def plan_verify(self, confidence, max_lengths, load):
            lengths = torch.zeros_like(max_lengths)
            for slot in range(5):
                row = slot % len(lengths)
                lengths[row] = min(int(lengths[row]) + 1, int(max_lengths[row]))
            return lengths

    seen = []
    draft.decoding = DecodingOptions(policy=FiveInAll(), observer=seen.append)
    assert_as_alone(target, draft, prompts)
    assert max(int(outcome.lengths.sum()) for outcome in seen) == 5
    ragged = next(outcome for outcome in seen if len(set(outcome.lengths.tolist())) > 1)
    assert ragged.target_logits.shape[:2] == (len(ragged.lengths), 1 + int(ragged.lengths.max()))
