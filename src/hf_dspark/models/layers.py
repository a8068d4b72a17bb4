"""What the layers of all drafts are made of: norms, rotary embedding, attention, MLP."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from .block_attention import CachedPass, KeyRanges, SlidingWindow
from .configuration_draft import DraftConfig

if TYPE_CHECKING:
    from .configuration_dspark import DSparkConfig

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines
Attending = KeyRanges | CachedPass  # who sees what: in training, in a cached pass
# Modules of DeepSeek-V4 with parameters of their own.
V4_KINDS = ("DeepseekV4Experts", "DeepseekV4HyperConnection", "DeepseekV4HyperHead", "DeepseekV4TopKRouter")


class DSparkRMSNorm(nn.RMSNorm):
    def __init__(self, size: int, eps: float, with_scale: bool = True) -> None:
        super().__init__(size, eps, elementwise_affine=with_scale)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # One kernel on an accelerator, in float32 inside; under autocast the weight is of another type.
        is_fused = self.weight is None or self.weight.dtype == hidden.dtype
        normed = F.rms_norm(hidden, hidden.shape[-1:], self.weight if is_fused else None, self.eps)
        return normed if is_fused else self.weight * normed


class DSparkRotaryEmbedding:
    """Rotary cosines and sines from float32 frequencies. Sines come with the sign of the rotation: that of an entry
    whose other one is subtracted is negative."""

    # Not a module: `model.to(torch.bfloat16)` would round a buffer, and positions beyond a few hundred tokens with it.
    def __init__(self, config: DraftConfig) -> None:
        self._config = config
        self._frequencies: dict[torch.device, tuple[torch.Tensor, float]] = {}

    def _make(self, device: torch.device) -> tuple[torch.Tensor, float]:
        """Return the frequency of each entry, `[rotary_dim]`, negative where the sine is to be, and the scaling."""
        parameters = self._config.rope_parameters
        if parameters.get("rope_type", "default") != "default":
            frequencies, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self._config, device)
        else:
            size = int(self._config.head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
            frequencies, scaling = parameters["rope_theta"] ** -exponents, 1.0
        pairs = torch.stack([-frequencies, frequencies]).float()
        return (pairs.T if self._config.rope_interleaved else pairs).flatten(), scaling

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Return cosines and sines `[B, 1, rows, rotary_dim]` for positions `[B, rows]`."""
        device = position_ids.device
        if device not in self._frequencies:
            self._frequencies[device] = self._make(device)
        frequencies, scaling = self._frequencies[device]
        angles = position_ids[:, None, :, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if scaling != 1.0:
            cos, sin = cos * scaling, sin * scaling
        return cos.to(dtype), sin.to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Apply rotary embedding to the leading `rotary_dim` entries of `[B, heads, rows, head_dim]`."""
    size = cos.shape[-1]
    turning, passing = states[..., :size], states[..., size:]
    crossed = turning.unflatten(-1, (-1, 2) if interleaved else (2, -1)).flip(-1 if interleaved else -2).flatten(-2)
    turned = torch.addcmul(turning * cos, crossed, sin)
    return torch.cat([turned, passing], dim=-1) if passing.shape[-1] else turned


def take_rows(states: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return rows `[B, Q]` of `[B, T, size]`; all of them without `rows`."""
    return states if rows is None else states.gather(1, rows[:, :, None].expand(-1, -1, states.shape[-1]))


def rotary_of_queries(rotary: Rotary, attending: Attending, num_queries: int) -> Rotary:
    """Return what turns the rows that attend, of what turns all rows of a pass: those that it names, or the last."""
    if attending.queries is None:
        return tuple(part[:, :, -num_queries:] for part in rotary)
    return tuple(take_rows(part[:, 0], attending.queries)[:, None] for part in rotary)


class DraftAttention(nn.Module):
    """Attention from some rows to all rows of a pass and what it has seen before."""

    def __init__(self, config: DraftConfig, layer_idx: int, input_size: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.scaling = config.head_dim**-0.5 if config.attention_scaling is None else config.attention_scaling
        self.window = window_of(config, layer_idx)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        shares_keys = config.attention_k_eq_v
        self.v_proj = None if shares_keys else nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        norm = (lambda: DSparkRMSNorm(config.head_dim, config.rms_norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        scale_free = DSparkRMSNorm(config.head_dim, config.rms_norm_eps, with_scale=False)
        self.v_norm = scale_free if config.value_norm else nn.Identity()
        sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sinks else None
        self.attention_sink_bias = sinks

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, rotary: Rotary, attending: Attending, *earlier: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what rows `[B, Q, *]` read, `[B, Q, d]`, and keys and values of all rows `[B, T, *]`."""
        paired, of_queries = self.config.rope_interleaved, rotary_of_queries(rotary, attending, queries.shape[1])
        query = rotate(self._heads(self.q_proj(queries), self.q_norm), *of_queries, paired)
        raw_key = self.k_proj(keys)
        raw_value = raw_key if self.v_proj is None else self.v_proj(keys)
        key = rotate(self._heads(raw_key, self.k_norm), *rotary, paired)
        value = self._heads(raw_value, self.v_norm)
        return self.o_proj(attending.attend(self, query, key, value, *earlier).flatten(2)), key, value

    def _heads(self, states: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return norm(states.unflatten(-1, (-1, self.config.head_dim))).transpose(1, 2)


class V4Attention(nn.Module):
    """Attention as DeepSeek-V4's draft has it, called as a [`DraftAttention`] is: queries and outputs pass matrices of
    low rank, and one normed projection, turned in its last entries, is key and value of all heads."""

    def __init__(self, config: DraftConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.scaling = config, layer_idx, config.head_dim**-0.5
        self.window, theirs = window_of(config, layer_idx), v4_module("Attention", config, 0)
        for name, part in theirs.named_children():
            self.add_module(name, part)
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, rotary: Rotary, attending: Attending, *earlier: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query = self.q_b_proj(self.q_a_norm(self.q_a_proj(queries))).unflatten(-1, (-1, self.config.head_dim))
        cos, sin = rotary_of_queries(rotary, attending, queries.shape[1])
        query = rotate_last(self.q_b_norm(query).transpose(1, 2), cos, sin)
        key = rotate_last(self.kv_norm(self.kv_proj(keys))[:, None], *rotary)
        attended = attending.attend(self, query, key, key, *earlier).transpose(1, 2)
        # Values were turned, as keys, by their positions: turned back by the query's, what is left is the distance.
        attended = rotate_last(attended, cos, -sin).transpose(1, 2).flatten(2)
        return self.o_b_proj(self.o_a_proj(attended.unflatten(-1, (self.config.o_groups, -1))).flatten(2)), key, key


def rotate_last(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply interleaved rotary embedding to the last `rotary_dim` entries of `[B, heads, rows, head_dim]`."""
    size = cos.shape[-1]
    return torch.cat([states[..., :-size], rotate(states[..., -size:], cos, sin, interleaved=True)], dim=-1)


def window_of(config: DraftConfig, layer_idx: int) -> SlidingWindow | None:
    if config.layer_types is None or config.layer_types[layer_idx] != "sliding_attention":
        return None
    return SlidingWindow(config.sliding_window, config.sliding_from_anchor, config.causal_sliding)


class BlockConvolution(nn.Module):
    """A depthwise convolution over the slots of a block, before and after a sublayer (DFlash 2).

    Entry c of slot i becomes the sum over taps t of (base_{t,c} + delta_{i,t,g(c)}) x_{i-t,c}: the own slot is the
    first tap, what lies before the block is zero, and delta is read from the sublayer's input for both sides.
    """

    def __init__(self, config: "DSparkConfig") -> None:
        super().__init__()
        self.num_slots, self.num_taps = config.num_slots, config.conv_kernel_size
        self.num_groups = config.hidden_size // config.conv_group_size
        base = torch.zeros(2, self.num_taps, config.hidden_size)
        base[:, 0] = 1.0  # untrained, it passes everything on
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.num_taps * self.num_groups, bias=False)

    def around(self, hidden: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run a sublayer on the rows of whole blocks, `[B, N*slots, d]`, convolved, and convolve what it returns."""
        deltas = self.kernel_projection(hidden).unflatten(-1, (2, self.num_taps, self.num_groups))
        before, after = deltas.unbind(dim=-3)
        return self._convolve(sublayer(self._convolve(hidden, before, 0)), after, 1)

    def _convolve(self, hidden: torch.Tensor, delta: torch.Tensor, side: int) -> torch.Tensor:
        base = self.base_kernel[side].unflatten(-1, (self.num_groups, -1))
        blocks = hidden.unflatten(-1, (self.num_groups, -1)).unflatten(1, (-1, self.num_slots))
        kernels = (base.to(hidden.dtype) + delta[..., None]).unflatten(1, (-1, self.num_slots))
        total = kernels[:, :, :, 0] * blocks
        for tap in range(1, self.num_taps):
            total = total + kernels[:, :, :, tap] * F.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0))
        return total.flatten(1, 2).flatten(-2)


class DraftLayer(GradientCheckpointingLayer):
    """Base of the decoder layers: attention and MLP, and what is added around them."""

    def __init__(self, config: DraftConfig, layer_idx: int, input_size: int) -> None:
        super().__init__()
        of_v4 = config.q_lora_rank is not None
        self.self_attn = V4Attention(config, layer_idx) if of_v4 else DraftAttention(config, layer_idx, input_size)
        self.mlp = v4_module("SparseMoeBlock", config, 0) if config.num_experts else LlamaMLP(config)
        self.sandwich_norms = config.sandwich_norms
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        # With sandwich norms (Gemma) this one follows the attention; without, it precedes the MLP.
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(1)) if config.layer_scalar else None

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        return self.mlp(normed)

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        if self.sandwich_norms:
            hidden = hidden + self.post_attention_layernorm(attended)
            read = self.feed_forward(self.pre_feedforward_layernorm(hidden))
            hidden = hidden + self.post_feedforward_layernorm(read)
        else:
            hidden = hidden + attended
            hidden = hidden + self.feed_forward(self.post_attention_layernorm(hidden))
        return hidden if self.layer_scalar is None else hidden * self.layer_scalar


# ---- what layers of DeepSeek-V4 have, by the modules of transformers: experts, hyper-connections, low-rank attention


def connected(
    connection: nn.Module, streams: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run a sublayer on streams `[B, Q, n, d]`, whose residual mixing is doubly stochastic."""
    after, mixing, collapsed = connection(streams)
    output = sublayer(collapsed)[:, :, None]
    return after.to(output.dtype)[..., None] * output + mixing.to(output.dtype).transpose(-1, -2) @ streams


def init_v4_weights(module: nn.Module, std: float) -> None:
    """Initialise a module's own parameters as transformers does; those of other modules stay as they are."""
    if type(module).__name__ in V4_KINDS:
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("scale"):
                nn.init.ones_(parameter)
            elif name.endswith("base"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)


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
