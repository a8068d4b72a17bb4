"""From rows to anchored blocks: parity with DeepSpec's blocks, and the properties of sampled anchors."""

import pytest
import torch

from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.training.blocks import anchor_candidates, cut_blocks, label_hidden, sample_anchors

GOLDEN = ("draft_vanilla", "gemma4/draft_vanilla")


def positions_of(values: torch.Tensor) -> torch.Tensor:
    """Positions of rows that hold one document each."""
    return torch.arange(values.shape[1]).expand(len(values), -1)


def one_document(anchors, real, input_ids, gamma) -> BlockLayout:
    return BlockLayout(anchors, real, positions_of(input_ids), gamma)


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_candidates_blocks_and_the_targets_logits_match_deepspec(golden, name):
    data = golden(name)
    train, kept = data.train, data.train["block_keep_mask"].bool()
    layout = one_document(train["anchor_positions"], kept, train["input_ids"], 5)
    blocks = cut_blocks(train["input_ids"], train["loss_mask"].bool(), layout)
    assert torch.equal(blocks.labels, train["target_ids"])
    assert torch.equal(blocks.supervised, train["eval_mask"].bool())
    if "anchor_candidate_mask" in train:
        candidates = anchor_candidates(train["loss_mask"].bool(), positions_of(train["loss_mask"]))
        assert torch.equal(candidates, train["anchor_candidate_mask"].bool())
    logits = data.draft.base_logits(label_hidden(train["target_last_hidden_states"], blocks))
    torch.testing.assert_close(
        logits[blocks.supervised], train["aligned_target_logits"][blocks.supervised], atol=2e-5, rtol=1e-4
    )


def test_blocks_are_supervised_on_a_contiguous_prefix_inside_the_row():
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])
    anchors, ids = torch.tensor([[1, 4, 6, 0]]), torch.arange(8)[None]  # the last one is a dummy
    blocks = cut_blocks(ids, loss_mask, one_document(anchors, anchors > 0, ids, 3))
    assert blocks.weights[0].tolist() == [[1, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_blocks_end_with_their_document():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    anchors = torch.tensor([[1, 3, 5]])
    layout = BlockLayout(anchors, anchors > 0, positions, 3)
    assert layout.starts.tolist() == [[0, 0, 4]]
    blocks = cut_blocks(torch.arange(8)[None], torch.ones(1, 8), layout)
    assert blocks.supervised[0].int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]


def test_anchors_fill_poor_rows_with_masked_dummies_at_zero():
    loss_mask = torch.zeros(3, 10, dtype=torch.bool)
    loss_mask[0, 2:9] = True  # six candidates
    loss_mask[1, 4:7] = True  # two
    loss_mask[2, 5] = True  # a lone supervised token has no supervised successor: none
    positions, mask = sample_anchors(loss_mask, positions_of(loss_mask), 4)
    assert mask.sum(dim=1).tolist() == [4, 2, 0]
    assert positions[1].tolist() == [4, 5, 0, 0] and (positions[~mask] == 0).all()
    positions, mask = sample_anchors(loss_mask[1:], positions_of(loss_mask[1:]), 64)
    assert positions.tolist() == [[4, 5], [0, 0]] and mask.tolist() == [[True, True], [False, False]]
    positions, mask = sample_anchors(loss_mask[2:], positions_of(loss_mask[2:]), 64)
    assert positions.tolist() == [[0]] and not mask.any()


def test_every_document_of_a_packed_row_has_as_many_anchors_as_if_it_stood_alone():
    """Short documents beside a long one starved when anchors were counted per row."""
    lengths, starts = (60, 7, 5, 28), (0, 60, 67, 72)
    packed = torch.cat([torch.arange(length) for length in lengths])[None]
    loss_mask = torch.ones_like(packed, dtype=torch.bool)
    taken = torch.zeros(100)
    for seed in range(300):
        positions, real = sample_anchors(loss_mask, packed, 4, torch.Generator().manual_seed(seed))
        counts = [
            int(((positions >= start) & (positions < start + n)).sum())
            for start, n in zip(starts, lengths, strict=True)
        ]
        assert real.all() and positions.shape[1] == sum(counts) and counts == [4, 4, 3, 4]
        assert positions[0].tolist() == sorted(set(positions[0].tolist()))
        taken[positions[0]] += 1
    # Uniform: each of 58, 5, 3 and 26 candidates is drawn alike; four standard deviations are below 0.12.
    for start, length, count in zip(starts, lengths, (4, 4, 3, 4), strict=True):
        share = taken[start + 1 : start + length - 1] / 300
        torch.testing.assert_close(share, torch.full_like(share, count / (length - 2)), atol=0.12, rtol=0)


def test_anchors_of_a_row_of_one_document_are_those_with_the_first_draws():
    """The anchors of DeepSpec's rule, as earlier versions drew them: trajectories stay."""
    loss_mask = torch.rand(3, 50, generator=torch.Generator().manual_seed(1)) < 0.8
    positions, real = sample_anchors(loss_mask, positions_of(loss_mask), 9, torch.Generator().manual_seed(2))
    draws = torch.rand(3, 49, generator=torch.Generator().manual_seed(2))
    draws[~anchor_candidates(loss_mask, positions_of(loss_mask))] = -1
    assert real.all() and torch.equal(positions, draws.topk(9).indices.sort().values)
