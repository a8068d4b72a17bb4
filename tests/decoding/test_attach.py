"""A draft for all calls of a model: it assists what it can, and the rest is plain `generate()`."""

import copy
import gc
import itertools
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    pipeline,
)

from hf_dspark import (
    DecodingOptions,
    FullBlock,
    PromptLookup,
    attach,
    decode_with,
    detach,
    evaluate,
    generate_many,
)
from hf_dspark.scheduling import scheduler
from hf_dspark.scheduling.step_costs import experience_of
from tests.decoding.test_assistant_draft import encoder_decoder
from tests.decoding.test_checks import REFUSED, SAMPLED, Counter
from tests.rows import GREEDY, Notes, alone, padded


@pytest.fixture(autouse=True)
def _detached(request):
    yield
    if "pair" in request.fixturenames:
        detach(request.getfixturevalue("pair")[0])


def outcome(target, options):
    """Return what a call gives, or which error; its draws are those of one seed."""
    torch.manual_seed(3)
    try:
        return target.generate(**options).tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fresh(options):
    """Return options whose processors and caches no call has changed yet."""
    return {name: each if name == "streamer" else copied(each) for name, each in options.items()}


def copied(each):
    try:
        return copy.deepcopy(each)
    except TypeError:  # it holds what cannot be copied
        return each


def assert_plain(target, draft, options, reason):
    """Two calls with an attached draft give what plain calls do, and warn once."""
    plain = outcome(target, fresh(options) | {"assistant_model": None})
    attached = attach(target, draft)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [outcome(target, fresh(options)) for _ in range(2)] == [plain, plain]
    said = [str(each.message) for each in caught if "without the attached draft" in str(each.message)]
    assert len(said) == 1 and reason in said[0], said
    assert (attached.num_assisted, attached.num_plain) == (0, 2) and set(attached.plain_calls.values()) == {2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 6])
def test_calls_are_those_with_the_draft_as_their_assistant(target, draft, prompts, rows, options):
    batch = padded(prompts[:rows]) | options
    explicit = outcome(target, batch | {"assistant_model": draft})
    draft.last_stats = None
    attached = attach(target, draft)
    assert outcome(target, batch) == explicit and draft.last_stats.rounds > 0
    assert (attached.num_assisted, attached.num_plain) == (1, 0) and "1 calls assisted" in repr(attached)
    detach(target)
    draft.last_stats = None
    plain = outcome(target, batch)
    assert draft.last_stats is None and (plain == explicit or options is SAMPLED)


