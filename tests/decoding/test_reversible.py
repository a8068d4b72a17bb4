"""Processors that go back with rejected drafts: the same tokens and the same distribution as in plain decoding."""

import json
import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, TopKLogitsWarper

from hf_dspark import (
    AssistantDraft,
    DecodingOptions,
    FullBlock,
    PromptLookup,
    ReversibleProcessor,
    Scheduler,
    attach,
    detach,
    generate_many,
)
from hf_dspark.decoding.reversible import FollowingProcessor, XGrammarProcessor
from tests.decoding.test_lossless_batches import PROMPTS, enumerate_rounds
from tests.distributions import HEADS, PROMPT, chi_square_p_value, distribution_of_call, make_pair
from tests.rows import EOS, GREEDY, padded

ONE_ROW = [list(PROMPTS[0])]
# From each state, the possible tokens and where they lead. State 1 forces a token.
SMALL = ({0: 1, 1: 2}, {2: 0}, {0: 0, 2: 1})
TREES = Scheduler(num_nodes=4)


class Automaton(ReversibleProcessor):
    def __init__(self, arrows):
        self.arrows, self.states = arrows, [0]

    def fork(self, row):
        return type(self)(self.arrows)

    def accept(self, token_id):
        following = self.arrows[self.states[-1]].get(token_id)
        self.states += [following] * (following is not None)
        return following is not None

    def rollback(self, num_tokens):
        assert 0 < num_tokens < len(self.states)
        del self.states[-num_tokens:]

    def mask(self, scores):
        return masked(scores, self.arrows[self.states[-1]])

    def forced(self):
        tokens = list(self.arrows[self.states[-1]])
        return tokens[0] if len(tokens) == 1 else None


class NeverBack(Automaton):
    def rollback(self, num_tokens):
        pass


class Replayed(LogitsProcessor):
    """The same by its definition: it reads all tokens after one of some prompts anew."""

    def __init__(self, arrows, prompts):
        self.arrows, self.prompts = arrows, [list(prompt) for prompt in prompts]

    def __call__(self, input_ids, scores):
        return torch.cat([self._one(ids.tolist(), row) for ids, row in zip(input_ids, scores[:, None], strict=True)])

    def _one(self, ids, scores):
        state, prompt = 0, next(prompt for prompt in self.prompts if ids[: len(prompt)] == prompt)
        for token in ids[len(prompt) :]:
            if token not in self.arrows[state]:
                break
            state = self.arrows[state][token]
        return masked(scores, self.arrows[state])


def masked(scores, possible):
    kept = torch.full_like(scores, -torch.inf)
    kept[:, list(possible)] = scores[:, list(possible)]
    return kept


def random_arrows(vocab, ends=(), size=24):
    """Return an automaton of which every third state forces a token; an end leads to a state that has only itself."""
    generator = torch.Generator().manual_seed(3)
    arrows = []
    for state in range(size):
        tokens = torch.randperm(vocab, generator=generator)[: 1 if state % 3 == 1 else 9].tolist()
        arrows.append({token: int(torch.randint(size, (), generator=generator)) for token in tokens})
        arrows[-1] |= {end: size for end in ends if state % 3 == 0}
    return [*arrows, dict.fromkeys(ends, size)]


# ---- the distribution, enumerated


