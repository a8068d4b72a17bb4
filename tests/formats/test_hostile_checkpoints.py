"""Checkpoints from strangers: every fault is one clear error, nothing runs, and nothing grows with what is claimed."""

import ast
import copy
import json
import pickle
import random
import shutil
import struct
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.utils import logging

import hf_dspark
from hf_dspark import DSparkConfig, DSparkDraftModel, Eagle3Config, Eagle3DraftModel
from hf_dspark.hub.convert import convert_checkpoint
from hf_dspark.models.auto import load_draft
from hf_dspark.models.slot_cache import SlotCache
from tests.config_files import change_config, read_config
from tests.features import new_context
from tests.samplers import ChainSampler

resource = pytest.importorskip("resource")  # not on Windows

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "num_target_layers": 4, "target_layer_ids": [0, 2], "block_size": 4,
    "markov_rank": 6, "max_position_embeddings": 256,
}  # fmt: skip
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A sound checkpoint of a tiny draft."""
    folder = tmp_path_factory.mktemp("sound")
    torch.manual_seed(5)
    DSparkDraftModel(DSparkConfig(**SIZES)).save_pretrained(folder)
    AutoModel.from_pretrained(folder)  # whatever is imported on the way does not count
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "draft"))


@pytest.fixture(autouse=True)
def _no_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def peak_memory() -> int:
    """Return the most memory that this process has ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def bounded(seconds: float = 5.0, memory: int = 64 * MEBIBYTE):
    """Assert that what is done takes no more than that; the least of real allocations would be far more."""
    start, before = time.process_time(), peak_memory()
    yield
    assert time.process_time() - start < seconds
    assert peak_memory() - before < memory


def refused(folder: Path, *found: str, load=DSparkDraftModel.from_pretrained) -> str:
    """Assert that loading raises one error that says all of that, quickly, and return it."""
    with bounded(), pytest.raises(ValueError) as raised:
        load(folder)
    message = str(raised.value)
    for text in found or (folder.name,):
        assert text in message
    assert "Traceback" not in message and len(message) < 1500
    error = raised.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    return message


class Explosive:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


# ---- no pickle


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "__0_0.distcp", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_refused_and_not_opened(folder, tmp_path, name):
    trace = tmp_path / "exploded"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Explosive(trace)))
    refused(
        folder, "no model.safetensors.index.json", "Pickled weights", "never loaded", "safetensors.torch.save_file"
    )
    assert not trace.exists()
    pickle.loads((folder / name).read_bytes())  # the control: this is what must not happen
    assert trace.exists()


@pytest.mark.parametrize(
    "names",
    [
        ["pytorch_model.bin.index.json", "a.bin"], ["adapter_config.json", "adapter_model.bin"],
        ["training_args.bin", "optimizer.pt", "rng_state.pth", ".metadata", "__0_0.distcp"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("load", [DSparkDraftModel.from_pretrained, AutoModel.from_pretrained])
def test_pickles_beside_safetensors_are_left_alone(folder, tmp_path, names, load, monkeypatch):
    trace = tmp_path / "exploded"
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Explosive(trace)))
    if "adapter_config.json" in names:
        adapter = {"peft_type": "LORA", "base_model_name_or_path": "../elsewhere"}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    monkeypatch.setattr(torch, "load", None)
    try:
        load(folder)
    except ValueError as error:  # with PEFT installed, AutoModel has found the adapter
        assert "holds a PEFT adapter" in str(error)
    assert not trace.exists()


@pytest.mark.parametrize(
    "argument",
    [
        {"use_safetensors": False}, {"weights_only": False}, {"variant": "fp16"}, {"gguf_file": "draft.gguf"},
        {"key_mapping": {"a": "b"}}, {"ignore_mismatched_sizes": True}, {"state_dict": {"a": torch.ones(1)}},
        {"adapter_kwargs": {"_adapter_model_path": "elsewhere"}},
    ],
    ids=lambda argument: next(iter(argument)),
)  # fmt: skip
def test_arguments_that_choose_other_weights_are_refused(folder, argument):
    with pytest.raises(ValueError, match="drafts (are|cannot be) loaded|holds a PEFT adapter"):
        DSparkDraftModel.from_pretrained(folder, **argument)
    nothing = {"use_safetensors": True, "weights_only": True, "variant": None, "ignore_mismatched_sizes": False}
    DSparkDraftModel.from_pretrained(folder, **nothing)


# ---- no code


@pytest.mark.parametrize(
    "config_or_model", [DSparkConfig, AutoConfig, DSparkDraftModel, AutoModel, AutoModelForCausalLM]
)
def test_code_in_a_checkpoint_does_not_run_without_the_flag(folder, tmp_path, config_or_model):
    trace = tmp_path / "exploded"
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoTokenizer")
    change_config(folder, auto_map=dict.fromkeys(names, "evil.Evil"))
    config_or_model.from_pretrained(folder)
    with pytest.raises(ValueError, match="custom code"):
        AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)
    assert not trace.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_attention_named_by_a_checkpoint_is_not_fetched(folder, key):
    change_config(folder, **{key: "someone/kernel"})
    assert DSparkDraftModel.from_pretrained(folder).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("key", ["name_or_path", "_name_or_path"])