ERRORS = {"threshold_above_one", "threshold_negative"}  # about drafts: a mistake with an attached one, too
OWN_WAYS = {"prompt_lookup", "mtp", "early_exit"}  # of drafting, which the call has chosen
KINDS = {
    **{name: row[:2] for name, row in REFUSED.items() if name not in ERRORS | OWN_WAYS},
    "contrastive": (1, {"penalty_alpha": 0.6, "top_k": 4}),
    "dola": (1, {"dola_layers": "low"}),
    "beams_sampled": (3, {"num_beams": 2, "do_sample": True}),
    "beams_of_a_configuration": (1, {"generation_config": GenerationConfig(num_beams=2)}),
    "random_processor": (2, {"logits_processor": [lambda ids, scores: scores + torch.rand_like(scores)]} | SAMPLED),
    "paged": (1, {"cache_implementation": "paged"}),
    "assistant_tokenizer": (1, {"assistant_tokenizer": object()}),
    "right_padding": (1, {"input_ids": torch.tensor([[5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}),
    "stateful_and_streamed": (1, {"logits_processor": [Counter()], "do_sample": True}),
}
REASONS = {
    "empty_prompt": "empty",
    "paged": "generate_batch",
    "right_padding": "padding_side",
    "no_prompts": "no prompts",
}


@pytest.mark.one_in(13)
@pytest.mark.parametrize(
    ("rows", "options"),
    [pytest.param(*each, id=name, marks=[pytest.mark.slow] * (name == "paged")) for name, each in KINDS.items()],
)
def test_a_call_that_would_be_refused_is_plain(target, draft, prompts, rows, options, request):
    kind = request.node.callspec.id
    assert_plain(target, draft, GREEDY | padded(prompts[:rows]) | options, REASONS.get(kind, ""))


def test_a_mistake_about_drafts_is_one_with_an_attached_draft(target, draft, prompts):
    attach(target, draft)
    for name in ERRORS:
        with pytest.raises(ValueError, match=REFUSED[name][2]):
            target.generate(**padded(prompts[:1]), **REFUSED[name][1], **GREEDY)


def test_caches_that_no_draft_continues_are_continued_without(target, draft, prompts):
    ids = torch.tensor(prompts[:1])
    static = StaticCache(config=target.config, max_cache_len=128)
    assert_plain(target, draft, GREEDY | {"input_ids": ids, "past_key_values": static}, "got StaticCache")
    offloaded = DynamicCache(config=target.config)
    target.generate(ids, past_key_values=offloaded, assistant_model=None, **GREEDY)
    offloaded.offloading = True
    longer = torch.tensor([prompts[0] * 12])
    assert_plain(target, draft, GREEDY | {"input_ids": longer, "past_key_values": offloaded}, "cannot continue a")


PLAIN_TURNS = {
    "refused": {"guidance_scale": 1.5},
    "without": {"assistant_model": None},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


# transformers' prompt lookup decodes one row, and reads the whole conversation again.
GIVEN = [
    (rows, given, kind)
    for rows, given, kind in itertools.product((1, 3), ("whole", "edited", "new"), PLAIN_TURNS)
    if kind != "lookup" or (rows == 1 and given != "new")
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("rows", "given", "kind"), GIVEN)
def test_a_plain_turn_goes_on_from_one_with_the_draft(target, draft, prompts, rows, given, kind):
    options = PLAIN_TURNS[kind]
    attach(target, draft)
    batch = padded(prompts[:rows])
    first = target.generate(**batch, return_dict_in_generate=True, **GREEDY)
    said = first.sequences[:, batch["input_ids"].shape[1] :]
    ids = torch.cat([first.sequences[:, : -4 if given == "edited" else None], said[:, :3]], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(ids[:, batch["input_ids"].shape[1] :])], dim=1)
    plain = GREEDY | {"assistant_model": None} | options
    expected = target.generate(ids, attention_mask=mask, **plain)[:, ids.shape[1] :]
    part = ids[:, -4:] if given == "new" else ids  # the last token was said, and not read
    found = target.generate(part, attention_mask=mask, past_key_values=first.past_key_values, **GREEDY | options)
    assert torch.equal(found[:, part.shape[1] :], expected)


def test_a_cache_of_all_that_is_given_is_left_to_plain_generate(target, draft, prompts):
    ids, cache = torch.tensor(prompts[:1]), DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids, past_key_values=cache)
    assert_plain(target, draft, GREEDY | {"input_ids": ids, "past_key_values": cache}, "something new after it")


def test_a_state_of_the_model_that_no_draft_follows_is_decoded_plain(make_target, make_draft):
    target = make_target()
    draft = make_draft(target)
    target.gradient_checkpointing_enable()
    target.train()
    with pytest.raises(ValueError, match=r"gradient checkpointing .* target\.eval\(\)"):
        attach(target, draft)
    attached = attach(target.eval(), draft)
    target.train()
    with pytest.warns(UserWarning, match="without the attached draft: a target in train"):
        assert target.generate(torch.arange(6)[None], max_new_tokens=4).shape == (1, 10)
    assert attached.num_plain == 1


class Refusing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise RuntimeError(f"{self} of {object()} (one\nby one) cannot take {input_ids.tolist()}")


def test_reasons_that_differ_in_what_an_error_quotes_are_one(target, draft, prompts):
    attached = attach(target, draft)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for prompt in prompts[:3]:
            with pytest.raises(RuntimeError, match="cannot take"):
                target.generate(**padded([prompt]), logits_processor=[Refusing()], **GREEDY)
    assert len(caught) == 1 and list(attached.plain_calls.values()) == [3]


def test_reasons_that_differ_in_numbers_alone_are_one(target, draft, prompts):
    attached = attach(target, draft)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (2, 3, 4):
            target.generate(**padded(prompts[:rows]), streamer=Notes(), **GREEDY)
        target.generate(**padded(prompts[:1]), num_beams=2, use_cache=False, **GREEDY)
    assert len(caught) == 2 and "; " in str(caught[1].message) and attached.num_plain == 4
    (reason, count), *others = attached.plain_calls.most_common()
    assert count == 3 and "got 2 rows" in reason and [each for _, each in others] == [1, 1]
    assert not any("assistant_model" in reason for reason in attached.plain_calls)


@pytest.mark.parametrize(
    ("processors", "loop"), [([], False), ([], True), ([Counter()], False)], ids=["assisted", "transformers", "plain"]
)
def test_a_streamer_gets_what_plain_generate_gives_it_token_by_token(target, draft, prompts, processors, loop):
    given, plain = Notes(), Notes()
    draft.decoding = DecodingOptions(use_transformers_loop=loop)
    options = GREEDY | padded(prompts[:1]) | {"logits_processor": processors}
    outcome(target, fresh(options) | {"streamer": plain, "assistant_model": None})
    with warnings.catch_warnings(action="ignore"):
        attach(target, draft)
        outcome(target, fresh(options) | {"streamer": given})
    assert given.puts == plain.puts and given.tokens == plain.tokens and plain.tokens[-1] == "end"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", [*OWN_WAYS - {"mtp", "early_exit"}, "draft", "custom", "none", "configuration"])
def test_a_calls_own_way_goes_before(pair, draft, prompts, way):
    target, own = pair[0], PromptLookup(pair[0])
    ways = {
        "prompt_lookup": REFUSED["prompt_lookup"][1],
        "configuration": {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)},
        "draft": {"assistant_model": own},
        "custom": {"custom_generate": decode_with(own)},
        "none": {"assistant_model": None},
    }
    batch = padded(prompts[:1]) | GREEDY
    plain = outcome(target, batch | {"assistant_model": None})
    attached, draft.last_stats = attach(target, draft), None
    with warnings.catch_warnings(action="error"):
        assert outcome(target, batch | ways[way]) == plain
    assert draft.last_stats is None and (own.last_stats is not None) == (way in ("draft", "custom"))
    assert (attached.num_assisted, attached.num_plain) == (0, 0)


def test_pipelines_queues_and_measurements_know_the_draft(target, draft, prompts, prompt_ids, tokenizer):
    text = tokenizer.decode(prompt_ids[0][0])
    made = pipeline("text-generation", model=target, tokenizer=tokenizer)
    plain = made([text] * 3, batch_size=2, do_sample=False, max_new_tokens=20)
    attached = attach(target, draft)
    assert made([text] * 3, batch_size=2, do_sample=False, max_new_tokens=20) == plain
    assert attached.num_assisted == 2 and draft.last_stats.tau > 2
    for done in generate_many(target, None, prompts, batch_size=2, progress=False, **GREEDY):
        assert done.token_ids.tolist() == alone(target, prompts[done.index], assistant_model=None)
    found = evaluate(target, None, {"task": [text]}, tokenizer, max_new_tokens=8)  # plain decoding
    assert found.metrics["task"].tau is None and attached.num_assisted == 2
    detach(target)
    with pytest.raises(TypeError, match="draft=None: pass one, or attach it"):
        generate_many(target, None, prompts)


def test_a_block_leaves_behind_what_was_there(target, draft, prompts):
    batch, lookup = padded(prompts[:1]) | GREEDY, PromptLookup(target)

    def assists(model):
        model.last_stats = None
        outcome(target, batch)
        return model.last_stats is not None

    with attach(target, draft) as outer:
        assert outer.draft is draft and assists(draft)
        with pytest.raises(KeyError), attach(target, lookup):
            assert assists(lookup)
            raise KeyError
        assert assists(draft) and not assists(lookup)
        detach(target)
        assert not assists(draft)
    assert not assists(draft)
    attach(target, draft)
    with attach(target, lookup):
        assert assists(lookup)
    assert assists(draft)
    attach(target, lookup)  # replaces it
    assert assists(lookup) and not assists(draft)


def test_calls_go_without_a_draft_that_did_not_pay_and_try_it_now_and_then(target, draft, prompts, monkeypatch):
    skipped = experience_of(target, draft).skipped
    for name, known in (("_wait", skipped.most), ("gain", 1.0), ("paid", 0.9)):  # all was in vain
        monkeypatch.setattr(skipped, name, known)  # other tests have the same pair
    monkeypatch.setattr(scheduler, "GAIN_WEIGHT", 0.0)  # whatever times this machine measures
    batch = padded(prompts[:1]) | GREEDY
    expected = outcome(target, batch)
    with attach(target, draft) as attached, pytest.warns(UserWarning, match="drafting has not paid"):
        assert [outcome(target, batch) for _ in range(20)] == [expected] * 20
    assert (attached.num_plain, attached.num_assisted) == (16, 4)  # the eighth call drafted, and every fourth since


def test_a_replaced_draft_is_not_kept(make_target, make_draft):
    target = make_target()
    held = [weakref.ref(attach(target, make_draft(target, seed)).draft) for seed in range(3)]
    target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3)
    gc.collect()
    assert [each() is None for each in held] == [True, True, False]


