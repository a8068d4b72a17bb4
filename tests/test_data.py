"""From text to anchored blocks: parity with DeepSpec's blocks, and the properties of sampled anchors."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_dspark.configuration_dspark import select_features
from hf_dspark.data import (
    BlockCollator,
    anchor_candidates,
    cut_blocks,
    label_hidden,
    sample_anchors,
    target_states,
    tokenize_prompt_completion,
)

GOLDEN = ("draft_vanilla", "gemma4/draft_vanilla")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words to ids; sequences start with <bos>."""
    words = ["<pad>", "<bos>", "<eos>", "what", "is", "up", "not", "much", "?"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="?"
    )


# ---- blocks


@pytest.mark.parametrize("name", GOLDEN)
def test_blocks_match_deepspec(golden, name):
    train = golden(name).train
    kept = train["block_keep_mask"].bool()
    blocks = cut_blocks(train["input_ids"], train["loss_mask"].bool(), train["anchor_positions"], kept, 5)
    assert torch.equal(blocks.labels, train["target_ids"])
    assert torch.equal(blocks.supervised, train["eval_mask"].bool())
    assert torch.equal(blocks.anchor_positions, train["anchor_positions"])
    assert torch.equal(blocks.anchor_mask, kept)


def test_anchor_candidates_match_deepspec(golden):
    train = golden("draft_vanilla").train
    candidates = anchor_candidates(train["loss_mask"].bool())
    assert torch.equal(candidates, train["anchor_candidate_mask"].bool())


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_label_hidden_matches_deepspecs_aligned_target_logits(golden, name):
    data = golden(name)
    train, kept = data.train, data.train["block_keep_mask"].bool()
    blocks = cut_blocks(train["input_ids"], train["loss_mask"].bool(), train["anchor_positions"], kept, 5)
    logits = data.draft.base_logits(label_hidden(train["target_last_hidden_states"], blocks))
    torch.testing.assert_close(
        logits[blocks.supervised], train["aligned_target_logits"][blocks.supervised], atol=2e-5, rtol=1e-4
    )


def test_label_hidden_takes_the_position_before_each_label():
    last_hidden = torch.arange(9.0)[None, :, None].expand(1, 9, 2)
    blocks = cut_blocks(torch.arange(9)[None], torch.ones(1, 9), torch.tensor([[2, 4]]), torch.ones(1, 2).bool(), 3)
    assert label_hidden(last_hidden, blocks)[0, :, :, 0].tolist() == [[2, 3, 4], [4, 5, 6]]
    assert blocks.labels[0].tolist() == [[3, 4, 5], [5, 6, 7]]


def test_blocks_are_supervised_on_a_contiguous_prefix_inside_the_row():
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])
    blocks = cut_blocks(
        torch.arange(8)[None], loss_mask, torch.tensor([[1, 4, 6]]), torch.tensor([[True, True, True]]), 3
    )
    assert blocks.supervised[0].int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 0, 0]]


def test_dummy_blocks_are_never_supervised():
    blocks = cut_blocks(torch.arange(8)[None], torch.ones(1, 8), torch.tensor([[0]]), torch.tensor([[False]]), 3)
    assert not blocks.supervised.any()


# ---- anchors


def test_anchors_are_distinct_candidates_in_order():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        loss_mask = torch.rand(3, 40, generator=generator) < 0.7
        positions, mask = sample_anchors(loss_mask, 6, generator)
        assert positions.shape == mask.shape == (3, 6)
        for row in range(3):
            drawn = positions[row][mask[row]].tolist()
            assert drawn == sorted(set(drawn))
            assert anchor_candidates(loss_mask)[row, drawn].all()


def test_anchors_fill_poor_rows_with_masked_dummies_at_zero():
    loss_mask = torch.zeros(3, 10, dtype=torch.bool)
    loss_mask[0, 2:9] = True  # six candidates
    loss_mask[1, 4:7] = True  # two
    loss_mask[2, 5] = True  # a lone supervised token has no supervised successor: none
    positions, mask = sample_anchors(loss_mask, 4)
    assert mask.sum(dim=1).tolist() == [4, 2, 0]
    assert positions[1].tolist() == [4, 5, 0, 0]
    assert (positions[~mask] == 0).all()


