"""Drafts that bitsandbytes has quantised: what they are stored in is not what they compute in."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_dspark import DecodingOptions, DSparkConfig, DSparkDraftModel, Eagle3Config, Eagle3DraftModel, FullBlock
from hf_dspark.formats.checkpoint import Checkpoint
from hf_dspark.hub.convert import convert_checkpoint
from hf_dspark.hub.inspection import inspect_draft
from hf_dspark.models.auto import load_draft
from hf_dspark.models.slot_cache import SlotCache
from tests.config_files import change_config
from tests.features import new_context

pytestmark = pytest.mark.usefixtures("bitsandbytes")
PAIR = Path(__file__).parents[2] / "examples" / "gsm8k_pair"
BITS = {
    "8": {"load_in_8bit": True},
    "fp4": {"load_in_4bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}
SMALL = 0.02  # so small that tanh and sigmoid do as good as nothing


@pytest.fixture(scope="module")
def shipped():
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    lines = (PAIR / "prompts.jsonl").read_text().splitlines()[:4]
    return target, tokenizer([json.loads(line)["prompt"] for line in lines], return_tensors="pt", padding=True)


def as_gated(draft, tensors):
    """The vanilla head, behind gates that are open."""
    rank, size = draft.config.markov_rank, draft.config.hidden_size
    gate = {"weight": torch.zeros(rank, size + rank), "bias": torch.full((rank,), 12.0)}
    return {"markov_head_type": "gated"}, tensors | {
        f"markov_head.gate_proj.{part}": each for part, each in gate.items()
    }


def as_rnn(draft, tensors):
    """The vanilla head, as a recurrent one whose state is not read and whose output is the embedding."""
    rank, size = draft.config.markov_rank, draft.config.hidden_size
    joint = torch.zeros(3 * rank, 2 * rank + size)
    joint[2 * rank :, rank : 2 * rank] = SMALL * torch.eye(rank)
    w2 = tensors["markov_head.markov_w2.weight"] / SMALL
    more = {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": torch.zeros(3 * rank)}
    return {"markov_head_type": "rnn"}, tensors | more | {"markov_head.markov_w2.weight": w2}


def as_pruned(draft, tensors):
    """A vocabulary without its last tokens, and with a head of its own."""
    kept = draft.config.vocab_size - 24
    head = load_file(PAIR / "target" / "model.safetensors")
    head = head.get("lm_head.weight", head.get("model.embed_tokens.weight"))[:kept]
    w2 = tensors["markov_head.markov_w2.weight"][:kept]
    more = {"lm_head.weight": head, "d2t": torch.zeros(kept, dtype=torch.long), "markov_head.markov_w2.weight": w2}
    return {"draft_vocab_size": kept}, tensors | more


def as_dflash(draft, tensors):
    """The backbone alone, as DFlash."""
    facts = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    return facts, {name: each for name, each in tensors.items() if "markov" not in name and "confidence" not in name}


KINDS = {"vanilla": lambda draft, tensors: ({}, tensors)} | {
    name: globals()[f"as_{name}"] for name in ("gated", "rnn", "pruned", "dflash")
}


@pytest.fixture(
    scope="module",
    params=["vanilla", *(pytest.param(each, marks=pytest.mark.slow) for each in KINDS if each != "vanilla")],
)
def folder(request, tmp_path_factory):
    """The shipped draft with one kind of head."""
    draft, folder = DSparkDraftModel.from_pretrained(PAIR / "draft"), tmp_path_factory.mktemp(request.param)
    calibrated = {"sts_temperatures": None, "confidence_fits": None, "sibling_acceptance": None}
    facts, tensors = KINDS[request.param](draft, dict(draft.float().state_dict()))
    config = draft.config.to_dict() | calibrated | facts
    made = DSparkDraftModel(DSparkConfig.from_dict(config))
    made.load_state_dict(tensors)
    made.save_pretrained(folder)
    return folder


def tau(pair, draft, top_k=None):
    target, inputs = pair
    draft.config.draft_top_k, draft.decoding = top_k, DecodingOptions(policy=FullBlock())
    target.generate(**inputs, assistant_model=draft, max_new_tokens=20, do_sample=False)
    return draft.last_stats.tau


@pytest.fixture(scope="module")
def whole(shipped, folder):
    return {top_k: tau(shipped, load_draft(folder, dtype="float32"), top_k) for top_k in (None, 64)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bits", ["8", "nf4", pytest.param("fp4", marks=pytest.mark.slow)])
def test_quantised_drafts_are_right_about_as_often(shipped, folder, whole, bits, tmp_path):
    """Whole blocks of a trained draft, loaded with bits, and stored with them, with and without candidates."""
    draft = load_draft(folder, quantization_config=BitsAndBytesConfig(**BITS[bits]))
    assert draft.is_quantized and not draft.fc.weight.is_floating_point()
    draft.save_pretrained(tmp_path / "new")
    stored = load_draft(tmp_path / "new")
    assert stored.is_quantized and not stored.fc.weight.is_floating_point()
    for each, top_k in ((draft, None), (draft, 64), (stored, None)):
        assert tau(shipped, each, top_k) >= 0.9 * whole[top_k] > 0.9 * 1.5
    draft.save_pretrained(tmp_path / "used")  # bitsandbytes has packed weights of four bits anew
    for each in (draft, load_draft(tmp_path / "used")):
        assert tau(shipped, each, None) >= 0.9 * whole[None]


@pytest.mark.parametrize("bits", [8, 4])
def test_candidates_of_a_quantised_head_get_what_all_tokens_get(make_target, make_draft, bits):
    """Whoever quantises the heads, too, after loading."""
    import bitsandbytes

    head = make_draft(make_target(vocab_size=64), markov_rank=64).markov_head
    if bits == 8:
        packed = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    else:
        packed = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
    packed.load_state_dict(head.markov_w2.state_dict())
    head.markov_w2 = packed.to("cpu")
    rows, ids = torch.randn(4, 64), torch.randint(64, (4, 7))
    biases = head.bias(rows)
    assert not packed.weight.is_floating_point()
    torch.testing.assert_close(head.bias(rows, ids), biases.gather(-1, ids), atol=1e-5, rtol=1e-4)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", [DSparkDraftModel, Eagle3DraftModel])
@torch.no_grad()
def test_quantised_drafts_read_features_as_they_are(make_quantised, tmp_path, kind, bits):
    target, config = make_quantised(8), {DSparkDraftModel: DSparkConfig, Eagle3DraftModel: Eagle3Config}[kind]
    draft = kind(config.from_target(target.config, block_size=4, target_layer_ids=[0, 2])).eval()
    for name, parameter in draft.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    draft.save_pretrained(tmp_path / "draft")
    packed = load_draft(tmp_path / "draft", quantization_config=BitsAndBytesConfig(**BITS[bits]))
    features, ids = torch.randn(1, 9, 128), torch.randint(48, (9,))
    hidden = [
        each.bind(target).read_block(new_context(ids[-1:], features, SlotCache(), committed_ids=ids)).float()
        for each in (draft, packed)
    ]
    assert (hidden[0] - hidden[1]).norm() < (0.1 if bits == "8" else 0.6) * hidden[0].norm()
    prompt = ids[None]
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, assistant_model=packed, max_new_tokens=12, do_sample=False), plain)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bits", BITS)
def test_stored_bits_are_read_as_they_were_written(tmp_path, bits):
    from bitsandbytes.functional import dequantize_4bit

    config, original = BitsAndBytesConfig(**BITS[bits]), load_file(PAIR / "draft" / "model.safetensors")
    draft = load_draft(PAIR / "draft", quantization_config=config)
    draft.save_pretrained(tmp_path)
    tensors = DSparkDraftModel.read_tensors(DSparkConfig.from_pretrained(tmp_path), Checkpoint(tmp_path))
    assert tensors.keys() == original.keys()
    expected = dict(original)  # 8 bits lose a half of one value in 127
    for name, module in draft.named_modules():
        if bits != "8" and hasattr(module, "weight") and not module.weight.is_floating_point():
            expected[f"{name}.weight"] = dequantize_4bit(module.weight, module.weight.quant_state)
    for name, tensor in tensors.items():
        difference = (tensor.float() - expected[name].float()).norm() / expected[name].float().norm().clamp_min(1e-6)
        assert difference < (0.02 if bits == "8" else 1e-2), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "damage",
    [
        {"fc.weight": lambda each: each[:-64]},
        {"fc.weight.absmax": lambda each: each[:-1]},
        {"fc.weight.quant_map": lambda each: each[:7]},
        {"fc.weight.quant_map": lambda each: each * torch.nan},
        {"fc.weight.quant_state.bitsandbytes__nf4": lambda each: each[:30]},
        {
            "fc.weight.quant_state.bitsandbytes__nf4": lambda each: torch.tensor(
                list(b'{"shape": [1e99], "blocksize": 0}'), dtype=torch.uint8
            )
        },
    ],
    ids=["short weight", "short absmax", "short map", "NaN in the map", "cut state", "foreign state"],
)
def test_damaged_bits_are_refused(tmp_path, damage):
    load_draft(PAIR / "draft", quantization_config=BitsAndBytesConfig(**BITS["nf4"])).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {name: change(tensors[name]).clone() for name, change in damage.items()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="intact|damaged|does not match"):
        load_draft(tmp_path)


OTHERS = [
    "gptq",
    "awq",
    "fp8",
    "fbgemm_fp8",
    "torchao",
    "quanto",
    "hqq",
    "aqlm",
    "compressed-tensors",
    "modelopt",
    "bitnet",
    None,
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("method", OTHERS)
def test_other_quantisations_are_refused_before_weights_are_read(tmp_path, method):
    folder = Path(shutil.copytree(PAIR / "draft", tmp_path / "draft"))
    given = {"quant_method": method}
    if method is not None:
        with pytest.raises(ValueError, match=f"{method}.*bitsandbytes or not at all.*BitsAndBytesConfig"):
            load_draft(folder, quantization_config=given)
    (folder / "model.safetensors").unlink()
    change_config(folder, quantization_config=given)
    with pytest.raises(ValueError, match="'quantization_config'.*bitsandbytes or not at all.*full precision"):
        load_draft(folder)


@pytest.mark.parametrize("packs", [True, False])
def test_sizes_that_bitsandbytes_cannot_pack_are_refused(tmp_path, monkeypatch, make_target, make_draft, packs):
    import bitsandbytes

    init = bitsandbytes.nn.Linear4bit.__init__

    def on_a_cpu(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.support_avx512bf16_for_cpu = packs

    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "__init__", on_a_cpu)
    make_draft(make_target()).save_pretrained(tmp_path)
    given = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    if packs:
        with pytest.raises(ValueError, match="weights of 32 rows and 64 columns.*q_proj has 48 x 32.*load_in_8bit"):
            load_draft(tmp_path, **given)
    else:
        assert load_draft(tmp_path, **given).is_quantized


def test_quantised_drafts_are_not_converted(tmp_path):
    draft = load_draft(PAIR / "draft", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    draft.save_pretrained(tmp_path / "stored")
    for each in (draft, tmp_path / "stored"):
        with pytest.raises(ValueError, match="is quantised, which no format holds: convert the one of full precision"):
            convert_checkpoint(each, tmp_path / "out", "hf_dspark")
    assert "quantised by bitsandbytes: no format holds them" in str(inspect_draft(tmp_path / "stored"))
    with pytest.raises(ValueError, match="is quantised already"):
        load_draft(tmp_path / "stored", quantization_config=BitsAndBytesConfig(load_in_4bit=True))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_types_of_target_and_draft_may_differ(pair, autocast, theirs, ours):
    target, draft = (copy.deepcopy(each) for each in pair)
    if autocast and theirs == torch.float16:
        pytest.skip("no model of float16 runs in autocast to bfloat16")
    draft.decoding = DecodingOptions(policy=FullBlock())
    prompt = torch.arange(8)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        target.to(theirs).generate(prompt, assistant_model=draft.to(ours), max_new_tokens=40, do_sample=False)
    assert draft.last_stats.tau > 4
