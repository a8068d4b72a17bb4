"""Loss and gradients of a tiny draft sharded over two processes, for the test of FSDP.

accelerate shards on accelerators only, so torch's own `fully_shard` is called as it calls it.

python -m torch.distributed.run --nproc_per_node=2 tests/training/shard_tiny.py OUTPUT_FILE
"""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_dspark.models.block_attention import BlockLayout
from hf_dspark.training.blocks import cut_blocks, label_hidden
from tests.training.tiny import tiny_pair
from tests.training.train_tiny import leave


def main(output_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    target, draft = tiny_pair()
    draft.bind(target.requires_grad_(False))
    ids, features, last_hidden = torch.randint(0, 48, (1, 20)), torch.randn(1, 20, 64), torch.randn(1, 20, 32)
    anchors = torch.tensor([[3, 8, 11]])
    layout = BlockLayout(anchors, anchors > 0, torch.arange(20)[None], 4)
    blocks = cut_blocks(ids, torch.ones(1, 20), layout, position_decay=4.0)
    inputs = (ids, features, label_hidden(last_hidden, blocks), blocks)

    alone = draft(*inputs).loss
    alone.backward()
    expected = {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    draft.gradient_checkpointing_enable()
    draft.train()
    mesh = init_device_mesh("cpu", (2,))
    for layer in draft.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(draft, mesh=mesh)
    sharded = draft(*inputs).loss
    sharded.backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in draft.named_parameters()}
    if dist.get_rank() == 0:
        losses = {"loss.alone": alone.detach(), "loss.sharded": sharded.detach()}
        alone = {f"alone.{name}": value.contiguous() for name, value in expected.items()}
        save_file(
            losses | alone | {f"sharded.{name}": value.contiguous() for name, value in gradients.items()}, output_file
        )
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
