"""Batches of rows of tokens: padded, or packed with several documents in a row.

Documents of a packed row follow each other; `position_ids` that start again at 0 tell them apart.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

COLUMNS = ("input_ids", "loss_mask", "position_ids", "attention_mask")  # of a batch


def collate(rows: list[dict[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Make a batch of rows of `input_ids` and `loss_mask`, padded on the right; padding is never supervised.

    Returns `input_ids`, `loss_mask`, `position_ids` and `attention_mask`, each `[B, S]`. A packed row brings its
    `position_ids`; those of its padding start again at 0, as another document's would.
    """
    batch = defaultdict(list)
    longest = max(len(row["input_ids"]) for row in rows)
    for row in rows:
        tokens = len(row["input_ids"])
        padding = longest - tokens
        batch["input_ids"].append([*row["input_ids"], *[pad_token_id] * padding])
        batch["loss_mask"].append([*row["loss_mask"], *[0] * padding])
        batch["position_ids"].append([*row.get("position_ids", range(tokens)), *range(padding)])
        batch["attention_mask"].append([1] * tokens + [0] * padding)
    tensors = {name: torch.tensor(values) for name, values in batch.items()}
    return tensors | {"loss_mask": tensors["loss_mask"].bool()}


class PackedRows(torch.utils.data.Dataset):
    """Several documents per row of at most `max_length` tokens, so that little is padding: best fit, longest first."""

    def __init__(self, rows: Sequence[dict[str, Any]], max_length: int) -> None:
        self._rows = rows
        lengths = [len(row["input_ids"]) for row in rows]
        self._groups: list[list[int]] = []
        free: list[tuple[int, int]] = []  # tokens left in a group, and the group; ascending
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            best = bisect_left(free, (lengths[index], 0))
            if best == len(free):
                room, group = max_length, len(self._groups)
                self._groups.append([])
            else:
                room, group = free.pop(best)
            self._groups[group].append(index)
            if room > lengths[index]:
                insort(free, (room - lengths[index], group))

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return join_documents([self._rows[part] for part in self._groups[index]])


def packed_in_order(rows: Iterable[dict[str, Any]], max_length: int) -> Iterator[dict[str, list[int]]]:
    """Yield several documents per row, of rows that come one by one."""
    waiting, room = [], max_length
    for row in rows:
        length = len(row["input_ids"])
        if length > room:
            yield join_documents(waiting)
            waiting, room = [], max_length
        waiting.append(row)
        room -= length
    if waiting:
        yield join_documents(waiting)


def join_documents(documents: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    return {
        "input_ids": [token for part in documents for token in part["input_ids"]],
        "loss_mask": [flag for part in documents for flag in part["loss_mask"]],
        "position_ids": [position for part in documents for position in range(len(part["input_ids"]))],
    }