def test_name_in_a_config_is_not_believed_and_labels_are_left_out(folder, tmp_path, key):
    labels = {str(number): "x" for number in range(1000)}
    change_config(folder, **{key: str(tmp_path / "elsewhere"), "num_labels": 10**9, "id2label": labels})
    with bounded():
        draft = DSparkDraftModel.from_pretrained(folder)
    assert draft.name_or_path == str(folder) and len(draft.config.id2label) == 2


def test_package_never_unpickles_and_never_trusts_remote_code_by_itself():
    for path in Path(hf_dspark.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not modules & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}, path.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path.name
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert not (isinstance(node.value, ast.Constant) and node.value.value is True), path.name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path.name


# ---- no path out of the folder


def write_index(folder: Path, files: list[str]) -> None:
    """Replace the weights by an index that names such files, and put the weights where each of them leads."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: files[number % len(files)] for number, name in enumerate(tensors)}
    for file in files:
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        (folder / file).resolve().parent.mkdir(parents=True, exist_ok=True)
        save_file(held, (folder / file).resolve())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "file",
    [
        "{absolute}/outside.safetensors", "../outside.safetensors", "inside/../../outside.safetensors",
        "inside/weights.safetensors", "..safetensors", "weights.bin", "weights\n.safetensors", "a\\..\\b.safetensors",
    ],
)  # fmt: skip
def test_index_that_names_anything_but_a_file_beside_it_is_refused(folder, tmp_path, file):
    write_index(folder, [file.replace("{absolute}", str(tmp_path))])
    refused(folder, "model.safetensors.index.json", "weight_map must name a safetensors file in the same folder")


def test_index_that_names_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    write_index(folder, ["weights.safetensors"])
    (folder / "weights.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "weights.safetensors").symlink_to(tmp_path / "outside.safetensors")
    refused(folder, "weights.safetensors is a link that leads out of the folder")


@pytest.mark.parametrize(
    ("weight_map", "found"),
    [
        *((wrong, "weight_map must name") for wrong in ({}, None, ["a.safetensors"], "a.safetensors")),
        ({"fc.weight": 7}, "for each tensor, got 7"), ({"fc.weight": ["a.safetensors"]}, "got ['a.safetensors']"),
        ({"fc.weight": "gone.safetensors"}, "names gone.safetensors, which is not there"),
    ],
)  # fmt: skip
def test_unsound_index_is_refused(folder, weight_map, found):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "model.safetensors.index.json", found)


def test_index_and_files_that_disagree_are_refused(folder):
    write_index(folder, ["a.safetensors", "b.safetensors"])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    moved = next(name for name, file in index["weight_map"].items() if file == "a.safetensors")
    for change, name in (({moved: "b.safetensors"}, moved), ({"stray": "a.safetensors"}, "stray")):
        weight_map = index["weight_map"] | change
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        refused(folder, f"a.safetensors disagree about {name}")


@pytest.mark.parametrize(
    "key", ["configuration_files", "transformers_weights", "quantization_config", "fusion_config"]
)
@pytest.mark.parametrize("value", [["../config.4.0.0.json"], "../outside.safetensors", {"quant_method": "gptq"}])
def test_config_that_points_to_other_files_is_refused(folder, key, value):
    change_config(folder, **{key: value})
    refused(folder, f"config.json has the key '{key}'")


# ---- configs


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, 10**9) for field in (
            "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "block_size", "num_target_layers", "markov_rank", "draft_vocab_size",
        )),
        *((field, 10**30) for field in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")),
        *(("num_hidden_layers", number) for number in (513, 0, -1, 2.0, "2")),
        ("hidden_size", None), ("hidden_size", [32]), ("hidden_size", 64), ("vocab_size", 49),
        ("target_layer_ids", list(range(5000))), ("target_layer_ids", [0, 2.5]), ("target_layer_ids", "02"),
        ("layer_types", ["full_attention"] * 5000), ("layer_types", {"0": "full_attention"}),
        ("rms_norm_eps", 0.0), ("rms_norm_eps", "1e-6"), ("attention_dropout", 1.5), ("initializer_range", -0.1),
        ("embedding_scale", 0), ("embedding_scale", 1e39), ("logit_scale", {"__float__": "NaN"}),
        ("final_logit_softcapping", -30.0), ("hidden_act", "eval"), ("hidden_act", ["silu"]), ("dtype", "save"),
        ("dtype", "int8"), ("eos_token_id", "2"), ("qk_norm", "yes"), ("markov_head_type", "__class__"),
        ("draft_vocab_size", 24), ("rope_parameters", []), ("rope_parameters", "default"),
        *(("rope_parameters", {"rope_type": "default", "rope_theta": theta})
          for theta in ("1e6", None, 0, 1e300, True, {"__float__": "Infinity"})),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e6, "factor": "8"}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
        ("rope_parameters", {"rope_type": ["default"], "rope_theta": 1e6}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.01}),
        ("sts_temperatures", []), ("sts_temperatures", {"default": [1.0, -1.0, 1.0, 1.0]}),
        *((field, number) for field in ("conv_kernel_size", "markov_start") for number in (10**9, -1, "2", 1.5)),
        ("conv_kernel_size", 2), ("markov_state_size", 0), ("markov_state_size", 10**9),
        ("confidence_fits", {"default": [[1.0, 0.0]] * 5000}), ("confidence_fits", {"default": [[1.0, None]] * 4}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_unsound_value_in_a_config_is_refused_before_anything_is_built(folder, field, value):
    change_config(folder, **{field: value})
    message = refused(folder)
    assert field in message or "does not match its config" in message or "config.json" in message


@pytest.mark.parametrize("field", ["num_hidden_layers", "block_size", "rope_parameters", "dtype", "hidden_act"])
def test_error_about_a_config_names_folder_and_field(folder, field):
    change_config(folder, **{field: ["x"]})
    for load in (DSparkConfig.from_pretrained, DSparkDraftModel.from_pretrained):
        refused(folder, folder.name, field, load=load)
    with pytest.raises(ValueError, match=field):  # transformers reads the file, and does not say which
        AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("number", [1, 3, 300])
def test_layers_that_are_not_in_the_files_are_refused_before_they_are_built(folder, number):
    change_config(folder, num_hidden_layers=number, layer_types=None)
    refused(folder, "does not match its config", "num_hidden_layers")


@pytest.mark.parametrize("key", ["to_dict", "check_values", "num_slots", "per_layer_config", "attribute_map"])
def test_config_cannot_replace_a_part_of_its_class(folder, key):
    change_config(folder, **{key: "x"})
    refused(folder, f"config.json has the key '{key}'", load=DSparkConfig.from_pretrained)
    change_config(folder, **{"__post_init__": "x"})
    assert callable(DSparkConfig.__post_init__)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5}, {"architectures": {"a": 1}}, {"model_type": ["dspark"]}, {"model_type": None},
        {"architectures": ["Qwen3DSparkModel"], "model_type": 3}, {"model_type": "qwen3"},
        {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "layer_types": 7},
        {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "rope_parameters": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_config_that_only_pretends_to_be_a_known_kind_gives_one_error(folder, changes):
    change_config(folder, **changes)
    try:
        with bounded():
            DSparkDraftModel.from_pretrained(folder)
    except ValueError as error:
        assert folder.name in str(error) and error.__cause__ is None
    else:
        assert changes.get("architectures") != ["Gemma4DSparkModel"]


@pytest.mark.parametrize("wrong", [{"num_hidden_layers": 10**9}, {"rope_parameters": {"rope_theta": 0}}])
def test_eagle3_config_is_distrusted_as_well(tmp_path, wrong):
    sizes = {name: value for name, value in SIZES.items() if name != "markov_rank"} | {"num_hidden_layers": 1}
    Eagle3DraftModel(Eagle3Config(**sizes)).save_pretrained(tmp_path)
    change_config(tmp_path, **wrong)
    refused(tmp_path, load=Eagle3DraftModel.from_pretrained)


def test_constructor_takes_what_a_checkpoint_may_not(folder):
    """The limits of sizes hold for every config; what transformers passes in its own way is accepted."""
    config = DSparkConfig(**SIZES, attn_implementation="eager")
    assert config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"DSparkConfig.hidden_size must lie in \[1, 131072\]"):
        DSparkConfig(**SIZES | {"hidden_size": 10**9})


# ---- safetensors


def parts(folder: Path) -> tuple[dict, bytes]:
    """Return header and data of the weights."""
    content = (folder / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def write_parts(folder: Path, header: dict | bytes, data: bytes, length: int | None = None) -> None:
    header = json.dumps(header).encode() if isinstance(header, dict) else header
    length = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + data)


def twice(header: dict, data: bytes) -> tuple[bytes, bytes]:
    """List a tensor twice."""
    norm = json.dumps(header["norm.weight"] | {"data_offsets": [len(data), len(data) + 128]})
    return json.dumps(header)[:-1].encode() + f', "norm.weight": {norm}}}'.encode(), data + data[:128]


def facts(**changes):
    """Return a damage that says something else about a tensor."""
    return lambda header, data: (header | {"norm.weight": header["norm.weight"] | changes}, data)


DAMAGES = {
    "a byte short": lambda header, data: (header, data[:-1]),
    "a byte more": lambda header, data: (header, data + b"x"),
    "empty": lambda header, data: (b"", b""),
    "header is a list": lambda header, data: (b"[]", data),
    "header is nested deeply": lambda header, data: (b"{" * 100_000, data),
    "tensor is a number": lambda header, data: ({"fc.weight": 7}, data),
    "tensor twice": twice,
    **{f"shape {shape}": facts(shape=shape) for shape in ([33], [-32], [2**40, 2**40], "32")},
    **{f"type {dtype}": facts(dtype=dtype) for dtype in ("F16", "PICKLE", None)},  # of another size, unknown, missing
    **{f"ends {ends}": facts(data_offsets=ends) for ends in ([0, 128], [128, 0], [0, 2**63], [-1, 127])},
    # A claimed length of the header allocates nothing.
    **{
        f"length {length}": lambda header, data, length=length: (header, data, length)
        for length in (0, 2**20, 99_999_999, 2**32, 2**64 - 1)
    },
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_weights_are_refused(folder, damage):
    write_parts(folder, *damage(*parts(folder)))
    refused(folder, "model.safetensors is no intact safetensors file", "download or write it again")


@pytest.mark.parametrize("content", [b"1234567", b"\x80\x04" + b"." * 100])
def test_file_that_is_no_safetensors_is_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors is no intact safetensors file")


NORM = torch.ones(32)


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        *(("norm.weight", tensor, "of another shape: norm.weight") for tensor in (torch.ones(33), torch.tensor(1.0))),
        *(("norm.weight", NORM.to(dtype), "of another type: norm.weight") for dtype in (torch.bool, torch.complex64)),
        *(("norm.weight", NORM * value, "norm.weight has values that are not finite")
          for value in (torch.nan, -torch.inf)),
        *((name, NORM[:1], f"unexpected: {name[:3]}")
          for name in ("layers.2.mlp.up_proj.weight", "../../fc.weight", "__class__", "x" * 100_000)),
        ("", NORM[:1], "does not match its config"), ("d2t", torch.zeros(4, dtype=torch.long), "unexpected: d2t"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_tensor_that_the_config_does_not_know_is_refused(folder, name, tensor, found):
    save_file(load_file(folder / "model.safetensors") | {name: tensor}, folder / "model.safetensors")
    refused(folder, found)


def test_thousands_of_strange_tensors_give_a_short_error(folder):
    strange = {f"layers.{number}.strange": torch.ones(1) for number in range(5000)}
    save_file(load_file(folder / "model.safetensors") | strange, folder / "model.safetensors")
    refused(folder, "unexpected: layers.0.strange", "more")


@pytest.mark.parametrize("offsets", [[48, 0], [1, 0], [2**62, 0]])
def test_pruned_vocabulary_with_strange_tokens_is_refused(tmp_path, offsets):
    folder = tmp_path / "pruned"
    DSparkDraftModel(DSparkConfig(**SIZES, draft_vocab_size=2)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": torch.tensor(offsets)}, folder / "model.safetensors")
    refused(folder, "d2t")


# ---- fuzzing


@pytest.fixture(params=["hf_dspark", "deepspec", "speculators", "sglang", "eagle3"])
def whole(request, tmp_path, make_target) -> tuple[Path, Path]:
    """A calibrated draft in a format, in shards where that can be, and a folder for a damaged copy of it."""
    target, folder = make_target(), tmp_path / "draft"
    target.config.name_or_path = "someone/target"
    if request.param == "eagle3":
        Eagle3DraftModel(Eagle3Config.from_target(target.config, block_size=4)).save_pretrained(folder)
    else:
        draft = DSparkDraftModel(DSparkConfig(**SIZES, sts_temperatures={"default": [1.5] * 4}))
        if request.param == "hf_dspark":
            draft.save_pretrained(folder, max_shard_size="40KB")
        else:
            convert_checkpoint(draft.bind(target), folder, request.param, target)
    return folder, Path(shutil.copytree(folder, tmp_path / "damaged"))


def loaded_or_refused(folder: Path, path: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Load a damaged draft: one error that names the file or its folder, or the weights that were saved."""
    try:
        found = load_draft(folder).state_dict()
    except ValueError as error:
        message = str(error)
        assert path.name in message or str(folder) in message, message
        assert error.__cause__ is None and len(message) < 1500
        return False
    if path.suffix == ".safetensors":  # there is no checksum of its data
        assert all(torch.isfinite(tensor).all() for tensor in found.values() if tensor.is_floating_point())
    else:
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), path
    return True


