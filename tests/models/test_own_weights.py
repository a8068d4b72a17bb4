"""An embedding and an LM head that a draft brings: shared if they are the target's, else used, and never exchanged."""

import copy
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.hub.convert import convert_checkpoint
from hf_dspark.models.auto import load_draft
from hf_dspark.models.configuration_draft import SHAREABLE
from hf_dspark.targets.borrowed_weights import BorrowedModules
from tests.targets.test_model_types import make_pair

EMBEDDING, HEAD = SHAREABLE
DRAFTS = {"dspark": "draft_vanilla", "dflash": "draft_dflash", "eagle3": "eagle3"}


def _turned(weight: torch.Tensor) -> torch.Tensor:
    return weight @ torch.linalg.qr(torch.randn(weight.shape[1], weight.shape[1]))[0]


def _with_other_padding(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[:-3], torch.zeros_like(weight[-3:])])


WEIGHTS = {
    "copies": {},
    "embedding": {EMBEDDING: _turned},
    "head": {HEAD: _turned},
    "both": {EMBEDDING: _turned, HEAD: _turned},
    "head of zeros": {HEAD: torch.zeros_like},
    "one value": {HEAD: lambda weight: torch.cat([weight[:7], weight[7:8] * (1 + 2**-20), weight[8:]])},
    "padding rows": {EMBEDDING: _with_other_padding, HEAD: _with_other_padding},
}
HOLDING = {"hf_dspark": True, "deepspec": True, "speculators": True, "sglang": False}


@pytest.fixture
def target(fixtures):
    target = AutoModelForCausalLM.from_pretrained(fixtures / "deepspec" / "target_qwen3").eval()
    target.config.name_or_path = str(fixtures / "deepspec" / "target_qwen3")
    return target


