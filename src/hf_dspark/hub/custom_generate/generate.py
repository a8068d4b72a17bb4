"""DSpark speculative decoding in one file. It needs transformers and torch alone; read it before you trust it.

    target.generate(**inputs, custom_generate="repository or folder with this file", trust_remote_code=True)

A large target writes one token per pass, although a pass over eight takes hardly longer. So a small draft model
proposes a block of tokens, and one pass of the target verifies them all:

1. Draft. One pass of the draft reads the target's hidden states and gives h_1..h_γ for the whole block. A light head
   then draws x_1..x_γ from left to right. A confidence threshold may end the block early.
2. Verify. The target reads the block in one pass. x_k is kept with probability min(1, p_t(x_k) / p_d(x_k)). The first
   token that is not kept is replaced by one from max(p_t - p_d, 0). If all are kept, one more is drawn from p_t. The
   output then follows the target's own distribution. Greedy output is the target's own, but for rounded ties.
3. Commit. The target's cache forgets the rejected tokens. The draft will read the hidden states of the accepted ones.

Equations are those of the DSpark paper; DFlash is the case without heads. The file decodes one sequence at a time. The
package hf_dspark, if installed, takes over: it is faster and does more. MIT licence, see LICENSE.
"""

import functools
import inspect
import os
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModel, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

# ---- Configuration


class DSparkConfig(PreTrainedConfig):
    """What `config.json` says.

    γ is `block_size`, d `hidden_size`, V `vocab_size`, r `markov_rank`. The draft uses the target's embedding and LM
    head, or its own; `embedding_scale`, `logit_scale` and `final_logit_softcapping` act around them.
    `target_layer_ids` are the m tapped layers of the target: -1 is the embedding output, i the output of layer i. With
    `sample_from_anchor`, slot k of a block predicts token k+1; without, token k, and the anchor's slot predicts none.
    """

    model_type = "dspark"
    # Of drafts that were saved before there was a choice.
    draft_vocab_size, embedding_norm, sliding_from_anchor, causal_sliding = None, True, False, False
    own_embedding = own_lm_head = rope_interleaved = False


# ---- Backbone: one parallel pass over the block. DSpark Section 3.1, Eq. 2-3


