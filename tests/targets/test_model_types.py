"""Many kinds of targets, decoded in ragged batches: every row as if it were alone.

The targets are random, so a draft would hardly ever be right: the tests put the true continuation into most blocks,
and an error into some, so that rows accept different numbers of tokens and roll back.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GPTJForCausalLM
from transformers.models.kosmos2 import Kosmos2TextConfig
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2TextForCausalLM

from hf_dspark import DecodingOptions, Scheduler, check_target, decode_with
from hf_dspark.decoding.tree_drafting import BestTrees, Chains
from hf_dspark.models.slot_cache import SlotLayout
from hf_dspark.sampling.drafts import DraftTree, DraftTrees
from hf_dspark.targets.support import TargetSupport
from tests.hybrids import make_own_draft
from tests.rows import assert_same_tokens, padded

COMMON = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MOE = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
TYPES = {
    "llama": {},
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": 6},
    "qwen2": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "use_sliding_window": True},
    "qwen3": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "use_sliding_window": True, "head_dim": 12},
    "qwen2_moe": MOE | {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 16},
    "qwen3_moe": MOE | {"head_dim": 8},
    "gemma2": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "gpt2": {"num_key_value_heads": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "glm4": {"head_dim": 8},
    "gpt_oss": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8, "num_local_experts": 4},
    "exaone4": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 2,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    },
    "starcoder2": {"sliding_window": 6},
    "ministral": {"layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8},
    "seed_oss": {"head_dim": 8},
    # Heads of other sizes in full attention; the last two layers read the keys of the first two.
    "gemma4_text": {
        "layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8, "global_head_dim": 16,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40,
    },
    # Layers return several streams of hidden states.
    "gemma3n_text": {
        "layer_types": MIXED_LAYERS, "sliding_window": 6, "head_dim": 8, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40, "activation_sparsity_pattern": None,
    },
    # It views the output of attention, which then must be in one piece.
    "afmoe": MOE | {"head_dim": 8, "num_dense_layers": 1, "sliding_window": 6, "layer_types": MIXED_LAYERS},
}  # fmt: skip
GPTJ = {"rotary_dim": 4, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}
if GPTJForCausalLM._supports_attention_backend:  # since 5.24
    TYPES["gptj"] = GPTJ
# What no other type has: others are as one of these, or mixtures of them.
QUICK = {
    "llama", "mistral", "qwen3", "gemma3_text", "phi3", "gpt2", "opt", "gpt_oss", "deepseek_v3", "gemma4_text",
    "gemma3n_text", "afmoe",
}  # fmt: skip
EACH_TYPE = pytest.mark.parametrize(
    ("model_type", "facts"),
    [pytest.param(*each, id=each[0], marks=[pytest.mark.slow] * (each[0] not in QUICK)) for each in TYPES.items()],
)
PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5], [11, 4, 8, 8, 25, 13, 17, 31, 22, 6, 5, 39], [14, 33, 20]]
PLAIN = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


def make_pair(model_type, facts):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(COMMON | facts))).eval()
    return target, make_own_draft(target)


def know_the_answers(monkeypatch, answers):
    """Let every block be the true continuation, with an error at a slot that differs from block to block."""
    honest = Chains.finish

    def finish(self, *args):
        block = honest(self, *args)
        tokens = block.token_ids.clone()
        for row, request in enumerate(self.requests):
            truth = answers[request.id][request.length : request.length + tokens.shape[1]]
            tokens[row, : len(truth)] = torch.tensor(truth)
            slot = (request.blocks * 3 + request.id) % (tokens.shape[1] + 2)
            if slot < tokens.shape[1]:
                tokens[row, slot] = (tokens[row, slot] + 1) % 40
        return replace(block, token_ids=tokens)

    monkeypatch.setattr(Chains, "finish", finish)


def know_trees(monkeypatch, answers):
    """Let every tree hold the true continuation among wrong branches, up to a depth that differs from tree to tree."""

    def finish(self, *args):
        trees = []
        for request in self.requests:
            tree, place = DraftTree(), 0
            depth = min((request.blocks * 3 + request.id) % 5, request.max_length - request.length - 1)
            truth = answers[request.id][request.length : request.length + depth]
            for number, token in enumerate(truth):
                wrong = tree.add(place, (token + 1 + number) % 40)
                below, place = place, tree.add(place, token)
                tree.add(wrong, token)
                tree.add(below, (token + 9) % 40)
            trees.append(tree)
        return DraftTrees(trees)

    monkeypatch.setattr(BestTrees, "finish", finish)


def assert_decoded_as_if_alone(target, draft, new_tokens=14):
    """Compare a single row and a ragged batch with plain greedy decoding of each prompt; return that."""
    greedy = PLAIN | {"max_new_tokens": new_tokens}
    plain = [target.generate(input_ids=torch.tensor([prompt]), **greedy)[0].tolist() for prompt in PROMPTS]
    batch = padded(PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        know_the_answers(patch, plain)
        single = target.generate(input_ids=torch.tensor(PROMPTS[:1]), assistant_model=draft, **greedy)
        assert single[0].tolist() == plain[0] and draft.last_stats.tau > 1.5
        output = target.generate(**batch, assistant_model=draft, **greedy)
    answers = [alone[len(prompt) :] for prompt, alone in zip(PROMPTS, plain, strict=True)]
    assert output[:, batch["input_ids"].shape[1] :].tolist() == answers
    assert len(set(draft.last_stats.accepted)) >= 3
    return plain


@pytest.mark.one_in(9)
@EACH_TYPE
def test_every_row_of_a_ragged_batch_is_decoded_as_if_alone(model_type, facts):
    target, draft = make_pair(model_type, facts)
    assert_decoded_as_if_alone(target, draft, new_tokens=20)
    assert draft.last_stats.tau > 1.5


@pytest.mark.one_in(5)
@EACH_TYPE
def test_hidden_states_are_those_of_plain_generate(model_type, facts):
    target, draft = make_pair(model_type, facts)
    asked = PLAIN | {"max_new_tokens": 4, "return_dict_in_generate": True, "output_hidden_states": True}
    batch = padded(PROMPTS[:3])
    plain, ours = target.generate(**batch, **asked), target.generate(**batch, **asked, assistant_model=draft)
    for step, own_step in zip(plain.hidden_states, ours.hidden_states, strict=True):
        for layer, own in zip(step, own_step, strict=True):
            assert own.shape == layer.shape
            last = -2 if layer.shape[-2] == (step[-1].shape[-2]) else -3  # hyper-connections have streams after it
            torch.testing.assert_close(own.select(last, -1), layer.select(last, -1), rtol=1e-3, atol=1e-3)


@pytest.mark.one_in(11)
@EACH_TYPE
def test_trees_follow_their_own_branch_alone(model_type, facts):
    target, draft = make_pair(model_type, facts)
    greedy = PLAIN | {"max_new_tokens": 20}
    plain = [target.generate(input_ids=torch.tensor([prompt]), **greedy)[0].tolist() for prompt in PROMPTS]
    draft.decoding, batch = DecodingOptions(policy=Scheduler(num_nodes=12)), padded(PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        know_trees(patch, plain)
        output = target.generate(**batch, assistant_model=draft, **greedy)
    answers = [alone[len(prompt) :] for prompt, alone in zip(PROMPTS, plain, strict=True)]
    assert output[:, batch["input_ids"].shape[1] :].tolist() == answers
    assert len(set(draft.last_stats.accepted)) >= 4 and max(draft.last_stats.proposed) == 16


def test_branches_that_see_each_other_are_found(monkeypatch):
    honest, all_seen = SlotLayout.slots_of_trees, torch.ones(1, 1, 1, dtype=torch.bool)
    monkeypatch.setattr(SlotLayout, "slots_of_trees", lambda self, device: (honest(self, device)[0], all_seen))
    with pytest.raises(AssertionError):
        test_trees_follow_their_own_branch_alone("llama", {})


OWN_ATTENTION = {
    "bloom": {"n_layer": 4, "n_head": 4},
    "falcon": {"alibi": False, "new_decoder_architecture": False},
    "falcon_alibi": {"alibi": True, "new_decoder_architecture": False},
}
if "gptj" not in TYPES:
    OWN_ATTENTION["gptj"] = GPTJ


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "facts"), OWN_ATTENTION.items(), ids=OWN_ATTENTION)
def test_targets_with_attention_of_their_own_run_alone_and_are_refused_in_batches(name, facts):
    target, draft = make_pair(name.removesuffix("_alibi"), facts)
    assert_same_tokens(target, draft, torch.tensor([PROMPTS[0]]), **PLAIN)
    with pytest.raises(ValueError, match="attention of its own.*Call generate"):
        target.generate(**padded(PROMPTS), assistant_model=draft, **PLAIN)
    with pytest.raises(ValueError, match="attention of its own"):
        check_target(target)


REFUSED = {
    "minimax": (
        {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2, "block_size": 4},
        "MiniMaxForCausalLM keeps a (recurrent )?state",
    ),
    "openai-gpt": ({"n_layer": 4, "n_head": 4, "n_embd": 32}, "OpenAIGPTLMHeadModel has no cache"),
    "xlm": ({"n_layers": 4, "n_heads": 4, "emb_dim": 32}, "XLMWithLMHeadModel has no cache"),
    "cpmant": ({"dim_head": 8, "dim_ff": 48}, "CpmAntForCausalLM puts tokens of its own"),
    "electra": ({"embedding_size": 16, "is_decoder": True}, "16 values for a token and its layers 32"),
}


@pytest.mark.parametrize(("name", "expected"), REFUSED.items(), ids=REFUSED)
def test_targets_that_cannot_be_drafted_for_are_refused_by_name_before_any_work(name, expected):
    facts, message = expected
    target, draft = make_pair(name, facts)
    target.register_forward_pre_hook(lambda *_: pytest.fail("the target runs"))
    for inputs in ({"input_ids": torch.tensor(PROMPTS[:1])}, padded(PROMPTS)):
        with pytest.raises(ValueError, match=message):
            target.generate(**inputs, assistant_model=draft, **PLAIN)


def test_targets_with_a_loop_of_their_own_are_refused_by_name():
    target, draft = make_pair("llama", {})

    class Streams(type(target)):
        def _sample(self, *args, **kwargs):
            return super()._sample(*args, **kwargs)

    target.__class__ = Streams
    for way in ({"assistant_model": draft}, {"custom_generate": decode_with(draft)}):
        with pytest.raises(ValueError, match="Streams generates by a loop of its own"):
            target.generate(torch.tensor(PROMPTS[:1]), **way, **PLAIN)


def kosmos_pair():
    sizes = {"vocab_size": 48, "embed_dim": 32, "layers": 3, "attention_heads": 4, "ffn_dim": 48, "init_std": 0.5}
    target = Kosmos2TextForCausalLM(Kosmos2TextConfig(**sizes, max_position_embeddings=64, eos_token_id=None)).eval()
    return target, make_own_draft(target)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: make_pair("doge", {}), "makes attention masks of its own"),
        (kosmos_pair, "makes attention masks of its own"),
        (lambda: make_pair("gemma", {"use_bidirectional_attention": True}), "reads prompts in both directions"),
    ],
    ids=["by_values", "additive", "both_directions"],
)
def test_masks_that_are_not_causal_are_left_to_transformers_loop(make, reason, monkeypatch):
    target, draft = make()
    ids = torch.tensor([PROMPTS[0]])
    know_the_answers(monkeypatch, target.generate(ids, **PLAIN).tolist())
    assert_same_tokens(target, draft, ids, **PLAIN)
    assert draft.last_stats.loop == "transformers" and draft.last_stats.tau > 1.5
    with pytest.raises(ValueError, match=f"{reason}.*Call generate"):
        target.generate(**padded(PROMPTS), assistant_model=draft, **PLAIN)


def test_masks_that_a_target_makes_itself_are_refused_where_nobody_knew_of_them(monkeypatch):
    monkeypatch.setattr("hf_dspark.targets.support.OWN_MASKS", set())
    target, draft = kosmos_pair()
    with pytest.raises(ValueError, match="masks that the target makes itself"):
        target.generate(**padded(PROMPTS), assistant_model=draft, **PLAIN)


def test_layers_that_share_keys_have_features_of_every_position_in_transformers_loop():
    target, draft = make_pair("gemma4_text", TYPES["gemma4_text"])
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    assert max(draft.config.target_layer_ids) >= 2
    assert_same_tokens(target, draft, torch.tensor([PROMPTS[0]]), **PLAIN)


def test_windows_that_a_cache_alone_knows_are_refused_where_they_would_be_left():
    target, draft = make_pair("moshi", {"sliding_window": 16, "num_key_value_heads": 4, "ffn_dim": 64})
    ids, message = torch.tensor([PROMPTS[2]]), "window of 16 has left.*generate 4 tokens at most"
    with pytest.raises(ValueError, match=message):
        target.generate(ids, assistant_model=draft, **PLAIN)
    assert_same_tokens(target, draft, ids, **(PLAIN | {"max_new_tokens": 4}))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text", "mistral"])
def test_plain_caches_of_layers_that_share_keys_are_continued_and_filled(model_type):
    target, draft = make_pair(model_type, TYPES[model_type])
    batch, asked = padded(PROMPTS[:3]), PLAIN | {"return_dict_in_generate": True}
    first, filled = target.generate(**batch, **asked), DynamicCache(config=target.config)
    target.generate(**batch, **PLAIN, past_key_values=filled, assistant_model=draft)
    more = torch.cat([first.sequences, torch.tensor([[7, 9]] * 3)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 22, dtype=torch.long)], dim=1)
    plain = target.generate(more, attention_mask=mask, **PLAIN)
    for cache, way in ((first.past_key_values, {"assistant_model": draft}), (filled, {})):
        assert torch.equal(target.generate(more, attention_mask=mask, past_key_values=cache, **PLAIN, **way), plain)


def test_frequencies_that_depend_on_the_longest_row_are_refused_in_batches():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target, draft = make_pair("llama", {"rope_parameters": rope})
    with pytest.raises(ValueError, match="depend on the longest row"):
        target.generate(**padded(PROMPTS), assistant_model=draft, **PLAIN)
    assert_same_tokens(target, draft, torch.tensor([PROMPTS[0]]), **PLAIN)


def longrope_pair(model_type, switch):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    facts = {"rope_parameters": rope | {"factor": 8.0, "original_max_position_embeddings": switch}}
    return make_pair(model_type, facts | {"original_max_position_embeddings": switch})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("switch", [12, 13, 20, 31])
def test_frequencies_that_switch_at_a_length_switch_there(monkeypatch, switch):
    target, draft = longrope_pair("llama", switch)
    ids, record = torch.tensor([PROMPTS[2]]), {"return_dict_in_generate": True, "output_logits": True}
    plain = target.generate(ids, **PLAIN, **record)
    know_the_answers(monkeypatch, plain.sequences.tolist())

    def difference():
        output = target.generate(ids, assistant_model=draft, **PLAIN, **record)
        return max(
            float((ours - theirs).abs().max()) for ours, theirs in zip(output.logits, plain.logits, strict=True)
        )

    assert difference() < 1e-4 and draft.last_stats.tau > 1.5
    for policy in (Scheduler(num_nodes=9), Scheduler(num_nodes=3)):
        draft.decoding = DecodingOptions(policy=policy)
        assert difference() < 1e-4
    draft.decoding = DecodingOptions()
    if 13 < switch < 31:  # otherwise no pass would reach over it by chance
        monkeypatch.setattr(TargetSupport, "rope_switches", [])
        assert difference() > 1e-2


def test_targets_that_read_again_where_frequencies_switch_do_not_cross_it():
    target, draft = longrope_pair("phi3", 20)
    ids = torch.tensor([PROMPTS[2]])  # 12 tokens
    with pytest.raises(ValueError, match="beyond 20 tokens.*max_new_tokens=9 at most"):
        target.generate(ids, assistant_model=draft, **PLAIN)
    assert_same_tokens(target, draft, ids, **(PLAIN | {"max_new_tokens": 9}))
    assert_same_tokens(target, draft, torch.tensor([PROMPTS[2] * 2]), **PLAIN)
    llama, draft = longrope_pair("llama", 20)
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    with pytest.raises(ValueError, match="beyond 20 tokens.*max_new_tokens=9 at most"):
        llama.generate(ids, assistant_model=draft, **PLAIN)
    assert_same_tokens(llama, draft, ids, **(PLAIN | {"max_new_tokens": 9}))


def test_drafts_end_with_a_learned_position_table(monkeypatch):
    target, draft = make_pair("gpt2", {"num_key_value_heads": 4, "max_position_embeddings": 30, "n_positions": 30})
    ids = torch.tensor([PROMPTS[2]])
    fits, too_long = PLAIN | {"max_new_tokens": 30 - ids.shape[1]}, PLAIN | {"max_new_tokens": 40}
    plain = target.generate(ids, **fits)[0].tolist()
    know_the_answers(monkeypatch, [plain])
    ends = {"eos_token_id": plain[-1]} if plain[-1] not in plain[:-1] else {}
    assert target.generate(ids, assistant_model=draft, **(fits | ends))[0].tolist() == plain
    draft.last_stats = None
    for assistant in ({}, {"assistant_model": draft}):
        with pytest.raises(IndexError):  # with a draft as without, at the same position
            target.generate(ids, **too_long, **assistant)
    assert draft.last_stats is not None
