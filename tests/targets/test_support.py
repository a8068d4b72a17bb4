"""`TargetSupport`: read once per model and call, forgotten when the model changes, with all reasons at once."""

import copy
import gc
import weakref

import accelerate
import pytest
import torch
from torch import nn

from hf_dspark import AssistantDraft, DecodingOptions, attach, decode_with
from hf_dspark.targets.support import TargetSupport
from tests.hybrids import HAVE_PROTOCOL, build, make_own_draft
from tests.rows import GREEDY


@pytest.fixture
def walks(monkeypatch):
    """Count walks over all modules of a model: how often its last one was reached."""
    counts, honest = {}, nn.Module.named_modules

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield from honest(self, memo, prefix, remove_duplicate)
        if memo is None:
            counts[self] = counts.get(self, 0) + 1

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    return counts


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["attention", "calibrated", "recurrent"])
@pytest.mark.parametrize("door", ["assistant_model", "custom_generate"])
def test_a_call_walks_over_the_targets_modules_once(make_target, make_draft, walks, kind, door):
    target = make_target()
    draft = make_draft(target)
    if kind == "calibrated":  # the cost of this machine is looked for
        draft.config.sts_temperatures = {"default": [1.0] * draft.config.block_size}
    if kind == "recurrent":
        if not HAVE_PROTOCOL:
            pytest.skip("needs a later transformers")
        target = build("qwen3_5_text")
        draft = make_own_draft(target)
    ids = torch.arange(3, 15).view(2, 6)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    target.generate(ids, **options)
    plain = walks.get(target, 0)
    for again in range(2):
        walks.clear()
        target.generate(ids, **options, **{door: draft if door == "assistant_model" else decode_with(draft)})
        assert walks.get(target, 0) - plain <= 1
        assert again == 0 or walks.get(target.get_decoder(), 0) == 0  # layers are looked for once per model


def test_it_is_read_once_and_anew_when_the_target_changes(target):
    target = copy.deepcopy(target)
    support = TargetSupport.of(target)
    assert TargetSupport.of(target) is support and TargetSupport.of(copy.deepcopy(target)) is not support

    def changed():
        nonlocal support
        before, support = support, TargetSupport.of(target)
        return support is not before

    target.model.layers[1].mlp.up_proj = nn.Linear(*reversed(target.model.layers[1].mlp.up_proj.weight.shape))
    assert changed() and not changed()
    target.model.layers[0] = copy.deepcopy(target.model.layers[0])
    assert changed() and support.layers[0] is target.model.layers[0]
    target.model.layers[0].self_attn.config = copy.deepcopy(target.config)
    own = target.model.layers[0].self_attn.config
    assert changed() and any(config is own for config in support.attention_configs)
    target.set_output_embeddings(copy.deepcopy(target.lm_head))
    assert changed() and support.lm_head is target.lm_head
    target.config = copy.deepcopy(target.config)
    assert changed()
    target.config.layer_types = ["conv", *target.config.layer_types[1:]]
    assert changed() and support.keeps_states


def test_devices_and_rotary_facts_are_those_of_the_moment(target):
    target = copy.deepcopy(target)
    support = TargetSupport.of(target)
    assert support.input_device == torch.device("cpu") and not support.is_spread and support.rope_switches == []
    target.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 20}
    target.hf_device_map = {"model": 0, "lm_head": 1}
    target.to("meta")
    assert TargetSupport.of(target) is support
    assert support.input_device.type == "meta" and support.is_spread and support.rope_switches == [20]


def test_it_does_not_keep_a_target_alive(make_target):
    target = make_target()
    support, gone = TargetSupport.of(target), weakref.ref(target)
    assert support.layers and support.lm_head is target.lm_head
    del target
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
def test_an_unknown_hybrid_is_refused_by_name(monkeypatch):
    target = build("qwen3_next")
    assert TargetSupport.of(target).slot_obstacle is None
    monkeypatch.setattr(type(target.config), "model_type", "tomorrows_hybrid")
    message = r"Qwen3NextForCausalLM keeps a state .*\(model_type 'tomorrows_hybrid', layers: linear_attention\)"
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=make_own_draft(target))


def test_all_reasons_against_a_batch_are_named_at_once(make_target, make_draft):
    target = make_target()
    draft, ids = make_draft(target), torch.arange(12).expand(2, -1)
    draft.decoding, positions = DecodingOptions(use_transformers_loop=True), torch.arange(12)[None] + 50
    with pytest.raises(ValueError, match="use_transformers_loop is set; position_ids are not"):
        target.generate(ids, position_ids=positions.expand(2, -1), assistant_model=draft, **GREEDY)


@pytest.mark.filterwarnings("ignore:torch")
def test_weights_that_cannot_draft_or_verify_are_refused(target, draft):
    ids = torch.arange(1, 12)[None]
    packed = torch.ao.quantization.quantize_dynamic(target, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="quantised by torch.ao.quantization"):
        packed.generate(ids, max_new_tokens=9, do_sample=False, assistant_model=draft)


@pytest.mark.parametrize("place", ["meta", "cpu_offload", "disk_offload"])
@pytest.mark.parametrize("kind", ["draft", "assistant"])
def test_drafts_whose_weights_are_elsewhere_are_refused_before_work(target, draft, tmp_path, kind, place):
    away = copy.deepcopy(target if kind == "assistant" else draft)
    if place == "meta":
        away.to("meta")
    else:
        options = {"offload_dir": tmp_path} if place == "disk_offload" else {}
        getattr(accelerate, place)(away, execution_device=torch.device("cpu"), **options)
    away = AssistantDraft(away) if kind == "assistant" else away
    options = {"max_new_tokens": 9, "do_sample": False, "assistant_model": away}
    doors = (lambda: target.generate(torch.arange(1, 12)[None], **options), lambda: decode_with(away))
    for door in (*doors, lambda: attach(target, away)):
        with pytest.raises(ValueError, match="the draft is on the meta device, offloaded or without weights"):
            door()
