"""Which drafts `attach` finds for a target: on a Hub that is made up, or in a cache."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.hf_api import ModelInfo

from hf_dspark import attach, detach
from hf_dspark.hub import search
from hf_dspark.hub.search import find_drafts
from tests.config_files import change_config

NAME = "someone/target"


@pytest.fixture
def target(pair):
    target = copy.deepcopy(pair[0])
    target.name_or_path = NAME
    yield target
    detach(target)


@pytest.fixture
def folder(fixtures):
    return fixtures / "deepspec" / "trained" / "draft"


@pytest.fixture
def altered(folder, tmp_path):
    """Copy the draft, with other facts in its config, or without weights."""

    def make(name: str, weights: bool = True, **facts) -> str:
        shutil.copytree(folder, copied := tmp_path / name)
        change_config(copied, **facts)
        if not weights:
            (copied / "model.safetensors").unlink()
        return str(copied)

    return make


@pytest.fixture
def list_on_hub(monkeypatch):
    """Let a Hub know some models: their id, downloads, files, tags."""
    asked = []

    def make(*models: tuple) -> list:
        class Api:
            def __init__(self, token=None):
                pass

            def list_models(self, *, filter, search="", **order):
                asked.append((*filter, search))
                for name, downloads, files, tags in models:
                    known = {*tags, *([] if "base_model:" in str(tags) else [f"base_model:{NAME}"])}
                    if known.issuperset(filter) and search in Path(name).name:
                        siblings = [{"rfilename": file} for file in files]
                        yield ModelInfo(id=name, downloads=downloads, siblings=siblings, tags=list(tags))

        monkeypatch.setattr(search, "ask_hub", lambda endpoint: None)
        monkeypatch.setattr(search, "HfApi", Api)
        return asked

    return make


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A local cache that may be filled: repositories by name, with their files."""
    root = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(root))

    def add(name: str, folder: str | Path, card: str | None = None) -> None:
        home, revision = root / f"models--{name.replace('/', '--')}", f"{len(name):040x}"
        shutil.copytree(folder, snapshot := home / "snapshots" / revision)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(revision)
        if card is not None:
            (snapshot / "README.md").write_text(f"---\nbase_model: {card}\n---\n")

    return add


def test_a_measured_draft_comes_first_then_the_one_that_is_downloaded_most(target, altered, list_on_hub):
    names = [altered(f"dspark-{number}") for number in range(3)]
    asked = list_on_hub(
        (names[0], 5, [], [search.TAG]),
        (names[1], 9, [], []),  # found by its name
        (names[2], 1, ["results/eval.json"], [search.TAG]),
        (altered("unnamed"), 99, [], []),  # neither a tag nor a word tells what it is
    )
    where, found = find_drafts(target)
    assert [name for name, *_ in found] == [names[2], names[1], names[0]] and where == "on the Hub"
    assert found[0][2] == f"its card names {NAME}, with results, 1 downloads"
    assert {(f"base_model:{NAME}", search.TAG, ""), (f"base_model:{NAME}", "eagle3")} <= set(asked)


def test_what_is_broken_or_does_not_fit_is_passed_over(pair, target, altered, list_on_hub, caplog):
    list_on_hub(
        (altered("dspark-wide", hidden_size=128, head_dim=32), 9, [], []),
        (altered("dspark-other", vocab_size=65), 8, [], []),
        (altered("eagle3-like", model_type="qwen3", architectures=["Qwen3ForCausalLM"]), 7, [], []),  # no draft
        (altered("dspark-empty", weights=False), 6, [], []),
        ("someone/gated-dspark", 5, [], []),
        (good := altered("dspark-good"), 4, [], []),
        (altered("dspark-later"), 3, [], []),
    )
    attached = attach(target)
    assert attached.draft.name_or_path == good
    (line,) = [record.getMessage() for record in caplog.records if "draft" in record.name or "attach" in record.name]
    assert line == f"attached the draft {good}, found on the Hub: its card names {NAME}, 4 downloads"
    target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8)
    assert attached.num_assisted == 1


