"""More prompts than rows: each as if alone, results as they finish, failures alone."""

import copy

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from hf_dspark import DecodingOptions, FullBlock, Scheduler, generate_many
from hf_dspark.decoding.loop import DecodingLoop
from hf_dspark.models.slot_cache import SlotCache
from tests import rows

GREEDY = rows.GREEDY | {"max_new_tokens": 24, "progress": False}
ENDS = {"eos_token_id": [62, 42, 11]}
NO_END = {"eos_token_id": None}


@pytest.fixture(scope="module")
def prompts(reference):
    rows = reference["prompts"]
    return [row[start : start + 3 + 2 * start] for row in rows for start in range(3)]


@pytest.fixture
def many(target, draft):
    """Decode prompts; return the results by index."""

    def call(prompts, *args, **options):
        results = generate_many(target, draft, prompts, *args, **(GREEDY | options))
        return {result.index: result for result in results}

    return call


@pytest.fixture
def assert_alone(target):
    """Check that these prompts succeeded, with the tokens of plain decoding."""

    def compare(results, prompts, indices, **options):
        for index in indices:
            expected = rows.alone(target, prompts[index], **({"max_new_tokens": 24} | options))
            assert results[index].error is None and results[index].token_ids.tolist() == expected

    return compare


class Processor(LogitsProcessor):
    """Calls a function before it changes nothing."""

    def __init__(self, function):
        self.function = function

    def __deepcopy__(self, memo):
        return self

    def __call__(self, input_ids, scores):
        self.function(input_ids)
        return scores


class RaisesAt(StoppingCriteria):
    """Fails for one prompt, when it has this length."""

    def __init__(self, prompt, length):
        self.prompt, self.length = prompt, length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length and input_ids[0, : len(self.prompt)].tolist() == self.prompt:
            raise KeyError("nothing there")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("batch_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 64))])
def test_every_prompt_is_decoded_as_if_alone(many, assert_alone, prompts, batch_size):
    results = many(prompts, batch_size=batch_size, **ENDS)
    assert sorted(results) == list(range(len(prompts)))
    assert_alone(results, prompts, results, **ENDS)
    assert all(result.prompt == prompts[index] for index, result in results.items())
    if batch_size > 1:
        assert list(results) != sorted(results)


def test_the_batch_stays_full_while_the_queue_lasts(many, prompts, monkeypatch):
    sizes, honest = [], DecodingLoop.run_round

    def run_round(self):
        sizes.append(len(self.requests))
        return honest(self)

    monkeypatch.setattr(DecodingLoop, "run_round", run_round)
    many(prompts, batch_size=4, **ENDS)
    assert max(sizes) == 4 and sorted(sizes, reverse=True) == sizes


def test_prompts_are_read_as_they_are_needed(target, draft, prompts):
    read = []

    def endless():
        index = 0
        while True:
            read.append(index)
            yield prompts[index % len(prompts)]
            index += 1

    results = generate_many(target, draft, endless(), batch_size=2, **GREEDY)
    assert {next(results).index, next(results).index} <= {0, 1, 2}
    assert len(read) <= 5
    results.close()


def test_failing_prompts_fail_alone(target, many, assert_alone, prompts):
    """An empty prompt, one of unknown tokens, and one whose processor raises in the middle."""
    mixed = [prompts[1], [], prompts[0], [999], prompts[2]]
    assert prompts[1][0] != prompts[0][0] != prompts[2][0]

    def fail(ids):
        if ids[0, 0] == prompts[0][0] and ids.shape[1] > 8:
            raise ZeroDivisionError("a bug of the user's")

    results = many(mixed, batch_size=5, logits_processor=[Processor(fail)], **NO_END)
    assert isinstance(results[1].error, ValueError) and "empty" in str(results[1].error)
    assert isinstance(results[2].error, ZeroDivisionError)
    kept = results[2].token_ids.tolist()
    assert kept == rows.alone(target, prompts[0], **NO_END)[: len(kept)]
    assert isinstance(results[3].error, ValueError) and "999" in str(results[3].error)
    assert_alone(results, mixed, (0, 4), **NO_END)


def test_prompts_of_another_type_fail_alone_and_say_what_is_needed(many, assert_alone, prompts):
    results = many([prompts[0], 5, None, [1.5], [[1, 2], [3]], torch.tensor(prompts[1])], batch_size=3)
    for index in range(1, 5):
        assert isinstance(results[index].error, ValueError) and "must be" in str(results[index].error)
    assert_alone(results, [prompts[0], *[None] * 4, prompts[1]], (0, 5))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (5, r"must be .*, got 5: pass \[prompt\]"),
        (None, "must be .*, got None"),
        ({"text": "up"}, "got an object"),
        ("up", "tokenizer"),
        ([{"role": "user", "content": "up"}], "tokenizer"),
    ],
)
def test_a_first_prompt_that_is_none_is_an_error_of_the_call(target, draft, prompts, first, said):
    """A forgotten tokenizer, or a list of something else: all prompts would fail one by one."""
    for given in ([first, prompts[0]], iter([first, prompts[0]])):
        with pytest.raises(ValueError, match=said):
            next(generate_many(target, draft, given, **GREEDY))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_failing_criterion_fails_alone(many, assert_alone, prompts, at_once):
    """At once: its neighbours in the admission keep their keys."""
    breaks = RaisesAt(prompts[0], len(prompts[0]) + 1 if at_once else 9)
    results = many(prompts[:4], batch_size=4, stopping_criteria=[breaks], **NO_END)
    assert isinstance(results[0].error, KeyError)
    assert_alone(results, prompts, (1, 2, 3), **NO_END)


