"""The comparison benchmark: the whole chain with tiny models, from training to the report; its sums, by hand."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import FullBlock
from hf_dspark.evaluation.measurements import compared_methods, measurements
from hf_dspark.evaluation.plots import figure_4_block_size
from hf_dspark.evaluation.results import describe_target
from hf_dspark_cli import main as hf_dspark_main

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
compare, compare_drafts, compare_prompts, compare_summary, domains, drafting, loop, tau_by_block_size = (
    importlib.import_module(name)
    for name in (
        "compare", "compare_drafts", "compare_prompts", "compare_summary", "domains", "drafting", "loop",
        "tau_by_block_size",
    )
)  # fmt: skip
NATIVE = ["prompt lookup", "assistant", "transformers' DFlash"]
OURS = ["Eagle3", "DFlash", "DSpark", "DSpark, threshold", "DSpark, scheduled"]
MAX_NEW_TOKENS = 10


@pytest.fixture(scope="module")
def word_tokenizer():
    words = ["<eos>", "<pad>", "<mask>", "<unk>", *(f"w{number}" for number in range(40))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", mask_token="<mask>", unk_token="<unk>"
    )


def write_rows(path, first, count, length):
    rows = [
        {
            "prompt": " ".join(f"w{(first + row + place) % 40}" for place in range(length)),
            "completion": f"w{row % 40} w3",
        }
        for row in range(count)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory, word_tokenizer):
    """A folder as `benchmarks/domains.py` needs it: a target, and texts of three domains."""
    folder = tmp_path_factory.mktemp("domains")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=44, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=128, initializer_range=0.2, eos_token_id=0,
        pad_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    word_tokenizer.save_pretrained(folder / "target")
    for number, domain in enumerate(domains.DOMAINS):
        write_rows(folder / f"{domain}_train.jsonl", 3 * number, 10, 6)
        write_rows(folder / f"{domain}_test.jsonl", 20 + number, 6, 5 + number)
    return folder


@pytest.fixture(scope="module")
def trained(work_dir):
    patch = pytest.MonkeyPatch()
    patch.setattr(domains, "NUM_EVAL_ROWS", 8)
    patch.setattr(domains.DSparkTrainer, "evaluate", lambda self: None)
    recipe = compare_drafts.Recipe(num_prompts=10, answer_tokens=12, steps=1, calibration_prompts=2)
    yield compare_drafts.trained_models(work_dir, recipe), recipe
    patch.undo()


CELLS = [
    compare.Cell("math", 1, 0.0, 0),
    compare.Cell("math", 1, 1.0, 0),
    compare.Cell("prose", 2, 0.0, 8192),
]


@pytest.fixture(scope="module")
def result(trained, tmp_path_factory):
    output = tmp_path_factory.mktemp("results") / "compare.json"
    returned = compare.compare(trained[0], CELLS, output, num_prompts=2, max_new_tokens=MAX_NEW_TOKENS)
    assert json.loads(output.read_text()) == returned
    return output, returned


# The whole chain


def test_half_of_what_drafts_learn_from_is_what_the_target_says_greedily(trained, work_dir):
    models, recipe = trained
    rows = compare_drafts.answered(models.target, models.tokenizer, work_dir, recipe)
    num_domains = len(domains.DOMAINS)
    greedy = [row for index, row in enumerate(rows) if index % (2 * num_domains) >= num_domains]
    assert 2 * len(greedy) == len(rows) == 2 * models.facts["greedy_rows"]
    for row in greedy[:num_domains]:
        prompt = torch.tensor([row["prompt_ids"]])
        output = models.target.generate(prompt, do_sample=False, max_new_tokens=recipe.answer_tokens)
        assert output[0, prompt.shape[1] :].tolist() == row["completion_ids"]


def test_all_methods_write_equally_many_tokens(result):
    for cell in result[1]["cells"]:
        tokens = {name: tuple(part["calls"]["tokens"]) for name, part in cell["methods"].items() if "calls" in part}
        assert len(set(tokens.values())) == 1
        if cell["temperature"]:
            assert set(tokens["plain"]) == {MAX_NEW_TOKENS * cell["batch_size"]}


def test_comparison_has_every_method_in_every_cell_when_drafts_are_trained(result):
    for cell in result[1]["cells"]:
        assert list(cell["methods"]) == ["plain", *NATIVE, *OURS]


def test_methods_are_marked_as_refused_when_they_cannot_batch(result):
    single, _, batch = result[1]["cells"]
    assert not any("refused" in part for part in single["methods"].values())
    assert [name for name, part in batch["methods"].items() if "refused" in part] == NATIVE


def test_transformers_refuses_batches_for_every_method_that_is_marked_so(trained):
    models = trained[0]
    cost = compare.ThroughputTable((1, 8), (100.0, 90.0))
    for method in compare.methods_for(models, cost, 0.5):
        if method.is_native:
            with pytest.raises(ValueError, match="batch"):
                compare.decode(models.target, method, [[4, 5], [6, 7]], 0, max_new_tokens=4, do_sample=False)


def test_greedy_rows_of_all_methods_are_identical_to_plain_decoding(result):
    for cell in result[1]["cells"]:
        for part in cell["methods"].values():
            if "refused" not in part:
                assert part["identical_rows"] == (None if cell["temperature"] else part["rows"])


def test_calls_keep_their_raw_times_and_tokens_within_the_limit(result):
    for cell in result[1]["cells"]:
        for part in cell["methods"].values():
            if "refused" not in part:
                assert all(len(values) == cell["num_calls"] == 2 for values in part["calls"].values())
                assert all(0 < tokens <= MAX_NEW_TOKENS * cell["batch_size"] for tokens in part["calls"]["tokens"])
                assert min(part["calls"]["seconds"]) > 0


def test_long_context_is_bounded_by_the_positions_of_the_target_and_said_so(result):
    cell = result[1]["cells"][2]
    assert cell["prompt_tokens"]["median"] == 128 - MAX_NEW_TOKENS == result[1]["longest_prompt"]
    assert "8192 were asked for, the target has room for 118" in compare_summary.markdown(result[1])


def test_models_read_as_many_positions_as_they_are_given(trained, tmp_path):
    models = trained[0]
    try:
        compare.give_positions(models, 300)
        cell = compare.Cell("math", 1, 0.0, 8192)
        longer = compare.compare(models, [cell], tmp_path / "long.json", num_prompts=1, max_new_tokens=MAX_NEW_TOKENS)
    finally:
        compare.give_positions(models, 128)
    (found,) = longer["cells"]
    assert found["prompt_tokens"]["median"] == 300 - MAX_NEW_TOKENS == longer["longest_prompt"]
    assert all(part["identical_rows"] == 1 for part in found["methods"].values())


def test_table_marks_what_cannot_batch_and_names_the_lowest_scheduled_speedup(result):
    text = compare_summary.markdown(result[1])
    lowest = min(cell["methods"]["DSpark, scheduled"]["speedup"] for cell in result[1]["cells"])
    assert result[1]["scheduled_minimum"]["speedup"] == lowest
    assert f"Lowest speed-up of the scheduled line: {lowest:.2f}x" in text
    assert text.count("| – |") == len(NATIVE)


def test_report_shows_the_comparison(result, tmp_path):
    assert hf_dspark_main(["report", str(result[0]), "--output_dir", str(tmp_path / "page")]) in (0, None)
    text = (tmp_path / "page" / "report.md").read_text()
    assert "Against the alternatives" in text
    single = [cell for cell in CELLS if cell.batch_size == 1]
    assert text.count("transformers' DFlash |") == len(single) and text.count("| DSpark |") == len(CELLS)
    assert text.count(f"Not in batches: {', '.join(NATIVE)} (transformers' assisted generation takes one") == 1


def test_comparisons_of_two_machines_name_them(result):
    here = result[1]
    there = here | {"provenance": here["provenance"] | {"device": "another machine"}}
    cells = {each.cell for each in compared_methods([here, there])}
    assert sum(cell.endswith("; another machine") for cell in cells) == len(cells) / 2
    assert not any("machine" in each.cell for each in compared_methods([there, there]))


def test_assistant_has_about_as_many_parameters_as_the_draft(trained):
    models = trained[0]
    assert models.assistant.num_parameters() == pytest.approx(models.dspark.num_parameters(), rel=0.1)
    assert models.assistant.get_input_embeddings().weight is models.assistant.get_output_embeddings().weight


def test_models_are_not_trained_again_when_they_are_in_the_folder(trained, work_dir, monkeypatch):
    models, recipe = trained

    def fail(*args, **kwargs):
        raise AssertionError("trains again")

    monkeypatch.setattr(compare_drafts.Trainer, "train", fail)
    again = compare_drafts.trained_models(work_dir, recipe)
    for name in ("dspark", "dflash", "eagle3", "fill_in", "assistant"):
        assert compare.fingerprint(getattr(again, name)) == compare.fingerprint(getattr(models, name))
    assert again.dspark.config.sts_temperatures == models.dspark.config.sts_temperatures


# Block sizes


@pytest.fixture(scope="module")
def short_blocks(trained, work_dir):
    """DSpark and DFlash drafts of four tokens, by kind."""
    return {kind: draft_of(trained, work_dir, name, block_size=4) for kind, name in tau_by_block_size.DRAFTS.items()}


def draft_of(trained, work_dir, name, **changes):
    models, recipe = trained[0], replace(trained[1], **changes)
    rows = compare_drafts.answered(models.target, models.tokenizer, work_dir, recipe)
    return compare_drafts.trained_draft(name, models.target, models.tokenizer, rows, work_dir, recipe)


def test_drafts_of_another_block_size_are_kept_beside_the_others(trained, work_dir, short_blocks):
    assert [draft.config.block_size for draft in short_blocks.values()] == [4, 4]
    again = draft_of(trained, work_dir, "dspark_2", block_size=4)
    assert compare.fingerprint(again) == compare.fingerprint(short_blocks["dspark"])
    assert draft_of(trained, work_dir, "dspark_2").config.block_size == 7


def test_later_tokens_of_longer_blocks_weigh_more(trained, work_dir, short_blocks):
    def decay(folder):
        return torch.load(work_dir / folder / "checkpoint-1" / "training_args.bin", weights_only=False).position_decay

    assert decay("dspark_2_4_1") < decay("dspark_2_1") == 4.0
    assert decay("eagle3_1") == 4.4814  # its steps are weighed by themselves


def test_tokens_by_block_size_have_the_form_that_figure_4_reads(trained, work_dir, short_blocks):
    models, rows = trained[0], []
    for drafts in ({"dspark": models.dspark, "dflash": models.dflash}, short_blocks):
        for kind, draft in drafts.items():
            rows += tau_by_block_size.rows_of(kind, draft, models.target, models.tokenizer, work_dir, 2, 8)
    result = {"target": "tiny", "block_sizes": rows, "ratio_to_dflash": tau_by_block_size.ratio_to_dflash(rows)}
    found = measurements([result])
    assert len(found) == 2 * 2 * 2 * len(domains.DOMAINS)
    assert {(each.draft.kind, each.draft.block_size, each.setting.regime) for each in found} == {
        (kind, size, regime) for kind in ("DSpark", "DFlash") for size in (4, 7) for regime in domains.REGIMES
    }
    figure = figure_4_block_size([result])
    assert len([axis for axis in figure.axes if axis.get_visible()]) == 2 * len(domains.DOMAINS)
    assert tau_by_block_size.markdown(result) == tau_by_block_size.markdown(json.loads(json.dumps(result)))


def test_ratio_to_dflash_is_taken_where_both_were_measured():
    rows = [
        {"kind": kind, "regime": "greedy", "block_size": size, "tau": {"math": tau}}
        for kind, size, tau in (("dspark", 4, 3.0), ("dspark", 7, 4.0), ("dflash", 7, 3.2), ("dflash", 15, 3.0))
    ]
    assert tau_by_block_size.ratio_to_dflash(rows) == {"greedy": {"math": {7: 1.25}}}


# Folders that scripts share


def test_drafts_trained_in_another_way_are_not_taken_for_ones_own(trained, work_dir):
    with pytest.raises(ValueError, match=r"dspark_2_1 holds a model .* differs in num_anchors \(64 there, 32 now\)"):
        draft_of(trained, work_dir, "dspark_2", num_anchors=32)
    models = trained[0]
    with pytest.raises(ValueError, match=r"assistant_1 holds a model .* differs in num_rows"):
        compare_drafts.train_assistant(models.target, models.tokenizer, [], work_dir / "assistant_1", 1, 1)


def test_folder_that_does_not_say_how_its_model_was_trained_is_refused(trained, work_dir):
    (work_dir / "eagle3_3").mkdir()
    with pytest.raises(ValueError, match="eagle3_3 does not say how its model was trained"):
        draft_of(trained, work_dir, "eagle3", steps=3)
    (work_dir / "eagle3_3").rmdir()


def test_malformed_rows_are_named_by_file_and_line(tmp_path):
    (tmp_path / "math_train.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match="math_train.jsonl line 2 is not JSON"):
        domains.read_rows(tmp_path / "math_train.jsonl")


# Interruptions


def test_interrupted_comparison_goes_on_where_it_stopped(trained, tmp_path, monkeypatch):
    models = compare_drafts.Models(trained[0].target, trained[0].tokenizer, trained[0].tasks, trained[0].dspark)
    output, honest, calls = tmp_path / "compare.json", compare.compared_call, []

    def interrupted(*args, **options):
        if options["max_new_tokens"] == MAX_NEW_TOKENS:
            calls.append(args[3])
            if len(calls) == 2:
                raise KeyboardInterrupt
        return honest(*args, **options)

    monkeypatch.setattr(compare, "compared_call", interrupted)
    monkeypatch.setattr(compare, "profile_throughput", profile_once := OnlyOnce(compare.profile_throughput))
    with pytest.raises(KeyboardInterrupt):
        compare.compare(models, CELLS[:1], output, 2, MAX_NEW_TOKENS)
    kept = [json.loads(line) for line in (tmp_path / "compare.json.partial.jsonl").read_text().splitlines()]
    result = compare.compare(models, CELLS[:1], output, 2, MAX_NEW_TOKENS)
    assert calls == [0, 1, 1] and profile_once.calls == 1
    seconds = result["cells"][0]["methods"]["plain"]["calls"]["seconds"]
    assert seconds[0] == kept[-1]["runs"]["plain"]["seconds"] and len(seconds) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]


class OnlyOnce:
    """Calls through, and counts."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


