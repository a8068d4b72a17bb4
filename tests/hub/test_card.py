"""Model cards say what result files hold, and nothing else."""

import ast
import json
import re

import pytest
import yaml

from hf_dspark import Eagle3Config, Eagle3DraftModel
from hf_dspark.hub.card import draft_kind, has_one_file_decoder, model_card
from hf_dspark.hub.repository import save_repository, write_card
from hf_dspark.measuring.results import describe_draft, describe_target, write_result

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
    "arguments": {"learning_rate": 6e-4, "num_anchors": 48, "seed": 7}, "num_rows": 14946, "steps": 4149,
    "metrics": {
        "eval_tau": 4.28571, "eval_acceptance_1": 0.81, "eval_acceptance_2": 0.7, "eval_samples_per_second": 31.25,
        "learning_rate": 0.0,
    },
}  # fmt: skip
PART = {"tau": 3.5, "acceptance": [0.8, None, None, None], "prompts": 5, "rounds": 60, "tokens_per_second": 61.25}
FASTER = {"ratio_of_medians": 2.04, "lower_quartile": 1.9, "upper_quartile": 2.1}
EVALUATION = {
    "sampling": {"do_sample": False}, "policy": "FullBlock()", "max_new_tokens": 9, "batch_size": 4, "failed": [],
    "records": [], "tasks": {"math": PART | {"speedup": FASTER}, "code": PART | {"speedup": None}, "all": PART},
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
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def snippets(card):
    return re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)


def test_a_card_begins_with_what_it_speeds_up_by_how_much_and_how_it_is_used(draft, write):
    path = write("evaluation", EVALUATION, {"name": "someone/target"})
    first = sections(model_card(draft, [path], repo_id="someone/my-draft"))[""]
    assert "# my-draft\n" in first and len(first.splitlines()) < 30
    assert "A DSpark draft for [someone/target](https://huggingface.co/someone/target)" in first
    assert "it makes `generate()` **2.04 times as fast**." in first
    assert 'AutoModel.from_pretrained("someone/my-draft"' in first
    assert "| math | greedy | 4 | **2.04** (1.90 to 2.10) | 3.50 | 61.2 |" in first
    assert "| code | greedy | 4 | – | 3.50 | 61.2 |" in first and "| all |" not in first


@pytest.mark.parametrize(
    ("kind", "found", "headline"),
    [
        ("acceptance", ACCEPTANCE, "**2.00 to 3.46 tokens** per pass of the target. Its speed was not measured"),
        ("training", TRAINING, "**4.29 tokens** per pass of the target, as estimated on held-out examples of its"),
        ("calibration", CALIBRATION, "its speed was not measured for this card."),
    ],
)
def test_a_card_without_a_measured_speed_claims_none(draft, write, kind, found, headline):
    first = sections(model_card(draft, [write(kind, found)]))[""]
    assert headline in first and "times as fast" not in first