def distance(monkeypatch, pair, policy, make=Automaton, prompts=ONE_ROW, top_k=2, **options):
    warpers = [TopKLogitsWarper(top_k)] if top_k else []
    plain = LogitsProcessorList([Replayed(SMALL, prompts), *warpers])
    return enumerate_rounds(monkeypatch, *pair, policy, [make(SMALL), *warpers], prompts, plain=plain, **options)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("policy", [FullBlock(), TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("head", ["vanilla", "rnn", "draft_top_k", "pruned", "headless"])
def test_a_round_has_the_distribution_of_plain_constrained_decoding(make_target, monkeypatch, head, policy):
    found, counts = distance(monkeypatch, make_pair(make_target, seed=5, **HEADS[head]), policy)
    assert found < 5e-6 and max(counts) > (1,)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "options",
    [
        {"policy": FullBlock(), "prompts": PROMPTS},
        {"policy": Scheduler(num_nodes=2), "prompts": PROMPTS},
        {"policy": FullBlock(), "rounds": 2},
        {"policy": Scheduler(num_nodes=3), "rounds": 2},
        {"policy": FullBlock(), "top_k": 0},
        {"policy": TREES, "prompt_lookup": True, "length": 6, "prompts": [[0, 0, 1, 1, 2, 2, 0, 2, 1, 0]]},
    ],
    ids=["two_rows", "two_trees", "two_rounds", "two_rounds_of_trees", "all_tokens", "prompt_lookup"],
)
def test_rounds_have_the_distribution_of_plain_constrained_decoding(make_target, monkeypatch, options):
    assert distance(monkeypatch, make_pair(make_target, seed=5), **options)[0] < 5e-6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", [FullBlock(), TREES], ids=["chains", "trees"])
def test_enumeration_catches_a_state_that_does_not_go_back(make_target, monkeypatch, policy):
    assert distance(monkeypatch, make_pair(make_target, seed=5), policy, NeverBack)[0] > 0.01


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=7)], ids=["chains", "trees"])
def test_samples_have_the_distribution_of_plain_constrained_decoding(make_target, policy):
    target, draft = make_pair(make_target, gamma=3, seed=5)
    draft.decoding, counts, length = DecodingOptions(policy), {}, 5
    output = target.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), assistant_model=draft, do_sample=True, top_k=0, pad_token_id=0,
        max_new_tokens=length, num_return_sequences=600, logits_processor=[Automaton(SMALL)],
    )  # fmt: skip
    for row in output[:, PROMPT.shape[1] :].tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    expected = distribution_of_call(target, length, [Replayed(SMALL, PROMPT.tolist())])
    assert chi_square_p_value(counts, expected) > 1e-3


# ---- greedy answers of the trained pair

