"""The DSpark draft model: a parallel backbone fed with target features, a sequential Markov head, a confidence head.

DFlash is the special case `markov_rank=0`. One backbone serves every target family; what differs is in the config.
The embedding and the LM head are the target's, borrowed by [`DSparkDraftModel.bind`] and held outside the module
tree, so they are neither saved, nor trained, nor moved, nor kept twice. Knows nothing of `generate()`, policies or
losses.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_dspark import DSparkConfig, require_decoder_only
from .draft_heads import MARKOV_HEADS, ConfidenceHead, MarkovProjection
from .policies import Policy, RoundOutcome
from .sampling import DraftBlock, Sampler, TokenLaw
from .slot_cache import SlotCache, SlotLayout, fold_mask, grouped_attention


@dataclass(frozen=True)
class DSparkOutput:
    """Teacher-forced scores of N anchored blocks per row.

    Attributes:
        block_hidden (`torch.Tensor` of shape `[B, N, γ, d]`): h_k, after the final norm.
        draft_logits (`torch.Tensor` of shape `[B, N, γ, V]`): Base logits plus the Markov bias along the labels.
        confidence_logits (`torch.Tensor` of shape `[B, N, γ]`, *optional*): Pre-sigmoid c_k.
    """

    block_hidden: torch.Tensor
    draft_logits: torch.Tensor
    confidence_logits: torch.Tensor | None


@dataclass(frozen=True)
class DraftPass:
    """One cached pass of the draft: context tokens that are not in the cache yet, then a block, of each request.

    Args:
        cache ([`SlotCache`]): The requests' context. Blocks are written behind it and never counted.
        num_features (`Sequence[int]`): New context tokens of each request.
        block_size (`int`): γ.
        device (`torch.device`): The draft's.
    """

    cache: SlotCache
    num_features: Sequence[int]
    block_size: int
    device: torch.device

    @functools.cached_property
    def layout(self) -> SlotLayout:
        """Context and block of each request, request by request."""
        starts = tuple(self.cache.lengths[: len(self.num_features)])
        return SlotLayout(starts, tuple(count + self.block_size for count in self.num_features))

    @functools.cached_property
    def blocks(self) -> SlotLayout:
        """The blocks alone."""
        starts = tuple(start + new for start, new in zip(self.layout.starts, self.num_features, strict=True))
        return SlotLayout(starts, (self.block_size,) * len(starts))

    @functools.cached_property
    def order(self) -> torch.Tensor | None:
        """Where each token of `layout` stands when the context of all requests precedes their blocks, `[T]`."""
        if len(self.num_features) == 1:
            return None
        features, blocks = torch.arange(self.layout.num_tokens).split([sum(self.num_features), self.blocks.num_tokens])
        parts = zip(features.split(list(self.num_features)), blocks.split(self.block_size), strict=True)
        return torch.cat([part for request in parts for part in request]).to(self.device)

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of all contexts, then of all blocks, `[1, T]`."""
        if self.order is None:
            return self.layout.position_ids(self.device)
        contexts = SlotLayout(self.layout.starts, tuple(self.num_features))
        return torch.cat([part.position_ids(self.device) for part in (contexts, self.blocks)], dim=1)

    def keys_from(self, window: int | None) -> int:
        """Return the first slot that some block row sees."""
        return 0 if window is None else max(0, min(self.blocks.starts) - window + 1)

    @functools.cached_property
    def _masks(self) -> dict[int | None, torch.Tensor | None]:
        return {}

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return who sees which slot from `keys_from(window)` on, folded as [`grouped_attention`] wants it.

        `None`: all see all.
        """
        if window not in self._masks:
            self._masks[window] = fold_mask(self._visible(window), group, dtype)
        return self._masks[window]

    def _visible(self, window: int | None) -> torch.Tensor | None:
        slots = torch.arange(self.keys_from(window), self.layout.end, device=self.device)
        ends = torch.tensor(self.blocks.starts, device=self.device) + self.block_size
        visible = None if len(set(self.blocks.starts)) == 1 else (slots < ends[:, None])[:, None, None]
        if window is not None and self.layout.end > window:
            near = self.blocks.row_positions(self.device)[:, None, :, None] - slots < window
            visible = near if visible is None else near & visible
        return None if visible is None else visible.expand(-1, -1, self.block_size, -1)


class DSparkRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, with_scale: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if with_scale else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return normed.to(hidden.dtype)
        return self.weight * normed.to(hidden.dtype)


class DSparkRotaryEmbedding:
    """Rotary cosines and sines from float32 frequencies.

    Not a module: a buffer would be rounded by `model.to(torch.bfloat16)`, and positions beyond a few hundred tokens
    with it.
    """

    def __init__(self, config: DSparkConfig) -> None:
        self._config = config
        self._inv_freq: dict[torch.device, torch.Tensor] = {}
        self._scaling = 1.0

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        if device not in self._inv_freq:
            parameters = self._config.rope_parameters
            if parameters.get("rope_type", "default") == "default":
                size = int(self._config.head_dim * parameters.get("partial_rotary_factor", 1.0))
                exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
                inv_freq = parameters["rope_theta"] ** -exponents
            else:
                inv_freq, self._scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self._config, device)
            self._inv_freq[device] = inv_freq.float()
        return self._inv_freq[device]

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines `[B, 1, rows, rotary_dim]` for positions `[B, rows]`."""
        angles = position_ids[:, None, :, None].float() * self._frequencies(position_ids.device)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to the leading `rotary_dim` entries of `[B, heads, rows, head_dim]`."""
    size = cos.shape[-1]
    turning, passing = states[..., :size], states[..., size:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, passing], dim=-1) if passing.shape[-1] else turned


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain torch; `attention_mask` is boolean, true where a query may attend."""
    batch, heads, rows, size = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, rows, size)
    scores = grouped @ key[:, :, None].transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[:, :, None], torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.float().softmax(dim=-1).to(query.dtype), dropout, module.training)
    if attention_mask is not None:
        weights = weights * attention_mask[:, :, None]  # a row that may attend nowhere yields 0, as in the reference
    output = (weights @ value[:, :, None]).reshape(batch, heads, rows, size)
    return output.transpose(1, 2), weights.flatten(1, 2)