# Parts


def call(seconds, tokens, identical=1, passes=10):
    run = {"prefill_seconds": 0.1, "identical": identical, "passes": passes}
    return {
        "prompt_tokens": [5],
        "runs": {name: run | {"seconds": value, "tokens": tokens} for name, value in seconds.items()},
    }


def test_speedup_is_the_ratio_of_the_medians():
    calls = [
        call({"plain": 2.0, "DSpark": 1.0}, 10),
        call({"plain": 4.0, "DSpark": 1.0}, 10),
        call({"plain": 9.0, "DSpark": 4.0}, 10),
    ]
    found = compare_summary.method_summary(calls, "DSpark")
    assert found["speedup"] == 4.0
    assert found["paired_speedup"]["median"] == 2.25
    assert found["seconds_per_token"] == {"median": 0.1, "lower_quartile": 0.1, "upper_quartile": 0.25}
    assert found["tokens_per_pass"] == 1.0


def test_leader_is_compared_with_the_best_of_transformers_even_if_that_is_plain_decoding():
    found = {"plain": {"speedup": 1.0}, "prompt lookup": {"speedup": 0.5}, "DSpark": {"speedup": 1.5}}
    methods = {"plain": False, "prompt lookup": True, "DSpark": False}
    assert compare_summary.leaders(found, methods) == {"fastest": "DSpark", "dspark_over_best_native": 1.5}


