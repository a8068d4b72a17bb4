"""Targets as people have them: quantised, offloaded, spread, with adapters, with eyes, thinking.

Each is the smallest stand-in that runs the code of the real one. Most blocks are made to hold the true continuation,
as in `test_model_types`, so that drafts are accepted and rejected at different places.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.integrations import peft as peft_integration

from hf_dspark import (
    DecodingOptions,
    DSparkConfig,
    DSparkTrainer,
    DSparkTrainingArguments,
    attach,
    calibrate,
    check_target,
    generate_many,
)
from hf_dspark.models.borrowing import input_device
from hf_dspark.targets.borrowed_weights import BorrowedModules
from hf_dspark.targets.feature_capture import FeatureCapture
from hf_dspark.targets.fingerprint import fingerprint
from hf_dspark.targets.int8_outliers import mixes_tokens, outliers_of_each
from hf_dspark.targets.support import TargetSupport
from tests.hybrids import make_own_draft
from tests.rows import assert_same_tokens, padded
from tests.targets.test_model_types import (
    MIXED_LAYERS,
    PLAIN,
    PROMPTS,
    assert_decoded_as_if_alone,
    know_the_answers,
)

TWO_OF_THEM = {"input_ids": torch.tensor([[3, 9, 12, 30], [5, 4, 8, 8]])}


# --- quantised -----------------------------------------------------------------------------------------------------

SOME_LAYERS = ["model.layers.1", "lm_head"]
QUANTISED = {
    "int8": {"bits": 8},
    "int8_many_outliers": {"bits": 8, "llm_int8_threshold": 2.0},
    "int8_no_outliers": {"bits": 8, "llm_int8_threshold": 0.0},
    "int8_some_layers": {"bits": 8, "llm_int8_skip_modules": SOME_LAYERS},
    "int8_head_too": {"bits": 8, "llm_int8_skip_modules": ["none"]},
    "nf4": {"bits": 4, "bnb_4bit_quant_type": "nf4"},
    "nf4_double": {"bits": 4, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4_head_too": {"bits": 4, "bnb_4bit_quant_type": "fp4", "llm_int8_skip_modules": ["none"]},
    "fp4_some_layers": {"bits": 4, "llm_int8_skip_modules": SOME_LAYERS},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] * (name not in ("int8", "nf4_double")))
        for name, each in QUANTISED.items()
    ],
)
def test_quantised_target_decodes_every_row_as_if_alone(make_quantised, options):
    target = make_quantised(**options)
    draft = make_own_draft(target).to(torch.bfloat16)
    before = copy.deepcopy(draft.state_dict())
    assert_decoded_as_if_alone(target, draft)
    # With fp4, one row and several differ by 2e-3 on CPUs with AMX.
    assert check_target(target) < (5e-3 if options == QUANTISED["fp4_some_layers"] else 1e-3)
    assert draft.state_dict().keys() == before.keys()
    for name, value in draft.state_dict().items():  # neither quantised nor cast by the target's
        assert value.dtype == torch.bfloat16 and torch.equal(value, before[name])


@pytest.mark.slow
def test_eight_bit_target_gives_the_same_tokens_in_transformers_loop(make_quantised, monkeypatch):
    target = make_quantised(bits=8, llm_int8_threshold=2.0)
    draft = make_own_draft(target)
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    for prompt in PROMPTS[:2]:
        with monkeypatch.context() as patch:
            know_the_answers(patch, target.generate(torch.tensor([prompt]), **PLAIN).tolist())
            assert_same_tokens(target, draft, torch.tensor([prompt]), **PLAIN)
        assert draft.last_stats.tau > 1.5


@pytest.mark.parametrize("bias", [False, True])
def test_eight_bit_layer_looks_for_outliers_in_each_group_alone(bitsandbytes, bias):
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    layer = Linear8bitLt(32, 24, bias=bias, has_fp16_weights=False, threshold=3.0)
    layer.weight = Int8Params(torch.randn(24, 32), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu").eval()
    states = torch.randn(1, 6, 32)
    states[0, 1, 4], states[0, 4, 9] = 9.0, -20.0
    assert mixes_tokens(layer)
    with torch.no_grad():
        together = layer(states)
        alone = torch.cat([layer(states[:, token : token + 1]) for token in range(6)], dim=1)
        parts = torch.cat([layer(part) for part in states.split([2, 3, 1], dim=1)], dim=1)
        with outliers_of_each(()):
            torch.testing.assert_close(layer(states), alone, atol=1e-5, rtol=1e-5)
        with outliers_of_each((2, 3, 1)):
            torch.testing.assert_close(layer(states), parts, atol=1e-5, rtol=1e-5)
        # Without it, the tokens beside decide, and what they do is no rounding; afterwards it is as it was.
        assert (together - alone).abs().max() > 1e-2 and (parts - alone).abs().max() > 1e-2
        assert torch.equal(layer(states), together)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [QUANTISED["int8_head_too"], QUANTISED["nf4_double"]], ids=["int8", "nf4"])
def test_quantised_target_lends_its_embedding_and_head_and_calibrates(make_quantised, options):
    target = make_quantised(**options)
    draft = make_own_draft(target).bind(target)
    hidden = torch.randn(2, 3, 64)
    torch.testing.assert_close(draft.base_logits(hidden), target.lm_head(hidden))
    report = calibrate(target, draft, PROMPTS, max_new_tokens=12)
    assert all(0 < temperature < 1e4 for temperature in draft.config.sts_temperatures["default"])
    assert report.mean_ece[1] <= report.mean_ece[0] + 0.05


class PackedLinear(nn.Module):
    """A layer as GPTQ's and AWQ's: packed integers and scales in buffers, and no `weight`."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 7
        levels = (linear.weight.detach() / scale).round().to(torch.int32) + 8
        self.register_buffer("qweight", levels[:, ::2] | (levels[:, 1::2] << 4))
        self.register_buffer("scales", scale)

    def forward(self, x):
        levels = torch.stack([self.qweight & 15, self.qweight >> 4], dim=-1).flatten(1) - 8
        return x @ (levels * self.scales).T.to(x.dtype)