def test_the_model_is_as_it_was(make_target, make_draft, tmp_path):
    target, ids = make_target(), torch.tensor([[1, 2, 3]])
    before, config, names = pickle.dumps(target), target.generation_config.to_dict(), set(vars(target))
    draft = make_draft(target)
    attached = attach(target, draft)
    plain = target.generate(ids, max_new_tokens=6, assistant_model=None)
    assert torch.equal(target.generate(ids, max_new_tokens=6), plain) and attached.num_assisted == 1
    assert pickle.dumps(target) == before and set(vars(target)) == names
    assert target.generation_config.to_dict() == config
    for other in (copy.deepcopy(target), pickle.loads(before)):
        assert torch.equal(other.generate(ids, max_new_tokens=6), plain)
    target.save_pretrained(tmp_path)
    assert torch.equal(Qwen3ForCausalLM.from_pretrained(tmp_path).generate(ids, max_new_tokens=6), plain)
    assert attached.num_assisted == 1
    kept, draft = weakref.ref(target), weakref.ref(draft)
    del target, other
    gc.collect()
    assert kept() is None and attached.draft is draft()
    attached.__exit__()
    del attached
    gc.collect()
    assert draft() is None


def test_threads_may_mix_calls_that_are_assisted_and_plain(target, draft, prompts):
    kinds = [{}, {"num_beams": 2}, {"logits_processor": [Counter()]}]
    calls = [padded(prompts[:1]) | GREEDY | kind for kind in kinds]
    plain = [target.generate(**fresh(call)).tolist() for call in calls]
    found: list = [[], [], []]
    attached = attach(target, draft)

    def run(place):
        for _ in range(4):
            found[place].append(target.generate(**fresh(calls[place])).tolist())

    with warnings.catch_warnings(action="ignore"):
        threads = [threading.Thread(target=run, args=(place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [[each] * 4 for each in plain] and (attached.num_assisted, attached.num_plain) == (4, 8)


def test_wrappers_end_at_the_model_they_wrap(make_target, make_draft):
    peft = pytest.importorskip("peft")
    target = make_target()
    draft, config = make_draft(target), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(target, config, adapter_name="one")
    adapted.add_adapter("two", config)
    adapted.eval()
    batch = {"input_ids": torch.arange(12).view(2, 6), "max_new_tokens": 8, "do_sample": False}
    rows = batch | {"adapter_names": ["one", "two"]}
    plain, by_row = adapted.generate(**batch), adapted.generate(**rows)
    attached = attach(adapted, draft)
    assert torch.equal(adapted.generate(**batch), plain) and attached.num_assisted == 1
    with pytest.warns(UserWarning, match="without the attached draft: .*adapter_names"):
        assert torch.equal(adapted.generate(**rows), by_row)
    detach(target)
    compiled = torch.compile(target)
    attached = attach(compiled, draft)
    compiled.generate(**batch)
    assert attached.num_assisted == 1
    detach(compiled)


def test_a_draft_comes_by_its_folder_in_the_targets_dtype(pair, fixtures, prompts):
    target, folder = copy.deepcopy(pair[0]).bfloat16(), fixtures / "deepspec" / "trained" / "draft"
    attached = attach(target, str(folder))
    target.generate(**padded(prompts[:2]), **GREEDY)
    assert attached.draft.dtype == torch.bfloat16 and attached.draft.last_stats.tau > 2
    assert attach(target, folder, dtype="float32").draft.dtype == torch.float32


def other_target():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, num_key_value_heads=2, vocab_size=80))


@pytest.mark.parametrize(
    ("make", "draft", "error", "message"),
    [
        (other_target, "draft", ValueError, "not made for this target .*vocab_size"),
        (lambda: encoder_decoder(64), "draft", ValueError, "encoder-decoder"),
        (lambda: "a-target", "draft", TypeError, "name 'a-target': load it, AutoModelForCausalLM"),
        ("draft", "draft", TypeError, "target comes first"),
        ("target", "n-gram", ValueError, "no draft 'n-gram'; did you mean 'ngram'"),
        ("target", "nobody/nothing", ValueError, "nobody/nothing has no config.json on the Hub"),
        ("target", "./nothing", ValueError, "there is no folder ./nothing"),
        ("target", None, TypeError, "DSparkDraftModel .* is needed, got NoneType"),
        ("target", "target", TypeError, "the target is its own draft"),
        ("target", "ngram+dtype", TypeError, "dtype are for loading a draft by its name, got a PromptLookup"),
        ("target", "draft+dtype", TypeError, "dtype are for loading a draft by its name, got a DSparkDraftModel"),
        ("target", "lookup+block", ValueError, "trees by prompt lookup alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_attached_is_said_at_once(pair, make, draft, error, message):
    models, options = {"target": pair[0], "draft": pair[1]}, {}
    target, chosen = models[make] if isinstance(make, str) else make(), models.get(draft, draft)
    if str(draft).endswith("+dtype"):
        chosen, options = {"draft": pair[1]}.get(draft[:5], "ngram"), {"dtype": "float32"}
    if draft == "lookup+block":
        chosen = PromptLookup(target)
        chosen.decoding = DecodingOptions(policy=FullBlock())
    with pytest.raises(error, match=message) as raised:
        attach(target, chosen, **options)
    assert "\n" not in str(raised.value)
    if target is pair[0]:  # and nothing is attached
        with pytest.raises(TypeError, match="draft=None"):
            generate_many(target, None, [[1]])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_a_copy_of_an_attachment_tells_what_it_told_and_assists_no_model(target, draft, prompts, copied, kind):
    attached = attach(target, kind if kind == "ngram" else draft)
    target.generate(**padded(prompts[:1]), **GREEDY)
    target.generate(**padded(prompts[:1]), **GREEDY | {"num_beams": 2})
    other = copied({"model": target, "attached": attached})["attached"]
    assert (other.num_assisted, other.plain_calls, repr(other)) == (1, attached.plain_calls, repr(attached))
    with other:
        other.count(["a reason of its own"])
    target.generate(**padded(prompts[:1]), **GREEDY)
    assert attached.num_assisted == 2 and len(attached.plain_calls) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 3])
def test_prompt_lookup_follows_a_target_that_changes(make_target, rows):
    target = make_target()
    attached, batch = attach(target, "ngram"), padded([[5, 9, 30, 5, 9], [4, 4, 4], [7, 8, 7, 8]][:rows])
    for change in (lambda: target.resize_token_embeddings(61), target.double, target.bfloat16, target.float):
        change()
        plain = target.generate(**batch, assistant_model=None, **GREEDY)
        assert torch.equal(target.generate(**batch, **GREEDY), plain) or target.dtype == torch.bfloat16
        assert attached.draft.last_stats.rounds and attached.draft.dtype == target.dtype
    assert (attached.num_assisted, attached.num_plain) == (4, 0)