CALLS = {
    "chains": (FullBlock(), {}),
    "trees": (Scheduler(num_nodes=20), {}),
    "default": (None, {}),
    "ends": (None, {"eos_token_id": EOS}),
    "penalty": (Scheduler(num_nodes=20), {"repetition_penalty": 1.3}),
    "ends_late": (None, {"eos_token_id": EOS, "min_new_tokens": 20}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("policy", "options"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_answers_are_those_of_plain_decoding(pair, prompts, policy, options, rows):
    target, draft = pair
    draft.decoding, arrows = DecodingOptions(policy, prompt_lookup=True), random_arrows(64, [EOS])
    batch, given = padded(prompts[:rows]), Automaton(arrows)
    options = GREEDY | {"eos_token_id": None} | options
    replayed = [Replayed(arrows, batch["input_ids"].tolist())]
    expected = target.generate(**batch, **options, logits_processor=replayed)
    for _ in range(2):  # one processor serves several calls
        assert torch.equal(target.generate(**batch, **options, logits_processor=[given]), expected)
        found = target.generate(**batch, **options, logits_processor=[given], assistant_model=draft)
        assert torch.equal(found, expected)
    assert given.states == [0] and draft.last_stats.tau > 1.3


def test_answers_are_those_of_plain_decoding_in_transformers_loop_queues_and_turns(pair, prompts, prompt_ids):
    target, draft = pair
    arrows = random_arrows(64, [EOS])
    options, given = GREEDY | {"eos_token_id": EOS}, Automaton(arrows)

    def plain(prompt):
        ids = torch.tensor([prompt])
        replayed = [Replayed(arrows, [prompt])]
        return target.generate(ids, attention_mask=torch.ones_like(ids), **(options | {"logits_processor": replayed}))

    options["logits_processor"] = [given]
    for done in generate_many(target, draft, prompts, batch_size=3, progress=False, **options):
        expected = plain(prompts[done.index])[0, len(done.prompt) :].tolist()
        assert done.error is None and done.token_ids.tolist() == expected
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    ids = prompt_ids[0]
    first = target.generate(ids, assistant_model=draft, **options)
    assert torch.equal(first, plain(prompts[0])) and draft.last_stats.loop == "transformers"
    draft.decoding = DecodingOptions()
    longer = torch.cat([first, torch.tensor([[7, 9]])], dim=1)
    expected = plain(longer[0].tolist())
    for drafting in ({}, {"assistant_model": draft}):
        assert torch.equal(target.generate(longer, **options, **drafting), expected)


@pytest.mark.parametrize("kind", ["ngram", "assistant"])
def test_other_drafts_answer_as_plain_decoding(pair, prompts, kind):
    target, arrows = pair[0], random_arrows(64)
    draft = PromptLookup(target) if kind == "ngram" else AssistantDraft(target)
    batch, options = padded(prompts[:3]), GREEDY | {"eos_token_id": None, "logits_processor": [Automaton(arrows)]}
    found = target.generate(**batch, **options, assistant_model=draft)
    assert torch.equal(found, target.generate(**batch, **options))
    assert draft.last_stats.tau > 1.1


def test_an_error_of_one_sequence_ends_that_one_alone(pair, prompts):
    class Fails(Automaton):
        def mask(self, scores):
            if len(self.states) == 12 and self.states[-1] % 2:
                raise KeyError("no such state")
            return super().mask(scores)

    found = generate_many(*pair, prompts, batch_size=3, progress=False, **GREEDY, eos_token_id=None,
                          logits_processor=[Fails(random_arrows(64))])  # fmt: skip
    errors = [type(done.error) for done in found]
    assert set(errors) == {KeyError, type(None)}


# ---- forced tokens


def without_forced(monkeypatch, make):
    monkeypatch.setattr(make, "forced", lambda self: None)


def test_forced_tokens_are_accepted_beyond_the_block_of_a_draft(make_target, make_draft, monkeypatch):
    target = make_target()
    draft = make_draft(target, block_size=4)
    draft.decoding = DecodingOptions(Scheduler(num_nodes=20))
    arrows = [dict.fromkeys(range(20), 1), *({10 + state: state + 1} for state in range(1, 12)), {9: 0}]
    ids, options = torch.arange(6)[None], GREEDY | {"max_new_tokens": 39, "eos_token_id": None}
    call = {"assistant_model": draft, "logits_processor": [Automaton(arrows)]}
    expected = target.generate(ids, **options, logits_processor=[Automaton(arrows)])
    assert torch.equal(target.generate(ids, **options, **call), expected)
    rounds = draft.last_stats.rounds
    assert rounds <= 3 * 2
    without_forced(monkeypatch, Automaton)
    assert torch.equal(target.generate(ids, **options, **call), expected)
    assert draft.last_stats.rounds > rounds


def test_confidence_of_a_forced_token_is_one(make_target, make_draft):
    target = make_target()
    draft = make_draft(target)
    seen = []
    draft.decoding = DecodingOptions(FullBlock(), observer=lambda outcome: seen.append(outcome.confidence))
    arrows = [dict.fromkeys(range(20), 1), {11: 2}, {12: 0}]
    target.generate(torch.arange(6)[None], assistant_model=draft, **GREEDY, logits_processor=[Automaton(arrows)])
    ones = [(each[0] == 1.0).tolist() for each in seen]
    assert len(ones) > 3 and all(sum(row[:3]) == 2 for row in ones if len(row) > 2), ones


def test_a_processor_follows_any_prefix_in_any_order():
    processor, prompt, scores = FollowingProcessor(Automaton(SMALL), 2), [7, 7], torch.zeros(1, 3)
    after = {(): [0, 1], (0, 2): [0, 1], (0,): [2], (1, 0, 0): [2], (1,): [0, 2], (0, 1, 1): [2]}
    for tokens, possible in [*after.items(), *reversed(after.items())]:
        found = processor(torch.tensor([[*prompt, *tokens]]), scores.clone())
        assert (found[0] > -torch.inf).nonzero()[:, 0].tolist() == possible
    assert processor.forced(torch.tensor([[*prompt, 1, 2]]), 5) == [2]
    assert processor.forced(torch.tensor([[*prompt, 0, 1]]), 5) == [], "after a token that is not possible"


# ---- xgrammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["reader", "writer"]},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "kind", "active"],
    "additionalProperties": False,
}
LETTERS = ["<eos>", *string.ascii_letters, *string.digits, *string.punctuation, " "]


@pytest.fixture(scope="module")
def xgrammar():
    return pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def characters():
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<eos>", eos_token="<eos>")


@pytest.fixture(scope="module")
def compile_schema(xgrammar, characters):
    info = xgrammar.TokenizerInfo.from_huggingface(characters, vocab_size=len(LETTERS))
    compiler = xgrammar.GrammarCompiler(info)
    return lambda schema: compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)


@pytest.fixture
def writers(make_target, make_draft):
    target = make_target(vocab_size=len(LETTERS), eos_token_id=0)
    return target, make_draft(target)


def read(output, tokenizer, width):
    return [json.loads(tokenizer.decode(row[width:], skip_special_tokens=True)) for row in output]


JSON_OPTIONS = {"max_new_tokens": 120, "pad_token_id": 0, "eos_token_id": 0}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", [FullBlock(), Scheduler(num_nodes=12), None], ids=["chains", "trees", "default"])
def test_all_of_100_samples_keep_to_a_json_schema(xgrammar, compile_schema, characters, writers, policy):
    target, draft = writers
    draft.decoding = DecodingOptions(policy)
    ids = torch.arange(20, 25).expand(100, -1)
    own = xgrammar.contrib.hf.LogitsProcessor(compile_schema(SCHEMA))
    sampled = JSON_OPTIONS | {"do_sample": True, "top_k": 0, "logits_processor": [own]}
    output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **sampled)
    found = read(output, characters, 5)
    assert len(found) == 100 and all(list(each) == list(SCHEMA["properties"]) for each in found)
    assert len({each["name"] for each in found}) > 50 and not own.matchers


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"eos_token_id": None}], ids=["", "goes_on_after_the_end"])
def test_greedy_json_is_that_of_xgrammar_in_plain_decoding(xgrammar, compile_schema, writers, options):
    target, draft = writers
    make = lambda grammar: [xgrammar.contrib.hf.LogitsProcessor(grammar)]  # noqa: E731
    batch, greedy = padded([[3, 4, 5], [9], [30, 31]]), JSON_OPTIONS | {"do_sample": False} | options
    other = compile_schema({"enum": ["yes", "no", "neither"]})
    for grammar in (compile_schema(SCHEMA), [compile_schema(SCHEMA), other, other]):
        expected = target.generate(**batch, **greedy, logits_processor=make(grammar))
        for decoding in (DecodingOptions(FullBlock()), DecodingOptions(Scheduler(num_nodes=12))):
            draft.decoding = decoding
            found = target.generate(**batch, **greedy, logits_processor=make(grammar), assistant_model=draft)
            assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="got 2 grammars for 3 sequences"):
        target.generate(**batch, **greedy, logits_processor=make([other, grammar[0]]), assistant_model=draft)


