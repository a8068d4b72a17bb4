"""The comparison and its neighbours: what they measure, on random tiny models, and their sums, by hand."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import FullBlock, ThroughputTable

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
compare, compare_drafts, compare_prompts, compare_summary, domains, drafting, loop, pair, speed = map(
    importlib.import_module,
    "compare compare_drafts compare_prompts compare_summary domains drafting loop pair speed".split(),
)
NATIVE = ["prompt lookup", "assistant", "transformers' DFlash"]
OURS = ["Eagle3", "DFlash", "DSpark", "DSpark, threshold", "DSpark, scheduled", "DSpark, default"]
MAX_NEW_TOKENS = 10
CELLS = [compare.Cell("math", 1, 0.0, 0), compare.Cell("math", 1, 1.0, 0), compare.Cell("prose", 2, 0.0, 8192)]
COST = ThroughputTable((1, 8), (100.0, 90.0))


@pytest.fixture(scope="module")
def word_tokenizer():
    words = ["<eos>", "<pad>", "<mask>", "<unk>", *(f"w{number}" for number in range(40))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", mask_token="<mask>", unk_token="<unk>"
    )


def rows_of(first, count, length):
    return [
        {"prompt": " ".join(f"w{(first + row + place) % 40}" for place in range(length)), "completion": f"w{row} w3"}
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def small_target():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=44, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=128, initializer_range=0.2, eos_token_id=0,
        pad_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def random_models(small_target, word_tokenizer, tmp_path_factory):
    """Every model of a comparison, with random weights."""
    drafts = {name: domains.make_draft(name, small_target, word_tokenizer).eval() for name in domains.DRAFTS}
    drafts["dspark_2"].config.sts_temperatures = {"greedy": 7 * [1.0], "sampled": 7 * [1.0]}
    native = compare_drafts.transformers_dflash(
        drafts["dflash_fill_in_2"].bind(small_target), small_target, tmp_path_factory.mktemp("native")
    )
    size = drafts["dspark_2"].num_parameters()
    assistant = Qwen3ForCausalLM(compare_drafts.assistant_config(small_target.config, size)).eval()
    tasks = {"math": rows_of(20, 6, 5), "prose": rows_of(22, 6, 7)}
    ours = (drafts[name] for name in ("dspark_2", "dflash_2", "eagle3"))
    return compare_drafts.Models(small_target, word_tokenizer, tasks, *ours, native, assistant)


@pytest.fixture(scope="module")
def result(random_models, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(compare, "measured_cost", lambda *_: COST)
    output = tmp_path_factory.mktemp("results") / "compare.json"
    returned = compare.compare(random_models, CELLS, output, num_prompts=2, max_new_tokens=MAX_NEW_TOKENS)
    patch.undo()
    assert json.loads(output.read_text()) == returned
    return returned


def test_comparison_has_every_method_in_every_cell_and_says_which_cannot_batch(result):
    for cell in result["cells"]:
        assert list(cell["methods"]) == ["plain", *NATIVE, *OURS]
        refused = [name for name, part in cell["methods"].items() if "refused" in part]
        assert refused == (NATIVE if cell["batch_size"] > 1 else [])
    text = compare_summary.markdown(result)
    assert text.count("| – |") == len(NATIVE) and "| DSpark, scheduled |" in text


def test_all_methods_write_equally_many_tokens_and_greedy_ones_the_same_as_plain_decoding(result):
    for cell in result["cells"]:
        parts = [part for part in cell["methods"].values() if "refused" not in part]
        assert all(part["identical_rows"] == (None if cell["temperature"] else part["rows"]) for part in parts)
        calls = [part["calls"] for part in parts]
        assert len({tuple(call["tokens"]) for call in calls}) == 1
        assert all(len(values) == cell["num_calls"] == 2 for call in calls for values in call.values())
        assert all(min(call["seconds"]) > 0 for call in calls)
        if cell["temperature"]:
            assert set(calls[0]["tokens"]) == {MAX_NEW_TOKENS * cell["batch_size"]}


def test_long_context_is_bounded_by_the_positions_of_the_target(result, random_models):
    assert result["cells"][2]["prompt_tokens"]["median"] == 128 - MAX_NEW_TOKENS == result["longest_prompt"]
    compare.give_positions(random_models, 300)
    assert compare_prompts.room_for_prompts(random_models.target, MAX_NEW_TOKENS) == 300 - MAX_NEW_TOKENS
    compare.give_positions(random_models, 128)
    with pytest.raises(ValueError, match="128 positions"):
        compare_prompts.room_for_prompts(random_models.target, 128)


def test_transformers_refuses_batches_for_every_method_that_is_marked_so(random_models):
    for method in compare.methods_for(random_models, COST, 0.5):
        if method.is_native:
            with pytest.raises(ValueError, match="batch"):
                compare.decode(random_models.target, method, [[4, 5], [6, 7]], 0, max_new_tokens=4, do_sample=False)


def test_packed_comparison_gives_the_same_kernels_to_all_but_plain_as_it_is(random_models):
    methods = compare.methods_for(random_models, COST, 0.5, packed=True)
    assert [method.name for method in methods if not method.packed] == ["plain, as it is"]
    assert {method.name for method in methods} - {"plain, as it is"} == {"plain", *NATIVE, *OURS}
    options = {"max_new_tokens": 6, "do_sample": False}
    texts = {tuple(compare.decode(random_models.target, m, [[4, 5]], 0, **options)[0].token_ids[0]) for m in methods}
    assert len(texts) == 1


def test_interrupted_comparison_goes_on_where_it_stopped(random_models, tmp_path, monkeypatch):
    few = replace(random_models, dflash=None, eagle3=None, fill_in=None, assistant=None)
    output, honest, calls, measured = tmp_path / "compare.json", compare.compared_call, [], []

    def interrupted(*args, **options):
        if options["max_new_tokens"] == MAX_NEW_TOKENS:
            calls.append(args[3])
            if len(calls) == 2:
                raise KeyboardInterrupt
        return honest(*args, **options)

    monkeypatch.setattr(compare, "compared_call", interrupted)
    monkeypatch.setattr(compare, "measured_cost", lambda *_: measured.append(1) or COST)
    with pytest.raises(KeyboardInterrupt):
        compare.compare(few, CELLS[:1], output, 2, MAX_NEW_TOKENS)
    (partial,) = tmp_path.glob("compare.json.partial.jsonl")
    kept = [json.loads(line) for line in partial.read_text().splitlines()]
    found = compare.compare(few, CELLS[:1], output, 2, MAX_NEW_TOKENS)
    seconds = found["cells"][0]["methods"]["plain"]["calls"]["seconds"]
    assert calls == [0, 1, 1] and seconds[0] == kept[-1]["runs"]["plain"]["seconds"] and len(seconds) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]


def test_preceding_text_comes_from_other_rows_and_ends_right_before_the_prompt(word_tokenizer):
    rows = [{"prompt": "w1", "completion": "w9"}, {"prompt": "w2 w3", "completion": None}, {"prompt": "w4 w5"}]
    ids = compare_prompts.prompt_ids(rows, 0, word_tokenizer, 6)
    assert word_tokenizer.decode(ids) == "w3 w4 w5 w2 w3 w1"
    assert compare_prompts.prompt_ids(rows, 0, word_tokenizer, 0) == word_tokenizer("w1")["input_ids"]
    with pytest.raises(ValueError, match="two prompts or more"):
        compare_prompts.prompt_ids(rows[:1], 0, word_tokenizer, 6)


def call(seconds, tokens):
    run = {"prefill_seconds": 0.1, "identical": 1, "passes": 10}
    runs = {name: run | {"seconds": value, "tokens": tokens} for name, value in seconds.items()}
    return {"prompt_tokens": [5], "runs": runs}


def test_speedup_is_the_ratio_of_the_medians():
    calls = [call({"plain": plain, "DSpark": own}, 10) for plain, own in ((2.0, 1.0), (4.0, 1.0), (9.0, 4.0))]
    found = compare_summary.method_summary(calls, "DSpark")
    assert (found["speedup"], found["paired_speedup"]["median"], found["tokens_per_pass"]) == (4.0, 2.25, 1.0)
    assert found["seconds_per_token"] == {"median": 0.1, "lower_quartile": 0.1, "upper_quartile": 0.25}


def test_speedups_name_both_baselines_where_both_were_timed():
    assert pair.speedups({"plain": 6.0, "own": 3.0}) == {"speedup": 2.0}
    found = pair.speedups({"plain": 6.0, "plain_packed": 4.0, "own": 3.0, "own_packed": 2.0})
    assert found == {"speedup": 3.0, "speedup_unpacked": 2.0, "speedup_same_kernels": 2.0}
    assert [way.name for way in pair.ways_of("both")] == ["plain", "plain_packed", "own", "own_packed"]
    assert pair.ways_of("both", "cuda") == pair.ways_of("as_it_is")


def test_assistant_has_about_as_many_parameters_as_the_draft(random_models):
    size = random_models.dspark.num_parameters()
    assert random_models.assistant.num_parameters() == pytest.approx(size, rel=0.1)
    with pytest.raises(ValueError, match="larger draft"):
        compare_drafts.assistant_config(random_models.target.config, 2000)
    row = compare_drafts.assistant_row({"prompt_ids": [4, 5], "completion_ids": [6, 0]})
    assert row == {"input_ids": [4, 5, 6, 0], "labels": [-100, -100, 6, 0]}


def test_folders_tell_how_their_model_was_trained(tmp_path):
    domains.note_recipe(tmp_path / "a", {"steps": 1, "num_anchors": 64})
    domains.note_recipe(tmp_path / "a", {"steps": 1, "num_anchors": 64})
    with pytest.raises(ValueError, match=r"trained in another way, which differs in num_anchors \(64 there, 32 now\)"):
        domains.note_recipe(tmp_path / "a", {"steps": 1, "num_anchors": 32})
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="b does not say how its model was trained"):
        domains.note_recipe(tmp_path / "b", {})


def test_missing_and_malformed_data_are_named_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="must hold a folder target, and DOMAIN_train.jsonl"):
        compare_drafts.trained_models(tmp_path, compare_drafts.Recipe())
    (tmp_path / "math_train.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match="math_train.jsonl line 2 is not JSON"):
        domains.read_rows(tmp_path / "math_train.jsonl")


def test_drafting_with_candidates_is_timed_against_the_whole_vocabulary(random_models):
    draft = random_models.dspark.bind(random_models.target)
    cells = drafting.drafting_costs(draft, [8, 16], context_length=12, repetitions=2)
    assert set(cells.pop("new_token_ms")) == {"8", "16"} and set(cells) == {"greedy", "temperature 1"}
    for cell in cells.values():
        for part in cell["candidates"].values():
            assert part["ratio"] == pytest.approx(part["ms"] / cell["full_ms"]) and part["ratio"] > 0
    assert draft.config.draft_top_k is None


def test_loss_of_tau_is_zero_when_all_tokens_are_candidates_and_not_when_one_is(random_models):
    target, draft = random_models.target, random_models.dspark
    size, prompts = target.config.vocab_size, ["w1 w2 w3", "w4 w5"]
    losses = drafting.tau_losses(
        target, draft, prompts, random_models.tokenizer, [1, size], max_new_tokens=16, num_seeds=2
    )
    assert losses["greedy"]["candidates"][str(size)]["loss"] == 0
    assert losses["sampled"]["candidates"]["1"]["loss"] != 0 and draft.config.draft_top_k is None


def test_compiled_drafting_is_timed_beside_drafting_as_it_is(random_models, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch, "compile", lambda function, mode: compiled.append((function.__name__, mode)) or function
    )
    draft = random_models.dspark.bind(random_models.target)
    found = drafting.compiled_costs(draft, ["default"], context_length=8, repetitions=1)["default"]
    assert compiled == [("backbone", "default"), ("sample_block", "default")]
    assert found["ratio"] == pytest.approx(found["ms"] / found["eager_ms"]) and found["seconds_to_compile"] > 0
    assert not {"backbone", "sample_block"} & vars(draft).keys()


def test_replayed_rounds_have_the_mean_of_the_recording_whatever_their_order():
    recording = [7] * 30 + [0] * 60 + [2] * 10  # the first ones are the best
    drawn = [pair.representative(recording, 20, seed) for seed in range(3)]
    assert [sum(numbers) / 20 for numbers in drawn] == pytest.approx([2.3] * 3)
    assert drawn[0] != drawn[1] and sorted(drawn[0]) != drawn[0]


def test_every_row_of_a_batch_accepts_what_was_recorded(random_models):
    target, draft = random_models.target, random_models.dspark
    options = {"max_new_tokens": 13, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    with pair.decoding(draft, FullBlock()), pair.replaying([3, 2]):
        target.generate(torch.tensor([[4, 5], [6, 7]]), assistant_model=draft, **options)
    assert draft.last_stats.accepted[:4] == [3, 2, 3, 2] and draft.decoding.policy is None


def test_replay_measures_every_row_count_in_both_regimes(make_target, make_draft, monkeypatch):
    target = make_target()
    draft, written = make_draft(target), []
    monkeypatch.setattr(sys, "argv", "loop.py replay --rows 2 --repetitions 1 --context 8 --new_tokens 12".split())
    monkeypatch.setattr(loop, "random_pair", lambda *_, **__: (target, draft))
    monkeypatch.setattr(loop, "CANDIDATES", 8)
    monkeypatch.setattr(loop, "write_result", lambda path, result: written.append(result))
    loop.main()
    cells = written[-1]["cells"]
    assert [(cell["rows"], cell["regime"]) for cell in cells] == [(2, "greedy"), (2, "truncated")]
    for cell in cells:
        assert cell["ms_per_token"].keys() == written[-1]["ways"].keys()
        assert cell.items() >= pair.speedups(cell["ms_per_token"]).items()


def test_speed_compares_outputs_and_names_both_baselines(random_models):
    models = random_models.target, random_models.dspark, random_models.tokenizer
    (cell,) = speed.measure(*models, ["w1 w2"], {"full block": FullBlock()}, 0.0, 6)
    assert cell.identical_outputs == 1 and set(cell.ms_per_token) == {"plain", "plain_packed", "own", "own_packed"}
    assert cell.speedup_same_kernels == pair.speedups(cell.ms_per_token)["speedup_same_kernels"]
