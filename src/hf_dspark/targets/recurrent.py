"""Recurrent layers of hybrid targets in the decoding loop: a state for each row, which no rejected token has read.

A state cannot go back to before a rejected token. So a layer keeps the state after the committed tokens, and the
inputs of the block that is verified. In the next pass it reads those that were accepted, keeps the new state, and
reads the new block from a copy. The model sees nothing of this: its pass holds the new tokens alone.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..models.slot_cache import RowState, SlotCache, SlotLayout
from .patched_forward import Replacement, copied, joined, part_of, restore, row_of, successive

# Settings of Mamba 2 layers in blocks. The rule for single tokens, which plain decoding follows, knows no limit.
BLOCK_SETTINGS = {"chunk_size": None, "time_step_limit": (0.0, float("inf"))}
Name = tuple[str, int]  # kind of a state, and its number within the layer
_CACHE = object()  # stands for the cache in inputs that are kept
_forgetful: dict[tuple[type[nn.Module], str], bool] = {}  # by class and kind of device, what a trial found


class States:
    """What a recurrent layer finds instead of its cache during one call: the states of some rows.

    The methods are those of transformers' caches for linear attention. A layer without previous states is padded with
    zeros on the left, as there.
    """

    def __init__(self, states: dict[Name, torch.Tensor], keeps_window: bool) -> None:
        self.states = states
        self.windows: dict[Name, torch.Tensor] = {}  # all that a convolution saw in this call
        self._keeps_window = keeps_window

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("convolution", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("recurrence", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self._keeps_window

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Append `[R, C, n]` to the state; returns state and new part, `[R, C, kernel + n]`."""
        name = ("convolution", state_idx)
        past = self.states.get(name)
        size = conv_kernel_size or (conv_states if past is None else past).shape[-1]
        if past is None:
            whole = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            whole = torch.cat([past, conv_states], dim=-1)
        self.states[name], self.windows[name] = whole[..., -size:], whole
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.states["recurrence", state_idx] = recurrent_states
        return recurrent_states

    def of_row(self, row: int) -> "States":
        one = States({name: state[row : row + 1] for name, state in self.states.items()}, self._keeps_window)
        one.windows = {name: window[row : row + 1] for name, window in self.windows.items()}
        return one