def test_lead_over_transformers_is_taken_call_by_call_as_well():
    calls = [
        call({"plain": 2.0, "prompt lookup": 1.2, "DSpark": 1.0}, 10),
        call({"plain": 8.0, "prompt lookup": 6.0, "DSpark": 4.0}, 20),
        call({"plain": 9.0, "prompt lookup": 2.0, "DSpark": 1.0}, 30),
    ]
    methods = {"plain": False, "prompt lookup": True, "DSpark": False}
    found = {name: compare_summary.method_summary(calls, name) for name in methods}
    ratios = compare_summary.ahead_call_by_call(found, methods)
    assert ratios == pytest.approx({"median": 1.5, "lower_quartile": 1.35, "upper_quartile": 1.75})


def test_passes_through_the_target_are_counted_when_the_loop_is_ours(trained):
    models = trained[0]
    plain, ours = compare.Method("plain"), compare.Method("DSpark", models.dspark, FullBlock())
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert compare.decode(models.target, plain, [[4, 5]], 0, **options)[1] == 6
    timed, passes = compare.decode(models.target, ours, [[4, 5]], 0, **options)
    assert passes == 1 + timed.statistics.rounds


def test_every_method_is_first_once_when_the_order_rotates():
    methods = [compare.Method(name) for name in "abc"]
    orders = ["".join(method.name for method in compare.rotated(methods, index)) for index in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_preceding_text_comes_from_other_rows_and_ends_right_before_the_prompt(word_tokenizer):
    rows = [{"prompt": "w1", "completion": "w9"}, {"prompt": "w2 w3", "completion": None}, {"prompt": "w4 w5"}]
    ids = compare_prompts.prompt_ids(rows, 0, word_tokenizer, 6)
    assert word_tokenizer.decode(ids) == "w3 w4 w5 w2 w3 w1"
    assert compare_prompts.prompt_ids(rows, 0, word_tokenizer, 0) == word_tokenizer("w1")["input_ids"]


def test_context_needs_other_rows(word_tokenizer):
    with pytest.raises(ValueError, match="two prompts or more"):
        compare_prompts.prompt_ids([{"prompt": "w1"}], 0, word_tokenizer, 6)


def test_assistant_is_refused_when_the_draft_is_smaller_than_its_embedding(trained):
    with pytest.raises(ValueError, match="larger draft"):
        compare_drafts.assistant_config(trained[0].target.config, 2000)


def test_answer_alone_has_labels_when_the_assistant_is_trained():
    row = compare_drafts.assistant_row({"prompt_ids": [4, 5], "completion_ids": [6, 0]})
    assert row == {"input_ids": [4, 5, 6, 0], "labels": [-100, -100, 6, 0]}


def test_answers_longer_than_the_context_are_refused(trained):
    with pytest.raises(ValueError, match="128 positions"):
        compare_prompts.room_for_prompts(trained[0].target, 128)


def test_result_says_which_target_was_decoded(result, trained):
    assert result[1]["target"] == describe_target(trained[0].target)


def test_missing_data_is_named_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="must hold a folder target, and DOMAIN_train.jsonl"):
        compare_drafts.trained_models(tmp_path, compare_drafts.Recipe())