class DSparkAttention(nn.Module):
    """Bidirectional attention of block rows over target features and the block itself. DSpark Eq. 3."""

    is_causal = False

    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5 if config.attention_scaling is None else config.attention_scaling
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        norm = (lambda: DSparkRMSNorm(config.head_dim, config.rms_norm_eps)) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        scale_free = DSparkRMSNorm(config.head_dim, config.rms_norm_eps, with_scale=False)
        self.v_norm = scale_free if config.value_norm else nn.Identity()

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        drafting: DraftPass | None,
    ) -> torch.Tensor:
        """Attend from block rows `[B, Q, d]` to themselves, the new context rows `[B, C, d]` and the cached ones."""
        num_queries = hidden.shape[1]
        cos, sin = rotary
        key_input = torch.cat([context, hidden], dim=1)
        query = rotate(
            self.q_norm(self._heads(self.q_proj(hidden))), cos[:, :, -num_queries:], sin[:, :, -num_queries:]
        )
        raw_key = self._heads(self.k_proj(key_input))
        raw_value = raw_key if self.v_proj is None else self._heads(self.v_proj(key_input))
        key, value = rotate(self.k_norm(raw_key), cos, sin), self.v_norm(raw_value)
        if drafting is not None:
            output = self._attend_to_slots(query, key, value, drafting)
        else:
            attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            output, _ = attend(
                self, query, key, value, attention_mask,
                scaling=self.scaling, dropout=self.config.attention_dropout if self.training else 0.0,
                sliding_window=self.sliding_window, is_causal=False,
            )  # fmt: skip
        return self.o_proj(output.reshape(*hidden.shape[:2], -1))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _attend_to_slots(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, drafting: DraftPass
    ) -> torch.Tensor:
        if drafting.order is not None:
            key, value = key[:, :, drafting.order], value[:, :, drafting.order]
        key, value = drafting.cache.update(key, value, self.layer_idx)
        start = drafting.keys_from(self.sliding_window)
        mask = drafting.mask(self.sliding_window, self.num_key_value_groups, query.dtype)
        rows = drafting.blocks.to_rows(query)
        attended = grouped_attention(rows, key[:, :, start:], value[:, :, start:], mask, self.scaling)
        return drafting.blocks.to_packed(attended)


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class DSparkLayer(GradientCheckpointingLayer):
    def __init__(self, config: DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        self.sandwich_norms = config.sandwich_norms
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        # With sandwich norms (Gemma) this one follows the attention; without, it precedes the MLP.
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(1)) if config.layer_scalar else None

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        drafting: DraftPass | None,
    ) -> torch.Tensor:
        # The context rows enter keys and values as they are: only block rows pass the input norm.
        attended = self.self_attn(self.input_layernorm(hidden), context, rotary, attention_mask, drafting)
        if self.sandwich_norms:
            hidden = hidden + self.post_attention_layernorm(attended)
            hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        else:
            hidden = hidden + attended
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden if self.layer_scalar is None else hidden * self.layer_scalar