def test_snippets_are_python_and_name_this_draft_and_its_target(draft, write):
    card = model_card(draft, [write("training", TRAINING, {"name": "someone/target"})], repo_id='me/my "draft"')
    codes = snippets(card)
    assert len(codes) == 3 and all(ast.parse(code) for code in codes)
    strings = {node.value for code in codes for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert {'me/my "draft"', "someone/target"} <= strings


def test_a_draft_that_has_no_repository_yet_is_loaded_by_a_path(draft, tmp_path):
    draft.save_pretrained(tmp_path / "cli-draft")
    codes = "".join(snippets(model_card(type(draft).from_pretrained(tmp_path / "cli-draft"))))
    assert codes.count('"path/to/the/draft"') == 3 and "cli-draft" not in codes


def test_a_card_without_results_says_so_and_shows_no_measurement(draft):
    card = model_card(draft)
    parts = sections(card)
    for title, kind in (("Accepted tokens", "decoding"), ("Training", "a training")):
        assert f"**Not measured:** no result of {kind}" in parts[title] and not re.search(r"\d", parts[title])
    assert "Not measured" in parts["Calibration of the confidences"]
    assert "Nothing was measured" in parts["How it was measured"]
    assert "| target | not named," in parts["The draft"]
    assert card.data.base_model is None
    draft.config.sts_temperatures = {"default": [1.0] * 4, "greedy": [2.0] * 4}
    text = sections(model_card(draft))["Calibration of the confidences"]
    assert "a calibration for: default, greedy." in text and "Not measured" in text


def test_every_number_that_a_reader_looks_for_is_shown(draft, write):
    paths = [write("acceptance", ACCEPTANCE), write("calibration", CALIBRATION), write("training", TRAINING)]
    parts = sections(model_card(draft, paths))
    row = "| math | temperature 0.7 | whole block | 50 | 1234 | 0.81 | 0.70 | – | 0.10 |"
    assert row in parts["Accepted tokens"] and r"| a \| b |" in parts["Accepted tokens"]
    assert "| greedy | 600 | 5.0 % | 1.5 % | 0.81 |" in parts["Calibration of the confidences"]
    for line in (
        "| examples | 14946 |", "| steps | 4149 |", "| `learning_rate` | 0.0006 |",
        "| tau, estimated on held-out examples | 4.29 |", "position, estimated on held-out examples | 0.81 0.70 |",
    ):  # fmt: skip
        assert line in parts["Training"]


def test_numbers_say_where_they_were_measured_without_noise_of_the_training_or_the_interpreter(draft, write):
    paths = [write("acceptance", ACCEPTANCE), write("calibration", CALIBRATION), write("training", TRAINING)]
    origin = json.loads(paths[0].read_text())["provenance"]
    card = model_card(draft, paths)
    text = sections(card)["How it was measured"]
    assert text.count("\n- ") == 1 and "- acceptance, calibration, training: " in text and "target in float32" in text
    assert all(origin[name] in text for name in ("device", "torch", "transformers"))
    assert origin["command"] not in card.text and f"python {origin['python']}" not in card.text
    assert "samples_per_second" not in card.text and "`seed`" not in card.text
    assert sections(card)["Training"].count("\n") < 15


def test_the_metadata_is_that_of_a_draft(draft, write):
    path = write("acceptance", ACCEPTANCE, {"name": "someone/target", "revision": "abc"})
    card = model_card(draft, [path], repo_id="someone/my-draft", license="mit", tags=["math"])
    data = yaml.safe_load(str(card).split("---")[1])
    assert data["library_name"] == "hf_dspark" and data["license"] == "mit"
    assert data["base_model"] == "someone/target" and data["base_model_relation"] == "adapter"
    assert {"dspark", "speculative-decoding", "custom_generate", "math"} <= set(data["tags"])
    assert "| target's revision | abc |" in card.text


def test_what_is_neither_of_an_upload_nor_of_a_card_is_refused(draft, tmp_path):
    for name in ("safe_serialization", "use_temp_dir", "variant", "licence"):
        with pytest.raises(ValueError, match=f"{name}: no argument of an upload"):
            draft.push_to_hub("me/mine", **{name: "x"})
    save_repository(draft, tmp_path, language="en", finetuned_from="someone/other", tags=["mine"])


def test_a_local_target_is_no_base_model(draft, write):
    card = model_card(draft, [write("acceptance", ACCEPTANCE, {"name": "target"})])
    assert card.data.base_model is None and "draft for `target`:" in card.text
    card = model_card(draft, [write("acceptance", ACCEPTANCE, {"name": "target"})], target="someone/other")
    assert card.data.base_model == "someone/other"  # a folder may have any name
    with pytest.raises(ValueError, match="different targets"):
        model_card(draft, [write("acceptance", ACCEPTANCE, {"name": "someone/target"})], target="someone/other")
    first = {"name": "someone/a", "revision": "1"}
    for other in ({"name": "someone/b"}, {"revision": "2"}):
        with pytest.raises(ValueError, match="different targets"):
            model_card(draft, [write("acceptance", ACCEPTANCE, facts) for facts in (first, first | other)])
    card = model_card(draft, [write("training", TRAINING, {"name": "target"})], target="someone/target")
    assert card.data.base_model == "someone/target"


def test_a_fine_tuned_draft_has_its_own_name_keeps_its_results_and_says_where_it_started(draft, write, tmp_path):
    """As the trainer writes it: the draft still has the name that it was loaded by."""
    draft.config._name_or_path = "someone/base"
    folder = tmp_path / "fine-tuned"
    draft.save_pretrained(folder)
    text = write_card(draft, folder, [write("training", TRAINING)], repo_id=None).read_text()
    assert "# fine-tuned\n" in text and 'from_pretrained("path/to/the/draft"' in text
    assert "Fine-tuned from [someone/base](https://huggingface.co/someone/base)." in text
    assert '"someone/base"' not in text
    assert "Fine-tuned" not in model_card(draft, [write("training", TRAINING, of_draft={"name": ""})]).text
    both = model_card(draft, [write("training", TRAINING)], repo_id="someone/mine", target="someone/target").data
    assert both.base_model == ["someone/target", "someone/base"] and both.base_model_relation == "finetune"
    assert "3.46" in model_card(draft, [write("acceptance", ACCEPTANCE, of_draft={"name": "someone/old"})]).text


def test_a_card_of_a_trained_draft_says_what_the_training_brought(draft, write):
    before = {"eval_tau": 3.81, "eval_acceptance_1": 0.7, "eval_acceptance_2": 0.6, "eval_loss": 1.25}
    after = TRAINING["metrics"] | {"eval_loss": 0.5}
    parts = sections(model_card(draft, [write("training", TRAINING | {"before": before, "metrics": after})]))
    assert "**4.29 tokens** per pass of the target, as estimated on held-out examples of its training" in parts[""]
    assert "(3.81 before it)" in parts[""]
    for line in (
        "| tau, estimated on held-out examples | 3.81 before, 4.29 after |",
        "| loss on held-out examples | 1.25 before, 0.50",
        "| acceptance by position, estimated on held-out examples | 0.70 0.60 before, 0.81 0.70 after |",
    ):  # fmt: skip
        assert line in parts["Training"]
    metrics = {"loss": 0.75, "tau": 3.5, "acceptance_1": 0.8, "learning_rate": 0.0}
    text = sections(model_card(draft, [write("training", TRAINING | {"metrics": metrics})]))["Training"]
    assert "| loss on the last batches | 0.75 |" in text and "| tau, estimated on the last batches | 3.50 |" in text


def test_a_card_says_what_was_found_on_each_set_of_held_out_rows(draft, write):
    metrics = {"eval_code_tau": 2.5, "eval_code_acceptance_1": 0.5, "eval_math_tau": 3.5, "eval_math_loss": 0.75}
    parts = sections(model_card(draft, [write("training", TRAINING | {"metrics": metrics})]))
    assert "**2.50 to 3.50 tokens** per pass" in parts[""]
    for line in (
        "tau, estimated on held-out examples of code | 2.50", "tau, estimated on held-out examples of math | 3.50",
        "loss on held-out examples of math | 0.75", "position, estimated on held-out examples of code | 0.50",
    ):  # fmt: skip
        assert f"{line} |" in parts["Training"]


@pytest.mark.parametrize(
    ("name", "value"), [("metrics", {"eval_tau": "x"}), ("provenance", {"device": {}}), ("before", 5)]
)
def test_a_result_file_with_unsound_values_is_named(draft, write, tmp_path, name, value):
    path = write("training", TRAINING)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=f"a result file is damaged .*leave out one of .*{path.name}"):
        write_card(draft, tmp_path, [path])


