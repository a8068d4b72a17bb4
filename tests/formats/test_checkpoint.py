"""What is read of a checkpoint: its config, the headers of its files, and tensors only when they are asked for."""

import json
import os
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from hf_dspark import convert_checkpoint, inspect_draft
from hf_dspark.formats.checkpoint import MAX_CONFIG_BYTES, Checkpoint, TensorInfo, read_json
from hf_dspark.models.auto import load_draft

TENSORS = {
    "fc.weight": torch.arange(6.0).reshape(2, 3),
    "norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "d2t": torch.tensor([4, 2]),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint of one file."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "dspark", "block_size": 4}')
    save_file(TENSORS, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A checkpoint of two files and an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weight_map = {name: f"model-0000{1 + (name == 'd2t')}-of-00002.safetensors" for name in TENSORS}
    for file in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in TENSORS if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def hub_cache(root: Path, source: Path) -> Path:
    """Lay a checkpoint out as huggingface_hub's cache does; return its snapshot."""
    repository = root / "models--someone--draft"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    for number, file in enumerate(sorted(source.iterdir())):
        blob = Path(shutil.copy(file, repository / "blobs" / f"{number:040x}"))
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def opened(place, **hub_kwargs) -> Checkpoint:
    """Return a checkpoint of which config and headers were read."""
    checkpoint = Checkpoint(place, **hub_kwargs)
    assert checkpoint.config is not None and checkpoint.tensors is not None
    return checkpoint


def assert_complete(checkpoint):
    facts = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    assert facts == {"fc.weight": ("F32", (2, 3)), "norm.weight": ("BF16", (3,)), "d2t": ("I64", (2,))}
    loaded = checkpoint.load(checkpoint.tensors)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


# ---- what is read


def test_checkpoint_of_one_file_is_read(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')  # the file wins
    checkpoint = opened(folder)
    assert checkpoint.config == {"model_type": "dspark", "block_size": 4}
    assert (checkpoint.name, os.fspath(checkpoint), checkpoint.revision) == (str(folder), str(folder), None)
    assert checkpoint.tensors["d2t"] == TensorInfo("I64", (2,), folder / "model.safetensors")
    assert checkpoint.load(["d2t"]).keys() == {"d2t"}
    assert_complete(checkpoint)
    assert_complete(opened(folder.parent, subfolder="checkpoint"))


def test_sharded_checkpoint_is_read_also_in_the_hubs_cache(sharded, tmp_path):
    assert_complete(opened(str(sharded)))
    hub_cache(tmp_path / "hub", sharded)
    assert_complete(opened("someone/draft", cache_dir=tmp_path / "hub", local_files_only=True))


def test_a_hub_that_cannot_be_reached_is_named_at_once_and_the_cache_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    start = time.monotonic()
    with pytest.raises(
        OSError, match=r"someone/draft .* http://127.0.0.1:9 does not answer \(.*refused.*HF_HUB_OFFLINE"
    ):
        opened("someone/draft", cache_dir=tmp_path / "hub")
    hub_cache(tmp_path / "hub", folder)
    assert_complete(opened("someone/draft", cache_dir=tmp_path / "hub"))
    assert time.monotonic() - start < 5  # it would be tried again and again


def test_what_the_cache_lacks_is_named_when_the_hub_may_not_be_asked(tmp_path, monkeypatch):
    lacking = "someone/draft has no config.json on the Hub, or in the local cache where HF_HUB_OFFLINE or local_files"
    with pytest.raises(ValueError, match=lacking):
        opened("someone/draft", cache_dir=tmp_path)  # as in all tests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=lacking):
        opened("someone/draft", cache_dir=tmp_path, local_files_only=True)


def test_config_and_headers_are_read_without_weights(folder, monkeypatch):
    monkeypatch.setattr(torch, "empty", None)  # whatever would be allocated
    assert Checkpoint(folder).tensors["fc.weight"].shape == (2, 3)
    (folder / "model.safetensors").unlink()
    assert Checkpoint(folder).config["block_size"] == 4


# ---- where it may be


def test_snapshot_in_the_hubs_cache_is_read_by_path_and_by_name(folder, tmp_path):
    snapshot = hub_cache(tmp_path / "hub", folder)
    assert_complete(opened(snapshot))
    checkpoint = opened("someone/draft", cache_dir=tmp_path / "hub", local_files_only=True)
    assert_complete(checkpoint)
    assert (checkpoint.name, checkpoint.revision) == ("someone/draft", "0" * 40)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="someone/draft has no model.safetensors .* Pickled weights .* never loaded"):
        opened("someone/draft", cache_dir=tmp_path / "hub", local_files_only=True)


def test_blobs_that_several_repositories_share_are_read(folder, tmp_path):
    snapshot = hub_cache(tmp_path / "hub", folder)
    for blob in sorted((snapshot.parent.parent / "blobs").iterdir()):
        shared = tmp_path / "hub" / "blobs" / "00" / blob.name
        shared.parent.mkdir(parents=True, exist_ok=True)
        blob.rename(shared)
        blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert_complete(opened(snapshot))


def move_and_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "moved",
    [
        lambda hub, repo, disk: move_and_link(repo / "blobs", disk),
        lambda hub, repo, disk: move_and_link(repo, disk),
        lambda hub, repo, disk: move_and_link(hub, disk),
        lambda hub, repo, disk: [disk.mkdir(), *(move_and_link(f, disk / f.name) for f in (repo / "blobs").iterdir())],
    ],
    ids=["blobs", "repository", "cache", "each blob"],
)
def test_a_cache_of_which_parts_lie_on_another_disk_is_read(folder, tmp_path, moved):
    snapshot = hub_cache(tmp_path / "hub", folder)
    moved(tmp_path / "hub", snapshot.parent.parent, tmp_path / "disk")
    assert_complete(opened(snapshot))
    assert_complete(opened("someone/draft", cache_dir=tmp_path / "hub", local_files_only=True))
    (tmp_path / "shortcut").symlink_to(snapshot)
    assert_complete(opened(tmp_path / "shortcut"))


