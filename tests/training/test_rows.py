"""Batches of rows: padding that is never read, and documents packed so that little is padding."""

from hf_dspark.training.blocks import anchor_candidates
from hf_dspark.training.rows import PackedRows, collate, join_documents, packed_in_order


def test_collator_pads_on_the_right_without_supervising_or_attending_the_padding():
    short = {"input_ids": [4], "loss_mask": [1], "extra": "ignored"}
    batch = collate([{"input_ids": [1, 2, 9], "loss_mask": [0, 1, 1]}, short], 9)
    assert batch["input_ids"].tolist() == [[1, 2, 9], [4, 9, 9]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]  # a token that equals the padding is attended to
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]
    assert batch.keys() == {"input_ids", "loss_mask", "attention_mask", "position_ids"}


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
    packed = list(packed_in_order(rows_of(5, 4, 3, 8), 10))
    assert [row["position_ids"] for row in packed] == [[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2], list(range(8))]
    assert packed[0]["input_ids"][5:] == [10, 11, 12, 13]


def test_padding_after_a_packed_row_is_a_document_of_its_own():
    batch = collate([join_documents(rows_of(3, 2)), join_documents(rows_of(7))], 0)
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert not anchor_candidates(batch["loss_mask"], batch["position_ids"])[0, 4:].any()