def test_neighbours_of_a_failing_criterion_end_at_their_first_token(many, prompts):
    breaks = RaisesAt(prompts[0], len(prompts[0]) + 1)
    alike = many(prompts[:4], batch_size=4, max_new_tokens=1, stopping_criteria=[breaks], **NO_END)
    assert [len(alike[index].token_ids) for index in (1, 2, 3)] == [1, 1, 1]
    first = int(alike[2].token_ids[0])
    ends = many(prompts[:4], batch_size=4, stopping_criteria=[breaks], eos_token_id=first)
    assert ends[2].token_ids.tolist() == [first] and ends[2].error is None


def test_a_draft_that_served_another_target_goes_on_with_its_own(target, draft, prompts):
    alone = [len(result.token_ids) for result in generate_many(target, draft, prompts[:4], batch_size=1, **GREEDY)]
    rounds = draft.last_stats.rounds
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.get_output_embeddings().weight.neg_()
    results = generate_many(target, draft, prompts[:4], batch_size=1, **GREEDY)
    lengths = [len(next(results).token_ids)]
    statistics = draft.last_stats
    other.generate(torch.tensor([prompts[0]]), assistant_model=draft, max_new_tokens=4, do_sample=False)
    lengths += [len(result.token_ids) for result in results]
    assert lengths == alone and statistics.rounds == rounds


def test_errors_that_belong_to_no_prompt_are_raised_at_once(target, draft, prompts):
    for wrong in ("batch_size", 0), ("attention_mask", torch.ones(1, 1)), ("num_return_sequences", 2):
        with pytest.raises(ValueError, match=wrong[0]):
            generate_many(target, draft, prompts, **dict([wrong]))
    for wrong in ("max_new_token", 5), ("num_beams", 2), ("use_cache", False):
        with pytest.raises(ValueError):
            generate_many(target, draft, prompts, **(GREEDY | dict([wrong])))
    with pytest.raises(TypeError, match="several"):
        generate_many(target, draft, "one prompt", **GREEDY)
    with pytest.raises(TypeError, match=r"draft=None: pass one, or attach it. Without one, regenerate\("):
        generate_many(target, None, prompts, **GREEDY)


def test_sampling_draws_the_same_in_any_company(many, draft, prompts):
    """Noise is keyed by the prompt's number: neighbours change nothing, save rounding, if no policy learns."""
    draft.decoding = DecodingOptions(policy=FullBlock())
    results = []
    for batch_size in (1, 5):
        torch.manual_seed(4)
        answers = many(prompts, batch_size=batch_size, do_sample=True, max_new_tokens=16)
        results.append({index: answer.token_ids.tolist() for index, answer in answers.items()})
    assert results[0] == results[1]