def packed(target):
    for path, module in list(target.named_modules()):
        if isinstance(module, nn.Linear):
            target.set_submodule(path, PackedLinear(module))
    return target


def test_target_of_packed_layers_without_weights_decodes_every_row_as_if_alone(make_target):
    target = packed(make_target())
    draft = make_own_draft(target)
    assert_decoded_as_if_alone(target, draft)
    assert check_target(target) < 1e-3
    assert input_device(target.lm_head) == torch.device("cpu")
    calibrate(target, draft, PROMPTS[:2], max_new_tokens=8)
    lent, hidden = BorrowedModules.copy_of(target), torch.randn(3, 32)
    torch.testing.assert_close(lent.lm_head(hidden), target.lm_head(hidden), atol=1e-4, rtol=1e-4)
    before = fingerprint(target)
    target.model.layers[2].mlp.up_proj.qweight[0, 0] ^= 1
    assert fingerprint(target) != before


# --- on several devices, or on none --------------------------------------------------------------------------------

DEVICE_MAPS = {
    "some_layers_on_disk": {"model.embed_tokens": "cpu", "model.layers.1": "disk", "lm_head": "cpu"},
    "embedding_and_head_on_disk": {"model.embed_tokens": "disk", "model.layers.1": "cpu", "lm_head": "disk"},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placed", DEVICE_MAPS.values(), ids=DEVICE_MAPS)
def test_target_partly_on_disk_decodes_every_row_as_if_alone(make_target, tmp_path, placed):
    from accelerate import dispatch_model

    others = {f"model.layers.{layer}": "cpu" for layer in (0, 2, 3)} | {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    target, in_memory = make_target(), make_target()
    target = dispatch_model(target, placed | others, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    draft = make_own_draft(target)
    assert sum(parameter.is_meta for parameter in target.parameters()) > 0
    plain = assert_decoded_as_if_alone(target, draft)
    usual = in_memory.generate(torch.tensor(PROMPTS[:1]), **PLAIN)[0].tolist()
    assert plain[0] == usual[: len(plain[0])]
    assert fingerprint(target) == fingerprint(in_memory)
    assert check_target(target) < 1e-3
    done = list(generate_many(target, draft, PROMPTS, max_new_tokens=6, eos_token_id=None, pad_token_id=0))
    assert [one.error for one in done] == [None] * len(PROMPTS)


def test_fully_offloaded_target_is_checked_and_calibrated(make_target):
    from accelerate import cpu_offload

    target = make_target()
    draft = make_own_draft(target)
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in target.parameters())
    assert check_target(target) < 1e-3
    calibrate(target, draft, PROMPTS[:2], max_new_tokens=8)
    assert len(draft.config.sts_temperatures["default"]) == 4


# --- adapters ------------------------------------------------------------------------------------------------------


def adapter(kind, **options):
    return getattr(pytest.importorskip("peft"), kind)(task_type="CAUSAL_LM", **options)


def lora(**options):
    facts = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 32, "init_lora_weights": False}
    return adapter("LoraConfig", **(facts | options))


def with_lora(target, *configs):
    torch.manual_seed(2)
    first, *others = configs or (lora(),)
    model = pytest.importorskip("peft").get_peft_model(target, first, "first")
    for index, config in enumerate(others):
        model.add_adapter(f"other{index}", config)
    return model.eval()


def ia3():
    layers = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return adapter("IA3Config", init_ia3_weights=False, **layers)


def switched(target):
    model = with_lora(target, lora(), lora())
    model.set_adapter("other0")
    return model


def added_by_transformers(target):
    torch.manual_seed(2)
    needed = peft_integration.MIN_PEFT_VERSION
    pytest.importorskip("peft", minversion=needed, reason=f"this transformers adds adapters of PEFT {needed}")
    target.add_adapter(lora(), "first")
    return target.eval()


ADAPTED = {
    "lora": with_lora,
    "dora": lambda target: with_lora(target, lora(use_dora=True)),
    "embedding_and_head": lambda target: with_lora(target, lora(target_modules=["q_proj", "embed_tokens", "lm_head"])),
    "whole_head": lambda target: with_lora(target, lora(modules_to_save=["embed_tokens", "lm_head"])),
    "ia3": lambda target: with_lora(target, ia3()),
    "second_of_two": switched,
    "merged": lambda target: with_lora(target).merge_and_unload(),
    "added_by_transformers": added_by_transformers,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("adapt", ADAPTED.values(), ids=ADAPTED)
def test_target_with_an_adapter_decodes_every_row_as_if_alone(make_target, adapt):
    base = make_target()
    draft = make_own_draft(base)  # of the target as it was
    before = base.generate(torch.tensor(PROMPTS[:1]), **PLAIN)[0].tolist()
    plain = assert_decoded_as_if_alone(adapt(base), draft)
    assert plain[0] != before[: len(plain[0])]


def test_disabled_adapter_leaves_the_base_target(make_target):
    base = make_target()
    draft, before = make_own_draft(base), base.generate(torch.tensor(PROMPTS[:1]), **PLAIN)[0].tolist()
    target = with_lora(base)
    with target.disable_adapter():
        plain = assert_decoded_as_if_alone(target, draft)[0]
    assert plain == before[: len(plain)]
    assert target.generate(input_ids=torch.tensor(PROMPTS[:1]), **PLAIN)[0].tolist() != before


def test_features_come_from_the_adapted_layers(make_target):
    base, ids = make_target(), torch.tensor([PROMPTS[0]])
    plain = base(ids, output_hidden_states=True).hidden_states
    target = with_lora(base)
    with FeatureCapture(TargetSupport.of(target), [-1, 0, 2]) as capture:
        adapted = target(input_ids=ids, output_hidden_states=True).hidden_states
        features = capture.take(torch.device("cpu"), torch.float32).split(32, dim=-1)
    for part, layer in zip(features, (0, 1, 3), strict=True):
        assert torch.equal(part, adapted[layer])
    assert torch.equal(features[0], plain[0]) and (features[1] - plain[1]).abs().max() > 1e-2


def test_fingerprint_tells_which_adapter_is_at_work(make_target):
    target = with_lora(make_target(), lora(), lora())
    first = fingerprint(target)
    target.set_adapter("other0")
    second = fingerprint(target)
    with target.disable_adapter():
        none = fingerprint(target)
    assert len({first, second, none, fingerprint(make_target())}) == 4
    assert fingerprint(target) == second
    target.set_adapter("first")
    assert fingerprint(target) == first
    target.base_model.model.model.layers[0].self_attn.q_proj.scaling["first"] *= 2  # as lora_alpha would: no weight
    assert fingerprint(target) not in (first, second, none)


def test_draft_is_calibrated_on_the_adapted_target_and_the_target_checked(make_target, tmp_path):
    base = make_target()
    target, draft, file = with_lora(base), make_own_draft(base), tmp_path / "rounds.jsonl"
    assert check_target(target) < 1e-3
    run = {"output_file": file, "max_new_tokens": 8}
    calibrate(target, draft, PROMPTS[:2], **run)
    only_the_target = r"another run .*differs in target \('\w+' there, '\w+' now\): go on"
    with target.disable_adapter(), pytest.raises(ValueError, match=only_the_target):
        calibrate(target, draft, PROMPTS[:2], **run)
    done = generate_many(target, draft, PROMPTS, max_new_tokens=6, eos_token_id=None, pad_token_id=0)
    for one, prompt in zip(sorted(done, key=lambda one: one.index), PROMPTS, strict=True):
        plain = target.generate(input_ids=torch.tensor([prompt]), **(PLAIN | {"max_new_tokens": 6}))
        assert one.error is None and one.token_ids.tolist() == plain[0, len(prompt) :].tolist()


def test_draft_learns_from_an_adapted_target_that_stays_as_it_is(make_target, tmp_path):
    base = make_target()
    target = with_lora(base)
    draft, before = make_own_draft(base), copy.deepcopy(target.state_dict())
    rows = [{"input_ids": list(range(1, 30)), "loss_mask": [1] * 29} for _ in range(4)]
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "num_anchors": 4, "save_strategy": "no"}
    args = DSparkTrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, **options)
    first = draft.fc.weight.clone()
    result = DSparkTrainer(draft, target, args, train_dataset=rows).train()
    assert result.training_loss > 0 and not torch.equal(draft.fc.weight, first)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


