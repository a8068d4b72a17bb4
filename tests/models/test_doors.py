"""A draft through the doors by which transformers' manual and its users come to an assistant: it works, or two lines
say what to write."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_dspark import DSparkDraftModel, convert_checkpoint
from hf_dspark.models.auto import DRAFTS
from tests.training.tiny import tiny_pair

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
@pytest.mark.parametrize("loader", [AutoModel, AutoModelForCausalLM])
def test_every_auto_class_loads_a_draft_that_assists(tmp_path, kind, loader):
    target, draft = tiny_pair(kind)
    draft.save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path, dtype=torch.float32, draft_top_k=4)
    assert type(loaded) is type(draft) is DRAFTS[AutoConfig.from_pretrained(tmp_path).model_type]
    assert loaded.config.draft_top_k == 4
    assert torch.equal(target.generate(IDS, assistant_model=loaded, **GREEDY), target.generate(IDS, **GREEDY))
    assert type(loader.from_config(draft.config)) is type(draft)


def test_what_the_manual_sets_on_an_assistant_is_said_in_two_lines(draft):
    for attempt in (
        lambda: draft.generation_config.num_assistant_tokens,
        lambda: setattr(draft, "generation_config", None),
    ):
        with pytest.raises(AttributeError, match=r"no generation_config.*\n.*num_assistant_tokens=4") as error:
            attempt()
        assert len(str(error.value).splitlines()) == 2
    assert not hasattr(draft, "generation_config") and copy.deepcopy(draft).config == draft.config
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        draft.nonsense  # noqa: B018


@pytest.mark.parametrize("form", ["deepspec", "sglang"])
def test_a_model_that_transformers_makes_of_a_foreign_draft_is_named(tmp_path, form):
    target, draft = tiny_pair()
    convert_checkpoint(draft, tmp_path / "draft", form, target=target)
    misread = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    with pytest.raises(TypeError, match=rf"is a Qwen3ForCausalLM.*'{form}'.*\n.*{type(draft).__name__}\.from_pretr"):
        target.generate(IDS, assistant_model=misread, **GREEDY)
    target.generate(IDS, assistant_model=copy.deepcopy(target), **GREEDY)  # any other is none of our business


def test_fields_of_the_configuration_are_arguments_of_loading(tmp_path):
    draft = tiny_pair()[1]
    draft.save_pretrained(tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path, attention_dropout=0.1).config.attention_dropout == 0.1
    for facts, error, message in (
        ({"block_size": 0}, ValueError, "block_size must lie in"),
        ({"markov_rank": 9}, ValueError, "of another shape: .*markov"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ):
        with pytest.raises(error, match=message):
            DSparkDraftModel.from_pretrained(tmp_path, **facts)


@pytest.mark.parametrize("change", [lambda d: d.half().float(), lambda d: d.train().eval(), lambda d: d.to("cpu")])
def test_what_modules_can_do_to_themselves_leaves_a_draft_a_draft(change):
    target, draft = tiny_pair()
    assert torch.equal(target.generate(IDS, assistant_model=change(draft), **GREEDY), target.generate(IDS, **GREEDY))


SAVED = {
    "is_main_process": True, "state_dict": None, "max_shard_size": "10KB", "token": None, "variant": "fp16",
    "save_peft_format": True, "safe_serialization": True, "push_to_hub": False,
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SAVED)
def test_every_argument_of_saving_works_or_is_refused(tmp_path, name):
    draft = tiny_pair()[1]
    draft.save_pretrained(tmp_path, **{name: SAVED[name]})
    if name == "variant":
        with pytest.raises(ValueError, match="variant"):
            DSparkDraftModel.from_pretrained(tmp_path, variant="fp16")
        return
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in draft.state_dict().items())