@pytest.mark.one_in(5)
def test_every_file_that_is_cut_short_is_refused(whole):
    sound, folder = whole
    expected, draw = load_draft(sound).state_dict(), random.Random(4)
    for path in sorted(sound.iterdir()):
        content = path.read_bytes()
        for length in sorted({0, 1, 8, len(content) // 2, len(content) - 2, *draw.choices(range(len(content)), k=12)}):
            (folder / path.name).write_bytes(content[:length])
            assert not loaded_or_refused(folder, folder / path.name, expected), (path.name, length)
        (folder / path.name).unlink()
        assert not loaded_or_refused(folder, folder / path.name, expected) or path.name in MAY_BE_MISSING
        (folder / path.name).write_bytes(content)
    assert loaded_or_refused(folder, folder / "config.json", expected)


MAY_BE_MISSING = ("sts.json", "README.md")


@pytest.mark.one_in(5)
def test_flipped_bits_of_any_file_are_refused_or_change_no_weight_unseen(whole):
    sound, folder = whole
    expected, draw = load_draft(sound).state_dict(), random.Random(5)
    for path in sorted(sound.iterdir()):
        content = path.read_bytes()
        for turn in range(24):  # headers come first, and are short
            flipped, end = bytearray(content), len(content) if turn % 2 else min(len(content), 2000)
            for place in draw.choices(range(end), k=draw.choice((1, 1, 4))):
                flipped[place] ^= 1 << draw.randrange(8)
            (folder / path.name).write_bytes(flipped)
            loaded_or_refused(folder, folder / path.name, expected)
        (folder / path.name).write_bytes(content)


STRANGE_VALUES = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**62, 10**30, 0.0, -0.5, 1e-320, 1e300, 2.5, "", "x", "2", "default",
    "full_attention", "../../x", "\ud800", "x" * 5000, [], [0], [0, 0], [1.5], ["full_attention"] * 2, [[]], [None],
    list(range(3000)), {}, {"default": [1.0] * 4}, {"rope_type": "yarn"}, {"a": {"b": {"c": []}}},
]  # fmt: skip


def mutate(config: dict, draw: random.Random) -> dict:
    config = copy.deepcopy(config)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = config
        if draw.random() < 0.2:
            place = draw.choice([value for value in config.values() if isinstance(value, dict)] or [config])
        key = draw.choice([*place, "strange", "rope_scaling", "torch_dtype", "per_layer_config", "num_labels"])
        if draw.random() < 0.1:
            place.pop(key, None)
        else:
            place[key] = draw.choice(STRANGE_VALUES)
    return config


def test_config_mutations_are_refused_or_give_a_draft_that_drafts(folder, make_target):
    target = make_target()
    sound = read_config(folder) | {"sts_temperatures": {"default": [1.0] * 4}}
    draw = random.Random(3)
    refusals = 0
    with bounded(60, 128 * MEBIBYTE):
        for _ in range(400):
            config = mutate(sound, draw)
            (folder / "config.json").write_text(json.dumps(config))
            try:
                draft = DSparkDraftModel.from_pretrained(folder).bind(target)
            except ValueError as error:
                refusals += 1
                assert len(str(error)) < 1500 and error.__cause__ is None, config
            else:
                block = draft_one_block(draft)
                assert 0 <= int(block.min()) and int(block.max()) < 48
    assert 150 < refusals < 400


@torch.no_grad()
def draft_one_block(draft: DSparkDraftModel) -> torch.Tensor:
    features = torch.ones(1, 3, len(draft.config.target_layer_ids) * draft.config.hidden_size, dtype=draft.dtype)
    return draft.draft_block(new_context(torch.tensor([3]), features, SlotCache()), ChainSampler()).token_ids