def test_a_link_to_a_disk_that_is_away_is_named(folder, tmp_path):
    snapshot = hub_cache(tmp_path / "hub", folder)
    move_and_link(snapshot.parent.parent / "blobs", tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"config.json is a link to .*disk.*, which is not there: mount its disk"):
        opened(snapshot)


def test_links_to_the_folder_and_within_it_are_followed(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "weights-of-today")
    (folder / "model.safetensors").symlink_to("weights-of-today")
    (tmp_path / "link").symlink_to(folder)
    assert_complete(opened(tmp_path / "link"))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("absolute", [True, False])
def test_link_out_of_the_folder_is_refused(folder, tmp_path, file, absolute):
    (folder / file).rename(tmp_path / "outside")
    (folder / file).symlink_to(tmp_path / "outside" if absolute else "../outside")
    with pytest.raises(ValueError, match=rf"{file} is a link that leads out of the folder, to .*: put the file"):
        opened(folder)


def test_link_of_a_snapshot_to_anything_but_blobs_is_refused(folder, tmp_path):
    snapshot = hub_cache(tmp_path / "hub", folder)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ValueError, match="leads out of the folder"):
        opened(snapshot)


# ---- what is refused


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"{folder} has no {missing}"):
        opened(folder)


@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", os.mkdir)], ids=["folder", "pipe"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_folder_or_pipe_instead_of_a_file_is_refused_and_not_waited_for(folder, file, make):
    (folder / file).unlink()
    make(folder / file)
    with pytest.raises(ValueError, match=f"{file}.*is no regular file"):
        opened(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint_is_not_taken_for_its_folder(folder, file):
    for read in (load_draft, inspect_draft):
        with pytest.raises(ValueError, match=f"{file} is a file: name the folder that it is in"):
            read(folder / file)


@pytest.mark.parametrize("read", [load_draft, inspect_draft, convert_checkpoint])
def test_a_loaded_model_is_not_taken_for_its_folder(read):
    arguments = ("somewhere",) if read is convert_checkpoint else ()
    with pytest.raises(TypeError, match="got Linear: save_pretrained"):
        read(torch.nn.Linear(2, 2), *arguments)


def test_file_that_may_not_be_read_is_named(folder, monkeypatch):
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))  # root may
    with pytest.raises(ValueError, match="config.json cannot be used.*Permission denied"):
        opened(folder)


