"""Fingerprints: the same wherever the weights are, another for any other weight."""

import pytest
import torch

from hf_dspark.targets.fingerprint import fingerprint


def test_fingerprint_is_the_same_for_the_same_weights_only(make_target):
    assert fingerprint(make_target()) == fingerprint(make_target())
    assert fingerprint(make_target()) != fingerprint(make_target(seed=1))
    assert fingerprint(make_target()) != fingerprint(make_target().to(torch.bfloat16))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_fingerprint_sees_one_changed_value_anywhere(make_target, name):
    original = fingerprint(make_target())
    for place in (0, 3, -1):
        target = make_target()
        target.get_parameter(name).data.flatten()[place] += 1e-6
        assert fingerprint(target) != original


@torch.no_grad()
def test_fingerprint_sees_changes_that_leave_sums_alone(make_target):
    target = make_target()
    weight = target.model.layers[1].mlp.up_proj.weight
    seen = {fingerprint(target)}
    for change in (lambda: weight.flip(0), lambda: weight.roll(2, 1), lambda: -weight, lambda: weight * weight.sign()):
        weight.copy_(change())
        seen.add(fingerprint(target))
    weight[:, 1] *= -1  # an even number of top bits
    seen.add(fingerprint(target))
    other = target.model.layers[0].mlp.up_proj.weight
    weight.data, other.data = other.data, weight.data
    assert len(seen | {fingerprint(target)}) == 7


def test_fingerprint_sees_the_last_bytes_of_odd_sizes(make_target):
    first, second = (make_target(hidden_size=31, head_dim=10).to(torch.bfloat16) for _ in range(2))
    second.model.norm.weight.data[-1] += 1
    assert fingerprint(first) != fingerprint(second)


def test_fingerprint_of_offloaded_weights_is_that_of_the_weights(make_target, tmp_path):
    from accelerate import cpu_offload, disk_offload

    on_cpu, on_disk, other = make_target(), make_target(), make_target()
    other.lm_head.weight.data[5, 5] += 1
    cpu_offload(on_cpu, execution_device=torch.device("cpu"))
    disk_offload(on_disk, tmp_path, execution_device=torch.device("cpu"))
    cpu_offload(other, execution_device=torch.device("cpu"))
    assert on_cpu.lm_head.weight.is_meta and on_disk.lm_head.weight.is_meta
    assert fingerprint(on_cpu) == fingerprint(on_disk) == fingerprint(make_target()) != fingerprint(other)
    assert on_cpu.lm_head.weight.is_meta  # not loaded for good


def test_fingerprint_of_weights_on_the_meta_device_needs_no_values(make_target):
    target = make_target().to("meta")
    assert fingerprint(target) == fingerprint(make_target(seed=1).to("meta")) != fingerprint(make_target())


@pytest.mark.parametrize("bits", [4, 8])
def test_fingerprint_of_a_quantised_model_covers_the_scales_and_survives_a_forward_pass(make_quantised, bits):
    target = make_quantised(bits)
    original = fingerprint(target)
    target(torch.tensor([[1, 2, 3]]))
    assert fingerprint(target) == original
    layer = target.model.layers[1].mlp.up_proj
    (layer.weight.quant_state.absmax if bits == 4 else layer.state.SCB).mul_(1.5)
    assert fingerprint(target) != original