VIRTUAL = {"num_virtual_tokens": 3}
REFUSED = {
    "prompt_tuning": ("PromptTuningConfig", VIRTUAL, "PROMPT_TUNING, which puts virtual tokens"),
    "prefix_tuning": ("PrefixTuningConfig", VIRTUAL, "PREFIX_TUNING, which puts virtual tokens"),
    "activated_lora": (
        "LoraConfig",
        {"target_modules": ["q_proj"], "alora_invocation_tokens": [9, 12]},
        "first.*switch themselves on",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_adapters_that_change_what_a_position_is_are_refused(make_target, kind, options, message):
    base = make_target()
    draft = make_own_draft(base)
    target = with_lora(base, adapter(kind, **options))
    with pytest.raises(ValueError, match=message):
        target.generate(input_ids=TWO_OF_THEM["input_ids"][:1], assistant_model=draft, **PLAIN)
    assert draft.last_stats is None


def test_adapters_by_row_work_for_one_row_and_are_refused_in_batches(make_target):
    base = make_target()
    target, draft = with_lora(base, lora(), lora()), make_own_draft(base)
    one, other = {"input_ids": TWO_OF_THEM["input_ids"][:1]}, {"adapter_names": ["other0"]}
    plain = target.generate(**one, **other, **PLAIN)
    assert plain.tolist() != target.generate(**one, **PLAIN).tolist()
    assert target.generate(**one, **other, assistant_model=draft, **PLAIN).tolist() == plain.tolist()
    with pytest.raises(ValueError, match="2 sequences .* adapter_names gives rows adapters"):
        target.generate(**TWO_OF_THEM, adapter_names=["first", "other0"], assistant_model=draft, **PLAIN)
    # Nothing of the refused call remains.
    plain = target.generate(**TWO_OF_THEM, **PLAIN)
    assert target.generate(**TWO_OF_THEM, assistant_model=draft, **PLAIN).tolist() == plain.tolist()
    assert target.generate(**one, **PLAIN).tolist() == plain[:1].tolist()


# --- with eyes -----------------------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
IMAGE = 60
# The towers are as deep as the language models.
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
QWEN_MLP = {"intermediate_size": 48, "out_hidden_size": 32}
QWEN_TOWER = {
    "depth": 4, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "in_channels": 3,
}  # fmt: skip
QWEN = {
    "image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63,
    "tie_word_embeddings": False, "text_config": TEXT | SECTIONS,
}  # fmt: skip
SEEING = {
    "qwen2_vl": QWEN | {"vision_config": QWEN_TOWER | {"embed_dim": 32, "mlp_ratio": 2}},
    "qwen2_5_vl": QWEN | {
        "vision_config": QWEN_TOWER | QWEN_MLP | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
    },
    "qwen3_vl": QWEN | {
        "vision_config": QWEN_TOWER | QWEN_MLP | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 6, "layer_types": MIXED_LAYERS, "query_pre_attn_scalar": 8},
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4},
        "mm_tokens_per_image": 4, "image_token_id": IMAGE, "boi_token_id": 61, "eoi_token_id": 62,
        "initializer_range": 0.3,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": TOWER | {
            "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 32,
        },
        "image_token_id": IMAGE, "image_seq_length": 4,
    },
    "idefics3": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER | {"image_size": 16, "patch_size": 4},
        "image_token_id": IMAGE, "scale_factor": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture(params=SEEING, scope="module")