def test_arguments_that_choose_other_files_are_refused(folder):
    with pytest.raises(TypeError, match="variant.*known are cache_dir"):
        Checkpoint(folder, variant="fp16")
    with pytest.raises(TypeError, match="got int"):
        Checkpoint(7)


def test_file_that_changes_between_header_and_tensors_is_noticed(folder):
    checkpoint = opened(folder)
    save_file({"fc.weight": torch.zeros(2, 3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="is no intact safetensors file"):
        checkpoint.load(TENSORS)


# ---- JSON


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "Expecting value"), (b"{", "Expecting property name"), (b'{"a": 1} trailing', "Extra data"),
        (b"[1, 2]", "a JSON object is needed, it holds list"), (b"null", "it holds NoneType"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"), (b'{"a": "\xff"}', "can't decode byte 0xff"),
        *((b'{"a": ' + number + b"}", f"the number {number.decode()}, which is not finite")
          for number in (b"NaN", b"-Infinity", b"1e999")),
        (b'{"a": ' + b"9" * 100_000 + b"}", "9, which is not finite or has more than 64 bits"),
        *((content, "recursion") for content in (b"[" * 500_000, b'{"a": ' * 100_000)),
        (b'{"a": "' + b"x" * MAX_CONFIG_BYTES + b'"}', "at most 1,048,576 are read"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_unsound_json_is_refused_with_its_fault(tmp_path, content, found):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="config.json cannot be used") as raised:
        read_json(path)
    assert found in str(raised.value) and len(str(raised.value)) < 500
    assert raised.value.__cause__ is None


def test_sound_json_is_read_whole(tmp_path):
    value = {"a": [1, -2.5, 1e-300, None, True, {"ä": "ö"}], "b": {}, "c": 2**62}
    (tmp_path / "x.json").write_text(json.dumps(value), encoding="utf-8")
    assert read_json(tmp_path / "x.json") == value


FIXTURES = Path(__file__).parents[1] / "fixtures"
KINDS = [
    "deepspec/draft_vanilla", "dflash/z_lab", "dspark/modelopt_vanilla", "eagle3/specforge",
    "eagle3/speculators_qwen3",
    "speculators/pruned_vocab_vanilla",
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_names_of_wrappers_and_remnants_of_old_versions_are_passed_over(tmp_path, kind):
    """As torch.compile, FSDP, DDP, PEFT and trainers leave them."""
    folder = tmp_path / "draft"
    shutil.copytree(FIXTURES / kind, folder)
    plain, stored = load_draft(folder).state_dict(), load_file(folder / "model.safetensors")
    wrappers = "_orig_mod. module. draft_model. model. module._orig_mod.draft_model. draft. drafter. base_model.model."
    for wrapper in (*wrappers.split(), "eagle_module.", "_fsdp_wrapped_module."):
        within = "_checkpoint_wrapped_module._fsdp_wrapped_module." if wrapper.startswith("_") else ""
        tensors = {f"{wrapper}{name}".replace(".mlp.", f".{within}mlp."): tensor for name, tensor in stored.items()}
        remnants = {f"{wrapper}{place}rotary_emb.inv_freq": torch.ones(6) for place in ("", "layers.0.self_attn.")}
        remnants |= {f"{wrapper}verifier_{name}.weight": torch.ones(6) for name in ("norm", "lm_head")}
        save_file(tensors | remnants, folder / "model.safetensors", {"format": "pt"})
        found = load_draft(folder).state_dict()
        assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)
    save_file({f"other.{name}": tensor for name, tensor in stored.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="those of 0 layers.*their names are other\\."):
        load_draft(folder)
    save_file(stored | {"ema.decay": torch.ones(6)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="unexpected: ema.decay. No key decides about them$"):
        load_draft(folder)
    (folder / "model.safetensors").rename(folder / "draft.safetensors")
    with pytest.raises(ValueError, match="It has draft.safetensors: a single file is called model.safetensors"):
        load_draft(folder)
