"""Every call decodes on an accelerator what it decodes on the CPU, seen without one: see `pretended`."""

import copy

import pytest
import torch

from hf_dspark import DecodingOptions, FullBlock, Scheduler

from .pretended import DEVICE, Pretended, moved
from .test_on_a_gpu import PROMPTS, padded


def test_devices_do_not_mix():
    with Pretended():
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        assert there.device == DEVICE and here.device.type == there.cpu().device.type == "cpu"
        for mixing in (
            lambda: torch.cat([there, here]),
            lambda: there + here,
            lambda: here[there.long()],
            lambda: torch.where(there > 0, there, here),
            lambda: torch.rand(3, device=DEVICE, generator=torch.Generator()).multinomial(1) + here,
        ):
            with pytest.raises(RuntimeError, match="device"):
                mixing()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert (there + torch.tensor(1.0)).device == (there + here.to(there)).device == DEVICE
        assert there[torch.tensor([0, 2])].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=15)], ids=["chains", "trees"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_are_those_of_the_cpu(pair, policy, do_sample, rows):
    options = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
    outputs = []
    for place in (torch.device("cpu"), DEVICE):
        target, draft = (copy.deepcopy(model) for model in pair)
        draft.decoding = DecodingOptions(policy=policy)
        with Pretended():
            if place == DEVICE:
                target, draft = moved(target), moved(draft)
            inputs = padded(PROMPTS[-rows:], place)
            torch.manual_seed(0)
            output = target.generate(**inputs, assistant_model=draft, **options)
            assert output.device == place and draft.last_stats.tau > 1.2
            outputs.append(output.tolist())
    assert outputs[0] == outputs[1]