# Drafting on a large vocabulary, and block sizes


@pytest.fixture
def own_pair(make_target, make_draft):
    target = make_target(eos_token_id=None)
    return target, make_draft(target)


def test_drafting_with_candidates_is_timed_against_the_whole_vocabulary(own_pair):
    cells = drafting.drafting_costs(own_pair[1].bind(own_pair[0]), [8, 16], context_length=12, repetitions=3)
    assert set(cells.pop("new_token_ms")) == {"8", "16"}
    assert set(cells) == {"greedy", "temperature 1"}
    for cell in cells.values():
        assert set(cell["candidates"]) == {"8", "16"}
        for part in cell["candidates"].values():
            assert part["ratio"] == pytest.approx(part["ms"] / cell["full_ms"]) and part["ratio"] > 0
    assert own_pair[1].config.draft_top_k is None


def test_loss_of_tau_is_zero_when_all_tokens_are_candidates_and_not_when_one_is(pair, chat_tokenizer):
    target, draft = pair
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    size = draft.config.vocab_size
    losses = drafting.tau_losses(target, draft, prompts, chat_tokenizer, [1, size], max_new_tokens=16)
    assert (
        losses["greedy"]["candidates"]["1"]["looked_up"] == 0 < losses["greedy"]["candidates"][str(size)]["looked_up"]
    )
    for choice in ("", "int8_"):
        assert losses["greedy"]["candidates"][str(size)][f"{choice}loss"] == 0
        assert losses["sampled"]["candidates"]["1"][f"{choice}loss"] != 0
    assert draft.config.draft_top_k is None and "rough_logits" not in vars(draft)


