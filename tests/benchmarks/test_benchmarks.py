"""The benchmarks: what they measure, on random tiny models, and their sums, by hand."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import FullBlock, ThroughputTable

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
bench, compare, domains, gemm, loop, speed = map(
    importlib.import_module, "bench compare domains gemm loop speed".split()
)
NATIVE = ["prompt lookup", "assistant", "transformers' DFlash"]
OURS = ["Eagle3", "DFlash", "DSpark", "DSpark, threshold", "DSpark, scheduled", "DSpark, default"]
MAX_NEW_TOKENS = 10
CELLS = [compare.Cell("math", 1, 0.0, 0), compare.Cell("math", 1, 1.0, 0), compare.Cell("prose", 2, 0.0, 8192)]
COST = ThroughputTable((1, 8), (100.0, 90.0))


def rows_of(first, count, length):
    return [
        {"prompt": " ".join(f"w{(first + row + place) % 40}" for place in range(length)), "completion": f"w{row} w3"}
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def random_models(tmp_path_factory):
    """Every model of a comparison, with random weights."""
    words = ["<eos>", "<pad>", "<mask>", "<unk>", *(f"w{number}" for number in range(40))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", mask_token="<mask>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=44, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=128, initializer_range=0.2, eos_token_id=0,
        pad_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    drafts = {name: domains.make_draft(name, target, tokenizer).eval() for name in domains.DRAFTS}
    fill_in = drafts["dflash_fill_in_2"].bind(target)
    native = domains.transformers_dflash(fill_in, target, tmp_path_factory.mktemp("native"))
    tasks = {"math": rows_of(20, 6, 5), "prose": rows_of(22, 6, 7)}
    ours = (drafts[name] for name in ("dspark_2", "dflash_2", "eagle3"))
    return domains.Models(target, tokenizer, tasks, *ours, native, Qwen3ForCausalLM(config).eval())


@pytest.fixture(scope="module")
def cells(random_models):
    with pytest.MonkeyPatch.context() as patch:
        profile = type("Profile", (), {"table": COST})
        patch.setattr(compare, "profile_throughput", lambda *_, **__: profile)
        *_, result = compare.compared(random_models, CELLS, [], 2, MAX_NEW_TOKENS)
    return json.loads(json.dumps(result))["cells"]


@pytest.mark.slow
def test_comparison_has_every_method_in_every_cell_and_greedy_tokens_are_those_of_plain_decoding(cells):
    for cell in cells:
        assert list(cell["methods"]) == ["plain", *NATIVE, *OURS]
        refused = [name for name, part in cell["methods"].items() if "refused" in part]
        assert refused == (NATIVE if cell["batch_size"] > 1 else [])
        parts = [part for part in cell["methods"].values() if "refused" not in part]
        assert all(part["identical_rows"] == (None if cell["temperature"] else part["rows"]) for part in parts)
        assert all(part["seconds_per_token"] > 0 for part in parts)


def test_speedup_is_the_ratio_of_the_medians():
    seconds = {"plain": (2.0, 4.0, 9.0), "DSpark": (1.0, 1.0, 4.0)}
    calls = {name: [bench.Call([[0] * 10], each, None, 10) for each in own] for name, own in seconds.items()}
    found = compare.method_summary(calls, "DSpark", True)
    assert (found["speedup"], found["tokens_per_pass"]) == (4.0, 1.0)


def test_speedups_name_both_baselines_where_both_were_timed():
    assert bench.speedups({"plain": 6.0, "own": 3.0}) == {"speedup": 2.0}
    found = bench.speedups({"plain": 6.0, "plain_packed": 4.0, "own": 3.0, "own_packed": 2.0})
    assert found == {"speedup": 3.0, "speedup_unpacked": 2.0, "speedup_same_kernels": 2.0}
    assert list(bench.ways_of(None, {"a": None}, "cuda")) == [("plain", None), ("own", "a")]


def test_arguments_of_a_part_are_its_options(tmp_path, monkeypatch):
    def part(names: tuple[str, ...], count: int = 3, dtype: bench.Dtype = "float32", quick: bool = False):
        """A part."""
        return {"found": [*names, count, dtype, quick]}

    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["x.py", "--names", "a", "b", "--count", "4", "--output", str(output)])
    bench.main("A script.", part)
    result = json.loads(output.read_text())
    assert result["found"] == ["a", "b", 4, "float32", False]
    assert result["provenance"]["command"].endswith("--names a b --count 4")


def test_replayed_rounds_have_the_mean_of_the_recording_whatever_their_order():
    recording = [7] * 30 + [0] * 60 + [2] * 10  # the first ones are the best
    drawn = [bench.representative(recording, 66, 1, seed) for seed in range(3)]
    assert [sum(numbers) / 20 for numbers in drawn] == pytest.approx([2.3] * 3)
    assert drawn[0] != drawn[1] and sorted(drawn[0]) != drawn[0]


def test_replay_measures_every_row_count_in_both_regimes(make_target, make_draft, monkeypatch):
    target = make_target()
    draft = make_draft(target)
    monkeypatch.setattr(bench, "random_pair", lambda *_, **__: (target, draft))
    target.generation_config.eos_token_id = None
    *_, result = loop.replay(rows=(2,), repetitions=1, context=8, new_tokens=12, draft_top_k=8)
    assert [(cell["rows"], cell["regime"]) for cell in result["cells"]] == [(2, "greedy"), (2, "truncated")]
    for cell in result["cells"]:
        found = bench.speedups(cell["ms_per_token"])
        assert {name: cell[name] for name in found} == pytest.approx(found)


def test_speed_compares_outputs_and_names_both_baselines(random_models):
    models = random_models.target, random_models.dspark, [[4, 5]]
    (cell,) = speed.measure(*models, {"full block": FullBlock()}, 0.0, 6)
    assert cell["identical_outputs"] == 1
    assert set(cell["ms_per_token"]) == {"plain", "plain_packed", "own", "own_packed"}
