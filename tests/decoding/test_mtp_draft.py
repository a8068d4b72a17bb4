"""MTP modules of targets as drafts: read from repositories of several layouts, computed as by transformers, exact."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_dspark import (
    DecodingOptions,
    Eagle3Config,
    Eagle3DraftModel,
    FullBlock,
    Scheduler,
    attach,
)
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.targets.mtp_draft import MTPDraft
from hf_dspark.targets.transformers_api import is_since
from tests.config_files import change_config, read_config
from tests.decoding.test_lossless_batches import enumerate_rounds
from tests.distributions import PROMPT, VOCAB
from tests.features import new_context
from tests.rows import GREEDY, assert_as_alone
from tests.samplers import ChainSampler

DEPTH = 2
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": DEPTH + 1, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
QWEN = {
    "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "head_dim": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
# By `model_type`: sizes, and what the module's own tensors are called in repositories.
NUMBERED = {"block": "model.layers.2.", "eh_proj": "model.layers.2.eh_proj", "enorm": "model.layers.2.enorm",
            "hnorm": "model.layers.2.hnorm", "norm": "model.layers.2.shared_head.norm"}  # fmt: skip
NAMED = {"block": "mtp.layers.0.", "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding",
         "hnorm": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm"}  # fmt: skip
FAMILIES = {
    "deepseek_v3": (SIZES | EXPERTS | MLA | {"num_key_value_heads": 4, "n_shared_experts": 1}, NUMBERED),
    "glm4_moe": (SIZES | EXPERTS | {"head_dim": 8, "use_qk_norm": True}, NUMBERED),
    "qwen3_next": (SIZES | QWEN, NAMED),
    "qwen3_5_text": (SIZES | QWEN, NAMED),
}


class Reference(nn.Module):
    """What DeepSeek-V3's report says of a module, around a decoder layer of the target's own."""

    def __init__(self, deeper):
        super().__init__()
        size, eps, layer = deeper.config.hidden_size, deeper.config.rms_norm_eps, deeper.model.layers[DEPTH]
        self.block, self.rotary = layer, deeper.model.rotary_emb
        self.enorm, self.hnorm, self.norm = (type(layer.input_layernorm)(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for parameter in (*self.enorm.parameters(), *self.hnorm.parameters(), *self.norm.parameters()):
                parameter += 0.3 * torch.randn_like(parameter)

    @torch.no_grad()
    def forward(self, embeds, hidden):
        """Run positions `[1, S, d]`, all of them causally."""
        states = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        count = states.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotary = self.rotary(states, torch.arange(count)[None] + 1)
        return self.norm(self.block(states, position_embeddings=rotary, attention_mask=mask))


def save_with_module(folder: Path, kind: str, **facts) -> Reference:
    """Save a target of random weights, and after its last layer what repositories call its MTP module."""
    sizes, names = FAMILIES[kind][0] | facts, FAMILIES[kind][1]
    torch.manual_seed(3)
    deeper = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation="eager").eval()
    reference = Reference(deeper)
    deeper.save_pretrained(folder)
    tensors, own = load_file(folder / "model.safetensors"), f"model.layers.{DEPTH}."
    tensors = {name.replace(own, names["block"]): tensor for name, tensor in tensors.items()}
    for part in ("eh_proj", "enorm", "hnorm", "norm"):
        tensors[f"{names[part]}.weight"] = getattr(reference, part).weight.detach()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder)
    kinds = {key: config[key][:DEPTH] for key in config.keys() & {"layer_types", "mlp_layer_types"}}
    change_config(folder, num_hidden_layers=DEPTH, **kinds)
    return reference


@pytest.fixture(scope="module", params=FAMILIES if is_since("5.23") else ["deepseek_v3", "glm4_moe"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_with_module(folder, request.param)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), reference


def test_outputs_are_those_of_the_target_s_own_layer(family, prompts):
    target, reference = family
    draft = MTPDraft(target).bind(target)
    prompts = [prompt[: 5 + 2 * row] for row, prompt in enumerate(prompts[:3])]
    anchors, states, expected = [], [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        states.append(target.model(ids[:, :-1]).last_hidden_state)
        expected.append(reference(target.model.embed_tokens(ids[:, 1:]), states[-1])[0, -1])
        anchors.append(prompt[-1])
    committed = torch.cat([torch.tensor(prompt[1:]) for prompt in prompts])
    features, counts = torch.cat(states, dim=1)[0], [len(prompt) - 1 for prompt in prompts]
    cache = SlotCache(num_rows=3)
    hidden = draft.read_block(new_context(torch.tensor(anchors), features, cache, counts, committed))
    torch.testing.assert_close(hidden, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("policy", [None, FullBlock(), Scheduler(num_nodes=4)], ids=["default", "full", "tree"])
def test_rows_are_those_of_plain_decoding(family, prompts, size, policy):
    target, _ = family
    draft = MTPDraft(target, block_size=size)
    draft.decoding = DecodingOptions(policy=policy)
    attends = target.config._attn_implementation
    assert_as_alone(target, draft, prompts[:3], max_new_tokens=12)
    assert draft.last_stats.rounds > 0 and sum(draft.last_stats.proposed) > 0
    assert target.config._attn_implementation == attends and all(each.requires_grad for each in target.parameters())


def test_its_chain_is_that_of_the_reference(family, prompts):
    """Fed with its own output, as transformers chains modules."""
    target, reference = family
    draft, ids = MTPDraft(target, block_size=3).bind(target), torch.tensor(prompts[:1])
    context = target.model(ids[:, :-1]).last_hidden_state
    states, fed = context, ids[:, 1:]
    for _ in range(3):
        output = reference(target.model.embed_tokens(fed), states)[:, -1:]
        token = target.lm_head(output).argmax(dim=-1)
        fed, states = torch.cat([fed, token], dim=1), torch.cat([states, output], dim=1)
    read = new_context(ids[0, -1:], context, SlotCache(), committed_ids=ids[0, 1:])
    drafts = draft.draft_block(read, ChainSampler())
    assert drafts.token_ids.tolist() == fed[:, ids.shape[1] - 1 :].tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_it_takes_as_many_passes_of_the_target_as_transformers_own(tmp_path, kind):
    """A token read late, or a state before the norm, would be accepted less often."""
    save_with_module(tmp_path, kind, vocab_size=6, eos_token_id=None)
    target = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # it knows the depth of the published ones
    draft, passes = MTPDraft(target), []
    draft.decoding = DecodingOptions(policy=FullBlock())
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(1, 6, (1, 5 + seed))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | GREEDY
        plain, counts = target.generate(**given), []
        for way in ({"use_mtp": True}, {"assistant_model": draft}):
            lengths = []
            counting = target.register_forward_pre_hook(lambda *given, lengths=lengths: lengths.append(1))
            assert torch.equal(target.generate(**given, **way), plain)
            counting.remove()
            counts.append(len(lengths))
        passes.append(counts)
    assert all(ours == theirs for theirs, ours in passes)
    assert min(ours for _, ours in passes) < GREEDY["max_new_tokens"]  # something was accepted


@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=3)], ids=["chain", "tree"])
def test_a_round_has_the_targets_distribution(tmp_path, monkeypatch, policy):
    save_with_module(tmp_path, "glm4_moe", vocab_size=VOCAB, pad_token_id=None, eos_token_id=None)
    target = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    pair = target, MTPDraft(target, block_size=2).bind(target)
    assert enumerate_rounds(monkeypatch, *pair, policy, prompts=PROMPT.tolist())[0] < 5e-6


@pytest.mark.one_in(2)
def test_it_is_attached_by_its_name(family, prompts):
    target, _ = family
    ids, options = torch.tensor(prompts[:1]), GREEDY | {"max_new_tokens": 9}
    plain = target.generate(ids, **options)
    with attach(target, "mtp", block_size=2) as attached:
        assert torch.equal(target.generate(ids, **options), plain)
        assert attached.num_assisted == 1 and attached.draft.config.block_size == 2
    draft = attached.draft
    with pytest.raises(TypeError, match="part of its target's repository"):
        draft.save_pretrained("anywhere")
    with pytest.raises(TypeError, match="from_target.target, mtp=True"):
        draft.teacher_forced()


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (".", "holds no tensors of mtp.* or layers.2"),
        ("hnorm", "cannot be loaded: .*hnorm"),
        (None, "was loaded from none"),
    ],
)
def test_a_repository_without_the_module_is_refused_with_the_cure(tmp_path, lost, message):
    save_with_module(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.2." not in name or str(lost) not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    target.config.name_or_path = "" if lost is None else str(tmp_path)
    with pytest.raises(ValueError, match=f"{message}.*attach.target, 'ngram'."):
        attach(target, "mtp")
    with pytest.raises(TypeError, match="target is needed, got"):
        MTPDraft("name")


def test_a_plain_layer_is_one_of_the_targets_own(make_target):
    """A trainable module computes what transformers' layers of the same weights do."""
    deeper, target = make_target(num_hidden_layers=DEPTH + 1), make_target(num_hidden_layers=DEPTH)
    reference, draft = Reference(deeper), Eagle3DraftModel(Eagle3Config.from_target(target, mtp=True)).bind(target)
    own = {f"layers.0.{name}": tensor for name, tensor in deeper.model.layers[DEPTH].state_dict().items()}
    for ours, theirs in (("eh_proj", "eh_proj"), ("enorm", "enorm"), ("hidden_norm", "hnorm")):
        own[f"layers.0.{ours}.weight"] = getattr(reference, theirs).weight
    draft.load_state_dict(own | {"norm.weight": reference.norm.weight})
    ids = torch.tensor([[5, 3, 8, 40, 2, 2, 19]])
    states = target.model(ids[:, :-1]).last_hidden_state
    hidden = draft.norm(draft.read_block(new_context(ids[0, -1:], states, SlotCache(), committed_ids=ids[0, 1:])))
    expected = reference(target.model.embed_tokens(ids[:, 1:]), states)[0, -1:]
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    assert draft.config.block_size == 1 and draft.config.target_layer_ids == [DEPTH - 1]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"target_layer_ids": [0]}, r"target_layer_ids must be \[3\], the last layer, with mtp=True"),
        ({"num_target_layers": None}, "num_target_layers must be known"),
        ({"fc_norm": True}, "fc_norm must not be set with mtp=True"),
    ],
)
def test_a_module_reads_the_last_layer_alone(make_target, facts, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_target(make_target(), mtp=True, **facts)