def test_none_that_can_be_taken_leaves_plain_generate(target, altered, list_on_hub, caplog):
    list_on_hub((altered("dspark-empty", weights=False), 6, [], []), ("someone/gated-dspark", 5, [], []))
    attached, ids = attach(target), torch.tensor([[1, 2, 3]])
    assert attached.draft is None and "no draft: 0 calls" in repr(attached)
    plain = target.generate(ids, assistant_model=None, max_new_tokens=8)
    assert torch.equal(target.generate(ids, max_new_tokens=8), plain) and attached.num_assisted == 0
    (line,) = [record.getMessage() for record in caplog.records if "attach" in record.name]
    assert line.startswith(f"no draft for {NAME} was found on the Hub: generate() stays plain.") and "\n" not in line
    assert "dspark-empty has no model.safetensors" in line and "passed over someone/gated-dspark: " in line


@pytest.mark.parametrize("fault", ["hub", "list"])
def test_without_the_hub_the_cache_is_searched(target, folder, altered, cache, monkeypatch, fault, caplog):
    if fault == "list":  # the Hub answers, and cannot list
        monkeypatch.setattr(search, "ask_hub", lambda endpoint: None)
    cache("someone/other-draft", folder, "someone/other")
    cache("someone/uncarded", folder)
    cache("someone/unreadable", folder, "[a, ")
    cache("someone/model", altered("model", model_type="qwen3", architectures=["Qwen3ForCausalLM"]))
    cache("someone/misfit", altered("misfit", vocab_size=65))
    cache("someone/named", folder, f"[{NAME}, someone/base]")
    where, found = find_drafts(target)
    assert [name for name, *_ in found][:1] == ["someone/named"] and "the Hub does not answer" in where
    assert {name for name, *_ in found[1:]} == {"someone/uncarded", "someone/misfit", "someone/unreadable"}
    assert attach(target).draft.name_or_path == "someone/named"
    assert f"its card names {NAME}, someone/base" in caplog.text
    target.name_or_path = str(folder)  # has no name on the Hub
    where, found = find_drafts(target)
    assert {name for name, *_ in found} == {
        f"someone/{name}" for name in ("named", "other-draft", "uncarded", "misfit", "unreadable")
    }
    assert "is no name on the Hub" in where


BASE = "someone/base"
OF_BASE = f"its card names {BASE}, which this target was made from: it may accept less"


@pytest.mark.parametrize("kind", ["card on the Hub", "card in the folder", "adapter in the folder", "adapter"])
@pytest.mark.parametrize("offline", [False, True])
def test_a_fine_tune_for_which_there_is_none_takes_a_draft_of_its_base(
    target, folder, tmp_path, list_on_hub, cache, monkeypatch, kind, offline, caplog
):
    cache("someone/dspark-base", folder, BASE)
    (home := tmp_path / "made").mkdir()
    if kind == "card on the Hub":
        load = search.ModelCard.load
        card = search.ModelCard(f"---\nbase_model: [{BASE}, {NAME}]\n---\n")
        monkeypatch.setattr(search.ModelCard, "load", lambda name: card if name == NAME else load(name))
    elif kind == "adapter":
        target.name_or_path = BASE
        target.peft_config = {"default": SimpleNamespace(base_model_name_or_path=BASE)}
    else:
        target.name_or_path = str(home)
        (home / "README.md").write_text(f"---\nbase_model: {BASE}\n---\n" if kind == "card in the folder" else "")
        (home / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": BASE}))
    if not offline:
        list_on_hub((str(tmp_path / "cache/models--someone--dspark-base"), 7, [], [search.TAG, f"base_model:{BASE}"]))
    where, found = find_drafts(target)
    assert len(found) == 1 and found[0][2].startswith(OF_BASE), found
    assert ("on the Hub" == where) is not offline
    if offline:
        assert attach(target).draft.name_or_path == "someone/dspark-base" and "it may accept less" in caplog.text


def test_without_hub_and_cache_there_is_none(target, cache):
    assert find_drafts(target)[1] == [] and attach(target).draft is None