@pytest.fixture
def make_folder(fixtures, tmp_path):
    """Write a DeepSpec draft, some of whose weights are other than the target's; returns its folder and tensors."""

    def build(changes, name="draft_vanilla"):
        folder = Path(shutil.copytree(fixtures / "deepspec" / name, tmp_path / "given"))
        tensors = load_file(folder / "model.safetensors")
        tensors |= {name: change(tensors[name]).contiguous() for name, change in changes.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder, tensors

    return build


def bound(folder, target, expected=(), **kwargs):
    """Load a draft and bind it, twice; exactly the expected weights are told of, once."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        draft = load_draft(folder, **kwargs)
        for _ in range(2):
            draft.bind(target)
    assert [str(each.message).split(" brings ")[1].split(",")[0] for each in told] == (
        [" and ".join(expected)] if expected else []
    )
    return draft.eval()


@torch.no_grad()
def assert_drafts_with(draft, tensors, target, own):
    """The values are those of the checkpoint; memory is the target's but for the weights of its own."""
    ids, hidden = torch.arange(len(tensors[EMBEDDING])), torch.randn(3, draft.config.hidden_size)
    assert torch.equal(draft.embed(ids), tensors[EMBEDDING])
    torch.testing.assert_close(draft.base_logits(hidden), hidden @ tensors[HEAD].T)
    torch.testing.assert_close(draft.target_logits(hidden), hidden @ target.lm_head.weight.T)
    assert SHAREABLE.keys() & draft.state_dict().keys() == set(own)
    assert {name for name, field in SHAREABLE.items() if getattr(draft.config, field)} == set(own)
    assert not any(draft.get_parameter(name).requires_grad for name in own)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("changes", WEIGHTS.values(), ids=WEIGHTS)
def test_what_differs_from_the_targets_is_used_told_and_kept(make_folder, target, tmp_path, changes):
    folder, tensors = make_folder(changes)
    draft = bound(folder, target, changes)
    assert_drafts_with(draft, tensors, target, changes)
    draft.save_pretrained(tmp_path / "saved")
    assert SHAREABLE.keys() & load_file(tmp_path / "saved" / "model.safetensors").keys() == changes.keys()
    assert_drafts_with(bound(tmp_path / "saved", target, changes), tensors, target, changes)
    load_draft(folder).save_pretrained(tmp_path / "unbound")  # without a target, all of it is the draft's
    assert_drafts_with(bound(tmp_path / "unbound", target, changes), tensors, target, changes)


@pytest.mark.one_in(17)
@pytest.mark.filterwarnings("ignore:the draft .* brings")
@pytest.mark.parametrize("given", ["folder", "draft", "bound draft"])
@pytest.mark.parametrize("named", [False, True], ids=["loaded target", "folder of the target"])
@pytest.mark.parametrize("changes", WEIGHTS.values(), ids=WEIGHTS)
def test_converting_keeps_what_differs_or_refuses(make_folder, target, tmp_path, changes, named, given):
    folder, tensors = make_folder(changes)
    draft = folder if given == "folder" else load_draft(folder)
    if given == "bound draft":
        draft.bind(target)
    where = target.config.name_or_path if named else target
    for format, holds in HOLDING.items():
        if changes and not holds:
            fault = f"'{format}' cannot hold.*no place for the draft's {' and '.join(changes)}, not known to be copies"
            with pytest.raises(ValueError, match=fault):
                convert_checkpoint(draft, tmp_path / format, format, where)
            continue
        convert_checkpoint(draft, tmp_path / format, format, where)
        assert_drafts_with(bound(tmp_path / format, target, changes), tensors, target, changes)


def test_without_a_target_nothing_is_taken_for_a_copy(make_folder, target, tmp_path):
    folder, tensors = make_folder({})
    for format in ("hf_dspark", "deepspec"):
        convert_checkpoint(folder, tmp_path / format, format)
        written = load_file(tmp_path / format / "model.safetensors")
        assert all(torch.equal(written[name], tensors[name]) for name in SHAREABLE)
    with pytest.raises(ValueError, match=r"'sglang' cannot hold.*not known to be copies.*\(target=\.\.\. compares"):
        convert_checkpoint(folder, tmp_path / "sglang", "sglang", target.config)


def test_a_converted_draft_keeps_the_weights_of_the_target_that_it_came_with(make_folder, target, tmp_path):
    folder, tensors = make_folder({})
    other = copy.deepcopy(target)
    other.lm_head.weight.data.neg_()
    for number, draft in enumerate((folder, load_draft(folder), load_draft(folder).bind(target))):
        convert_checkpoint(draft, tmp_path / str(number), "deepspec", other)
        assert torch.equal(load_file(tmp_path / str(number) / "model.safetensors")[HEAD], tensors[HEAD])


def test_a_draft_that_was_bound_to_one_target_keeps_its_head_with_another(make_folder, target):
    folder, tensors = make_folder({})
    other = copy.deepcopy(target)
    other.lm_head.weight.data.neg_()
    draft = bound(folder, target)
    with pytest.warns(UserWarning, match="brings lm_head.weight, other than the target's"):
        draft.bind(other)
    assert_drafts_with(draft, tensors, other, {HEAD})
    assert draft.get_input_embeddings() is other.get_input_embeddings()
    assert_drafts_with(draft.bind(target), tensors, target, {HEAD})


@pytest.mark.parametrize("name", DRAFTS.values(), ids=DRAFTS)
def test_each_kind_of_draft_decodes_with_its_own_weights(make_folder, fixtures, target, tmp_path, name):
    folder, tensors = make_folder(WEIGHTS["both"], name)
    if name == "eagle3":
        target = AutoModelForCausalLM.from_config(target.config.__class__(**target.config.to_dict() | {
            "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 8, "layer_types": None}))  # fmt: skip
    draft = bound(folder, target, SHAREABLE)
    prompt = torch.tensor([[3, 9, 12, 30]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft), plain)
    assert sum(draft.last_stats.proposed) > 0
    assert_drafts_with(draft, tensors, target, SHAREABLE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_copies_may_be_rounded(make_folder, target, stored, theirs):
    folder, _ = make_folder(dict.fromkeys(SHAREABLE, lambda weight: weight.to(stored)))
    assert bound(folder, target.to(theirs)).get_output_embeddings() is target.lm_head
    target.lm_head.weight.data *= 1.02
    bound(folder, target, [HEAD])


def with_bias(target):
    target.lm_head.bias = torch.nn.Parameter(torch.ones(target.config.vocab_size))
    return target


def offloaded(target):
    from accelerate import cpu_offload

    cpu_offload(target, execution_device=torch.device("cpu"))
    return target


def adapted(target):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(target, LoraConfig(target_modules=["lm_head", "embed_tokens", "q_proj"])).base_model.model


def on_meta(target):
    return target.to("meta")


@pytest.mark.parametrize("place", [offloaded, adapted, on_meta])
def test_weights_are_compared_wherever_the_target_keeps_them(make_folder, target, place):
    folder, _ = make_folder({})
    other, placed = copy.deepcopy(target), place(target)
    draft = bound(folder, placed)
    assert draft.get_output_embeddings() is placed.get_output_embeddings()
    other.lm_head.weight.data.neg_()
    draft = bound(folder, place(other), [] if place is on_meta else [HEAD])
    assert draft.brought.keys() == (SHAREABLE.keys() if place is on_meta else set())


def test_a_head_with_a_bias_is_another_one(make_folder, target):
    folder, tensors = make_folder({})
    bound(folder, with_bias(target), [HEAD])


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_heads_are_told_from_others(make_quantised, make_draft, tmp_path, bits):
    target = make_quantised(bits, llm_int8_skip_modules=["none"])
    lent = BorrowedModules.copy_of(target.train(bits == 4))
    target.eval()
    draft = make_draft(target, own_embedding=True, own_lm_head=True)
    weights = {EMBEDDING: lent.embedding.weight, HEAD: lent.lm_head.weight}
    for change, own in ((lambda head: head * 1.001, []), (_turned, [HEAD])):
        head = change(weights[HEAD]).contiguous()
        draft.load_state_dict(draft.state_dict() | weights | {HEAD: head})
        draft.save_pretrained(tmp_path / "draft")
        loaded = bound(tmp_path / "draft", target, own)
        assert (loaded.get_output_embeddings() is target.lm_head) == (not own)


SCALES = {
    "gemma3_text": {"embedding_scale": 1.0},
    "granite": {"embedding_scale": 1.0, "logit_scale": 1.0},
    "gemma2": {"final_logit_softcapping": None},
}


@pytest.mark.parametrize(("family", "own"), SCALES.items(), ids=SCALES)
@torch.no_grad()
def test_scales_are_the_drafts_own_and_told_where_they_differ(family, own):
    facts = {"granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0}}.get(family, {"head_dim": 8})
    target, draft = make_pair(family, facts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draft.bind(target)
    config = DSparkConfig.from_target(target.config, **own)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        draft = DSparkDraftModel(config).bind(target).bind(target)
    assert [str(each.message).split(" own ")[1].split("=")[0] for each in told] == list(own)
    hidden, ids = torch.randn(2, config.hidden_size), torch.arange(9)
    rows, logits = target.get_input_embeddings().weight[ids], target.lm_head(hidden)
    torch.testing.assert_close(draft.embed(ids), rows * config.embedding_scale)
    cap = config.final_logit_softcapping
    logits = logits * config.logit_scale
    torch.testing.assert_close(draft.base_logits(hidden), logits if cap is None else cap * torch.tanh(logits / cap))


def test_a_pickled_draft_that_is_not_bound_keeps_what_it_brought(make_folder, target):
    folder, tensors = make_folder(WEIGHTS["head"])
    draft = copy.deepcopy(load_draft(folder))
    with pytest.warns(UserWarning, match="brings lm_head.weight"):
        draft.bind(target)
    assert_drafts_with(draft, tensors, target, {HEAD})