def test_a_saved_repository_warns_about_what_its_card_does_not_name(draft, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dspark.hub.repository.write_remote_code", lambda folder: [])  # has tests of its own
    with pytest.warns(UserWarning, match="does not name a license .*license=.*"):
        save_repository(draft, tmp_path / "draft", target="someone/target")
    assert "# draft\n" in (tmp_path / "draft" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"num_parameters": 1}, "num_parameters (1 there"),
        ({"markov_rank": 0, "markov_head": None}, "markov_head (None there, 'vanilla' now), markov_rank (0 there"),
        ({"name": "someone/else", "weights": "0123"}, "someone/else, which differs in weights ('0123' there"),
    ],
)
def test_results_of_another_draft_are_refused_with_the_difference(draft, write, tmp_path, changed, difference):
    path = write("acceptance", ACCEPTANCE, of_draft=changed)
    with pytest.raises(ValueError, match=re.escape(difference)):
        model_card(draft, [write("calibration", CALIBRATION), path])
    write_result(tmp_path / "a.json", "acceptance", {}, {}, **ACCEPTANCE)
    with pytest.raises(ValueError, match=r"num_parameters \('not said' there"):
        model_card(draft, [tmp_path / "a.json"])


def test_a_card_says_which_kind_of_draft_it_is(target, make_draft):
    eagle3 = Eagle3DraftModel(Eagle3Config.from_target(target.config))
    plain = {"enable_confidence_head": False, "confidence_head_with_markov": False}
    dflash = make_draft(target, markov_rank=0, **plain)
    dflash2 = make_draft(target, markov_head_type="selector", conv_kernel_size=2, conv_group_size=8, **plain)
    domino = make_draft(target, markov_head_type="domino", **plain)
    kinds = {"Eagle3": eagle3, "DFlash": dflash, "DFlash 2": dflash2, "Domino": domino}
    assert {draft_kind(model.config): model for model in kinds.values()} == kinds
    for kind, model in kinds.items():
        text = model_card(model).text
        assert kind.lower().replace(" ", "") in model_card(model).data.tags and f"A {kind} draft" in text
        # Drafts of the others need the package.
        assert ("trust_remote_code" in text) == (kind == "DFlash") == has_one_file_decoder(model.config.to_dict())
    dflash.config.draft_vocab_size = 12
    assert "| vocabulary | 12 of the target's 48 tokens |" in model_card(dflash).text
    assert "| Markov head | none |" in model_card(dflash).text
