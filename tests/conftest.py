"""Tiny seeded models and the golden data, shared by all tests."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DSPARK_CACHE"] = os.path.join(os.devnull, "none")  # no table of this user, and none is kept

import json
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_dspark
from hf_dspark.scheduling.costs import ThroughputTable
from hf_dspark.scheduling.learning import LearnedAcceptance, LearnedCosts
from hf_dspark.scheduling.step_costs import known_profiles

# Two threads win nothing at these sizes, and lose much when anything else runs.
torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.hookimpl(tryfirst=True)  # before those that `-m` leaves out are left out
def pytest_collection_modifyitems(items):
    """Of a test marked `one_in(n)`, which says one thing of many cases, let every n-th case be no slow one."""
    seen = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None and item.get_closest_marker("slow") is None:
            place = seen[item.path, item.originalname]
            seen[item.path, item.originalname] += 1
            if place % mark.args[0]:
                item.add_marker(pytest.mark.slow)


@dataclass
class Golden:
    """One DeepSpec draft, its target, and what DeepSpec computed with them."""

    draft: hf_dspark.DSparkDraftModel
    target: PreTrainedModel
    io: dict[str, torch.Tensor]
    train: dict[str, torch.Tensor]
    info: dict

    @property
    def losses(self) -> dict[str, dict]:
        return self.info["train"].get("losses") or {"dspark_default": self.info["train"]["loss"]}


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture(scope="module")
def pair(fixtures):
    """A tiny trained target and its draft, which accepts most of its own: acceptance, cuts and rollback all happen."""
    folder = fixtures / "deepspec" / "trained"
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    return target, hf_dspark.DSparkDraftModel.from_pretrained(folder / "draft").eval()


@pytest.fixture
def golden():
    """Load a golden draft folder, bound to its target; training inputs are merged into `train`."""

    def load(name: str, **kwargs) -> Golden:
        root = FIXTURES / "deepspec"
        folder = root / name
        target = AutoModelForCausalLM.from_pretrained(
            root / ("gemma4/target_gemma4_text" if name.startswith("gemma4") else "target_qwen3")
        ).requires_grad_(False)
        draft = hf_dspark.DSparkDraftModel.from_pretrained(folder, **kwargs).bind(target).eval()
        train = load_file(folder / "train.safetensors")
        if not name.startswith("gemma4"):
            train |= load_file(root / "train_common.safetensors")
            layers = {id_: train[f"target_layer{id_}_output"] for id_ in (0, 1)} | {
                -1: train["target_embedding_output"]
            }
            train["target_hidden_states"] = torch.cat([layers[id_] for id_ in draft.config.target_layer_ids], dim=-1)
        info = json.loads((folder / "info.json").read_text())
        return Golden(draft, target, load_file(folder / "io.safetensors"), train, info)

    return load


@pytest.fixture(scope="session")
def make_target():
    """Build a tiny Qwen3 target with O(1) activations; the same seed gives the same weights."""

    def build(seed: int = 0, **overrides) -> Qwen3ForCausalLM:
        config = Qwen3Config(
            **{
                "vocab_size": 48,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "max_position_embeddings": 256,
                "initializer_range": 0.2,
                "tie_word_embeddings": False,
                "bos_token_id": None,
                "eos_token_id": None,
                "pad_token_id": 0,
            }
            | overrides
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Qwen3ForCausalLM(config).eval()

    return build


@pytest.fixture
def make_quantised(make_target, tmp_path, bitsandbytes):
    """Build a tiny target that bitsandbytes has quantised to 4 or 8 bits; options are those of its configuration."""

    def build(bits: int, **options) -> PreTrainedModel:
        make_target(hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=64).save_pretrained(tmp_path)
        options = {f"load_in_{bits}bit": True, "bnb_4bit_compute_dtype": torch.float32} | options
        return AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map="cpu", dtype=torch.float32, quantization_config=BitsAndBytesConfig(**options)
        ).eval()

    return build


@pytest.fixture(scope="session")
def bitsandbytes() -> None:
    """Skip where bitsandbytes is not installed, or computes on no device of this machine."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    try:
        layer = bitsandbytes.nn.Linear8bitLt(32, 32, has_fp16_weights=False, threshold=6.0)
        layer(torch.ones(1, 32))
    except Exception as error:  # whatever a library says where it has no kernels
        pytest.skip(f"bitsandbytes has no backend on this machine: {error}")


@pytest.fixture(scope="session")
def make_draft():
    """Build a tiny draft for a target. Every parameter is random, so that each of them matters."""

    def build(target: PreTrainedModel, seed: int = 1, **overrides) -> hf_dspark.DSparkDraftModel:
        config = hf_dspark.DSparkConfig.from_target(
            target.config,
            **{"num_hidden_layers": 2, "block_size": 4, "markov_rank": 6, "target_layer_ids": [0, 2]} | overrides,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = hf_dspark.DSparkDraftModel(config)
            with torch.no_grad():
                for name, parameter in draft.named_parameters():
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
                if config.draft_vocab_size is not None:
                    draft.d2t.copy_(torch.arange(config.draft_vocab_size))  # every second token
        return draft.bind(target).eval()

    return build


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A few words, turns as in ChatML, all ids below those of the tiny target."""
    words = ["<pad>", "<eos>", "<unk>", "user", "assistant", "what", "is", "up", "not", "much"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ' ' + message.content + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    return tokenizer


@pytest.fixture
def target(make_target) -> Qwen3ForCausalLM:
    return make_target()


@pytest.fixture
def draft(make_draft, target) -> hf_dspark.DSparkDraftModel:
    return make_draft(target)


@pytest.fixture(scope="module")
def wide_pair() -> tuple[Qwen3ForCausalLM, hf_dspark.DSparkDraftModel]:
    """A target and a draft whose MLPs and heads are large enough for the other ways to multiply; whole blocks."""
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=8192, hidden_size=128, intermediate_size=8192, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    config = hf_dspark.DSparkConfig.from_target(
        target.config, num_hidden_layers=1, block_size=7, target_layer_ids=[0, 1], mask_token_id=1, markov_rank=128
    )
    draft = hf_dspark.DSparkDraftModel(config).eval()
    draft.decoding = hf_dspark.DecodingOptions(policy=hf_dspark.FullBlock())
    return target, draft


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache of what was measured and learnt on this machine."""
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    known_profiles.cache_clear()
    yield tmp_path / "cache"
    known_profiles.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch, request):
    """By default, whole blocks are verified, whatever the clock says. Tests marked `learns` let rounds teach."""
    if request.node.get_closest_marker("learns") is None:
        flat = ThroughputTable((1, 4096), (1.0, 1.0))
        monkeypatch.setattr("hf_dspark.scheduling.step_costs.estimated_cost", lambda *_: flat)
        monkeypatch.setattr(LearnedCosts, "observe", lambda *_: None)
        monkeypatch.setattr("hf_dspark.scheduling.learning.CallKeys", lambda odd: lambda: 0)
        monkeypatch.setattr(LearnedAcceptance, "wants_trees", False)
        monkeypatch.setattr("hf_dspark.scheduling.learning.FIRST_PLAIN", 10**9)
        monkeypatch.setattr(LearnedAcceptance, "_observe_chains", lambda *_: None)
    if not torch.cuda.is_available():  # of a pretended device
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "pretended")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer():
    """Each id of the trained pair is a letter."""
    letters = string.ascii_letters + string.digits + ".,"
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="a", eos_token=".")