def test_anchors_are_all_candidates_when_there_are_fewer_than_asked_for():
    loss_mask = torch.zeros(1, 10, dtype=torch.bool)
    loss_mask[0, 3:8] = True
    positions, mask = sample_anchors(loss_mask, 64)
    assert positions.tolist() == [[3, 4, 5, 6]] and mask.all()


def test_anchors_are_one_dummy_when_no_row_has_a_candidate():
    positions, mask = sample_anchors(torch.zeros(2, 6, dtype=torch.bool), 8)
    assert positions.tolist() == [[0], [0]] and not mask.any()


def test_anchors_follow_the_generators_seed():
    loss_mask = torch.ones(2, 60, dtype=torch.bool)
    draws = [sample_anchors(loss_mask, 8, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_anchors_are_drawn_uniformly():
    loss_mask = torch.ones(20_000, 6, dtype=torch.bool)
    positions, _ = sample_anchors(loss_mask, 2, torch.Generator().manual_seed(0))
    share = positions.flatten().bincount(minlength=5) / 20_000
    # Each of five candidates is among two drawn with probability 0.4; four standard deviations are 0.014.
    torch.testing.assert_close(share, torch.full((5,), 0.4), atol=0.014, rtol=0)


# ---- tokens and batches


def test_only_the_completion_and_its_end_are_supervised(tokenizer):
    row = tokenize_prompt_completion("what is up", "not much", tokenizer)
    assert row["input_ids"] == [1, 3, 4, 5, 6, 7, 2]
    assert row["loss_mask"] == [0, 0, 0, 0, 1, 1, 1]


def test_rows_are_cut_to_the_length_asked_for(tokenizer):
    row = tokenize_prompt_completion("what is up", "not much", tokenizer, max_length=5)
    assert row == {"input_ids": [1, 3, 4, 5, 6], "loss_mask": [0, 0, 0, 0, 1]}


def test_collator_pads_on_the_right_without_supervising_or_attending_the_padding():
    batch = BlockCollator(9)(
        [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1], "extra": "ignored"}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.keys() == {"input_ids", "loss_mask", "attention_mask"}


def test_collator_attends_to_a_token_that_equals_the_padding():
    batch = BlockCollator(0)([{"input_ids": [1, 0], "loss_mask": [0, 1]}])
    assert batch["attention_mask"].tolist() == [[1, 1]] and batch["loss_mask"].tolist() == [[False, True]]


def test_collator_refuses_masks_of_another_length():
    with pytest.raises(ValueError, match=r"input_ids \(3 tokens\) and loss_mask \(2\) differ in length"):
        BlockCollator(0)([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}])


# ---- the target's states


@torch.no_grad()
def test_target_states_are_the_targets_features_and_head_input(target):
    input_ids = torch.randint(1, 48, (2, 9))
    states = target_states(target, [-1, 2], input_ids, torch.ones_like(input_ids), torch.device("cpu"), torch.float32)
    output = target(input_ids, output_hidden_states=True)
    assert torch.equal(states.features, select_features(output.hidden_states, [-1, 2]))
    torch.testing.assert_close(target.lm_head(states.last_hidden), output.logits)


def test_target_states_of_a_row_do_not_depend_on_its_padding(target):
    input_ids, attention_mask = torch.randint(1, 48, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    attention_mask[1, 6:] = 0
    device = torch.device("cpu")
    padded = target_states(target, [0, 2], input_ids, attention_mask, device, torch.float32)
    alone = target_states(target, [0, 2], input_ids[1:, :6], attention_mask[1:, :6], device, torch.float32)
    torch.testing.assert_close(padded.features[1:, :6], alone.features, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded.last_hidden[1:, :6], alone.last_hidden, atol=1e-5, rtol=1e-5)


def test_target_states_need_no_gradient(target):
    input_ids = torch.randint(1, 48, (1, 5))
    states = target_states(target, [0], input_ids, torch.ones_like(input_ids), torch.device("cpu"), torch.bfloat16)
    assert not states.features.requires_grad and not states.last_hidden.requires_grad
    assert states.features.dtype == states.last_hidden.dtype == torch.bfloat16
