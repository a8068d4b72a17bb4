"""Tails: the slots of a block that lie after the tokens that its round committed.

Their states and base logits do not depend on what was drawn before them. Drawn anew, after the true tokens and with
noise of their own, they propose again without another pass of the backbone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..sampling.transfers import to_device
from .request import Request


@dataclass(frozen=True)
class BlockSlots:
    """What the draft said of the slots of one request's block, before anything was drawn in them."""

    anchor_position: int
    hidden: torch.Tensor  # h_1..h_n, [n, d]
    base_logits: torch.Tensor  # U_1..U_n, [n, V or V_d]


@dataclass
class LastBlocks:
    """The slots of the last block of each request, by its id: rows of a batch may move, come and go."""

    slots: dict[int, BlockSlots] = field(default_factory=dict)

    def keep(self, requests: Sequence[Request], hidden: torch.Tensor, base_logits: torch.Tensor) -> None:
        """Keep h `[R, n, d]` and U `[R, n, V]` of new blocks in the place of all earlier ones."""
        rows = zip(requests, hidden, base_logits, strict=True)
        self.slots = {request.id: BlockSlots(request.anchor_position, *row) for request, *row in rows}

    def left(self, request: Request) -> int:
        """Return how many slots of a request's last block lie after its anchor."""
        slots = self.slots.get(request.id)
        return 0 if slots is None else max(0, len(slots.hidden) - request.anchor_position + slots.anchor_position)

    def places(self, requests: Sequence[Request], num_tokens: int) -> torch.Tensor:
        """Return in which slots `[R, n]` of their blocks so many tokens after each anchor stand, counted from 0. Where
        no slot is left, the last one stands in: nothing is sent there."""
        sizes = [len(self.slots[request.id].hidden) if request.id in self.slots else 1 for request in requests]
        first = [size - self.left(request) for size, request in zip(sizes, requests, strict=True)]
        wanted = torch.tensor(first, device="cpu")[:, None] + torch.arange(num_tokens, device="cpu")
        return wanted.minimum(torch.tensor(sizes, device="cpu")[:, None] - 1)

    def tails(self, requests: Sequence[Request], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return h `[R, n, d]` and U `[R, n, V]` of these slots, zeros for requests without a block."""
        some = next(iter(self.slots.values()))
        nothing = BlockSlots(0, torch.zeros_like(some.hidden[:1]), torch.zeros_like(some.base_logits[:1]))
        places = to_device(self.places(requests, num_tokens), some.hidden.device)
        rows = list(zip([self.slots.get(request.id, nothing) for request in requests], places, strict=True))
        hidden = torch.stack([slots.hidden[place] for slots, place in rows])
        return hidden, torch.stack([slots.base_logits[place] for slots, place in rows])