def test_json_of_queues_attached_drafts_and_transformers_loop(xgrammar, compile_schema, characters, writers):
    target, draft = writers
    make = lambda: xgrammar.contrib.hf.LogitsProcessor(compile_schema(SCHEMA))  # noqa: E731
    greedy, prompts = JSON_OPTIONS | {"do_sample": False}, [[3, 4, 5], [9], [30, 31]]
    expected = [target.generate(torch.tensor([prompt]), **greedy, logits_processor=[make()]) for prompt in prompts]
    queued = generate_many(target, draft, prompts, batch_size=2, progress=False, **greedy, logits_processor=[make()])
    for done in queued:
        assert done.token_ids.tolist() == expected[done.index][0, len(done.prompt) :].tolist()
    ids = torch.tensor(prompts[:1])
    draft.decoding = DecodingOptions(use_transformers_loop=True)
    found = target.generate(ids, **greedy, logits_processor=[make()], assistant_model=draft)
    assert torch.equal(found, expected[0])
    draft.decoding = DecodingOptions()
    outlines = {"__module__": "outlines.backends.xgrammar", "compiled_grammar": compile_schema(SCHEMA)}
    of_outlines = type("XGrammarLogitsProcessor", (LogitsProcessor,), outlines)()
    found = target.generate(ids, **greedy, logits_processor=[of_outlines], assistant_model=draft)
    assert torch.equal(found, expected[0])
    attached = attach(target, draft)
    assert torch.equal(target.generate(ids, **greedy, logits_processor=[make()]), expected[0])
    assert attached.num_assisted == 1 and not attached.plain_calls
    detach(target)


def test_forced_tokens_of_a_json_schema_save_rounds(xgrammar, compile_schema, writers, monkeypatch):
    target, draft = writers
    draft.decoding = DecodingOptions(Scheduler(num_nodes=12))
    ids, tau = torch.arange(20, 25).expand(8, -1), {}
    for name in ("forced", "masked"):
        own = xgrammar.contrib.hf.LogitsProcessor(compile_schema(SCHEMA))
        torch.manual_seed(0)
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, do_sample=True, top_k=0,
                        **JSON_OPTIONS, logits_processor=[own])  # fmt: skip
        tau[name] = draft.last_stats.tau
        without_forced(monkeypatch, XGrammarProcessor)
    assert tau["forced"] > 1.1 * tau["masked"], tau
