"""Answers in the target's own words: whole files and interrupted ones."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.data.examples import prepare_examples, tokenize_example
from hf_dspark.measuring.regenerate import regenerate

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking is false %},,{% endif %}{% endif %}"
)
PROMPTS = ["abc", "bcdef", "cde", "dQ", "efghij", "Xy"]
SAMPLED = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": [62, 42, 11], "pad_token_id": 0}
GREEDY = SAMPLED | {"do_sample": False}


@pytest.fixture
def target(pair):
    return pair[0]


@pytest.fixture
def draft(pair):
    return pair[1]


@pytest.fixture(params=["plain", "draft"])
def run(request, target, draft, tokenizer, tmp_path):
    """Call `regenerate` with and without the draft; returns the lines by (index, sample)."""

    def call(prompts=PROMPTS, name="answers.jsonl", options=SAMPLED, **changes):
        file, drafting = tmp_path / name, {"draft": draft if request.param == "draft" else None}
        report = regenerate(target, prompts, tokenizer, file, **({"batch_size": 4} | options | drafting | changes))
        lines = read_lines(file)
        done = [line for line in lines if "error" not in line]
        assert report.output_file == file and report.num_answers == len(done)
        assert report.num_failed == len(lines) - len(done)
        assert report.num_unfinished == sum(not line["finished"] for line in done)
        assert len({(line["index"], line["sample"]) for line in lines}) == len(lines)
        return {(line["index"], line["sample"]): line for line in lines}

    call.path = tmp_path / "answers.jsonl"
    return call


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_what_the_target_decodes_alone(run, target, tokenizer):
    lines = run(options=GREEDY)
    assert set(lines) == {(index, 0) for index in range(len(PROMPTS))}
    for (index, _), line in lines.items():
        ids = tokenizer(PROMPTS[index])["input_ids"]
        expected = target.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist()
        assert line == {
            "index": index, "sample": 0, "prompt": PROMPTS[index], "prompt_ids": ids, "completion_ids": expected,
            "text": tokenizer.decode(expected, skip_special_tokens=True),
            "finished": expected[-1] in GREEDY["eos_token_id"],
        }  # fmt: skip


def test_lines_say_whether_the_target_ended_them_and_train_as_they_are(run, tokenizer):
    lines = run(num_samples=3)
    assert {line["finished"] for line in lines.values()} == {True, False}
    for line in lines.values():
        assert line["finished"] == (line["completion_ids"][-1] in SAMPLED["eos_token_id"])
        assert line["finished"] or len(line["completion_ids"]) == 12
        assert not set(line["completion_ids"][:-1]) & set(SAMPLED["eos_token_id"])
        row = tokenize_example(line, tokenizer)
        assert row["input_ids"] == line["prompt_ids"] + line["completion_ids"]
        assert sum(row["loss_mask"]) == len(line["completion_ids"])
    long = [line for line in lines.values() if len(line["completion_ids"]) > 1]
    assert len(prepare_examples(long, tokenizer, 4, 64)) == len(long)


def test_samples_of_a_prompt_differ_and_follow_the_seed(run):
    before = torch.get_rng_state()
    first, again, other = run(num_samples=2), run(name="b", num_samples=2), run(name="c", num_samples=2, seed=1)
    assert first == again and first != other
    assert first[0, 0]["completion_ids"] != first[0, 1]["completion_ids"]
    assert torch.equal(torch.get_rng_state(), before)  # it is the caller's


def test_prompts_are_rendered_as_they_were_given(run, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    chat = [{"role": "user", "content": "hi"}]
    answered = [*chat, {"role": "assistant", "content": "ho"}]
    prompts = {
        "uhi.a": chat, "uhi.aho.uso.a": {"messages": [*answered, {"role": "user", "content": "so"}]},
        "uWhat.a": {"question": "What", "answer": "dropped"}, "Xy": [23 + 26, 24],
        "uhi.a,,": {"messages": answered, "chat_template_kwargs": {"enable_thinking": False}},
    }  # fmt: skip
    lines = run(list(prompts.values()), max_new_tokens=2)
    assert [tokenizer.decode(lines[index, 0]["prompt_ids"]) for index in range(5)] == list(prompts)
    assert lines[0, 0]["prompt"] == chat and lines[3, 0]["prompt"] == "Xy"
    lines = run(["hi"], name="a text", max_new_tokens=2)
    assert tokenizer.decode(lines[0, 0]["prompt_ids"]) == "uhi.a" and lines[0, 0]["prompt"] == "hi"
    lines = run([chat], name="not thinking", enable_thinking=False, max_new_tokens=2)
    assert tokenizer.decode(lines[0, 0]["prompt_ids"]) == "uhi.a,,"


def test_the_targets_own_recommendation_is_followed(run, target, monkeypatch):
    for name, value in {"do_sample": False, "max_new_tokens": 3, "eos_token_id": 5}.items():
        monkeypatch.setattr(target.generation_config, name, value)
    for name, options in (("a", {}), ("none", {"max_new_tokens": None})):
        lines = run(name=name, options={"pad_token_id": 0} | options)
        assert all(len(line["completion_ids"]) <= 3 for line in lines.values())
    with pytest.raises(ValueError, match="num_samples=2, but decoding is greedy"):
        run(name="b", num_samples=2, options={"pad_token_id": 0})


def test_prompts_longer_than_the_context_fail_alone(run, target):
    context = target.config.max_position_embeddings
    long, nearly = "b" * context, "c" * (context - 3)
    with pytest.warns(UserWarning, match="1 prompts failed"):
        lines = run(["abc", long, nearly, "dQ"])
    assert f"{context} tokens leaves no room" in lines[1, 0]["error"] and "completion_ids" not in lines[1, 0]
    assert len(lines[2, 0]["completion_ids"]) <= 3
    assert all("error" not in lines[index, 0] for index in (0, 2, 3))


def test_a_prompt_that_breaks_its_batch_fails_alone(target, tokenizer, tmp_path, monkeypatch):
    honest, (breaking,) = target.generate, tokenizer("Q")["input_ids"]

    def fragile(input_ids, **kwargs):
        if (input_ids == breaking).any():
            raise RuntimeError("not this one")
        return honest(input_ids, **kwargs)

    monkeypatch.setattr(target, "generate", fragile)
    with pytest.warns(UserWarning, match="1 prompts failed"):
        regenerate(target, PROMPTS, tokenizer, tmp_path / "a", batch_size=3, **SAMPLED)
    lines = read_lines(tmp_path / "a")
    failed = [(line["prompt"], line["error"]) for line in lines if "error" in line]
    assert len(lines) == 6 and failed == [("dQ", "RuntimeError: not this one")]
    monkeypatch.setattr(target, "generate", honest)  # the failed one is tried again
    regenerate(target, PROMPTS, tokenizer, tmp_path / "a", batch_size=3, **SAMPLED)
    lines = read_lines(tmp_path / "a")
    assert len(lines) == 6 and not any("error" in line for line in lines)


@pytest.mark.parametrize("drafting", [False, True])
def test_learned_positions_are_never_exceeded(tokenizer, tmp_path, drafting):
    target = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=8, n_layer=2, n_head=1)).eval()
    prompts = ["abcdefghijklmn", "abcdefg", "abc"]
    options = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}
    if drafting:
        options["draft"] = DSparkDraftModel(DSparkConfig.from_target(target.config, target_layer_ids=[0])).eval()
    regenerate(target, prompts, tokenizer, tmp_path / "a", **options)
    lengths = {line["prompt"]: len(line["completion_ids"]) for line in read_lines(tmp_path / "a")}
    assert lengths == {"abcdefghijklmn": 2, "abcdefg": 9, "abc": 12}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 2, "do_sample": False}, "num_samples=2, but decoding is greedy"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"num_return_sequences": 2}, "use num_samples"),
        ({"max_length": 20}, "use max_new_tokens"),
        ({"max_new_token": 5}, "max_new_token"),
        ({"prompts": ["abc", {"text": "a"}]}, "prompt 1: a prompt must be .* got an object with \\['text'\\]"),
        ({"prompts": [{"turns": ["a", "b"]}]}, "prompt 0: has several turns"),
    ],
)
def test_wrong_options_are_raised_before_anything_is_written(run, options, words):
    with pytest.raises(ValueError, match=words):
        run(**options)
    with pytest.raises(TypeError, match="got the name 'org/model': load it"):
        regenerate("org/model", PROMPTS, None, run.path)
    assert not run.path.exists()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kept", [0, 1, 5, 8])
def test_an_interruption_changes_nothing(run, kept):
    whole = run(num_samples=2, seed=3)
    lines = run.path.read_text().splitlines(keepends=True)
    run.path.write_text("".join(lines[:kept]) + lines[kept][:20])
    torch.manual_seed(7)
    assert run(num_samples=2, seed=3) == whole
    assert run.path.read_text().splitlines(keepends=True)[:kept] == lines[:kept]


def test_what_is_there_is_not_written_again_and_samples_can_be_added(run, target, monkeypatch):
    first, asked, honest = run(), [], target.generate
    monkeypatch.setattr(target, "generate", lambda *args, **kwargs: asked.append(1) or honest(*args, **kwargs))
    assert run() == first and len(asked) <= 1  # with a draft the options are checked once
    more = run(num_samples=2)
    assert len(more) == 12 and {key: more[key] for key in first} == first


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts": PROMPTS[:-1]}, "differs in prompts"),
        ({"seed": 1}, "differs in seed \\(0 there, 1 now\\)"),
        ({"temperature": 0.5}, "differs in temperature \\(.* there, 0.5 now\\)"),
        ({"enable_thinking": True}, "differs in enable_thinking"),
    ],
)
def test_a_file_of_another_run_or_target_is_refused(run, target, monkeypatch, change, words):
    before = run()
    with pytest.raises(ValueError, match=words):
        run(**change)
    assert {(line["index"], line["sample"]): line for line in read_lines(run.path)} == before
    weight = target.get_input_embeddings().weight
    monkeypatch.setattr(weight, "data", weight.detach() + 1)
    with pytest.raises(ValueError, match="differs in target"):
        run()


def test_answers_are_written_in_batches_of_similar_length(target, tokenizer, tmp_path, monkeypatch):
    widths, honest = [], target.generate
    monkeypatch.setattr(target, "generate", lambda ids, **kw: widths.append(list(ids.shape)) or honest(ids, **kw))
    regenerate(target, PROMPTS, tokenizer, tmp_path / "a", batch_size=2, **SAMPLED)
    assert widths == [[2, 6], [2, 3], [2, 2]]


def test_stop_strings_end_answers_as_alone(run):
    """In a batch the rows that end first are filled up, with a token that this target also writes."""
    options = GREEDY | {"eos_token_id": None}
    longest = run(name="whole.jsonl", options=options)
    stop = longest[0, 0]["text"][2]
    lines = run(options=options, stop_strings=[stop])
    assert len({len(line["completion_ids"]) for line in lines.values()}) > 1
    for index, line in lines.items():
        whole = longest[index]["text"]
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert line["text"] == whole[:end]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 2, "eos_token_id": None}, "6 of 6 answers are unfinished: raise max_new_tokens"),
        ({"eos_token_id": list(range(64))}, "6 of 6 answers are empty: Is this the form"),
    ],
)
def test_a_warning_says_that_most_answers_are_empty_or_unfinished(run, monkeypatch, options, words):
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda self, ids, **_: "" if len(ids) == 1 else "words")
    with pytest.warns(UserWarning, match=words):
        run(**options)
    with pytest.warns(UserWarning, match=words):  # of those that were there, too
        run(**options)
