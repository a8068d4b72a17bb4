"""Drafts that DeepSeek-V4's repositories carry: their names and forward are those of transformers' layers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from hf_dspark import DSparkDraftModel, FullBlock, Scheduler, attach
from hf_dspark.models.auto import names_a_draft
from hf_dspark.models.slot_cache import SlotCache
from hf_dspark.targets.feature_capture import FeatureCapture
from hf_dspark.targets.support import TargetSupport
from tests.features import new_context
from tests.rows import assert_as_alone

STAGES, GAMMA, RANK, TAPS, NOISE = 3, 4, 6, [1, 3], 47
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "moe_intermediate_size": 12, "num_attention_heads": 4, "head_dim": 16,
    "q_lora_rank": 8, "o_lora_rank": 6, "o_groups": 2, "n_routed_experts": 3, "num_experts_per_tok": 2, "hc_mult": 2,
    "sliding_window": 6, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
DSPARK = {
    "dspark_block_size": GAMMA, "dspark_noise_token_id": NOISE, "dspark_target_layer_ids": TAPS,
    "dspark_markov_rank": RANK,
}  # fmt: skip
PROMPTS = [[3, 9, 12, 30, 7, 7, 21], [5, 11], [11, 4, 8, 8, 25, 13, 17, 31, 22, 6, 5, 39]]
VANILLA = {"dspark_markov_head_type": "vanilla", "dspark_enable_confidence_head": True}  # as SGLang reads them
# Of transformers' layers, and as DeepSeek's files have them.
NAMES = {
    "self_attn.": "attn.", "mlp.": "ffn.", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "attn_hc.": "hc_attn_", "ffn_hc.": "hc_ffn_", "q_a_proj": "wq_a", "q_b_proj": "wq_b", "q_a_norm": "q_norm",
    "kv_proj": "wkv", "o_a_proj": "wo_a", "o_b_proj": "wo_b", "attn.sinks": "attn.attn_sink",
    "gate.e_score_correction_bias": "gate.bias", "shared_experts.gate_proj": "shared_experts.w1",
    "shared_experts.down_proj": "shared_experts.w2", "shared_experts.up_proj": "shared_experts.w3",
}  # fmt: skip


class Reference(nn.Module):
    """The draft by modules of transformers, whose attention reads context and block in one sequence."""

    def __init__(self):
        super().__init__()
        kinds = {"layer_types": ["sliding_attention"] * STAGES, "mlp_layer_types": ["moe"] * STAGES}
        config = DeepseekV4Config(**SIZES, num_hidden_layers=STAGES, partial_rotary_factor=0.5, **kinds)
        config._attn_implementation, size, vocab = "eager", SIZES["hidden_size"], SIZES["vocab_size"]
        config._experts_implementation = "eager"
        self.stages = nn.ModuleList(v4.DeepseekV4DecoderLayer(config, stage) for stage in range(STAGES))
        self.main_proj, self.main_norm = nn.Linear(len(TAPS) * size, size, bias=False), v4.DeepseekV4RMSNorm(size)
        self.hc_head, self.norm = v4.DeepseekV4HyperHead(config), v4.DeepseekV4RMSNorm(size)
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, RANK), nn.Linear(RANK, vocab, bias=False)
        self.confidence = nn.Linear(size + RANK, 1, bias=False)
        self.rotary = v4.DeepseekV4RotaryEmbedding(config)
        generator = torch.Generator().manual_seed(0)
        for name, each in [*self.named_parameters(), *self.named_buffers()]:
            if "inv_freq" not in name:
                each.data = 0.25 * torch.randn(each.shape, generator=generator) + ("norm" in name)

    def tensors(self):
        found = {}
        for stage, layer in enumerate(self.stages):
            for name, tensor in layer.state_dict().items():
                for ours, theirs in NAMES.items():
                    name = name.replace(ours, theirs)
                if name.endswith("_proj"):
                    kinds = ("w2",) if "down" in name else ("w1", "w3")
                    for expert, whole in enumerate(tensor):
                        for kind, part in zip(kinds, whole.chunk(len(kinds)), strict=True):
                            found[f"mtp.{stage}.ffn.experts.{expert}.{kind}.weight"] = part.clone()
                else:
                    found[f"mtp.{stage}.{name}"] = tensor
        last = f"mtp.{STAGES - 1}."
        found |= {f"mtp.0.{name}.weight": getattr(self, name).weight for name in ("main_proj", "main_norm")}
        found |= {f"{last}hc_head_{part}": getattr(self.hc_head, f"hc_{part}") for part in ("fn", "base", "scale")}
        found |= {
            f"{last}markov_head.{name}.weight": getattr(self, name).weight for name in ("markov_w1", "markov_w2")
        }
        found |= {f"{last}norm.weight": self.norm.weight, f"{last}confidence_head.proj.weight": self.confidence.weight}
        return {name: tensor.detach() for name, tensor in found.items()}

    def forward(self, embeds, features):
        """Return the states of the block's slots before the final norm."""
        context, num_seen = self.main_norm(self.main_proj(features)), features.shape[1]
        positions = torch.arange(num_seen + GAMMA)[None]
        rotary = {"main": self.rotary(embeds, positions, layer_type="main")}
        distances = num_seen - torch.arange(num_seen + GAMMA)  # to the anchor: negative within the block
        mask = torch.zeros(1, 1, num_seen + GAMMA, num_seen + GAMMA)
        mask[..., distances > SIZES["sliding_window"]] = -torch.inf
        mask[:, :, :num_seen] = 0  # what the context's rows read is not used

        def around(own):
            return lambda normed, **kwargs: (
                own(torch.cat([context, normed], dim=1), rotary, positions, mask)[0][:, num_seen:],
                None,
            )

        streams = embeds[:, :, None].repeat(1, 1, SIZES["hc_mult"], 1)
        for layer in self.stages:
            own, layer.self_attn.forward = layer.self_attn.forward, around(layer.self_attn.forward)
            streams = layer(streams)
            layer.self_attn.forward = own
        return self.hc_head(streams)


