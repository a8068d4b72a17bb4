"""Drafts on a stand-in Hub, over HTTP, and in folders: what is published, replaced, refused; and loaded again, in
fresh processes, with the package and without it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load

import hf_dspark
from hf_dspark import DSparkDraftModel, Eagle3DraftModel
from hf_dspark.hub.convert import convert_checkpoint
from hf_dspark.hub.repository import (
    DECODER,
    load_draft,
    save_repository,
    upload_repository,
    write_card,
    write_remote_code,
)
from hf_dspark.measuring.results import describe_draft, describe_target, write_result
from tests.config_files import read_config
from tests.hub.loopback_hub import TOKEN, LoopbackHub

pytestmark = pytest.mark.xdist_group("hub")  # one server, one publication
SESSION = Path(__file__).parent / "hub_session.py"
CODE = {"custom_generate/generate.py", "custom_generate/LICENSE"}
DSPARK, EAGLE3 = "someone/my-draft.v1", "someone/eagle3"


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub() as server:
        server.refuse = lambda path: path.startswith("/api/models/someone/refused/commit")
        yield server


@pytest.fixture(scope="module")
def session(hub, tmp_path_factory):
    """Run a command of hub_session.py in a process with an empty cache; returns its report."""

    def run(*words: str | Path, **variables: str) -> dict:
        home = tmp_path_factory.mktemp("home")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
        environment |= {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": str(Path(hf_dspark.__file__).parent.parent),
        } | variables  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(SESSION), *map(str, words)],
            env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def published(session, tmp_path_factory):
    return session("publish", tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def fork(hub, published, tmp_path_factory):
    """A copy of the repository in a folder of another name."""
    folder = tmp_path_factory.mktemp("forks") / "fork-of.my-draft"
    for name, content in hub.repositories[DSPARK].files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


@pytest.mark.slow
def test_one_file_decodes_the_same_tokens_where_the_package_is_not_installed(session, published, fork):
    report = session("alone", DSPARK, fork, EAGLE3)
    expected = published["tokens"][DSPARK]["greedy"]
    assert report["tokens"] == {DSPARK: expected, fork: expected}
    assert report["loaded"] == report["worse"] == expected and sum(accepted for _, accepted in report["rounds"]) > 10
    assert len(report["weights"]) == 3 and report["weights"].count(0.0) == 1  # the branch has weights of its own
    eagle3, batch, untrusted = report["refusals"]
    assert "drafts of the type 'dspark_eagle3'" in eagle3 and "hf_dspark from a checkout" in eagle3
    assert "batches, and got 2 sequences" in batch and "trust_remote_code=True" in untrusted


@pytest.mark.slow
def test_the_package_takes_over_where_it_is_installed(session, published):
    report = session("package", DSPARK, EAGLE3)
    for repo in (DSPARK, EAGLE3):
        assert report[repo]["assistant"] == report[repo]["custom_generate"] == published["tokens"][repo]
    assert report[DSPARK]["temperatures"] == {"default": [1.5] * 5}
    tokens = published["tokens"][DSPARK]
    assert len({str(tokens[name]) for name in ("greedy", "sampled", "cut")}) == 3  # the calls do differ


@pytest.mark.slow
def test_a_draft_that_names_its_target_is_found_and_attached_also_without_the_hub(session, published, tmp_path):
    report = session("attach", "someone/for-target", HF_HOME=str(tmp_path))
    assert report == session("attach", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert (report["draft"], report["assisted"]) == ("someone/for-target", 3)
    assert report["tokens"]["greedy"] == published["tokens"][DSPARK]["greedy"]


@pytest.mark.slow
def test_a_trainer_publishes_draft_card_code_and_nothing_else(session, hub, tmp_path):
    report = session("train", tmp_path / "trained")
    repository = hub.repositories["someone/trained"]
    assert repository.private and report["tokens"]
    *while_training, (pushed, first), (later, _) = repository.commits[1:]
    assert pushed in report["url"] and later in report["later"]
    assert len(while_training) == 2  # at the checkpoints
    for _, files in while_training:
        assert files.keys() == CODE | {".gitattributes", "README.md", "config.json", "model.safetensors"}
        assert b"Not measured" in files["README.md"]
    assert first.keys() == files.keys() | {"results/training.json"}
    result = json.loads(first["results/training.json"])
    assert result["steps"] == 2 and result["num_rows"] == 8 and result["metrics"]["tau"] >= 1.0
    assert TOKEN not in first["results/training.json"].decode() and str(tmp_path) not in str(first)
    card = first["README.md"].decode()
    assert "| steps | 2 |" in card and "someone/rows" in card and "license: mit" in card
    assert (tmp_path / "trained" / "training_args.bin").exists()  # kept, and kept here


def test_a_repository_holds_the_drafts_own_weights_in_shards(published, hub):
    files = hub.repositories[DSPARK].commits[1][1]
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 1 and "model.safetensors.index.json" in files
    names = {name for shard in shards for name in load(files[shard])}
    assert "fc.weight" in names and not names & {"embed_tokens.weight", "lm_head.weight"}
    config = json.loads(files["config.json"])
    assert config["sts_temperatures"] == {"default": [1.5] * 5}
    assert config["auto_map"]["AutoModel"] == "custom_generate/generate.DSparkDraftModel"
    assert b"auto_map" not in hub.repositories[EAGLE3].files["config.json"]  # the file has no such class


def test_pushing_again_replaces_shards_card_and_code(published, hub):
    before, after = (files for _, files in hub.repositories[DSPARK].commits[1:3])
    assert [name for name in after if name.endswith(".safetensors")] == ["model.safetensors"]
    assert "model.safetensors.index.json" not in after
    assert b"Not measured" in before["README.md"] and b"license: mit" in after["README.md"]
    assert "results/acceptance.json" in after and "results/acceptance.json" not in before
    assert CODE < before.keys() and CODE < after.keys()


def test_branches_are_made_and_main_left_alone(published, hub):
    repository = hub.repositories[EAGLE3]
    assert published["branch"].endswith(repository.branches["v2"])
    assert b"3.25" in repository.files["README.md"] and b"3.25" not in repository.at("v2")[1]["README.md"]


def test_a_failed_upload_names_the_repository_and_changes_nothing(published, hub):
    assert "someone/refused" in published["refused"] and "the stand-in was told to" in published["refused"]
    assert list(hub.repositories["someone/refused"].files) == [".gitattributes"]
    assert hub.repositories[DSPARK].private and not hub.repositories["someone/refused"].private


def test_a_loaded_repository_is_saved_without_code_that_is_not_there(draft, tmp_path):
    (tmp_path / "first" / "results").mkdir(parents=True)
    (tmp_path / "first" / "results" / "mine.txt").write_text("notes")
    save_repository(draft, tmp_path / "first")
    assert (tmp_path / "first" / "results" / "mine.txt").read_text() == "notes"  # other files are left alone
    assert "Not measured" in (tmp_path / "first" / "README.md").read_text()
    again = DSparkDraftModel.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    convert_checkpoint(tmp_path / "first", tmp_path / "third", "hf_dspark")
    for name in ("second", "third"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["config.json", "model.safetensors"]
        assert "auto_map" not in read_config(tmp_path / name)


def test_remote_code_of_an_older_version_is_replaced(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    code = tmp_path / "custom_generate"
    code.mkdir()
    (code / "old_module.py").write_text("x = 1")
    for _ in range(2):
        assert write_remote_code(tmp_path).read_bytes() == DECODER.read_bytes()
        assert sorted(path.name for path in code.iterdir()) == ["LICENSE", "generate.py"]
    assert (code / "LICENSE").read_text() == Path(__file__).parents[2].joinpath("LICENSE").read_text()


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"model_type": "qwen3"}'])
def test_remote_code_is_refused_where_there_is_no_draft(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json cannot be used|convert it"):
        write_remote_code(tmp_path)
    assert not (tmp_path / "custom_generate").exists()


def test_a_wrong_result_stops_before_anything_is_written(draft, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for publish in (
        lambda: save_repository(draft, tmp_path / "new", [tmp_path / "bad.json"]),
        lambda: draft.push_to_hub("someone/new", results=[tmp_path / "bad.json"]),
        lambda: write_card(draft, tmp_path / "new", [tmp_path / "bad.json"]),
    ):
        with pytest.raises(ValueError, match=r"bad\.json"):
            publish()
    assert not (tmp_path / "new").exists()


@pytest.fixture
def api(monkeypatch) -> MagicMock:
    api = MagicMock()
    monkeypatch.setattr("hf_dspark.hub.repository.HfApi", lambda token: api)
    return api


def test_what_shall_be_private_goes_into_no_public_repository(tmp_path, api):
    api.repo_info.return_value.private = False
    with pytest.raises(OSError, match="it is public: make it private"):
        upload_repository(tmp_path, "me/draft", private=True)
    assert not api.upload_folder.called
    api.repo_info.return_value.private = True
    upload_repository(tmp_path, "me/draft", private=True)
    assert api.upload_folder.called


def test_result_files_of_one_name_are_all_published(target, draft, tmp_path):
    files = [tmp_path / name / "eval.json" for name in ("greedy", "sampled")]
    for file in files:
        found = {"sampling": {}, "policy": "FullBlock()", "domains": {file.parent.name: {"tau": 3.25}}}
        write_result(file, "acceptance", describe_target(target), describe_draft(draft), **found)
    save_repository(draft, tmp_path / "draft", files)
    copied = [path.read_bytes() for path in (tmp_path / "draft" / "results").glob("*.json")]
    assert sorted(copied) == sorted(path.read_bytes() for path in files)


def test_settings_of_an_interrupted_evaluation_are_not_uploaded(tmp_path, api):
    upload_repository(tmp_path, "someone/new")
    patterns = {name: api.upload_folder.call_args.kwargs[name] for name in ("allow_patterns", "ignore_patterns")}
    files = ["results/a.json", "results/a.json.partial.jsonl", "results/a.json.partial.jsonl.settings.json"]
    assert list(filter_repo_objects(files, **patterns)) == ["results/a.json"]


def test_folders_of_every_kind_of_draft_are_loaded_and_other_models_refused(draft, target, fixtures, tmp_path):
    save_repository(draft, tmp_path / "ours")
    kinds = {"ours": tmp_path / "ours", "deepspec": fixtures / "deepspec" / "trained" / "draft"}
    assert {name: type(load_draft(folder)) for name, folder in kinds.items()} == dict.fromkeys(kinds, DSparkDraftModel)
    assert isinstance(load_draft(str(fixtures / "deepspec" / "eagle3")), Eagle3DraftModel)
    target.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="holds a 'qwen3' model, which is no draft"):
        write_card(tmp_path / "target", tmp_path / "target")
    assert not (tmp_path / "target" / "README.md").exists()
