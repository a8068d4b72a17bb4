"""From rows to anchored blocks: parity with DeepSpec's blocks, and the properties of sampled anchors."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.training.blocks import (
    BlockCollator,
    PackedRows,
    PackedStream,
    anchor_candidates,
    cut_blocks,
    join_documents,
    label_hidden,
    require_separable_documents,
    sample_anchors,
    target_states,
)
from tests.features import select_features

GOLDEN = ("draft_vanilla", "gemma4/draft_vanilla")


def positions_of(values: torch.Tensor) -> torch.Tensor:
    """Positions of rows that hold one document each."""
    return torch.arange(values.shape[1]).expand(len(values), -1)


def one_document(anchors, real, input_ids, gamma) -> BlockLayout:
    return BlockLayout(anchors, real, positions_of(input_ids), gamma)


# ---- blocks


@pytest.mark.parametrize("name", GOLDEN)
def test_blocks_match_deepspec(golden, name):
    train = golden(name).train
    kept = train["block_keep_mask"].bool()
    layout = one_document(train["anchor_positions"], kept, train["input_ids"], 5)
    blocks = cut_blocks(train["input_ids"], train["loss_mask"].bool(), layout)
    assert torch.equal(blocks.labels, train["target_ids"])
    assert torch.equal(blocks.supervised, train["eval_mask"].bool())


def test_anchor_candidates_match_deepspec(golden):
    train = golden("draft_vanilla").train
    candidates = anchor_candidates(train["loss_mask"].bool(), positions_of(train["loss_mask"]))
    assert torch.equal(candidates, train["anchor_candidate_mask"].bool())


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_label_hidden_matches_deepspecs_aligned_target_logits(golden, name):
    data = golden(name)
    train, kept = data.train, data.train["block_keep_mask"].bool()
    layout = one_document(train["anchor_positions"], kept, train["input_ids"], 5)
    blocks = cut_blocks(train["input_ids"], train["loss_mask"].bool(), layout)
    logits = data.draft.base_logits(label_hidden(train["target_last_hidden_states"], blocks))
    torch.testing.assert_close(
        logits[blocks.supervised], train["aligned_target_logits"][blocks.supervised], atol=2e-5, rtol=1e-4
    )


def test_label_hidden_takes_the_position_before_each_label():
    last_hidden = torch.arange(9.0)[None, :, None].expand(1, 9, 2)
    ids = torch.arange(9)[None]
    blocks = cut_blocks(ids, torch.ones(1, 9), one_document(torch.tensor([[2, 4]]), torch.ones(1, 2).bool(), ids, 3))
    assert label_hidden(last_hidden, blocks)[0, :, :, 0].tolist() == [[2, 3, 4], [4, 5, 6]]
    assert blocks.labels[0].tolist() == [[3, 4, 5], [5, 6, 7]]


def test_blocks_are_supervised_on_a_contiguous_prefix_inside_the_row():
    loss_mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])
    anchors, ids = torch.tensor([[1, 4, 6]]), torch.arange(8)[None]
    blocks = cut_blocks(ids, loss_mask, one_document(anchors, anchors > 0, ids, 3))
    assert blocks.supervised[0].int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 0, 0]]


def test_dummy_blocks_are_never_supervised():
    anchors, ids = torch.tensor([[0]]), torch.arange(8)[None]
    blocks = cut_blocks(ids, torch.ones(1, 8), one_document(anchors, anchors > 0, ids, 3))
    assert not blocks.supervised.any()


def test_blocks_end_with_their_document():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    anchors = torch.tensor([[1, 3, 5]])
    layout = BlockLayout(anchors, anchors > 0, positions, 3)
    assert layout.starts.tolist() == [[0, 0, 4]]
    blocks = cut_blocks(torch.arange(8)[None], torch.ones(1, 8), layout)
    assert blocks.supervised[0].int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]


# ---- anchors


def test_anchors_are_distinct_candidates_in_order():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        loss_mask = torch.rand(3, 40, generator=generator) < 0.7
        positions, mask = sample_anchors(loss_mask, positions_of(loss_mask), 6, generator)
        assert positions.shape == mask.shape == (3, 6)
        for row in range(3):
            drawn = positions[row][mask[row]].tolist()
            assert drawn == sorted(set(drawn))
            assert anchor_candidates(loss_mask, positions_of(loss_mask))[row, drawn].all()


def test_anchors_fill_poor_rows_with_masked_dummies_at_zero():
    loss_mask = torch.zeros(3, 10, dtype=torch.bool)
    loss_mask[0, 2:9] = True  # six candidates
    loss_mask[1, 4:7] = True  # two
    loss_mask[2, 5] = True  # a lone supervised token has no supervised successor: none
    positions, mask = sample_anchors(loss_mask, positions_of(loss_mask), 4)
    assert mask.sum(dim=1).tolist() == [4, 2, 0]
    assert positions[1].tolist() == [4, 5, 0, 0]
    assert (positions[~mask] == 0).all()


def test_anchors_are_all_candidates_when_there_are_fewer_than_asked_for():
    loss_mask = torch.zeros(1, 10, dtype=torch.bool)
    loss_mask[0, 3:8] = True
    positions, mask = sample_anchors(loss_mask, positions_of(loss_mask), 64)
    assert positions.tolist() == [[3, 4, 5, 6]] and mask.all()


def test_anchors_are_one_dummy_when_no_row_has_a_candidate():
    nothing = torch.zeros(2, 6, dtype=torch.bool)
    positions, mask = sample_anchors(nothing, positions_of(nothing), 8)
    assert positions.tolist() == [[0], [0]] and not mask.any()


def test_anchors_follow_the_generators_seed():
    loss_mask = torch.ones(2, 60, dtype=torch.bool)
    draws = [
        sample_anchors(loss_mask, positions_of(loss_mask), 8, torch.Generator().manual_seed(seed))[0]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_anchors_are_drawn_uniformly():
    loss_mask = torch.ones(20_000, 6, dtype=torch.bool)
    positions, _ = sample_anchors(loss_mask, positions_of(loss_mask), 2, torch.Generator().manual_seed(0))
    share = positions.flatten().bincount(minlength=5) / 20_000
    # Each of four candidates (1 to 4) is among two drawn with probability 0.5; four standard deviations are 0.014.
    torch.testing.assert_close(share, torch.tensor([0.0, 0.5, 0.5, 0.5, 0.5]), atol=0.014, rtol=0)


def test_no_anchor_is_the_first_token_of_a_document_or_its_last():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    candidates = anchor_candidates(torch.ones(1, 7, dtype=torch.bool), positions)
    assert candidates[0].int().tolist() == [0, 1, 0, 0, 1, 1]


# ---- batches


def test_collator_pads_on_the_right_without_supervising_or_attending_the_padding():
    batch = BlockCollator(9)(
        [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1], "extra": "ignored"}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]
    assert batch.keys() == {"input_ids", "loss_mask", "attention_mask", "position_ids"}


def test_collator_attends_to_a_token_that_equals_the_padding():
    batch = BlockCollator(0)([{"input_ids": [1, 0], "loss_mask": [0, 1]}])
    assert batch["attention_mask"].tolist() == [[1, 1]] and batch["loss_mask"].tolist() == [[False, True]]


def test_collator_refuses_masks_of_another_length():
    with pytest.raises(ValueError, match=r"input_ids \(3 tokens\) and loss_mask \(2\) differ in length"):
        BlockCollator(0)([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}])


# ---- packing


def rows_of(*lengths: int) -> list[dict]:
    """Documents whose tokens tell them apart."""
    return [
        {"input_ids": [10 * n + i for i in range(size)], "loss_mask": [1] * size} for n, size in enumerate(lengths)
    ]


def test_packed_rows_hold_every_document_once_and_fit():
    rows = rows_of(5, 9, 3, 8, 2, 6, 7)
    packed = PackedRows(rows, 10)
    assert len(packed) == 5  # 9, 8 + 2, 7 + 3, 6, 5
    documents = []
    for row in (packed[index] for index in range(len(packed))):
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["position_ids"]) <= 10
        starts = [place for place, position in enumerate(row["position_ids"]) if position == 0] + [None]
        documents += [row["input_ids"][start:end] for start, end in zip(starts, starts[1:], strict=False)]
    assert sorted(documents) == sorted(row["input_ids"] for row in rows)


def test_a_packed_stream_joins_documents_in_their_order():
    packed = list(PackedStream(rows_of(5, 4, 3, 8), 10))
    assert [row["position_ids"] for row in packed] == [[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2], list(range(8))]
    assert packed[0]["input_ids"][5:] == [10, 11, 12, 13]


@pytest.mark.parametrize("pack", [PackedRows, PackedStream])
def test_packing_refuses_documents_longer_than_a_row(pack):
    with pytest.raises(ValueError, match="a row of 12 tokens does not fit into packed rows of 10"):
        list(pack(rows_of(3, 12), 10))


def test_padding_behind_a_packed_row_is_a_document_of_its_own():
    batch = BlockCollator(0)([join_documents(rows_of(3, 2)), join_documents(rows_of(7))])
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert not anchor_candidates(batch["loss_mask"], batch["position_ids"])[0, 4:].any()


@pytest.mark.parametrize("family", [Qwen3Config, LlamaConfig, Gemma3TextConfig])
def test_the_target_keeps_packed_documents_apart(family):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = family(vocab_size=48, num_key_value_heads=2, head_dim=8, sliding_window=6, **sizes)
    target = AutoModelForCausalLM.from_config(config).eval()
    rows = [join_documents(rows_of(9, 7)), join_documents(rows_of(4, 3, 8))]
    batch = BlockCollator(0)([{name: [token % 48 for token in row[name]] for name in row} for row in rows])
    cpu = torch.device("cpu")
    packed = target_states(
        target, [0, 1], batch["input_ids"], batch["attention_mask"], cpu, torch.float32, batch["position_ids"]
    )
    for row, start, end in ((0, 0, 9), (0, 9, 16), (1, 0, 4), (1, 4, 7), (1, 7, 15)):
        ids = batch["input_ids"][row : row + 1, start:end]
        alone = target_states(target, [0, 1], ids, torch.ones_like(ids), cpu, torch.float32)
        torch.testing.assert_close(packed.features[row, start:end], alone.features[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.last_hidden[row, start:end], alone.last_hidden[0], atol=1e-5, rtol=1e-5)
    require_separable_documents(target, [0, 1])


def test_a_target_that_mixes_packed_documents_is_refused(target, monkeypatch):
    decoder = target.get_decoder()
    forward = decoder.forward
    # As a target does that knows nothing of positions that start again.
    monkeypatch.setattr(decoder, "forward", lambda position_ids=None, **kwargs: forward(**kwargs))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM does not keep the documents of a packed row apart"):
        require_separable_documents(target, [0, 2])


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
