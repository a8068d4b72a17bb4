"""What decoding shows, against what `generate()` itself reports; runs that are interrupted, killed, fed nonsense."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from hf_dspark import ConfidenceThreshold, DecodingOptions, evaluate
from hf_dspark.data.prompts import Prompt
from hf_dspark.measuring import decode_prompts as driver
from hf_dspark.measuring import evaluate as evaluation
from hf_dspark.measuring.results import read_results
from hf_dspark.measuring.timed_decoding import timed_call

GREEDY = {"do_sample": False, "max_new_tokens": 20}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 16}
TEXTS = ["what is up", "not much", "up up up much is", "what"]
TALKS = [{"turns": ["what is", "not much", "up"]}, {"prompt": "is up"}, {"turns": ["much", "up"]}]


@pytest.fixture
def text_tokenizer(chat_tokenizer):
    """Without a chat template, texts are continued as they are."""
    chat_tokenizer.chat_template = None
    return chat_tokenizer


def without_times(result: dict) -> dict:
    """Return a result file without what two runs may differ in."""
    measured = ("seconds", "prefill_seconds", "draft_seconds", "verify_seconds", "total_seconds",
                "tokens_per_second", "seconds_per_round", "time_to_first_token", "speedup", "provenance")  # fmt: skip

    def kept(value):
        if isinstance(value, dict):
            return {name: kept(part) for name, part in value.items() if name not in measured}
        return [kept(part) for part in value] if isinstance(value, list) else value

    return kept(result)


def test_records_are_the_rounds_of_generate(pair, text_tokenizer, tmp_path):
    target, draft = pair
    found = evaluate(target, draft, {"talk": TEXTS}, text_tokenizer, tmp_path / "e.json", **GREEDY)
    places = [(record.group, record.index, record.turn) for record in found.answers]
    assert places == [("talk", index, 0) for index in range(4)]
    for record, text in zip(found.answers, TEXTS, strict=True):
        ids = torch.tensor([text_tokenizer(text)["input_ids"]])
        output = target.generate(ids, assistant_model=draft, do_sample=False, max_new_tokens=20)
        stats = draft.last_stats
        assert (record.rounds.proposed, record.rounds.accepted) == (stats.proposed, stats.accepted)
        assert (len(record.prompt_ids), len(record.token_ids)) == (ids.shape[1], output.shape[1] - ids.shape[1])
        for said, confidence in zip(record.rounds.confidence, stats.confidence, strict=True):
            if confidence is None:  # no room for a draft
                assert said is None
            else:
                assert torch.allclose(said, confidence, atol=1e-6)
        assert 0 < record.prefill_seconds < record.seconds
        # What remains is between the rounds, and behind them.
        assert 0.5 * record.seconds < record.prefill_seconds + record.rounds.total_seconds <= record.seconds
        for proposed, spent in zip(record.rounds.proposed, record.rounds.seconds, strict=True):
            assert (spent.draft > 0) == (proposed > 0) and spent.verify > 0 and spent.rest > 0
    metrics = found.metrics["talk"]
    assert 2 < metrics.tau < 6 and metrics.tokens == sum(len(record.token_ids) for record in found.answers)
    assert metrics.rounds == sum(len(record.rounds.proposed) for record in found.answers)
    (result,) = read_results([tmp_path / "e.json"])
    assert result["kind"] == "evaluation" and result["tasks"]["talk"]["tau"] == metrics.tau
    assert result["policy"] == {"name": "FullBlock"} and result["sampling"]["do_sample"] is False
    assert "records" not in result
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]  # nothing unfinished is left


def test_turns_decoded_together_have_the_rounds_that_they_have_alone(pair, text_tokenizer):
    alone, together = (
        evaluate(*pair, {"talk": TALKS + TEXTS}, text_tokenizer, batch_size=size, **GREEDY) for size in (1, 3)
    )
    keys = [[(part.index, part.turn, len(part.token_ids)) for part in found.answers] for found in (alone, together)]
    assert keys[0] == keys[1] and len(keys[0]) == 10
    for one, other in zip(alone.answers, together.answers, strict=True):
        assert (one.rounds.proposed, one.rounds.accepted) == (other.rounds.proposed, other.rounds.accepted)
        assert {spent.num_requests for spent in one.rounds.seconds} <= {1}
    first = [record for record in together.answers if record.turn == 0 and record.index < 3]
    # One round serves all three until the first of them has ended.
    rounds = sorted(len(record.rounds.proposed) for record in first)
    assert all(spent.num_requests == 3 for record in first for spent in record.rounds.seconds[: rounds[0]])
    seconds = [record.rounds.seconds[: rounds[0]] for record in first]
    assert seconds[0] == seconds[1] == seconds[2]
    assert together.metrics["all"].rounds == alone.metrics["all"].rounds
    assert len({record.seconds / len(record.token_ids) for record in first}) == 1


@pytest.mark.parametrize("templated", [True, False])
def test_each_turn_follows_the_targets_own_answer(pair, chat_tokenizer, templated, monkeypatch):
    target, draft = pair
    seen = []
    spy = lambda *args, **kwargs: seen.append([each.prompt_ids for each in args[1]]) or timed_call(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(driver, "timed_call", spy)
    if not templated:
        chat_tokenizer.chat_template = None
    found = evaluate(target, draft, {"talk": TALKS[:1]}, chat_tokenizer, **GREEDY)
    lengths = [(turn, len(prompt[0])) for turn, prompt in enumerate(seen)]
    assert [(record.turn, len(record.prompt_ids)) for record in found.answers] == lengths
    asked = [chat_tokenizer.decode(prompt[0]) for prompt in seen]
    assert asked[0] == ("user what is <eos> assistant" if templated else "what is")
    ids = torch.tensor(seen[0])
    output = target.generate(ids, do_sample=False, max_new_tokens=20)
    answer = chat_tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    conversation = [{"role": "user", "content": "what is"}, {"role": "assistant", "content": answer},
                    {"role": "user", "content": "not much"}]  # fmt: skip
    if templated:
        following = chat_tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    else:
        following = chat_tokenizer(f"what is{answer}\n\nnot much")["input_ids"]
    assert seen[1][0] == following


def test_a_policy_decides_and_is_noted_and_the_drafts_own_is_kept(pair, text_tokenizer):
    target, draft = pair
    before = draft.decoding = DecodingOptions(policy=ConfidenceThreshold(0.5))
    found = evaluate(target, draft, {"t": TEXTS}, text_tokenizer, policy=ConfidenceThreshold(0.9), **GREEDY)
    assert draft.decoding is before
    draft.decoding = DecodingOptions()
    assert found.facts["policy"] == ConfidenceThreshold(0.9).to_dict()
    full = evaluate(target, draft, {"t": TEXTS}, text_tokenizer, **GREEDY)
    assert found.metrics["t"].proposed_per_round < full.metrics["t"].proposed_per_round


def test_a_target_alone_has_speed_and_no_rounds(pair, text_tokenizer, tmp_path):
    facts = {"generation_config": GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=None)}
    found = evaluate(pair[0], None, {"t": TEXTS}, text_tokenizer, tmp_path / "plain.json", batch_size=2, **facts)
    assert {len(record.token_ids) for record in found.answers} == {found.facts["max_new_tokens"]} == {3}
    metrics = found.metrics["t"]
    assert metrics.rounds == 0 and metrics.tau is None and metrics.acceptance == [] and metrics.ece_mean is None
    assert all(0 < part.prefill_seconds < 2 * part.seconds for part in found.answers)  # two share their call's time
    assert metrics.tokens_per_second > 0 and metrics.time_to_first_token > 0
    (result,) = read_results([tmp_path / "plain.json"])
    assert result["draft"] == {} and result["policy"] is None and found.answers[0].rounds.proposed == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_plain_decoding_of_the_same_turns_is_compared(pair, text_tokenizer, batch_size):
    found = evaluate(*pair, {"t": TALKS}, text_tokenizer, batch_size=batch_size, compare_plain=True, **GREEDY)
    speedup = found.metrics["t"].speedup
    assert speedup.identical == 6 == found.metrics["t"].turns  # float32
    assert speedup.lower_quartile <= speedup.median <= speedup.upper_quartile and speedup.ratio_of_medians > 0
    assert all(len(record.plain.token_ids) == len(record.token_ids) for record in found.answers)
    assert speedup.best_tokens == found.metrics["t"].tokens == sum(record.num_best for record in found.answers)
    assert "| 6 of 6 turns | 120 of 120 tokens |" in found.table() == str(found)
    assert "128 units in the last place of float32" in found.table() and found.facts["rounding"] in found.table()
    sampled = evaluate(*pair, {"t": TEXTS[:2]}, text_tokenizer, compare_plain=True, **SAMPLED)
    assert sampled.metrics["t"].speedup.identical is sampled.metrics["t"].speedup.best_tokens is None
    assert sampled.facts["rounding"] is None


def test_packed_copies_serve_plain_decoding_too(pair, text_tokenizer, monkeypatch):
    entered, inside = [], []

    @contextlib.contextmanager
    def recorded(*models, packed):
        entered.append((models, packed))
        yield
        entered.append("left")

    spy = lambda *args, **kwargs: inside.append(len(entered)) or timed_call(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(evaluation, "fast_linears", recorded)
    monkeypatch.setattr(driver, "timed_call", spy)
    found = evaluate(*pair, {"t": TEXTS[:1]}, text_tokenizer, compare_plain=True, packed=True, **GREEDY)
    assert entered == [(pair, True), "left"] and inside == [1, 1] and found.facts["packed"] is True


def test_wrong_tokens_of_drafted_answers_are_not_taken_for_rounding(pair, text_tokenizer, monkeypatch):
    def one_wrong_when_drafted(target, prompts, seed, draft=None, **options):
        call = timed_call(target, prompts, seed, draft, **options)
        return call if draft is None else [replace(each, token_ids=[*each.token_ids[:-1], 7]) for each in call]

    monkeypatch.setattr(driver, "timed_call", one_wrong_when_drafted)
    found = evaluate(*pair, {"t": TEXTS}, text_tokenizer, compare_plain=True, **GREEDY).metrics["t"]
    assert found.speedup.identical == 0 and found.speedup.best_tokens == found.tokens - len(TEXTS)


def test_evaluating_leaves_the_users_random_state_alone(pair, text_tokenizer):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = evaluate(*pair, {"t": TEXTS}, text_tokenizer, **SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = (evaluate(*pair, {"t": TEXTS}, text_tokenizer, seed=seed, **SAMPLED) for seed in (0, 1))
    accepted = [[record.rounds.accepted for record in found.answers] for found in (first, again, other)]
    assert accepted[0] == accepted[1] != accepted[2]


def test_malformed_lines_and_prompts_that_do_not_fit_are_named_and_the_rest_runs(pair, text_tokenizer, tmp_path):
    lines = ['{"turns": ["what is"]}', "{oops", '{"turns": []}', json.dumps({"prompt": "up " * 300}), "", '"up"',
             json.dumps({"turns": ["much", "is " * 300]}), json.dumps({"prompt": "up " * 250}),
             '"half a pair \\ud83d"', "[" * 100_000]  # fmt: skip
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    tasks = {"file": tmp_path / "p.jsonl", "list": ["what", {"text": "up"}, 5]}
    found = evaluate(*pair, tasks, text_tokenizer, tmp_path / "e.json", batch_size=4, **GREEDY)
    assert [(part.task, part.line) for part in found.failed] == [
        ("file", 2), ("file", 3), ("file", 4), ("file", 7), ("file", 9), ("file", 10), ("list", 2), ("list", 3),
    ]  # fmt: skip
    errors = [part.error for part in found.failed]
    assert errors[0].startswith("is not JSON") and "'turns' must be" in errors[1]
    assert "a prompt of 300 tokens leaves no room in the target's context of 256" in errors[2]
    assert errors[3].startswith("turn 2: a prompt of 30")
    assert "the tokenizer refuses" in errors[4] and errors[5].startswith("is not JSON: maximum recursion")
    assert [(part.group, part.index, part.turn) for part in found.answers] == [
        ("file", 0, 0), ("file", 2, 0), ("file", 3, 0), ("file", 4, 0), ("list", 0, 0),
    ]  # fmt: skip
    assert len(found.answers[3].token_ids) == 6  # of 20: what the context has room for
    assert all(len(record.token_ids) == 20 or record.index == 4 for record in found.answers[:3])
    (result,) = read_results([tmp_path / "e.json"])
    assert [part["line"] for part in result["failed"]] == [2, 3, 4, 7, 9, 10, 2, 3]
    assert set(result["failed"][0]) == {"task", "line", "error"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", [0, 1])  # the first prompt warms up, too
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_prompt_that_fails_fails_alone(pair, text_tokenizer, batch_size, place, monkeypatch):
    rows = ["up", "much", "what"]
    rows.insert(place, "up what is")
    real = timed_call

    def failing(target, prompts, *args, **options):
        if any(6 in each.prompt_ids[:3] for each in prompts):
            raise RuntimeError("no 'is' please")
        return real(target, prompts, *args, **options)

    monkeypatch.setattr(driver, "timed_call", failing)
    told = pytest.warns(UserWarning, match="each is decoded alone") if batch_size > 1 else contextlib.nullcontext()
    with told:
        found = evaluate(*pair, {"t": rows}, text_tokenizer, batch_size=batch_size, **GREEDY)
    assert [(part.line, part.error) for part in found.failed] == [(1 + place, "no 'is' please")]
    assert [record.index for record in found.answers] == [each for each in range(4) if each != place]
    with pytest.raises(ValueError, match="no prompt could be answered; the first: t line 1: .*no room"):
        evaluate(*pair, {"t": ["up " * 400]}, text_tokenizer, **GREEDY)


def wrong_calls():
    good, several = {"t": ["up"]}, GenerationConfig(do_sample=True, num_return_sequences=2)
    return [
        ({"tasks": {"t": "nowhere.jsonl"}}, "nowhere.jsonl: there is no such file"),
        ({"tasks": {"t": []}}, "t holds no prompt"),
        ({"tasks": {}}, "there is no task"),
        ({"tasks": {"all": ["up"]}}, "a task cannot be called 'all'"),
        ({"tasks": good, "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"tasks": good, "max_length": 5}, "makes max_length itself: use max_new_tokens"),
        ({"tasks": good, "generation_config": several}, "makes num_return_sequences"),
        ({"tasks": good, "generation_config": GenerationConfig(return_dict_in_generate=True)}, "makes return_dict"),
        ({"tasks": good, "assistant_confidence_threshold": 0.5}, r"pass policy=ConfidenceThreshold\(...\)"),
        ({"tasks": good, "draft": None, "compare_plain": True}, "compare_plain needs a draft"),
        ({"tasks": good, "draft": None, "policy": ConfidenceThreshold(0.5)}, "a policy needs a draft"),
        ({"tasks": good, "nonsense": 1}, "nonsense"),
        ({"tasks": good, "max_new_tokens": None}, "answers need a limit, .* has none: give max_new_tokens"),
    ]


def test_wrong_calls_are_refused_before_anything_is_decoded(pair, make_target, text_tokenizer, tmp_path):
    target, draft = pair
    for arguments, message in wrong_calls():
        arguments = {"draft": draft, "output_file": tmp_path / "e.json"} | arguments
        with pytest.raises(ValueError, match=message):
            evaluate(target, processing_class=text_tokenizer, **arguments)
    with pytest.raises(TypeError, match="tasks must map names to prompts, got list"):
        evaluate(target, draft, ["p.jsonl"], text_tokenizer)
    with pytest.raises(ValueError, match="hidden_size|vocab"):
        evaluate(make_target(), draft, {"t": ["up"]}, text_tokenizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [{"max_new_tokens": 3}, {"max_length": 5}])
def test_without_a_length_the_targets_generation_config_decides(pair, text_tokenizer, monkeypatch, limit):
    target, draft = pair
    for name, value in {"max_new_tokens": None, "max_length": None, "eos_token_id": None, **limit}.items():
        monkeypatch.setattr(target.generation_config, name, value)
    found = evaluate(target, draft, {"t": ["up is"]}, text_tokenizer, max_new_tokens=None, do_sample=False)
    assert len(found.answers[0].token_ids) == 3 and len(found.answers[0].prompt_ids) == 2
    assert found.facts["max_new_tokens"] == limit.get("max_new_tokens")


@pytest.mark.parametrize("continuous", [True, False])
def test_errors_come_without_frames_which_would_keep_tensors(pair, text_tokenizer, continuous):
    def fails(input_ids, scores, **kwargs):
        raise KeyError("nothing there")

    prompts = {"": [Prompt([5, 6]), Prompt([7])]}
    options = {"continuous": continuous, "stopping_criteria": [fails], **GREEDY}
    errors = [answer.error for answer in driver.decode_prompts(*pair[:1], prompts, text_tokenizer, pair[1], **options)]
    assert [type(error) for error in errors] == [KeyError, KeyError]
    assert all(error.__traceback__ is error.__cause__ is error.__context__ is None for error in errors)


CALLS = (2, 1, 1, 1, 1, 2, 2)  # turns of each call of a whole run


@pytest.fixture
def whole(pair, text_tokenizer, tmp_path):
    """A run that was not interrupted; returns its result and the arguments."""
    arguments = (*pair, {"talk": TALKS, "texts": TEXTS}, text_tokenizer)
    evaluate(*arguments, tmp_path / "whole.json", batch_size=2, **SAMPLED)
    return read_results([tmp_path / "whole.json"])[0], arguments


def test_an_interrupted_run_goes_on_and_its_result_is_that_of_a_whole_one(whole, tmp_path, monkeypatch):
    result, arguments = whole
    output, calls, stop_at = tmp_path / "cut.json", [], 4

    def interrupted(*args, **kwargs):
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append([each.prompt_ids for each in args[1]])
        return timed_call(*args, **kwargs)

    monkeypatch.setattr(driver, "timed_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(*arguments, output, batch_size=2, **SAMPLED)
    assert not output.exists()
    unfinished = output.with_name("cut.json.partial.jsonl")
    assert len(unfinished.read_text().splitlines()) == sum(CALLS[:4])
    finished, stop_at = list(calls), -1
    calls.clear()
    evaluate(*arguments, output, batch_size=2, **SAMPLED)
    assert not unfinished.exists() and len(calls) == 7 - 4
    assert not [prompts for prompts in finished if prompts in calls]  # none is decoded again
    assert json.dumps(without_times(read_results([output])[0])) == json.dumps(without_times(result))


def test_an_unfinished_run_is_not_gone_on_with_other_settings(pair, text_tokenizer, tmp_path, monkeypatch):
    target, draft = pair
    output = tmp_path / "e.json"
    monkeypatch.setattr("hf_dspark.files.Journal.remove", lambda journal: None)
    evaluate(target, draft, {"t": TEXTS}, text_tokenizer, output, **GREEDY)
    for changed, name in (
        ({"seed": 3}, "seed"), ({"batch_size": 2}, "batch_size"), ({"max_new_tokens": 3}, "options"),
        ({"policy": ConfidenceThreshold(0.5)}, "policy"), ({"tasks": {"t": TEXTS[:2]}}, "tasks"),
        ({"compare_plain": True}, "compare_plain"), ({"draft": None}, "draft"),
        ({"enable_thinking": True}, "enable_thinking"),
    ):  # fmt: skip
        arguments = {"tasks": {"t": TEXTS}, "draft": draft} | GREEDY | changed
        with pytest.raises(ValueError, match=rf"differs in .*{name} \("):
            evaluate(target, processing_class=text_tokenizer, output_file=output, **arguments)
    with torch.no_grad():
        next(draft.parameters()).add_(1.0)
        with pytest.raises(ValueError, match=r"differs in draft \("):
            evaluate(target, draft, {"t": TEXTS}, text_tokenizer, output, **GREEDY)
        next(draft.parameters()).sub_(1.0)
