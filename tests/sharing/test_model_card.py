"""Model cards say what result files hold, and nothing else."""

import json
import re

import pytest
import yaml

from hf_dspark import Eagle3Config, Eagle3DraftModel, profile_throughput
from hf_dspark.evaluation.results import describe_draft, describe_target, write_result
from hf_dspark.sharing.model_card import kind_of, model_card

ACCEPTANCE = {
    "sampling": {"do_sample": True, "temperature": 0.7},
    "policy": "FullBlock()",
    "domains": {
        "math": {"tau": 3.4567, "acceptance": [0.8123, 0.7, None, 0.1], "prompts": 50, "rounds": 1234, "tokens": 9},
        "a | b": {"tau": 2.0, "acceptance": [0.5, 0.5, 0.5, 0.5], "prompts": 7, "rounds": 11, "tokens": 9},
    },
}
CALIBRATION = {
    "domain": "greedy", "num_prompts": 600, "ece_before": [0.04, 0.05, 0.06, 0.05],
    "ece_after": [0.01, 0.02, 0.02, 0.01], "auc": 0.8149,
}  # fmt: skip
TRAINING = {
    "arguments": {"learning_rate": 6e-4, "num_anchors": 48}, "num_rows": 14946, "steps": 4149,
    "metrics": {"eval_tau": 4.28571},
}  # fmt: skip


@pytest.fixture
def write(target, draft, tmp_path):
    """Write a result file of this pair, with facts of it changed; returns its path."""

    def result(kind, found, of_target=None, of_draft=None):
        path = tmp_path / f"{kind}{len(list(tmp_path.iterdir()))}.json"
        who = describe_target(target) | (of_target or {}), describe_draft(draft) | (of_draft or {})
        write_result(path, kind, *who, **found)
        return path

    return result


def sections(card):
    parts = re.split(r"^## (.*)$", card.text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_card_without_results_says_so_and_shows_no_measurement(draft):
    card = model_card(draft)
    parts = sections(card)
    for title, kind in (("Accepted tokens", "acceptance"), ("Training", "training")):
        assert f"**Not measured:** no result file of {kind}" in parts[title]
    assert "Not measured" in parts["Calibration of the confidences"] and "Not measured" in parts["Step times (SPS)"]
    assert "Nothing was measured" in parts["How it was measured"]
    assert "not named by any result" in parts["Draft and target"]
    assert card.data.eval_results is None and card.data.base_model is None
    measured = "".join(parts[title] for title in ("Accepted tokens", "Training", "Step times (SPS)"))
    assert not re.search(r"\d", measured)


def test_every_number_of_the_results_is_shown(draft, write):
    paths = [write("acceptance", ACCEPTANCE), write("calibration", CALIBRATION), write("training", TRAINING)]
    parts = sections(model_card(draft, paths))
    math_row = next(line for line in parts["Accepted tokens"].splitlines() if line.startswith("| math"))
    assert "sampled, temperature 0.7" in math_row and "FullBlock()" in math_row
    assert "| 50 | 1234 | 3.46 | 0.81 0.70 – 0.10 | [1] |" in math_row
    calibration = parts["Calibration of the confidences"]
    assert "| greedy | 600 | 5.0 % | 1.5 % | 1.0 2.0 2.0 1.0 % | 0.81 | [2] |" in calibration
    for line in (
        "| rows | 14946 |",
        "| steps | 4149 |",
        "| `learning_rate` | 0.0006 |",
        "| reported eval_tau | 4.2857",
    ):
        assert line in parts["Training"]


def test_every_number_has_its_provenance(draft, write):
    path = write("acceptance", ACCEPTANCE)
    origin = json.loads(path.read_text())["provenance"]
    text = sections(model_card(draft, [path]))["How it was measured"]
    assert "**[1]**" in text and "target in float32" in text
    for name in ("command", "device", "torch", "transformers"):
        assert str(origin[name]) in text


def test_a_table_cell_cannot_break_its_table(draft, write):
    text = sections(model_card(draft, [write("acceptance", ACCEPTANCE)]))["Accepted tokens"]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert r"a \| b" in text
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {9}


def test_the_metadata_is_that_of_a_draft(draft, write):
    path = write("acceptance", ACCEPTANCE, {"name": "someone/target", "revision": "abc"})
    card = model_card(draft, [path], repo_id="someone/my-draft", license="mit", tags=["math"])
    data = yaml.safe_load(str(card).split("---")[1])
    assert data["library_name"] == "hf_dspark" and data["license"] == "mit"
    assert data["base_model"] == "someone/target" and data["base_model_relation"] == "adapter"
    assert {"dspark", "speculative-decoding", "custom_generate", "math"} <= set(data["tags"])
    (model,) = data["model-index"]
    assert model["name"] == "my-draft"
    assert [result["metrics"][0]["value"] for result in model["results"]] == [3.4567, 2.0]
    assert "| target's revision | abc |" in card.text
    assert 'from_pretrained("someone/target"' in card.text and 'custom_generate="someone/my-draft"' in card.text


def test_a_local_target_is_no_base_model(draft, write):
    card = model_card(draft, [write("acceptance", ACCEPTANCE, {"name": "target"})])
    assert card.data.base_model is None and "draft of target" in card.text
    with pytest.raises(ValueError, match="different targets"):
        model_card(draft, [write("acceptance", ACCEPTANCE, {"name": "target"})], target="someone/other")
    card = model_card(draft, [write("training", TRAINING, {"name": "target"})], target="someone/target")
    assert card.data.base_model == "someone/target"


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"num_parameters": 1}, "num_parameters: 1 there"),
        ({"block_size": 9}, "block_size: 9 there, 4 here"),
        ({"model_type": "dspark_eagle3"}, "model_type: 'dspark_eagle3' there, 'dspark' here"),
        ({"markov_rank": 0, "markov_head": None}, "markov_head: None there, 'vanilla' here; markov_rank: 0 there"),
        ({"name": "someone/else"}, "name: 'someone/else' there, 'mine' here"),
    ],
)
def test_results_of_another_draft_are_refused_with_the_difference(draft, write, changed, difference):
    draft.config._name_or_path = "someone/mine"
    path = write("acceptance", ACCEPTANCE, of_draft=changed)
    with pytest.raises(ValueError, match=re.escape(difference)):
        model_card(draft, [write("calibration", CALIBRATION), path])