def rotary_angles(config: DSparkConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[positions, rotary_dim]` in float32."""
    parameters, scaling = config.rope_parameters, 1.0
    if parameters.get("rope_type", "default") == "default":
        size = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        frequencies = parameters["rope_theta"] ** -(torch.arange(0, size, 2, device=positions.device) / size)
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, positions.device)
    both = frequencies.repeat_interleave(2) if config.rope_interleaved else frequencies.repeat(2)
    angles = positions[:, None].float() * both.float()
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(states: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the leading `rotary_dim` entries of `[1, heads, positions, head_dim]`, in pairs, by their positions."""
    turning, passing = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    crossed = torch.stack([-second, first], dim=-1).flatten(-2) if interleaved else torch.cat([-second, first], dim=-1)
    turned = turning * cos + crossed * sin
    return torch.cat([turned, passing], dim=-1).to(states.dtype)


def visible_positions(config: DSparkConfig, positions: Tensor, slots: int) -> Tensor:
    """Return which positions a block's slots see in a sliding layer, `[slots, all positions so far]`."""
    queries, keys = positions[-slots:, None], torch.arange(int(positions[-1]) + 1, device=positions.device)
    if config.sliding_from_anchor:  # all slots see the same context
        visible = (queries[0] - keys <= config.sliding_window).expand(slots, -1)
    else:
        visible = queries - keys < config.sliding_window
    return visible & (keys <= queries) if config.causal_sliding else visible


class Attention(nn.Module):
    """The slots of a block attend to the target's features of all tokens before it, and to each other. Eq. 3."""

    def __init__(self, config: DSparkConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        width, size, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, width, bias=config.attention_output_bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(size, eps) if config.qk_norm else nn.Identity() for _ in range(2))
        self.v_norm = nn.RMSNorm(size, eps, elementwise_affine=False) if config.value_norm else nn.Identity()

    def forward(
        self, block: Tensor, context: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None, cache: DynamicCache
    ) -> Tensor:
        """Attend from the block `[1, slots, d]` to cached context, new context `[1, C, d]` and the block itself."""
        rows, slots = torch.cat([context, block], dim=1), block.shape[1]
        query, raw_key = self._heads(self.q_proj(block)), self._heads(self.k_proj(rows))
        value = raw_key if self.v_proj is None else self._heads(self.v_proj(rows))
        paired = self.config.rope_interleaved
        query, key = rotate(self.q_norm(query), cos[-slots:], sin[-slots:], paired), self.k_norm(raw_key)
        key, value = cache.update(rotate(key, cos, sin, paired), self.v_norm(value), self.index)
        mask = visible if self.config.layer_types[self.index] == "sliding_attention" else None
        scale = self.config.attention_scaling
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, config: DSparkConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.sandwich_norms = config.sandwich_norms
        self.self_attn, self.mlp = Attention(config, index), LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        if config.sandwich_norms:  # Gemma
            self.pre_feedforward_layernorm = nn.RMSNorm(size, eps)
            self.post_feedforward_layernorm = nn.RMSNorm(size, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1)) if config.layer_scalar else None

    def forward(self, hidden: Tensor, *context: Any) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), *context)
        if self.sandwich_norms:
            hidden = hidden + self.post_attention_layernorm(attended)
            hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        else:
            hidden = hidden + attended
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden if self.layer_scalar is None else hidden * self.layer_scalar


# ---- Head: what the token before adds to each slot, from left to right. Eq. 4-6


class MarkovHead(nn.Module):
    """The bias B_k on the logits of slot k that depends on the token before, x_{k-1}."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        size, rank, self.kind = config.hidden_size, config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return B_k `[1, V]` and the state s_k, from W_1[x_{k-1}] `[1, r]`, h_k `[1, d]` and s_{k-1} `[1, r]`."""
        vector = embedding  # vanilla: B_k = W_1[x_{k-1}] W_2. Eq. 5
        if self.kind == "gated":
            vector = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding
        elif self.kind == "rnn":  # Eq. 6
            state = torch.zeros_like(embedding) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            vector, state = torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(vector), state


# ---- The draft


class DSparkDraftModel(PreTrainedModel):
    """A draft. It has an embedding and an LM head of its own only if they are not the target's."""

    config_class = DSparkConfig
    _supports_sdpa = True

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        if config.enable_confidence_head:
            with_markov = config.confidence_head_with_markov * config.markov_rank
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(size + with_markov, 1)})
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        num_tokens = config.draft_vocab_size or config.vocab_size * config.own_lm_head
        self.lm_head = nn.Linear(size, num_tokens, bias=False) if num_tokens else None
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.rounds: list[tuple[int, int]] = []  # drafted and accepted tokens of each round of the last call
        self.post_init()

    def hidden_block(self, target: PreTrainedModel, anchor: Tensor, features: Tensor, cache: DynamicCache) -> Tensor:
        """Return h `[slots, d]` of the block at the anchor x_0 `[1]`, the last committed token; one pass.

        `features [1, C, m*d]`: the target's tapped hidden states of the committed tokens that are not in the draft's
        cache, without the anchor. They join the cache.
        """
        config, seen = self.config, cache.get_seq_length()
        slots = config.block_size + (not config.sample_from_anchor)
        block_ids = F.pad(anchor, (0, slots - 1), value=config.mask_token_id)
        embedding, scale = self.embed_tokens or target.get_input_embeddings(), config.embedding_scale
        block_ids = block_ids[None].to(self.device if self.embed_tokens else target.device)
        if hasattr(embedding, "embed_scale"):  # Gemma 3 scales inside the module; some drafts read bare rows
            hidden = F.embedding(block_ids, embedding.weight) if scale == 1.0 else embedding(block_ids)
        else:
            hidden = embedding(block_ids) * scale
        hidden = hidden.to(self.device, self.dtype)
        context = self.hidden_norm(self.fc(features.to(self.device, self.dtype)))  # Eq. 2
        positions = torch.arange(seen, seen + features.shape[1] + slots, device=self.device)
        cos, sin = rotary_angles(config, positions)
        visible = visible_positions(config, positions, slots) if "sliding_attention" in config.layer_types else None
        for layer in self.layers:
            hidden = layer(hidden, context, cos, sin, visible, cache)
        cache.crop(-slots)  # the block is no context
        return self.norm(hidden)[0]

    def base_logits(self, target: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Return U_k `[slots, V]`: what the target's LM head says to h_k."""
        head, cap = self.lm_head or target.get_output_embeddings(), self.config.final_logit_softcapping
        logits = head(hidden.to(hidden if self.lm_head else target.dtype)).to(hidden) * self.config.logit_scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def confidence(self, hidden: Tensor, embedding: Tensor | None, slot: int, regime: str) -> float:
        """Return the calibrated c_k: how likely x_k is kept if those before it are. Eq. 7, Section 3.2.1."""
        read = torch.cat([hidden, embedding], dim=-1) if self.config.confidence_head_with_markov else hidden
        temperatures, fits = self.config.sts_temperatures or {}, self.config.confidence_fits or {}
        slope, offset = 1.0, 0.0
        for name in ("default", regime):  # the regime's own comes before the default
            if name in fits or name in temperatures:
                slope, offset = fits[name][slot] if name in fits else (1 / temperatures[name][slot], 0.0)
        return float(torch.sigmoid(self.confidence_head["proj"](read).float() * slope + offset))

    def draw_block(
        self, ids: Tensor, hidden: Tensor, base_logits: Tensor, rule: "TokenRule", threshold: float | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return drafts x_1..x_l `[1]` after `ids [1, S]`, and the distributions `[V]` they were drawn from.

        From left to right, given h and U; the block ends before the first slot of too little confidence.
        """
        markov, embedding, state = self.markov_head, None, None
        if markov is not None and not self.config.sample_from_anchor:  # the anchor's slot predicts none
            _, state = markov(markov.markov_w1(ids[0, -1:].to(self.device)), hidden[:1], state)
        drafts, distributions = [], []
        for slot, logits in enumerate(base_logits[:, None]):
            h_k = hidden[len(hidden) - self.config.block_size + slot, None]
            if markov is not None:
                embedding = markov.markov_w1(ids[0, -1:].to(self.device))
                bias, state = markov(embedding, h_k, state)
                logits = logits.float() + bias  # p_d(x_k | x_<k) = softmax(U_k + B_k). Eq. 4
            # Whether x_k is verified is decided before x_k is drawn: to decide by its value would bias the output.
            if threshold and self.confidence(h_k, embedding, slot, rule.regime) < threshold:
                break
            if self.config.draft_vocab_size is not None:  # draft id i is the target's token i + d2t[i]
                token_ids = torch.arange(len(self.d2t), device=self.device) + self.d2t
                nothing = logits.new_full((1, self.config.vocab_size), -torch.inf)
                logits = nothing.scatter(-1, token_ids[None], logits)
            distribution = rule.distribution(ids, logits, drafting=True)
            if distribution.isnan().any():  # numbers that overflow: nothing is drafted from them
                break
            distributions.append(distribution)
            drafts.append(rule.draw(distribution))
            ids = torch.cat([ids, drafts[-1][None]], dim=1)
        return drafts, distributions


# ---- Verification. DSpark Section 2.1; Leviathan et al. 2023, Algorithm 1

# Drafts may come from any distribution that is known. These processors make it like the target's. Others may keep
# state: they are called for the target alone, once per committed token and in order, as in plain decoding.
WARPERS = ("MinP", "Temperature", "TopK", "TopP", "Typical")
FOR_DRAFTS = {getattr(transformers, f"{name}LogitsWarper") for name in WARPERS}
FOR_DRAFTS |= {transformers.RepetitionPenaltyLogitsProcessor}


class TokenRule:
    """From logits to distributions to tokens, by the call's processors. Greedy distributions are one-hot."""

    def __init__(self, processors: LogitsProcessorList, do_sample: bool) -> None:
        self.processors, self.do_sample = processors, do_sample
        self.draft_processors = LogitsProcessorList(each for each in processors if type(each) in FOR_DRAFTS)
        self.regime = "sampled" if do_sample else "greedy"

    def distribution(self, ids: Tensor, logits: Tensor, drafting: bool = False) -> Tensor:
        """Return p_t `[V]`, or p_d, of the token after `ids [1, S]`."""
        process = self.draft_processors if drafting else self.processors
        scores = process(ids, logits.to(ids.device, torch.float32, copy=True))[0]
        return scores.softmax(dim=-1) if self.do_sample else F.one_hot(scores.argmax(), len(scores)).float()

    def draw(self, distribution: Tensor) -> Tensor:
        """Draw a token `[1]`; the distribution need not sum to one."""
        return torch.multinomial(distribution, 1) if self.do_sample else distribution.argmax(dim=-1, keepdim=True)

    def happens(self, probability: Tensor) -> bool:
        return bool(torch.rand_like(probability) < probability if self.do_sample else probability == 1.0)

    def verify(self, draft: Tensor, p_t: Tensor, p_d: Tensor) -> tuple[Tensor, bool]:
        """Keep a draft with probability min(1, p_t / p_d), else draw from max(p_t - p_d, 0); tell which it was."""
        if self.happens((p_t[draft] / p_d[draft]).clamp(max=1.0)):
            return draft, True
        residual = (p_t - p_d).clamp(min=0.0)
        # Distributions that agree to rounding leave no residual, and hardly ever reject.
        return self.draw(residual if residual.any() else p_t), False


# ---- The decoding loop


def decode(
    target: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, draft: DSparkDraftModel,
    streamer: Any, threshold: float | None, max_drafts: int | None, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """Decode one sequence: transformers has prepared the call, this takes the place of its sampling loop."""
    _check(target, draft.config, input_ids, generation_config, model_kwargs)
    ids, rule = input_ids, TokenRule(logits_processor, generation_config.do_sample)
    emit = (lambda tokens: None) if streamer is None else (lambda tokens: streamer.put(tokens.cpu()))
    emit(ids)
    # A cache without a config keeps all positions, in sliding layers, too: so the last ones can be dropped.
    cache, draft_cache, features, ended, draft.rounds = DynamicCache(), DynamicCache(), None, False, []
    options = {CACHE: cache, "use_cache": True, "return_dict": True, "output_hidden_states": True}
    text = target.config.get_text_config(decoder=True)
    num_positions = getattr(text, "max_position_embeddings", None) or generation_config.max_length
    while not ended:
        # Draft a block. The first pass reads the prompt alone; the last token of an answer needs no drafts before it.
        drafts, distributions = [], []
        room = min(generation_config.max_length - 1, num_positions) - ids.shape[1]
        limit = min(max_drafts or draft.config.block_size, room)
        if features is not None and limit > 0:
            hidden = draft.hidden_block(target, ids[0, -1:], features, draft_cache)
            base_logits = draft.base_logits(target, hidden[-draft.config.block_size :][:limit])
            drafts, distributions = draft.draw_block(ids, hidden, base_logits, rule, threshold)

        # One pass of the target over what it has not read: the prompt, or the anchor, and the drafts.
        start = cache.get_seq_length()
        unread = torch.cat([ids[0, start:], *drafts])[None].to(target.device)
        if "logits_to_keep" in model_kwargs:  # transformers has asked whether the target knows it
            options["logits_to_keep"] = len(drafts) + 1
        output = target(input_ids=unread, **options)

        # Verify and commit, token by token. Each is tested against the distribution at its own place.
        for k, logits in enumerate(output.logits[0, -len(drafts) - 1 :, None]):
            distribution = rule.distribution(ids, logits)
            if k < len(drafts):
                token, accepted = rule.verify(drafts[k], distribution, distributions[k])
            else:
                token, accepted = rule.draw(distribution), False  # all drafts were accepted: the bonus token
            ids = torch.cat([ids, token[None]], dim=1)
            emit(token)
            ended = bool(stopping_criteria(ids, None).all())
            if ended or not accepted:
                break

        # Roll back. What stays in the cache: all tokens but the last one, which is the next anchor.
        kept = ids.shape[1] - 1 - start
        tapped = [output.hidden_states[layer + 1] for layer in draft.config.target_layer_ids]
        if tapped[0].dim() == 4:  # streams of states, [streams, 1, S, d] or [1, S, streams, d]
            tapped = [states.mean(dim=0 if states.shape[1:3] == unread.shape else 2) for states in tapped]
        features = torch.cat([states[:, :kept].to(draft.device) for states in tapped], dim=-1)
        cache.crop(kept - unread.shape[1])
        draft.rounds += [(len(drafts), k + accepted)] if start else []
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=ids, **{CACHE: cache})
    return ids


# ---- What generate() calls

OF_REPOSITORY = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"  # since 5.24
RECORDS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
REPLACED = ("attention_mask", "logits_to_keep", CACHE, "position_ids", "use_cache")
STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "dummy", "moe", "mlp"}  # kinds of layers
_drafts: "weakref.WeakKeyDictionary[PreTrainedModel, dict]" = weakref.WeakKeyDictionary()  # of targets in use


def generate(
    model: PreTrainedModel, assistant_model: PreTrainedModel | str | None = None, streamer: Any = None,
    tokenizer: Any = None, stop_strings: str | list[str] | None = None, **arguments: Any,
) -> Any:  # fmt: skip
    """Decode with the draft of this repository: `target.generate(custom_generate=...)` calls this.

    `assistant_model` is the draft, or where it is; by default the repository that `custom_generate` names. It is
    loaded once per target. `assistant_confidence_threshold` and `num_assistant_tokens` end blocks early; `revision`,
    `token` and the like belong to the repository. What needs the package is refused with a `ValueError`.
    """
    hub = {name: arguments.pop(name) for name in OF_REPOSITORY if name in arguments}
    draft = assistant_model
    if draft is None:  # transformers passes on all arguments but this one, which its own frame still has
        draft = inspect.currentframe().f_back.f_locals.get("custom_generate")
        if not isinstance(draft, str):
            raise ValueError("where is the draft? Pass custom_generate=repository, or assistant_model=repository")
        if not os.path.isdir(draft):  # this file lies in a folder named by its commit: weights of the same one
            hub["revision"] = Path(__file__).parents[1].name
    if isinstance(draft, (str, os.PathLike)):
        draft = _load(model, os.fspath(draft), hub)
    if type(draft).__module__.startswith("hf_dspark."):  # the package takes over
        others = {"streamer": streamer, "tokenizer": tokenizer, "stop_strings": stop_strings}
        return model.generate(assistant_model=draft, **others, **arguments)
    _require_dspark(getattr(getattr(draft, "config", None), "model_type", None))
    if arguments.get("past_key_values", arguments.get(CACHE)) is not None or arguments.get("synced_gpus"):
        raise refuse("past_key_values and synced_gpus")
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings!r} need the target's tokenizer: pass tokenizer=tokenizer")
        criteria = [*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stop_strings)]
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
    # Asked here, before transformers fills in defaults that are meant for other assistants.
    given = (model.generation_config.__dict__, getattr(arguments.get("generation_config"), "__dict__", {}), arguments)
    chosen = {name: value for values in given for name, value in values.items() if value is not None}
    threshold, max_drafts = map(chosen.get, ("assistant_confidence_threshold", "num_assistant_tokens"))
    if not 0.0 <= (threshold or 0.0) <= 1.0 or (max_drafts is not None and max_drafts < 1):
        raise ValueError(f"{threshold=} and {max_drafts=}: a threshold lies in [0, 1], and drafts are 1 or more")
    if threshold and not draft.config.enable_confidence_head:
        raise ValueError("the draft has no confidence head: leave assistant_confidence_threshold unset")
    loop = functools.partial(decode, draft=draft, streamer=streamer, threshold=threshold, max_drafts=max_drafts)
    return model.generate(custom_generate=loop, **arguments)


def refuse(what: str) -> ValueError:
    return ValueError(
        f"the one-file decoder of this draft does not support {what}. Install the package hf_dspark from a "
        "checkout (pip install -e .), which then takes over, or call generate() without custom_generate."
    )


def _load(target: PreTrainedModel, name: str, hub: dict[str, Any]) -> PreTrainedModel:
    """Return the draft of a folder or repository on the target's device: the package's class if it is installed."""
    drafts, key, kind = _drafts.setdefault(target, {}), (name, hub.get("revision")), AutoModel
    if key not in drafts:
        try:
            import hf_dspark  # noqa: F401  AutoModel then knows all kinds of drafts
        except ImportError:
            kind = DSparkDraftModel
            _require_dspark(PreTrainedConfig.get_config_dict(name, **hub)[0].get("model_type"))
        drafts[key] = kind.from_pretrained(name, dtype="auto", use_safetensors=True, **hub)
    return drafts[key].to(target.device).eval()


def _require_dspark(model_type: str | None) -> None:
    if model_type != DSparkConfig.model_type:
        raise refuse(f"drafts of the type {model_type!r}")


def _check(target: PreTrainedModel, config: DSparkConfig, ids: Tensor, call: GenerationConfig, given: dict) -> None:
    """Refuse what would be ignored, or would not give plain decoding's output."""
    mode, mask, positions = call.get_generation_mode(), given.get("attention_mask"), given.get("position_ids")
    text = target.config.get_text_config(decoder=True)
    rope, kinds = getattr(text, "rope_parameters", None) or {}, set(getattr(text, "layer_types", None) or ())
    ropes = [each for each in (rope, *rope.values()) if isinstance(each, dict) and "long_factor" in each]
    # Beyond this length longrope rotates all tokens by other frequencies, and plain decoding reads them again.
    crossed = [ids.shape[1] <= each["original_max_position_embeddings"] < call.max_length - 1 for each in ropes]
    inputs = {name: value for name, value in given.items() if name not in REPLACED and value is not None}
    asked = [name for name, value in inputs.items() if not (isinstance(value, Tensor) and not value.any())]
    asked += [name for name in RECORDS if call.return_dict_in_generate and getattr(call, name)]
    unsupported = {
        f"the decoding mode {mode.value!r}": mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        f"batches, and got {len(ids)} sequences": len(ids) != 1,
        " and ".join(asked): asked,
        "empty prompts, and prompts as embeddings": ids.shape[1] == 0,
        "padded prompts": mask is not None and not mask.all(),
        "unusual position_ids": positions is not None and (positions.cpu() != torch.arange(ids.shape[1])).any(),
        "use_cache=False": not call.use_cache,
        f"cache_implementation={call.cache_implementation!r}": (
            call.cache_implementation not in (None, "dynamic", "dynamic_full")
        ),
        "prefill_chunk_size": call.prefill_chunk_size is not None,
        "targets with a recurrent state": target._is_stateful or kinds - STATELESS,
        "an answer within which rotary frequencies switch": any(crossed),
        "encoder-decoder targets": target.config.is_encoder_decoder,
        "drafts that read rows without the norm in the target's embedding": (
            not config.embedding_norm and hasattr(target.get_input_embeddings(), "embed_norm")
        ),
        "drafts with attention sinks": getattr(config, "attention_sinks", False),
    }
    for what in (what for what, is_asked in unsupported.items() if is_asked):
        raise refuse(what)
    ours = (config.vocab_size, config.hidden_size, config.num_target_layers or text.num_hidden_layers)
    theirs = (text.vocab_size, text.hidden_size, text.num_hidden_layers)
    if ours != theirs:
        raise ValueError(
            f"the draft was made for a target of vocabulary, hidden size and layers {ours}, this one's are {theirs}: "
            "load the model that the draft's card names"
        )
