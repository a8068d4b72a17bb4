"""Policies: how much of a block is verified, decided by confidences alone."""

import pytest
import torch

from hf_dspark import ConfidenceThreshold, FullBlock


@pytest.mark.parametrize("num_drafts", [0, 3, 5])
def test_full_block_verifies_every_draft(num_drafts):
    assert FullBlock().plan_verify(torch.zeros(2, 5), num_drafts).tolist() == [num_drafts] * 2


def test_full_block_works_without_a_confidence_head():
    assert FullBlock().plan_verify(None, 4).tolist() == [4]


def test_confidence_threshold_stops_before_the_first_doubtful_slot():
    confidence = torch.tensor([[0.9, 0.6, 0.4, 0.99], [0.3, 0.9, 0.9, 0.9], [0.8, 0.8, 0.8, 0.8]])
    assert ConfidenceThreshold(0.5).plan_verify(confidence, 4).tolist() == [2, 0, 4]


def test_confidence_threshold_keeps_a_slot_that_reaches_it_exactly():
    assert ConfidenceThreshold(0.5).plan_verify(torch.tensor([[0.5, 0.5, 0.25]]), 3).tolist() == [2]


def test_confidence_threshold_of_zero_verifies_every_draft():
    assert ConfidenceThreshold(0.0).plan_verify(torch.tensor([[0.0, 0.1, 0.0]]), 3).tolist() == [3]


def test_confidence_threshold_of_one_needs_certainty():
    assert ConfidenceThreshold(1.0).plan_verify(torch.tensor([[1.0, 0.999]]), 2).tolist() == [1]


@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_confidence_threshold_never_exceeds_the_drafts_there_are(num_drafts):
    assert ConfidenceThreshold(0.1).plan_verify(torch.full((1, 4), 0.9), num_drafts).tolist() == [num_drafts]


@pytest.mark.parametrize("length", range(5))
def test_confidence_threshold_does_not_look_behind_its_cut(length):
    confidence = torch.full((1, 4), 0.9)
    confidence[0, length:] = 0.1
    other = confidence.clone()
    other[0, length + 1 :] = 0.95
    policy = ConfidenceThreshold(0.5)
    assert policy.plan_verify(confidence, 4).tolist() == policy.plan_verify(other, 4).tolist() == [length]


@pytest.mark.parametrize("name", ["draft_vanilla", "draft_rnn"])
def test_confidence_threshold_matches_deepspecs_proposal_lengths(golden, name):
    for expected in golden(name).info["inference"]["rounds"]:
        confidence = torch.tensor([expected["confidence_probs"]])
        for threshold, length in expected["proposal_len_by_threshold"].items():
            assert ConfidenceThreshold(float(threshold)).plan_verify(confidence, 5).tolist() == [length]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan"), float("inf")])
def test_confidence_threshold_refuses_values_outside_the_unit_interval(threshold):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got"):
        ConfidenceThreshold(threshold)


def test_confidence_threshold_refuses_a_draft_without_confidence_head():
    with pytest.raises(ValueError, match="this one has none.*enable_confidence_head is False"):
        ConfidenceThreshold(0.5).plan_verify(None, 4)