@dataclass(frozen=True)
class _Borrowed:
    """The target's embedding and head, outside the module tree."""

    embedding: nn.Module
    lm_head: nn.Module
    dtype: torch.dtype


class DSparkDraftModel(PreTrainedModel):
    """A DSpark draft. Pass it to `target.generate(..., assistant_model=draft)`, or train it with [`DSparkTrainer`].

    What `generate()` reads from it besides its weights, all settable at any time:

    Attributes:
        policy ([`Policy`], *optional*): Whether to draft and how much of a block is verified. `None`:
            [`PrefixScheduler`] within [`AdaptiveDrafting`] if the draft is calibrated and this machine's throughput is
            known, else the full block.
        load (`int` or `Callable`): Tokens per step that the rest of the engine adds to the target's forward pass, or
            a function that returns them.
        domain (`str`, *optional*): Whose temperatures calibrate the confidences; `None`: by the sampling regime.
        observer (`Callable`, *optional*): Is called with the [`RoundOutcome`] of each round.
        use_transformers_loop (`bool`): Whether transformers' own assisted loop verifies and commits, one sequence at
            a time; for comparison.
        last_stats ([`RoundStatistics`], *optional*): Of the last call.

    DSpark Section 3.1.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["DSparkLayer"]
    # DeepSpec stores copies of the target's tensors; the target's own are used.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.weight$", r"^lm_head\.weight$"]

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = DSparkRMSNorm(hidden_size, eps)
        self.layers = nn.ModuleList(DSparkLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DSparkRMSNorm(hidden_size, eps)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = DSparkRotaryEmbedding(config)
        self.policy: Policy | None = None
        self.load: int | Callable[[], int] = 0
        self.domain: str | None = None
        self.observer: Callable[[RoundOutcome], None] | None = None
        self.use_transformers_loop = False
        self.last_stats = None
        # A tuple is not searched for submodules: what is borrowed stays out of state_dict, parameters and `.to()`.
        self._borrowed: tuple[_Borrowed, ...] = ()
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkRMSNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        elif isinstance(module, DSparkLayer) and module.layer_scalar is not None:
            nn.init.ones_(module.layer_scalar)
        elif isinstance(module, MarkovProjection):
            nn.init.zeros_(module.weight)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> "DSparkDraftModel":
        """Load one of our checkpoints or a DeepSpec one (Qwen3 or Gemma 4 layout).

        Raises:
            ValueError: If tensors are missing, unexpected, or of another shape than the config says.
        """
        want_info = kwargs.pop("output_loading_info", False)
        if "config" not in kwargs:
            hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
            kwargs["config"] = DSparkConfig.from_pretrained(pretrained_model_name_or_path, **hub)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        faults = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "of another shape": sorted(
                str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]
            ),
        }
        if any(faults.values()):
            found = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in faults.items() if keys)
            raise ValueError(
                f"the checkpoint {pretrained_model_name_or_path} does not match its config. Tensors {found}. Check "
                "markov_rank, markov_head_type, enable_confidence_head, num_hidden_layers and the norms in "
                "config.json."
            )
        return (model, info) if want_info else model

    def get_input_embeddings(self) -> nn.Module | None:
        return self._borrowed[0].embedding if self._borrowed else None

    def get_output_embeddings(self) -> nn.Module | None:
        return self._borrowed[0].lm_head if self._borrowed else None

    def bind(self, target: PreTrainedModel) -> "DSparkDraftModel":
        """Borrow the target's embedding and LM head; checks that draft and target fit. Costs no memory.

        Args:
            target (`PreTrainedModel`): A decoder-only causal LM.

        Returns:
            The draft itself.

        Raises:
            ValueError: If vocabulary, hidden size or layer count differ, or the target is an encoder-decoder.
        """
        check_fits(self.config, target)
        self._borrowed = (_Borrowed(target.get_input_embeddings(), target.get_output_embeddings(), target.dtype),)
        return self

    def _require_target(self) -> _Borrowed:
        if not self._borrowed:
            raise ValueError(
                "the draft has no embedding and no LM head of its own: call draft.bind(target) first "
                "(target.generate(..., assistant_model=draft) does it for you)"
            )
        return self._borrowed[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's embedding rows, scaled, on the draft's device and in its dtype; `[..., d]`."""
        embedding = self._require_target().embedding
        rows = embedding(token_ids.to(input_device(embedding)))
        # Gemma 3 and 4 scale inside the module, Gemma 1 and 2 and Granite outside of it.
        if self.config.embedding_scale != 1.0 and not hasattr(embedding, "embed_scale"):
            rows = rows * self.config.embedding_scale
        return rows.to(device=self.device, dtype=self.dtype)

    def base_logits(self, block_hidden: torch.Tensor) -> torch.Tensor:
        """Return U_k, the target's LM head on h_k, scaled and soft-capped; `[..., V]` in the draft's dtype."""
        borrowed = self._require_target()
        hidden = block_hidden.to(device=input_device(borrowed.lm_head), dtype=borrowed.dtype)
        logits = borrowed.lm_head(hidden).to(block_hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def backbone(
        self,
        block_embeds: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        drafting: DraftPass | None = None,
    ) -> torch.Tensor:
        """Run the parallel stage.

        Args:
            block_embeds (`torch.Tensor` of shape `[B, Q, d]`): Embedded anchor and mask tokens of one or more blocks.
            features (`torch.Tensor` of shape `[B, C, m*d]`): Tapped target layers of the context rows, of those alone
                that are not yet cached when `drafting`.
            position_ids (`torch.LongTensor` of shape `[B, C+Q]`): Positions of those rows, then of the block rows.
            attention_mask (`torch.BoolTensor` of shape `[B, 1, Q, C+Q]`, *optional*): True where a row may attend;
                `None` means everywhere (and, in sliding layers, within the window).
            drafting ([`DraftPass`], *optional*): A cached pass: then B = 1, and the rows of all requests are packed.

        Returns:
            `torch.Tensor` of shape `[B, Q, d]`: h, after the final norm.

        DSpark Eq. 2-3.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight)))  # Eq. 2
        rotary = self.rotary(position_ids, block_embeds.dtype)
        hidden = block_embeds
        for layer in self.layers:
            hidden = layer(hidden, context, rotary, self._layer_mask(layer, attention_mask, position_ids), drafting)
        return self.norm(hidden)

    def _layer_mask(
        self, layer: DSparkLayer, attention_mask: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor | None:
        window = layer.self_attn.sliding_window
        if attention_mask is None or window is None:
            return attention_mask
        queries = position_ids[:, -attention_mask.shape[2] :]
        return attention_mask & (queries[:, None, :, None] - position_ids[:, None, None, :] < window)

    @torch.no_grad()
    def draft_block(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        sampler: Sampler,
        num_features: Sequence[int] | None = None,
    ) -> DraftBlock:
        """Draft one block per request: one parallel pass, then γ Markov draws.

        Args:
            anchor_ids (`torch.LongTensor` of shape `[B]`): x_0, the last committed token of each request.
            features (`torch.Tensor` of shape `[B, C, m*d]`, or `[T, m*d]` with `num_features`): Tapped target layers
                of the committed tokens not yet in `cache`, the anchor excluded; packed, request by request.
            cache ([`SlotCache`]): Rows 0..B-1 hold the requests' context; the new one is appended.
            sampler ([`Sampler`]): Draws each token; supplied by the caller.
            num_features (`Sequence[int]`, *optional*): How many tokens of `features` belong to each request.

        Returns:
            [`DraftBlock`]

        DSpark Eq. 3-7.
        """
        hidden = self.read_block(anchor_ids, features, cache, num_features)
        return self.sample_block(hidden, self.base_logits(hidden), anchor_ids.to(self.device), sampler)

    @torch.no_grad()
    def read_block(
        self,
        anchor_ids: torch.Tensor,
        features: torch.Tensor,
        cache: SlotCache,
        num_features: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the parallel pass of [`~DSparkDraftModel.draft_block`]: read the new context, and return h_1..h_γ.

        Args:
            anchor_ids, features, cache, num_features: As there.

        Returns:
            `torch.Tensor` of shape `[B, γ, d]`.

        DSpark Eq. 2-3.
        """
        requests, gamma = anchor_ids.shape[0], self.config.block_size
        if num_features is None:
            num_features = (features.shape[1],) * requests
        drafting = DraftPass(cache, num_features, gamma, self.device)
        block_ids = torch.full((requests, gamma), self.config.mask_token_id, device=anchor_ids.device)
        block_ids[:, 0] = anchor_ids
        block_embeds = self.embed(block_ids).flatten(0, 1)[None]
        with cache.writing(drafting.layout):
            hidden = self.backbone(
                block_embeds, features.reshape(1, -1, features.shape[-1]), drafting.position_ids, drafting=drafting
            ).view(requests, gamma, -1)
        for row, count in enumerate(num_features):
            cache.lengths[row] += count
        return hidden

    def sample_block(
        self, hidden: torch.Tensor, base_logits: torch.Tensor, anchor_ids: torch.Tensor, sampler: Sampler
    ) -> DraftBlock:
        """Run the sequential stage: draw x_k from softmax(U_k + B_k), left to right.

        Args:
            hidden (`torch.Tensor` of shape `[B, γ, d]`): h_1..h_γ.
            base_logits (`torch.Tensor` of shape `[B, γ, V]`): U_1..U_γ.
            anchor_ids (`torch.LongTensor` of shape `[B]`): x_0.
            sampler ([`Sampler`]): Draws each token.

        Returns:
            [`DraftBlock`]

        DSpark Eq. 4.
        """
        scores, candidate_ids = base_logits, None
        if self.config.draft_top_k is not None:  # no full-vocabulary work behind this line
            scores, candidate_ids = scores.topk(self.config.draft_top_k, dim=-1)
        previous, state = anchor_ids, None
        tokens = anchor_ids.new_empty(base_logits.shape[:2])
        laws, embeddings = [], []
        slots = zip(scores.unbind(dim=1), hidden.unbind(dim=1), strict=True)
        for slot, (slot_scores, slot_hidden) in enumerate(slots):
            slot_candidates = None if candidate_ids is None else candidate_ids[:, slot]
            if self.markov_head is not None:
                embedding = self.markov_head.markov_w1(previous)
                transition, state = self.markov_head.transition(embedding, slot_hidden, state)
                slot_scores = slot_scores.float() + self.markov_head.bias(transition, slot_candidates)
                embeddings.append(embedding)
            previous, law = sampler(slot_scores.float(), slot_candidates, tokens[:, :slot])
            tokens[:, slot] = previous
            laws.append(law)
        law = None if laws[0] is None else TokenLaw.stack(laws)
        confidence_logits = None
        if self.confidence_head is not None:
            stacked = torch.stack(embeddings, dim=1) if embeddings else None
            confidence_logits = self.confidence_head(hidden, stacked).float()  # Eq. 7
        return DraftBlock(tokens, law, confidence_logits)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        anchor_positions: torch.Tensor,
        anchor_mask: torch.Tensor,
        labels: torch.Tensor,
    ) -> DSparkOutput:
        """Score N anchored blocks per row along their labels; the training pass.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, S]`): The target's sequences.
            features (`torch.Tensor` of shape `[B, S, m*d]`): Tapped target layers of all positions.
            anchor_positions (`torch.LongTensor` of shape `[B, N]`): Position of each block's anchor.
            anchor_mask (`torch.BoolTensor` of shape `[B, N]`): False for dummy blocks.
            labels (`torch.LongTensor` of shape `[B, N, γ]`): x*_1..x*_γ of each block.

        Returns:
            [`DSparkOutput`]

        DSpark Section 3.3.
        """
        batch, num_anchors, gamma = labels.shape
        anchor_ids = input_ids.gather(1, anchor_positions)
        block_ids = torch.full_like(labels, self.config.mask_token_id)
        block_ids[:, :, 0] = torch.where(anchor_mask, anchor_ids, block_ids[:, :, 0])
        slots = torch.arange(gamma, device=labels.device)
        block_positions = (anchor_positions[:, :, None] + slots).flatten(1)
        context_positions = torch.arange(input_ids.shape[1], device=labels.device).expand(batch, -1)
        hidden = self.backbone(
            self.embed(block_ids.flatten(1)),
            features,
            torch.cat([context_positions, block_positions], dim=1),
            block_attention_mask(anchor_positions, anchor_mask, gamma, input_ids.shape[1]),
        ).unflatten(1, (num_anchors, gamma))

        draft_logits = self.base_logits(hidden)
        previous_ids = torch.cat([anchor_ids[:, :, None], labels[:, :, :-1]], dim=-1)
        embedding = None
        if self.markov_head is not None:
            embedding = self.markov_head.markov_w1(previous_ids)
            draft_logits = draft_logits + self.markov_head.bias(self.markov_head.teacher_forced(embedding, hidden))
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, embedding)
        return DSparkOutput(hidden, draft_logits, confidence)


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def input_device(module: nn.Module) -> torch.device:
    """Return where a module wants its input; between calls, offloaded weights live on the meta device."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):  # accelerate chains several
        if getattr(part, "execution_device", None) is not None:
            return torch.device(part.execution_device)
    return module.weight.device


def block_attention_mask(
    anchor_positions: torch.Tensor, anchor_mask: torch.Tensor, block_size: int, context_length: int
) -> torch.Tensor:
    """Return who may attend to whom in training, `[B, 1, N*γ, S+N*γ]`, true where allowed.

    A block's rows see context before their anchor and their own block. Rows of dummy blocks see nothing.

    Args:
        anchor_positions (`torch.LongTensor` of shape `[B, N]`): Position of each anchor.
        anchor_mask (`torch.BoolTensor` of shape `[B, N]`): False for dummy blocks.
        block_size (`int`): γ.
        context_length (`int`): S.
    """
    device = anchor_positions.device
    before_anchor = torch.arange(context_length, device=device) < anchor_positions[:, :, None]  # [B, N, S]
    own_block = torch.eye(anchor_positions.shape[1], dtype=torch.bool, device=device).repeat_interleave(
        block_size, dim=1
    )
    mask = torch.cat([before_anchor, own_block.expand(len(anchor_positions), -1, -1)], dim=-1)
    mask = mask & anchor_mask[:, :, None]
    return mask.repeat_interleave(block_size, dim=1)[:, None]


def check_fits(config: DSparkConfig, target: PreTrainedModel) -> None:
    """Raise a `ValueError` that names every way in which draft and target do not fit."""
    require_decoder_only(target.config)
    text = target.config.get_text_config(decoder=True)
    facts = {
        "vocab_size": (config.vocab_size, text.vocab_size),
        "hidden_size": (config.hidden_size, text.hidden_size),
        "num_target_layers": (config.num_target_layers, text.num_hidden_layers),
    }
    wrong = [f"{name}: draft {ours}, target {theirs}" for name, (ours, theirs) in facts.items() if ours != theirs]
    if wrong:
        raise ValueError(
            f"this draft was not made for this target ({'; '.join(wrong)}). A draft fits only the model it was "
            "trained on: load the matching pair, or train one with DSparkConfig.from_target(target.config)."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"the target {type(target).__name__} has no LM head: load it with AutoModelForCausalLM")