class _Products:
    """What the linear layers of a recurrent layer make of tokens. Tokens that are read a second time find their
    products here, so that no weight is read twice."""

    def __init__(self, module: nn.Module) -> None:
        self.linears = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
        self._known: dict[str, torch.Tensor] = {}  # of the tokens that are read again, [R, n, ...]
        self._made: dict[str, list[torch.Tensor]] = defaultdict(list)

    def attach(self) -> None:
        for name, linear in self.linears.items():
            Replacement(linear, partial(self._product, name))

    def begin(self, known: dict[str, torch.Tensor]) -> None:
        self._known = dict(known)
        self._made.clear()

    def made(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the products of all tokens since the beginning, by layer; not those of anything else."""
        joined = {name: torch.cat(parts, dim=1) for name, parts in self._made.items()}
        return {name: each for name, each in joined.items() if each.shape[1] == num_tokens}

    def _product(self, name: str, own: Callable[..., torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        known, num_tokens = self._known.get(name), states.shape[1]
        if known is not None:
            self._known[name] = known[:, num_tokens:]
            return known[:, :num_tokens]
        product = own(states)
        self._made[name].append(product)
        return product


class Mixer:
    """Runs one recurrent layer in packed passes, while it is attached: it reads and writes its states through the
    cache that it is given. One that `keeps_window` is a convolution alone, whose state is what it saw last."""

    def __init__(
        self, name: str, module: nn.Module, keeps_window: bool = False, takes_chunk_size: bool = False
    ) -> None:
        self._name = name
        self.module = module
        self._products = _Products(module)
        self._keeps_window = keeps_window
        self._takes_chunk_size = takes_chunk_size
        self._settings: dict[str, Any] = {}  # the layer's own, during a pass

    def attach(self, cache: SlotCache, layout: SlotLayout) -> None:
        self._settings = {name: vars(self.module)[name] for name in BLOCK_SETTINGS if name in vars(self.module)}
        self._cache, self._layout = cache, layout
        Replacement(self.module, self._forward)
        if not self._keeps_window and not layout.is_prefill:
            self._products.attach()

    def restore(self) -> None:
        vars(self.module).update(self._settings)
        for module in (self.module, *self._products.linears.values()):
            restore(module)
        self._settings = {}
        self._cache = self._layout = self._own = None
        self._products.begin({})

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read what was accepted since the last pass, then the new tokens; returns the layer's output for these.

        Rows that read equally many tokens are read together.
        """
        self._own, layout = own, self._layout
        states = self._cache.row_states[layout.first_row : layout.first_row + layout.num_rows]
        rows = {row: each.setdefault(self._name, RowState()) for row, each in enumerate(states) if layout.counts[row]}
        for accepted, group in _grouped(rows, lambda row: layout.starts[row] - rows[row].position):
            self._advance([rows[row] for row in group], accepted)
        inputs = tree_map(lambda leaf: _CACHE if leaf is self._cache else leaf, (args, kwargs))
        outputs = {}
        for (count, _), group in _grouped(rows, lambda row: (layout.counts[row], bool(rows[row].states))):
            parts = [part_of(inputs, layout.num_tokens, layout.first_tokens[row], count) for row in group]
            output, after, products = self._read(parts, [rows[row].states for row in group], count)
            for place, row in enumerate(group):
                outputs[row] = tree_map(lambda leaf, place=place: row_of(leaf, place), output)
                if layout.is_prefill:
                    rows[row].position, rows[row].states = layout.starts[row] + count, after[place].states
                else:
                    of_row = {name: product[place : place + 1] for name, product in products.items()}
                    again = after[place].windows if self._keeps_window else (copied(parts[place]), of_row)
                    rows[row].num_waiting, rows[row].waiting, rows[row].after_all = count, again, after[place].states
        return successive([outputs[row] for row in sorted(outputs)])

    def _advance(self, rows: Sequence[RowState], accepted: int) -> None:
        """Bring the states of rows behind the tokens that were accepted of those that wait."""
        if accepted == 0:
            return
        partly = [row for row in rows if row.num_waiting > accepted]
        for row in rows:
            if row.num_waiting == accepted:
                row.states = row.after_all
            elif self._keeps_window:  # a convolution has only to be cut
                rejected = row.num_waiting - accepted
                row.states = {
                    name: _last(window, row.states[name].shape[-1], rejected) for name, window in row.waiting.items()
                }
        if partly and not self._keeps_window:
            parts, known = zip(*(part_of(row.waiting, row.num_waiting, 0, accepted) for row in partly), strict=True)
            _, after, _ = self._read(parts, [row.states for row in partly], accepted, joined(known, accepted))
            for row, states in zip(partly, after, strict=True):
                row.states = states.states
        for row in rows:
            row.position, row.num_waiting, row.waiting, row.after_all = row.position + accepted, 0, None, {}

    def _read(
        self,
        parts: Sequence[Any],
        states: Sequence[dict[Name, torch.Tensor]],
        count: int,
        known: dict[str, torch.Tensor] | None = None,
    ) -> tuple[Any, list[States], dict[str, torch.Tensor]]:
        """Call the layer for rows that read `count` tokens each; returns its output, states and windows by row, and
        the products of its linear layers."""
        inputs = joined(parts, count)
        alone = self._layout.singly and not self._keeps_window  # a convolution sees nothing that comes later
        singly = count > 1 and states[0] and (alone or self._forgets_states(inputs, states, count))
        self._products.begin(known or {})
        if singly:
            outputs = []
            for token in range(count):
                output, after = self._call(part_of(inputs, count, token, 1), states, 1)
                states = [each.states for each in after]
                outputs.append(output)
            output = successive(outputs)
        else:
            output, after = self._call(inputs, states, count)
        return output, after, self._products.made(count)

    def _call(self, inputs: Any, states: Sequence[dict[Name, torch.Tensor]], count: int) -> tuple[Any, list[States]]:
        # Joining copies, which is needed: kernels for one token write into the states that they are given.
        found = States({name: torch.cat([row[name] for row in states]) for name in states[0]}, self._keeps_window)
        args, kwargs = tree_map(lambda leaf: found if leaf is _CACHE else leaf, inputs)
        if count > 1 and not self._layout.is_prefill:
            settings = BLOCK_SETTINGS
            # transformers' own code fills chunks up to 64 or 256 tokens; kernels on accelerators have their own sizes.
            if next(self.module.parameters()).device.type == "cpu":
                settings = settings | {"chunk_size": count}
                kwargs = kwargs | ({"chunk_size": count} if self._takes_chunk_size else {})
            vars(self.module).update({name: settings[name] or own for name, own in self._settings.items()})
        output = self._own(*args, **kwargs)
        return output, [found.of_row(row) for row in range(len(states))]

    def _forgets_states(self, inputs: Any, states: Sequence[dict[Name, torch.Tensor]], count: int) -> bool:
        """Tell whether the layer begins anew when it is given several tokens: Mamba's scan takes no first state.

        A layer that reads its states gives other numbers for others. This is tried once for each class of layers.
        """
        recurrent = [name for name in states[0] if name[0] == "recurrence"]
        if not recurrent:
            return False
        kind = (type(self.module), states[0][recurrent[0]].device.type)
        if kind not in _forgetful:
            self._products.begin({})
            others = [row | {name: row[name] + 1 for name in recurrent} for row in states]
            (_, after), (_, other) = (self._call(inputs, each, count) for each in (states, others))
            _forgetful[kind] = all(torch.equal(after[0].states[name], other[0].states[name]) for name in recurrent)
        return _forgetful[kind]


class AttributeMixer(Mixer):
    """Runs a recurrent layer that keeps its states in attributes. They are its own again after each pass."""

    def __init__(self, name: str, module: nn.Module, attributes: Sequence[str]) -> None:
        super().__init__(name, module)
        paths = [each.rpartition(".") for each in attributes]
        self._owners = [(module.get_submodule(path), attribute) for path, _, attribute in paths]
        self._left_by_others: list[Any] | None = None  # during a pass

    def attach(self, cache: SlotCache, layout: SlotLayout) -> None:
        self._left_by_others = self._attributes()
        super().attach(cache, layout)

    def restore(self) -> None:
        if self._left_by_others is not None:
            self._set_attributes(self._left_by_others)
        self._left_by_others = None
        super().restore()

    def _call(self, inputs: Any, states: Sequence[dict[Name, torch.Tensor]], count: int) -> tuple[Any, list[States]]:
        names = [("attribute", number) for number in range(len(self._owners))]
        self._set_attributes([torch.cat([row[name] for row in states]) if states[0] else None for name in names])
        args, kwargs = inputs
        output = self._own(*args, **kwargs)
        found = States(dict(zip(names, self._attributes(), strict=True)), keeps_window=False)
        return output, [found.of_row(row) for row in range(len(states))]

    def _forgets_states(self, inputs: Any, states: Sequence[dict[Name, torch.Tensor]], count: int) -> bool:
        return True  # of several tokens, its convolution sees no earlier ones

    def _attributes(self) -> list[Any]:
        return [getattr(owner, attribute) for owner, attribute in self._owners]

    def _set_attributes(self, values: Sequence[Any]) -> None:
        for (owner, attribute), value in zip(self._owners, values, strict=True):
            setattr(owner, attribute, value)


def _grouped(rows: dict[int, RowState], key: Callable[[int], Any]) -> list[tuple[Any, list[int]]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return list(groups.items())


def _last(window: torch.Tensor, size: int, rejected: int) -> torch.Tensor:
    """Return the last columns before those that were rejected."""
    end = window.shape[-1] - rejected
    return window[..., end - size : end]