def write(folder, tensors, **facts):
    """Write the repository of a target with a draft, whose own first layers are as DeepSeek names them."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 4}
    config |= SIZES | DSPARK | {"num_key_value_heads": 1, "rope_theta": 10000.0, "qk_rope_head_dim": 8}
    config |= {"rope_scaling": {"type": "yarn", "factor": 16}, "num_nextn_predict_layers": 1, "num_hash_layers": 0}
    (folder / "config.json").write_text(json.dumps(config | facts))
    own = {"embed.weight": torch.zeros(48, 32), "layers.0.attn_norm.weight": torch.zeros(32)}
    save_file(own | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def reference():
    return Reference().eval()


@pytest.mark.parametrize("prefix", ["mtp.", "mtp_dspark."])
@torch.no_grad()
def test_a_carried_draft_computes_what_transformers_layers_do(tmp_path, target, reference, prefix):
    tensors = {name.replace("mtp.", prefix): tensor for name, tensor in reference.tensors().items()}
    draft = DSparkDraftModel.from_pretrained(write(tmp_path, tensors, **VANILLA), target=target).bind(target)
    ids, features = torch.tensor([8, *[NOISE] * (GAMMA - 1)]), torch.randn(1, 11, 64)
    hidden = draft.read_block(new_context(ids[:1], features, SlotCache()))
    expected = reference(target.get_input_embeddings()(ids)[None], features)
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(draft.base_logits(hidden), target.lm_head(reference.norm(expected)), atol=1e-4, rtol=0)
    embedding = reference.markov_w1(ids)[None]
    confidence = reference.confidence(torch.cat([expected, embedding], dim=-1))[..., 0]
    torch.testing.assert_close(draft.confidence_head(hidden, embedding), confidence, atol=1e-4, rtol=0)
    assert draft.markov_head.markov_w2.weight.equal(reference.markov_w2.weight)
    assert (draft.config.num_hidden_layers, draft.config.num_target_layers, draft.config.block_size) == (3, 4, GAMMA)
    assert not names_a_draft(tmp_path)  # it is a target


@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=6)], ids=["chain", "tree"])
def test_it_is_attached_as_the_targets_own_and_changes_no_token(tmp_path, target, reference, policy):
    target.config.name_or_path = str(write(tmp_path, reference.tensors()))
    draft = attach(target, "mtp").draft
    draft.decoding = type(draft.decoding)(policy=policy)
    assert type(draft) is DSparkDraftModel
    assert_as_alone(target, draft, PROMPTS, max_new_tokens=16)
    draft.save_pretrained(tmp_path / "own")
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "own").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in draft.state_dict().items())


def quantised(tensors):
    """Quantise as DeepSeek does: pairs of FP4 and scales of 32 for experts, FP8 and scales of 128 x 128 elsewhere."""
    stored, values = {}, {}
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    for name, tensor in tensors.items():
        if ".experts." in name:
            codes = torch.randint(0, 16, tensor.shape)
            scale = 2.0 ** torch.randint(-4, 4, (len(tensor), -(-tensor.shape[1] // 32)))
            packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
            values[name] = table[codes] * scale.repeat_interleave(32, dim=1)[:, : tensor.shape[1]]
        elif "attn.w" in name or "main_proj" in name:
            packed = tensor.to(torch.float8_e4m3fn)
            scale = torch.full((1, 1), 0.5)
            values[name] = packed.float() * 0.5
        else:
            stored[name] = values[name] = tensor
            continue
        stored |= {name: packed, name.replace(".weight", ".scale"): scale.to(torch.float8_e8m0fnu)}
    return stored, values


def test_quantised_tensors_are_read_as_their_values(tmp_path, reference):
    stored, values = quantised(reference.tensors())
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    found = DSparkDraftModel.from_pretrained(
        write(tmp_path / "packed", stored, quantization_config=quantisation, expert_dtype="fp4")
    )
    plain = DSparkDraftModel.from_pretrained(write(tmp_path / "plain", values))
    read = found.state_dict()
    assert all(torch.equal(tensor.bfloat16(), read[name].bfloat16()) for name, tensor in plain.state_dict().items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("lost", "facts", "message"),
    [
        ("mtp.2.norm.weight", {}, "missing: mtp.2.norm|missing: norm.weight"),
        ("mtp.1.ffn.experts.1.w1.weight", {}, "no intact safetensors file .*1.w1.weight"),
        ("mtp.1.ffn.experts.1.", {}, r"of another shape: .*gate_up_proj \[2, 24, 32\]"),
        ("mtp.1.ffn.experts.2.w", {}, r"of another shape: .*gate_up_proj \[2, 24, 32\]"),
        ("nothing", {"n_mtp_layers": 4}, "num_hidden_layers is 4"),
        ("nothing", {"q_lora_rank": 9}, "q_lora_rank"),
        ("nothing", {"routed_scaling_factor": 2.5}, r"routed_scaling_factor is 2.5, not one of"),
        ("nothing", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', not one of"),
        ("nothing", {"dspark_markov_head_type": "gated"}, "dspark_markov_head_type is 'gated', not one of"),
        ("nothing", {"dspark_gate": True}, "dspark_gate is True, and nothing here computes"),
        ("nothing", {"dspark_block_size": None}, "'deepseek_v4' model .* which is no DSpark draft"),
        ("more", {}, "unexpected: mtp.0.enorm.weight"),
    ],
)
def test_what_is_not_known_of_it_is_refused_by_name(tmp_path, reference, lost, facts, message):
    tensors = {name: tensor for name, tensor in reference.tensors().items() if lost not in name}
    tensors |= {"mtp.0.enorm.weight": torch.ones(32)} if lost == "more" else {}
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(write(tmp_path, tensors, **facts))


@torch.no_grad()
def test_its_own_target_gives_the_mean_of_the_last_streams_and_is_refused_for_its_state(tmp_path, reference):
    kinds = {"layer_types": ["sliding_attention"] * 4, "mlp_layer_types": ["moe"] * 4}
    target = AutoModelForCausalLM.from_config(DeepseekV4Config(**SIZES, num_hidden_layers=4, **kinds)).eval()
    seen = []
    target.model.layers[3].register_forward_hook(lambda module, args, output: seen.append(output))
    with FeatureCapture(TargetSupport.of(target), TAPS) as capture:
        target(torch.randint(1, 48, (1, 7)))
        assert torch.equal(capture.take(torch.device("cpu"), torch.float32)[..., 32:], seen[0].mean(dim=2))
    folder = write(tmp_path, reference.tensors())
    assert load_file(folder / "model.safetensors").keys() > {"embed.weight"}
    with pytest.raises(ValueError, match="keeps a .*state"):
        attach(target, folder)