@pytest.fixture
def scarce(monkeypatch):
    """Let the memory end where a cache of more than these rows would grow longer than 64 slots."""

    def limit(max_rows):
        honest = torch.Tensor.new_zeros

        def new_zeros(self, *shape, **kwargs):
            size = shape[0] if isinstance(shape[0], tuple) else shape
            if len(size) == 4 and size[0] > max_rows and size[2] > 64:
                raise torch.OutOfMemoryError("out of memory")
            return honest(self, *shape, **kwargs)

        monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)

    return limit


def test_when_memory_runs_out_the_youngest_wait(many, assert_alone, prompts, scarce):
    scarce(max_rows=2)
    options = {"max_new_tokens": 70, **NO_END}
    with pytest.warns(UserWarning, match="out of memory: 2 sequences"):
        results = many(prompts[:5], batch_size=5, **options)
    assert_alone(results, prompts, range(5), **options)


def test_a_prompt_that_fits_nowhere_fails_alone(many, assert_alone, prompts, scarce):
    scarce(max_rows=0)
    mixed = [prompts[0], (prompts[0] * 40)[:80], prompts[1]]
    with pytest.warns(UserWarning, match="out of memory"):
        results = many(mixed, batch_size=3)
    assert isinstance(results[1].error, MemoryError)
    assert_alone(results, mixed, (0, 2))


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:out of memory")
@pytest.mark.parametrize("place", [1, 5])
def test_after_a_prompt_that_fits_nowhere_as_many_as_before_are_decoded_together(
    target, draft, assert_alone, prompts, scarce, monkeypatch, place
):
    scarce(max_rows=0)
    mixed = [*prompts[:place], (prompts[0] * 40)[:80], *prompts[place:9]]
    together, honest = [], DecodingLoop.run_round
    monkeypatch.setattr(DecodingLoop, "run_round", lambda self: (together.append(len(self.requests)), honest(self)))
    results = {}
    for result in generate_many(target, draft, mixed, batch_size=4, **GREEDY, **NO_END):
        results[result.index] = result
        if result.error is not None:
            together.clear()
    assert isinstance(results[place].error, MemoryError) and max(together) == 4
    assert_alone(results, mixed, results.keys() - {place}, **NO_END)


@pytest.mark.filterwarnings("ignore")
def test_shortage_in_a_users_processor_fails_no_prompt(many, assert_alone):
    prompts = [[3, 9, 12], [30, 7], [5, 5, 8, 41, 2], [17]]
    left = [1]

    def short_once(ids):
        if len(ids[0]) > 12 and left:
            left.pop()
            raise torch.OutOfMemoryError("out of memory")

    results = many(prompts, batch_size=4, logits_processor=[Processor(short_once)])
    assert not left
    assert_alone(results, prompts, range(4))


@pytest.mark.parametrize("cleared", [True, False])
def test_what_an_overflow_leaves_behind_reaches_no_later_prompt(many, assert_alone, prompts, monkeypatch, cleared):
    """Rows that end hold nothing but NaN from then on; if they were not cleared, it would be seen."""
    honest = DecodingLoop.release_ended

    def release_ended(self):
        for row, request in enumerate(self.requests):
            for cache in (self.cache, self.drafter.cache):
                for store in cache.stores.values():
                    store[row].masked_fill_(torch.tensor(request.ended), torch.nan)
        honest(self)

    monkeypatch.setattr(DecodingLoop, "release_ended", release_ended)
    if not cleared:
        monkeypatch.setattr(SlotCache, "clear", lambda self, row: self.truncate(row, 0))
    results = many(prompts, batch_size=3, **ENDS)
    if cleared:
        assert_alone(results, prompts, results, **ENDS)
    else:
        with pytest.raises(AssertionError):
            assert_alone(results, prompts, results, **ENDS)


