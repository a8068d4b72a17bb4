"""What DeepSeek-V4's layers have, by the modules of transformers: experts, hyper-connections, low-rank attention."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from .configuration_dspark import DSparkConfig


def connected(
    connection: nn.Module, streams: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run a sublayer on streams `[B, Q, n, d]`, whose residual mixing is doubly stochastic."""
    after, mixing, collapsed = connection(streams)
    output = sublayer(collapsed)[:, :, None]
    return after.to(output.dtype)[..., None] * output + mixing.to(output.dtype).transpose(-1, -2) @ streams


def init_v4_weights(module: nn.Module, std: float) -> None:
    """Initialise a module's own parameters as transformers does; those of other modules stay as they are."""
    if type(module).__name__ in _KINDS:
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("scale"):
                nn.init.ones_(parameter)
            elif name.endswith("base"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)


_KINDS = ("DeepseekV4Experts", "DeepseekV4HyperConnection", "DeepseekV4HyperHead", "DeepseekV4TopKRouter")


def v4_module(kind: str, config: "DSparkConfig", *layer_idx: int) -> nn.Module:
    """Return a `SparseMoeBlock` of routed experts and a shared one, a `HyperConnection`, which gives a sublayer its
    input and mixes its output into the streams `[B, Q, n, d]`, a `HyperHead`, which makes one state of these after the
    last layer, or `Attention`, whose submodules are taken: its pass is that of transformers' caches."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, modeling_deepseek_v4  # slow to import

    names = ["hidden_size", "hidden_act", "rms_norm_eps", "mlp_bias"]
    names += ["num_experts_per_tok", "moe_intermediate_size"] if config.num_experts else []
    of_attention = ["num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "o_groups"]
    names += of_attention if config.q_lora_rank else []
    facts = {name: getattr(config, name) for name in names} | {"n_routed_experts": config.num_experts}
    kinds = {"mlp_layer_types": ["moe"], "layer_types": ["sliding_attention"]}
    found = DeepseekV4Config(num_hidden_layers=1, hc_mult=config.hc_mult, **kinds, **facts)
    # In neither way a shape depends on the routing: passes can be compiled. Groups need rows of whole 16 bytes;
    # products of single tokens do not, but copy the experts' weights for each of them.
    is_aligned = config.num_experts and (config.hidden_size | config.moe_intermediate_size) % 8 == 0
    found._experts_implementation = "grouped_mm" if is_aligned else "batched_mm"
    return getattr(modeling_deepseek_v4, f"DeepseekV4{kind}")(found, *layer_idx)