def seeing(request):
    """A model that reads text and images, and a draft for it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **copy.deepcopy(SEEING[request.param]))
    target = AutoModelForImageTextToText.from_config(config).eval()
    if request.param == "gemma3":
        nn.init.normal_(target.model.multi_modal_projector.mm_input_projection_weight)  # zero at first
    return target, make_own_draft(target)


def image_prompt(target, num_rows=1, seed=1):
    """A prompt with one image, as the model's processor would give it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[5, 7, 11, 62, *[IMAGE] * 4, 63, 9, 11]] * num_rows)
    types = (ids == IMAGE).long()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    name = target.config.model_type
    if name.startswith("qwen"):
        pixels = torch.randn(16 * num_rows, 3 * 2 * 4 * 4, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * num_rows)
        return inputs | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
    shape = (num_rows, 1, 3, 16, 16) if name == "idefics3" else (num_rows, 3, 16, 16)
    inputs["pixel_values"] = torch.randn(*shape, generator=generator)
    return inputs | {"token_type_ids": types} if name == "gemma3" else inputs


@pytest.mark.one_in(4)
def test_texts_are_decoded_together_by_a_target_that_sees(seeing):
    target, draft = seeing
    assert_decoded_as_if_alone(target, draft)
    assert check_target(target) < 1e-3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seeing", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"], indirect=True)