def test_compiled_drafting_is_timed_beside_drafting_as_it_is(own_pair, monkeypatch):
    compiled, plain = [], torch.compile

    def traced(function, mode):
        compiled.append((function.__name__, mode))
        return plain(function, backend="eager")  # without a C++ compiler

    monkeypatch.setattr(torch, "compile", traced)
    target, draft = own_pair
    found = drafting.compiled_costs(draft.bind(target), ["default"], context_length=8, repetitions=1)["default"]
    assert compiled == [("backbone", "default"), ("sample_block", "default")]
    assert found["ratio"] == pytest.approx(found["ms"] / found["eager_ms"]) and found["seconds_to_compile"] > 0
    assert not {"backbone", "sample_block"} & vars(draft).keys()


def test_round_times_of_whole_blocks_have_the_form_that_figure_4_reads(make_target):
    target = make_target(eos_token_id=None)
    drafts = [
        drafting.draft_of_size(target, size, head, draft_top_k=8) for size in (2, 6) for head in ("dflash", "rnn")
    ]
    rows = drafting.block_size_rows(target, drafts, context_length=8, num_rounds=2, repetitions=2)
    assert [row["block_size"] for row in rows] == [2, 2, 6, 6]
    for row in rows:
        assert 0 < row["draft_ms"] + row["verify_ms"] < row["total_ms"] * 1.5
    found = measurements([{"target": "tiny", "regime": "greedy", "block_sizes": rows}])
    assert [each.draft.block_size for each in found] == [2, 2, 6, 6] and found[0].time is not None
    assert [each.draft.kind for each in found] == ["DFlash", "DSpark"] * 2
    assert [each.draft.head for each in found] == [None, "rnn"] * 2


