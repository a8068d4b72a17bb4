"""The draft model: parity with DeepSpec's numbers, and with formulas written out here."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.models.block_attention import BlockLayout, CachedPass, KeyRanges
from hf_dspark.models.modeling_draft import AnchoredBlocks
from hf_dspark.models.slot_cache import SlotCache, SlotLayout
from hf_dspark.sampling.distributions import TokenDistribution
from tests.features import new_context
from tests.samplers import ChainSampler

GOLDEN = ("draft_vanilla", "draft_rnn", "draft_dflash", "gemma4/draft_vanilla")
NO_MARKOV = {"markov_rank": 0}
HEADS = {kind: {"markov_head_type": kind} for kind in ("vanilla", "gated", "rnn", "selector")} | {
    "domino": {"markov_head_type": "domino", "confidence_head_with_markov": False},
    "late_domino": {"markov_head_type": "domino", "markov_state_size": 5, "markov_start": 2, "markov_rank": 4}
    | {"enable_confidence_head": False},
    "none": NO_MARKOV | {"confidence_head_with_markov": False},
    "dflash": NO_MARKOV | {"enable_confidence_head": False},
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
LAYOUTS = {
    "full": {},
    "sliding": SLIDING,
    "sliding_from_anchor": SLIDING | {"sliding_window": 3, "sliding_from_anchor": True, "causal_sliding": True},
    "causal_sliding": SLIDING | {"causal_sliding": True},
    "fill_in": SLIDING | {"sample_from_anchor": False},
    "pruned": {"draft_vocab_size": 20},
    "sinks": SLIDING | {"attention_sinks": True},
    "convolved": SLIDING | {"conv_kernel_size": 3, "conv_group_size": 8, "sample_from_anchor": False},
    "interleaved": SLIDING | {"rope_interleaved": True},
}


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 2e-5, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


class ForcedSampler(ChainSampler):
    """Returns given tokens and keeps the scores it was shown."""

    def __init__(self, token_ids: torch.Tensor) -> None:
        super().__init__()
        self._forced, self.scores = token_ids, []

    def draw(self, logits, candidate_ids):
        self.scores.append(logits)
        distribution = TokenDistribution(logits.softmax(dim=-1), candidate_ids)
        return self._forced[:, len(self.token_ids)], distribution


VOCAB = 48  # of the tiny target


def cached_backbone(draft, block_embeds, features, cache):
    """Run the backbone as `draft_block` does, for one request."""
    start, count = cache.lengths[0], features.shape[1]
    block = SlotLayout((start + count,), (block_embeds.shape[1],))
    drafting = CachedPass(cache, (SlotLayout((start,), (count,)), block), block)
    hidden = draft.backbone(block_embeds, features, drafting.position_ids(draft.device), drafting)
    cache.commit(0, count)
    return hidden


# ---- parity with DeepSpec


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_backbone_matches_deepspec_over_two_cached_rounds(golden, name):
    data = golden(name)
    cache = SlotCache()
    for r in ("r1", "r2"):
        embeds = data.draft.embed(data.io[f"{r}.draft_input_ids"])
        close(embeds, data.io.get(f"{r}.noise_embedding", embeds))  # scaled, for Gemma
        hidden = cached_backbone(data.draft, embeds, data.io[f"{r}.context_hidden"], cache)
        close(hidden, data.io[f"{r}.block_hidden"])
        close(data.draft.base_logits(hidden), data.io[f"{r}.base_logits"])
        if f"{r}.draft_cache_k_layer0" in data.io:
            keys, values = (cache.stores[0, name][0, :, : cache.lengths[0]] for name in ("keys", "values"))
            close(keys[None], data.io[f"{r}.draft_cache_k_layer0"])
            close(values[None], data.io[f"{r}.draft_cache_v_layer0"])


@pytest.mark.parametrize("name", GOLDEN)
def test_draft_block_matches_deepspec_over_two_cached_rounds(golden, name):
    data = golden(name)
    cache = SlotCache()
    for r in ("r1", "r2"):
        expected = data.io[f"{r}.greedy_tokens"]
        anchor, features = data.io[f"{r}.draft_input_ids"][:, 0], data.io[f"{r}.context_hidden"]
        length = cache.lengths[0]
        block = data.draft.draft_block(new_context(anchor, features, cache), ChainSampler())
        assert torch.equal(block.token_ids, expected)
        assert block.distribution is None
        cache.truncate(0, length)
        forced = ForcedSampler(expected)
        data.draft.draft_block(new_context(anchor, features, cache), forced)
        close(torch.stack(forced.scores, dim=1), data.io[f"{r}.corrected_logits"])
        if f"{r}.confidence_logits" in data.io:
            close(block.confidence_logits, data.io[f"{r}.confidence_logits"])
        else:
            assert block.confidence_logits is None
        if name.startswith("gemma4"):  # of which nothing was sampled
            continue
        cache.truncate(0, length)
        block = data.draft.draft_block(new_context(anchor, features, cache), ForcedSampler(data.io[f"{r}.t1_tokens"]))
        close(block.distribution.probs, data.io[f"{r}.t1_draft_probs"])
        if f"{r}.t1_confidence_logits" in data.io:
            close(block.confidence_logits, data.io[f"{r}.t1_confidence_logits"])


def teacher_forced(draft, input_ids, features, layout, labels):
    """Hidden states, logits and confidences of all slots, as the training pass has them chunk by chunk."""
    logits, confidence_logits = draft.teacher_forced(input_ids, features, layout, labels)
    hidden = draft.block_hidden(input_ids, features, layout, labels)
    return hidden, logits.compute(*logits.inputs), confidence_logits


def layout_of(anchors, real, length, gamma) -> BlockLayout:
    return BlockLayout(anchors, real, torch.arange(length).expand(len(anchors), -1), gamma)


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_training_pass_matches_deepspec(golden, name):
    data = golden(name)
    train, kept = data.train, data.train["block_keep_mask"].bool()
    layout = layout_of(train["anchor_positions"], kept, train["input_ids"].shape[1], 5)
    hidden, logits, confidence = teacher_forced(
        data.draft, train["input_ids"], train["target_hidden_states"], layout, train["target_ids"]
    )
    expected = train["draft_logits"] if "draft_logits" in train else train["base_logits"]
    close(logits[kept], expected[kept])
    if "backbone_hidden" in train:
        close(hidden[kept], train["backbone_hidden"][kept])
    if "confidence_pred" in train:
        close(confidence[kept], train["confidence_pred"][kept])
    else:
        assert confidence is None
    assert logits.isfinite().all(), "dummy blocks must not yield NaN"


# ---- borrowing from the target


def test_draft_owns_neither_embedding_nor_head_and_borrows_the_targets_storage(draft, target):
    ends = [(model.get_input_embeddings(), model.get_output_embeddings()) for model in (draft, target)]
    borrowed, lent = ([end.weight.data_ptr() for end in pair] for pair in ends)
    state = draft.state_dict()
    assert borrowed == lent
    assert not {value.data_ptr() for value in [*draft.parameters(), *state.values()]} & set(lent)
    assert not [key for key in state if "embed_tokens" in key or "lm_head" in key]


def test_pickled_draft_leaves_the_targets_tensors_behind_and_a_copy_borrows_them(draft, target):
    size = len(pickle.dumps(DSparkDraftModel(draft.config)))
    stored = pickle.dumps(draft)
    assert len(stored) < size + 1000, "the embedding alone takes more"
    loaded, copied = pickle.loads(stored), copy.deepcopy(draft)
    assert loaded.get_input_embeddings() is None
    assert copied.get_input_embeddings() is target.get_input_embeddings()
    for each in (loaded.bind(target), copied):
        assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in each.state_dict().items())
        assert torch.equal(each.embed(torch.tensor([[1, 2]])), draft.embed(torch.tensor([[1, 2]])))


def test_draft_leaves_the_targets_tensors_alone_when_cast(draft, target):
    draft.to(torch.bfloat16)
    assert draft.dtype == torch.bfloat16
    assert target.get_input_embeddings().weight.dtype == torch.float32
    assert draft.embed(torch.tensor([[1, 2]])).dtype == torch.bfloat16
    assert draft.base_logits(torch.zeros(1, 2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_unbound_draft_raises_and_names_the_cure(draft):
    unbound = DSparkDraftModel(draft.config)
    assert unbound.get_input_embeddings() is None and unbound.get_output_embeddings() is None
    context = new_context(torch.tensor([1]), torch.zeros(1, 3, 64), SlotCache())
    for call in (
        lambda: unbound.embed(torch.tensor([[1]])),
        lambda: unbound.base_logits(torch.zeros(1, 1, 32)),
        lambda: unbound.draft_block(context, ChainSampler()),
    ):
        with pytest.raises(ValueError, match=r"draft\.bind\(target\)"):
            call()


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        ({"vocab_size": 50}, "vocab_size: draft 48, target 50"),
        ({"hidden_size": 40}, "hidden_size: draft 32, target 40"),
        ({"num_hidden_layers": 5}, "num_target_layers: draft 4, target 5"),
        ({"vocab_size": 50, "hidden_size": 40}, "vocab_size.*hidden_size"),
    ],
)
def test_bind_refuses_a_target_that_does_not_fit_and_names_the_fact(make_target, draft, overrides, fact):
    with pytest.raises(ValueError, match=fact):
        draft.bind(make_target(**overrides))


def test_bind_refuses_encoder_decoders_and_targets_without_lm_head(draft, target):
    config = T5Config(vocab_size=48, d_model=32, d_ff=32, d_kv=8, num_layers=4, num_heads=4)
    with pytest.raises(ValueError, match="encoder-decoder 't5'"):
        draft.bind(T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="no LM head"):
        draft.bind(target.model)


# ---- attention and cache


@pytest.mark.parametrize("overrides", [{}, SLIDING, {"qk_norm": False}], ids=["full", "sliding", "no norms"])
@torch.no_grad()
def test_interleaved_rotation_is_that_of_halves_with_the_heads_entries_reordered(make_draft, target, overrides):
    halves = make_draft(target, **overrides)
    paired = make_draft(target, rope_interleaved=True, **overrides)
    state = dict(halves.state_dict())
    for name in (name for name in state if name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm")):
        # Entry i goes to 2i, and the one half a head away to 2i + 1.
        heads = state[name].unflatten(0, (-1, 2, halves.config.head_dim // 2))
        state[name] = heads.transpose(1, 2).flatten(0, 2)
    paired.load_state_dict(state)
    features, block_ids = torch.randn(1, 9, 64), torch.tensor([[7, 47, 47, 47]])
    hidden = [cached_backbone(each, each.embed(block_ids), features, SlotCache()) for each in (halves, paired)]
    close(hidden[0], hidden[1])
    paired.config.rope_interleaved = False  # the control
    assert (cached_backbone(paired, paired.embed(block_ids), features, SlotCache()) - hidden[0]).abs().max() > 1e-2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
@torch.no_grad()
def test_cached_rounds_equal_one_pass_over_the_whole_context(make_draft, target, overrides):
    draft = make_draft(target, **overrides)
    features, cache, committed = torch.randn(2, 30, 64), SlotCache(2), 0
    for new_rows in (11, 1, 3, 4, 1, 5):
        fresh = features[:, committed : committed + new_rows]
        committed += new_rows
        anchors = torch.randint(0, 47, (2,))
        forced = torch.randint(0, 20, (2, 4)) * 2
        stepwise = draft.draft_block(new_context(anchors, fresh, cache), ForcedSampler(forced))
        at_once = draft.draft_block(new_context(anchors, features[:, :committed], SlotCache(2)), ForcedSampler(forced))
        assert cache.lengths == (committed, committed)
        close(stepwise.distribution.probs.log(), at_once.distribution.probs.log())
        close(stepwise.confidence_logits, at_once.confidence_logits)


@pytest.mark.one_in(23)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_training_pass_scores_the_distribution_that_inference_draws_from(make_draft, target, head, layout):
    """Three documents in one row, many blocks, so that several chunks attend; each block knows its document alone."""
    draft = make_draft(target, **HEADS[head], **LAYOUTS[layout])
    lengths = (70, 9, 61)
    input_ids, features = torch.randint(0, 47, (1, sum(lengths))), torch.randn(1, sum(lengths), 64)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    anchors = [(start, own) for start, length in ((0, 70), (70, 9), (79, 61)) for own in range(1, length - 4)]
    anchor_positions = torch.tensor([[start + own for start, own in anchors]])
    labels = torch.stack([input_ids[0, a + 1 : a + 5] for a in anchor_positions[0]])[None]
    layout = BlockLayout(anchor_positions, anchor_positions >= 0, positions, draft.config.block_size)
    chunks = KeyRanges(layout.starts, anchor_positions, sum(lengths), draft.config.num_slots).chunks
    assert len(chunks) > 2 and chunks[-1][1].start > 0
    _, logits, confidence = teacher_forced(draft, input_ids, features, layout, labels)
    proposed = slice(None) if draft.draft_token_ids() is None else draft.draft_token_ids()
    for index, (start, own) in list(enumerate(anchors))[::6]:
        forced, context = ForcedSampler(labels[:, index]), features[:, start : start + own]
        block = draft.draft_block(new_context(input_ids[:, start + own], context, SlotCache()), forced)
        distribution = block.distribution.dense(VOCAB).probs
        close(logits[:, index].log_softmax(-1), distribution[..., proposed].log(), atol=1e-5)
        close(distribution[..., proposed].sum(-1), torch.ones(distribution.shape[:-1]), atol=1e-5)
        if block.confidence_logits is not None:
            close(confidence[:, index], block.confidence_logits, atol=1e-4)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_gradient_checkpointing_changes_no_gradient(make_draft, target, sinks):
    anchors = torch.tensor([[2, 5]])
    layout, labels = layout_of(anchors, anchors > 0, 12, 4), torch.randint(0, 47, (1, 2, 4))
    batch = torch.randint(0, 47, (1, 12)), torch.randn(1, 12, 64), torch.randn(1, 2, 4, 32)
    gradients = []
    for checkpointing in (False, True):
        draft = make_draft(target, attention_sinks=sinks).train()
        if checkpointing:
            draft.gradient_checkpointing_enable()
        draft(*batch, AnchoredBlocks(layout, labels, torch.ones(1, 2, 4))).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in draft.named_parameters()})
    assert all(gradient.abs().max() > 0 for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, atol=1e-7)


# ---- rotary embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_rotary_frequencies_stay_float32_when_the_draft_is_cast(make_draft, target, dtype, theta):
    draft = make_draft(target, rope_parameters={"rope_type": "default", "rope_theta": theta}).to(dtype)
    cos, sin = draft.rotary(torch.tensor([[30_000]]), torch.float32)
    angles = 30_000 * theta ** (-torch.arange(0, 12, 2, dtype=torch.float64) / 12)
    angles = torch.cat([-angles, angles])
    # 30000 * 2 ** -24 is 2e-3: what one float32 rounding of a frequency may do. bfloat16 would be off by radians.
    torch.testing.assert_close(cos[0, 0, 0].double(), angles.cos(), atol=4e-3, rtol=0)
    torch.testing.assert_close(sin[0, 0, 0].double(), angles.sin(), atol=4e-3, rtol=0)


SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": SCALED | {"rope_type": "yarn"},
    "llama3": SCALED | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embedding_matches_transformers(make_draft, target, rope):
    draft = make_draft(target, rope_parameters=dict(ROPES[rope]))
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 12, "max_position_embeddings": 256}
    reference = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(ROPES[rope])))
    positions = torch.tensor([[0, 1, 63, 200]])
    (cos, sin), (their_cos, their_sin) = draft.rotary(positions, torch.float32), reference(torch.zeros(1), positions)
    close(cos[:, 0], their_cos)
    close(sin[:, 0] * torch.tensor([-1.0, 1.0]).repeat_interleave(6), their_sin)


# ---- heads


@torch.no_grad()
def test_confidence_is_known_before_its_token_is_drawn(draft):
    hidden, base = torch.randn(1, 4, 32), torch.randn(1, 4, 48)
    confidence = [
        draft.sample_block(hidden, base, torch.tensor([21]), ForcedSampler(tokens)).confidence_logits[0]
        for tokens in (torch.tensor([[3, 9, 1, 40]]), torch.tensor([[3, 8, 2, 41]]))
    ]
    assert torch.equal(confidence[0][:2], confidence[1][:2])
    assert (confidence[0][2:] != confidence[1][2:]).all()


@pytest.mark.parametrize("head", HEADS)
def test_untrained_markov_head_leaves_the_base_logits_alone(target, head):
    draft = DSparkDraftModel(DSparkConfig.from_target(target.config, **{"markov_rank": 6} | HEADS[head])).bind(target)
    hidden, base = torch.randn(1, 7, 32), torch.randn(1, 7, 48)
    sampler = ForcedSampler(torch.randint(0, 48, (1, 7)))
    draft.sample_block(hidden, base, torch.tensor([1]), sampler)
    assert torch.equal(torch.stack(sampler.scores, dim=1), base)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("candidates", "num_successors"), [(1, 0), (2, 1), (5, 2), (9, 3), (48, 0)])
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_draft_top_k_distribution_is_the_softmax_over_the_best_and_the_likely_successors(
    make_draft, target, head, candidates, num_successors
):
    tokens = torch.randint(0, 48, (2, 4))
    hidden, base, anchors = torch.randn(2, 4, 32), torch.randn(2, 4, 48), torch.tensor([5, 6])
    full, plain, few = ForcedSampler(tokens), make_draft(target, **HEADS[head]), ForcedSampler(tokens)
    plain.sample_block(hidden, base, anchors, full)
    block = make_draft(target, draft_top_k=candidates, **HEADS[head]).sample_block(hidden, base, anchors, few)
    distribution = block.distribution.dense(VOCAB).probs
    for row in range(2):
        for slot in range(4):
            chosen = []
            if num_successors and plain.markov_head is not None and plain.markov_head.names_successors:
                previous = anchors[row] if slot == 0 else tokens[row, slot - 1]
                embedding = plain.markov_head.markov_w1(previous)
                transition, _ = plain.markov_head.transition(embedding, torch.zeros(32), None)
                chosen = plain.markov_head.bias(transition).topk(num_successors).indices.tolist()
            others = [token for token in base[row, slot].argsort(descending=True).tolist() if token not in chosen]
            chosen += others[: candidates - len(chosen)]
            expected = torch.zeros(48)
            expected[chosen] = full.scores[slot][row][chosen].softmax(-1)
            close(distribution[row, slot], expected, atol=1e-6)
            assert (distribution[row, slot] > 0).sum() == candidates


def test_pruned_vocabularies_follow_the_weights_that_are_loaded(make_draft, target):
    draft = make_draft(target, draft_vocab_size=3)
    assert draft.draft_token_ids().tolist() == [0, 2, 4]
    draft.load_state_dict(draft.state_dict() | {"d2t": torch.tensor([0, 0, 0])})
    assert draft.draft_token_ids().tolist() == [0, 1, 2]


def test_drafts_that_were_made_in_inference_mode_draft(make_draft, target):
    with torch.inference_mode():
        draft = make_draft(target, draft_vocab_size=20, draft_top_k=8)
    ids = torch.tensor([[5, 6, 8]])
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=draft, **options), target.generate(ids, **options))


# ---- checkpoints


@pytest.mark.one_in(3)
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_saved_draft_loads_back_identical(make_draft, target, tmp_path, head):
    draft = make_draft(target, **HEADS[head])
    draft.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == dict(draft.named_parameters()).keys()
    assert not [key for key in stored if key.startswith(("embed_tokens", "lm_head"))]
    loaded = DSparkDraftModel.from_pretrained(tmp_path).bind(target)
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    given = torch.tensor([3]), torch.ones(1, 6, 64)
    block, again = (
        model.draft_block(new_context(*given, SlotCache()), ForcedSampler(torch.ones(1, 4).long()))
        for model in (draft, loaded)
    )
    # some processors' products depend on the address
    close(block.distribution.probs, again.distribution.probs, atol=1e-6)