@pytest.mark.filterwarnings("ignore:out of memory")
def test_a_shortage_while_a_path_is_committed_loses_nothing(target, draft, many, assert_alone, prompts, monkeypatch):
    draft.decoding = DecodingOptions(policy=Scheduler(num_nodes=12))
    honest, gathered = SlotCache.gather, []

    def gather(self, row, columns):
        gathered.append(row)
        if len(gathered) in (3, 8):
            raise torch.OutOfMemoryError("out of memory")
        honest(self, row, columns)

    monkeypatch.setattr(SlotCache, "gather", gather)
    results = many(prompts[:5], batch_size=5, **NO_END)
    assert len(gathered) > 8
    assert_alone(results, prompts, range(5), **NO_END)


def test_requests_that_ended_keep_no_features(target, draft, prompts):
    ended = []
    honest = DecodingLoop.release_ended

    def release_ended(self):
        ended.extend(request for request in self.requests if request.ended)
        honest(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodingLoop, "release_ended", release_ended)
        list(generate_many(target, draft, prompts, batch_size=2, **GREEDY))
    assert len(ended) == len(prompts) and not any(request.features for request in ended)


def test_the_target_is_the_callers_between_results(target, draft, prompts):
    before = target(torch.tensor([prompts[0]])).logits
    for _ in generate_many(target, draft, prompts[:4], batch_size=2, **GREEDY):
        assert torch.equal(target(torch.tensor([prompts[0]])).logits, before)


def test_criteria_that_count_their_calls_count_for_each_prompt(many, prompts):
    results = many(prompts[:5], batch_size=2, stopping_criteria=[rows.EndsAfterTwo()], **NO_END)
    assert [len(result.token_ids) for result in results.values()] == [2] * 5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", ["argument", "config", "target"])
def test_stop_strings_work(target, draft, many, assert_alone, prompts, tokenizer, monkeypatch, place):
    stop = {"stop_strings": ["Q", "Ld"]}
    if place == "target":
        monkeypatch.setattr(target.generation_config, "stop_strings", stop["stop_strings"])
    config = GenerationConfig(**stop, max_new_tokens=24)
    options = {"argument": stop, "config": {"generation_config": config}, "target": {}}[place]
    results = many(prompts[:5], tokenizer, batch_size=2, **options)
    assert_alone(results, prompts, range(5), tokenizer=tokenizer, **stop)
    assert all(result.text == tokenizer.decode(result.token_ids) for result in results.values())
    assert config.stop_strings == stop["stop_strings"]
    with pytest.raises(ValueError, match="need a tokenizer"):
        generate_many(target, draft, prompts, **GREEDY, **options)


def test_progress_is_shown_on_terminals_only(pair, capsys, monkeypatch):
    for is_terminal, progress in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr("sys.stderr.isatty", lambda shown=is_terminal: shown, raising=False)
        list(generate_many(*pair, [[5, 6, 7]], **GREEDY | {"progress": progress}))
        assert ("prompt" in capsys.readouterr().err) == (is_terminal and progress)


def test_without_progress_no_bar_is_made_whose_lock_an_interrupt_could_leave_held(pair, monkeypatch):
    monkeypatch.setattr("hf_dspark.decoding.many.tqdm", None)
    options = {"processing_class": None, "max_new_tokens": 3}
    assert len(list(generate_many(*pair, [[1], [2]], progress=False, **options))) == 2
    with pytest.raises(TypeError):
        generate_many(*pair, [[1], [2]], progress=True, **options)


@pytest.mark.slow
def test_a_processor_that_finds_out_the_prompts_length_has_one_for_each_prompt(many, assert_alone, prompts):
    class Finds(LogitsProcessor):
        length = None

        def __call__(self, input_ids, scores):
            self.length = self.length or input_ids.shape[1]
            generated = input_ids[0, self.length :]
            return scores - 4.0 * generated.bincount(minlength=scores.shape[-1])

    results = many(prompts, logits_processor=[Finds()])
    for index in range(len(prompts)):
        assert_alone(results, prompts, [index], logits_processor=[Finds()])
