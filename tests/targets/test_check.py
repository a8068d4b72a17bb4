"""The self-check passes what is right and refuses what is not."""

import pytest
import torch

from hf_dspark import check_target
from hf_dspark.targets import slot_attention


def test_supported_targets_pass_and_windows_are_crossed(make_target):
    windowed = make_target(sliding_window=5, use_sliding_window=True, layer_types=["sliding_attention"] * 4)
    assert max(check_target(target) for target in (make_target(), windowed)) < 1e-5


def test_a_target_that_attends_wrongly_is_refused(target, monkeypatch):
    """Queries that see what comes after them: as if the target built masks of its own."""

    def everything(*args, device="cpu", **kwargs):
        layout = slot_attention._running.get().layout
        return torch.ones(layout.num_rows, 1, layout.width, layout.end, dtype=torch.bool)

    monkeypatch.setitem(slot_attention.AttentionMaskInterface._global_mapping, slot_attention.NAME, everything)
    with pytest.raises(ValueError, match="decodes packed rows differently"):
        check_target(target)