def test_processors_may_say_that_texts_hold_no_images(seeing):
    target, draft = seeing
    batch = padded(PROMPTS)
    (name,) = (name for name in image_prompt(target) if name.endswith("token_type_ids"))
    types = {name: torch.zeros_like(batch["input_ids"])}
    plain = target.generate(**batch, assistant_model=draft, **PLAIN)
    assert target.generate(**batch, **types, assistant_model=draft, **PLAIN).tolist() == plain.tolist()


@pytest.mark.one_in(5)
def test_prompt_with_an_image_gives_the_same_tokens_alone_and_is_refused_in_batches(seeing, monkeypatch):
    target, draft = seeing
    plain = target.generate(**image_prompt(target), **PLAIN)
    other = target.generate(**image_prompt(target, seed=2), **PLAIN)
    assert plain.tolist() != other.tolist()  # the image matters
    with monkeypatch.context() as patch:
        know_the_answers(patch, plain.tolist())
        assisted = target.generate(**image_prompt(target), assistant_model=draft, **PLAIN)
    assert assisted.tolist() == plain.tolist() and draft.last_stats.tau > 1.5
    with pytest.raises(ValueError, match="2 sequences cannot be decoded together.*images.*Call generate"):
        target.generate(**image_prompt(target, num_rows=2), assistant_model=draft, **PLAIN)
    plain = target.generate(**image_prompt(target, num_rows=2), **PLAIN)
    with attach(target, draft), pytest.warns(UserWarning, match="without the attached draft: .*images"):
        assert target.generate(**image_prompt(target, num_rows=2), **PLAIN).tolist() == plain.tolist()