def test_growth_of_the_round_is_split_into_what_drafting_and_verifying_add():
    rows = [
        {"head": None, "block_size": 16, "draft_ms": 2.0, "verify_ms": 8.0, "total_ms": 11.0},
        {"head": None, "block_size": 4, "draft_ms": 2.0, "verify_ms": 7.0, "total_ms": 10.0},
        {"head": "rnn", "block_size": 4, "draft_ms": 3.0, "verify_ms": 7.0, "total_ms": 10.0},
        {"head": "rnn", "block_size": 16, "draft_ms": 4.0, "verify_ms": 8.0, "total_ms": 13.0},
    ]
    assert drafting.growth(rows)["rnn"] == pytest.approx({"round": 0.3, "drafting": 0.1, "verifying": 0.1})
    assert drafting.growth(rows)["dflash"] == pytest.approx({"round": 0.1, "drafting": 0.0, "verifying": 0.1})
    assert drafting.over_dflash(rows) == {"rnn": pytest.approx({4: 0.0, 16: 2 / 11})}
    assert drafting.over_dflash(rows[2:]) == {}


def test_replayed_rounds_have_the_mean_of_the_recording_whatever_their_order():
    recording = [7] * 30 + [0] * 60 + [2] * 10  # the first ones are the best
    drawn = [loop.representative(recording, 20, seed) for seed in range(3)]
    assert [sum(numbers) / 20 for numbers in drawn] == pytest.approx([2.3] * 3)
    assert drawn[0] != drawn[1] and sorted(drawn[0]) != drawn[0]