def test_results_without_a_geometry_are_refused(draft, tmp_path):
    write_result(tmp_path / "a.json", "acceptance", {}, {}, **ACCEPTANCE)
    with pytest.raises(ValueError, match="num_parameters: 'not said' there"):
        model_card(draft, [tmp_path / "a.json"])


def test_a_renamed_draft_keeps_its_results(draft, write):
    draft.config._name_or_path = "someone/new"
    path = write("acceptance", ACCEPTANCE, of_draft={"name": "someone/old"})
    with pytest.raises(ValueError, match="draft_name"):
        model_card(draft, [path])
    assert "3.46" in model_card(draft, [path], draft_name="someone/old").text
    assert "3.46" in model_card(draft, [path], repo_id="me/old").text


def test_a_training_names_the_draft_as_it_was_before(draft, write):
    draft.config._name_or_path = "someone/fine-tuned"
    assert "4149" in model_card(draft, [write("training", TRAINING, of_draft={"name": "someone/base"})]).text


@pytest.mark.parametrize("other", [{"name": "someone/b"}, {"revision": "2"}])
def test_results_of_two_targets_are_refused(draft, write, other):
    first = {"name": "someone/a", "revision": "1"}
    paths = [write("acceptance", ACCEPTANCE, first), write("calibration", CALIBRATION, first | other)]
    with pytest.raises(ValueError, match="different targets"):
        model_card(draft, paths)


def test_step_times_are_shown_with_their_machine_and_those_of_others_refused(target, draft, make_draft, tmp_path):
    profile = profile_throughput(target, draft, (1, 2), (8, 16), repetitions=1, cache=False)
    profile.save(tmp_path / "sps.json")
    text = sections(model_card(draft, throughput=[tmp_path / "sps.json"]))["Step times (SPS)"]
    assert profile.machine.device in text and f"| {profile.table.verify_tokens[0]} |" in text
    with pytest.raises(ValueError, match="block_size: 4 there, 3 here"):
        model_card(make_draft(target, block_size=3), throughput=[tmp_path / "sps.json"])
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json holds no measured step times"):
        model_card(draft, throughput=[tmp_path / "broken.json"])


def test_a_card_says_which_kind_of_draft_it_is(target, make_draft):
    eagle3 = Eagle3DraftModel(Eagle3Config.from_target(target.config))
    dflash = make_draft(target, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    assert [kind_of(model.config) for model in (eagle3, dflash)] == ["eagle3", "dflash"]
    assert "eagle3" in model_card(eagle3).data.tags and "Eagle3" in model_card(eagle3).text
    assert "| Markov head | none |" in model_card(dflash).text


def test_the_card_of_a_pruned_vocabulary_says_whose_head_it_has(target, draft):
    assert "embedding and LM head are the target's" in model_card(draft).text
    draft.config.draft_vocab_size = 12
    text = model_card(draft).text
    assert "| vocabulary of the draft | 12 of the target's 48 tokens |" in text
    assert "(the embedding is the target's)" in text and "the embedding is borrowed" in text


def test_a_card_says_what_is_lost_without_the_package(draft):
    text = sections(model_card(draft))["What is lost without hf_dspark"]
    for word in ("assistant_model", "generate_many", "refused", "training"):
        assert word in text


def test_the_temperatures_are_named_even_if_their_effect_was_not_measured(draft):
    draft.config.sts_temperatures = {"default": [1.0] * 4, "greedy": [2.0] * 4}
    text = sections(model_card(draft))["Calibration of the confidences"]
    assert "temperatures for: default, greedy." in text and "Not measured" in text


def test_an_evaluation_shows_what_was_accepted_and_how_fast_it_was(draft, write):
    part = {"tau": 3.5, "acceptance": [0.8, None, None, None], "prompts": 5, "rounds": 60, "tokens_per_second": 61.25}
    faster = {"ratio_of_medians": 2.04, "lower_quartile": 1.9, "upper_quartile": 2.1}
    tasks = {"math": part | {"speedup": faster}, "code": part | {"speedup": None}}
    found = {"sampling": {"do_sample": False}, "policy": "FullBlock()", "max_new_tokens": 9, "batch_size": 4}
    path = write("evaluation", found | {"tasks": tasks | {"all": tasks["math"]}, "failed": [], "records": []})
    parts = sections(card := model_card(draft, [path]))
    assert "| math | greedy | FullBlock() | 5 | 60 | 3.50 | 0.80 – – – | [1] |" in parts["Accepted tokens"]
    assert "| math | greedy | FullBlock() | 4 | 61.2 | 2.04 (1.90 to 2.10) | [1] |" in parts["Speed"]
    assert "| code | greedy | FullBlock() | 4 | 61.2 | – | [1] |" in parts["Speed"]
    assert "[2]" not in card.text and "| all |" not in card.text