@pytest.mark.one_in(4)
def test_conversation_about_an_image_is_refused_on_a_cache_and_decoded_whole(seeing):
    target, draft = seeing
    turn = image_prompt(target)
    first = target.generate(**turn, return_dict_in_generate=True, **PLAIN)
    following = torch.cat([first.sequences, torch.tensor([[5, 9]])], dim=1)
    longer = {name: value for name, value in turn.items() if name in ("pixel_values", "image_grid_thw")}
    longer |= {"input_ids": following, "attention_mask": torch.ones_like(following)}
    longer |= {name: (following == IMAGE).long() for name in turn if name.endswith("token_type_ids")}
    with pytest.raises(ValueError, match="already holds .* tokens.*images"):
        target.generate(**longer, past_key_values=first.past_key_values, assistant_model=draft, **PLAIN)
    assert_same_tokens(target, draft, longer.pop("input_ids"), **PLAIN, **longer)


@pytest.mark.one_in(3)
def test_features_come_from_the_language_model(seeing):
    target, draft = seeing
    assert TargetSupport.of(target).layers is target.get_decoder().layers
    turn = image_prompt(target)
    with FeatureCapture(TargetSupport.of(target), [0]) as capture, torch.no_grad():
        target(**turn)
        features = capture.take(torch.device("cpu"), torch.float32)
    assert features.shape == (1, turn["input_ids"].shape[1], 32)


def test_layers_of_a_tower_of_the_same_depth_are_not_taken_for_the_decoders(make_target, monkeypatch):
    """A decoder that keeps its tower inside, and first, as Idefics does."""
    target, decoder = make_target(), nn.Module()
    decoder.vision = nn.ModuleDict({"layers": nn.ModuleList(nn.Identity() for _ in range(4))})
    decoder.layers = nn.ModuleList(nn.Identity() for _ in range(4))
    monkeypatch.setattr(target, "get_decoder", lambda: decoder)
    assert TargetSupport.of(target).layers is decoder.layers


def test_draft_config_of_a_target_that_sees_describes_its_text():
    config = AutoConfig.for_model("qwen3_vl", **copy.deepcopy(SEEING["qwen3_vl"]))
    config.vision_config.hidden_size, config.vision_config.depth = 48, 7
    ours = DSparkConfig.from_target(config)
    assert (ours.hidden_size, ours.num_target_layers, ours.vocab_size) == (32, 4, 64)
    assert ours.target_model_type == "qwen3_vl_text"
    assert ours.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


# --- thinking ------------------------------------------------------------------------------------------------------

USER, ASSISTANT, END, THINK, THOUGHT = 50, 51, 52, 53, 54


@pytest.mark.one_in(3)
@pytest.mark.parametrize("opening", [[], [THINK]], ids=["target_opens_its_thoughts", "template_opens_them"])
@pytest.mark.parametrize("keeps", [False, True], ids=["thoughts_dropped", "thoughts_kept"])
def test_conversation_goes_on_over_a_cache_whose_thoughts_were_dropped(pair, keeps, opening):
    """A long thought and a short answer: much less than half of what is cached is still true."""
    target, draft = pair
    greedy = PLAIN | {"max_new_tokens": 40}
    history, cache = [], None
    for question in ([7, 21, 33, 9, 14], [11, 3, 8], [25, 30, 6, 40]):
        history += [USER, *question, END, ASSISTANT]
        prompt = torch.tensor([history + opening])
        plain = target.generate(prompt, **greedy)
        with_cache = target.generate(
            prompt, assistant_model=draft, past_key_values=cache, return_dict_in_generate=True, **greedy
        )
        assert with_cache.sequences.tolist() == plain.tolist()
        cache = with_cache.past_key_values
        said = plain[0, prompt.shape[1] :].tolist()
        thoughts, answer = [*opening, *said[:36], THOUGHT], said[36:]
        history += (thoughts if keeps else []) + answer + [END]
    assert keeps or len(history) < cache.get_seq_length()
    assert draft.last_stats.tau > 1
