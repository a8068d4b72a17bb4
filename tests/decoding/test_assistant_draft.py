"""Ordinary causal LMs as drafts: exact, accepted as far as they are right, for batches, queues and conversations."""

import copy

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from hf_dspark import (
    AssistantDraft,
    ConfidenceThreshold,
    DecodingOptions,
    FullBlock,
    Scheduler,
    attach,
    decode_with,
    detach,
    generate_many,
)
from tests.decoding.test_lossless_batches import SLOPE, enumerate_rounds
from tests.distributions import (
    CLIFF,
    ROUNDING,
    TABLE,
    VOCAB,
    distance_from_target,
)
from tests.rows import GREEDY, alone, assert_as_alone, assert_no_hooks, assert_rows, padded

POLICIES = {
    "default": None,
    "full": FullBlock(),
    "threshold": ConfidenceThreshold(0.6),
    "scheduler": Scheduler(TABLE, skip=False),
}


def disturbed(model, by):
    """Return a copy that is right most of the time."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter += by * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0.0
    return copied


def gpt2(vocab_size=64, **sizes):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3} | sizes
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes)).eval()


def llama(vocab_size=64):
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, initializer_range=0.3, **sizes)).eval()


MAKERS = {"near": lambda target: disturbed(target, 0.15), "gpt2": lambda _: gpt2(), "llama": lambda _: llama()}


@pytest.fixture
def many(prompts):
    """Eight prompts of unequal lengths."""
    return [*prompts, *(prompt[: 2 + number] for number, prompt in enumerate(prompts))][:8]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name == "llama")) for name, make in MAKERS.items()],
)
def test_rows_are_those_of_plain_decoding(target, many, make, policy, rows):
    draft = AssistantDraft(make(target))
    draft.decoding = DecodingOptions(policy=policy)
    options = {} if rows == 8 else {"repetition_penalty": 1.3, "eos_token_id": None}
    assert_as_alone(target, draft, many[:rows], **options)
    accepted, proposed = sum(draft.last_stats.accepted), sum(draft.last_stats.proposed)
    assert draft.last_stats.rounds > 0 and (
        make is not MAKERS["near"] or policy != FullBlock() or 0 < accepted < proposed
    )


@pytest.mark.parametrize("options", [GREEDY, GREEDY | {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 8])
def test_all_that_a_copy_of_the_target_drafts_is_accepted(target, many, rows, options):
    """A wrong position, or a slot of another row, would only be rejected more often."""
    draft = AssistantDraft(copy.deepcopy(target), block_size=3)
    draft.decoding = DecodingOptions(policy=FullBlock())
    target.generate(**padded(many[:rows]), assistant_model=draft, **options)
    assert sum(draft.last_stats.accepted) == sum(draft.last_stats.proposed) > 0 and draft.last_stats.tau > 2.5


def test_the_next_turn_goes_on_with_what_the_assistant_has_read(target, many):
    draft, options = AssistantDraft(copy.deepcopy(target)), GREEDY | {"eos_token_id": None}
    draft.decoding = DecodingOptions(policy=FullBlock())
    batch = padded(many)
    first = target.generate(**batch, assistant_model=draft, return_dict_in_generate=True, **options)
    said = first.sequences[:, batch["input_ids"].shape[1] :].tolist()
    whole = [prompt + answer + [9, 33] for prompt, answer in zip(many, said, strict=True)]
    second, cache = padded(whole), first.past_key_values
    output = target.generate(**second, past_key_values=cache, assistant_model=draft, **options)
    assert_rows(output, second["input_ids"].shape[1], [alone(target, row, eos_token_id=None) for row in whole])
    assert sum(draft.last_stats.accepted) == sum(draft.last_stats.proposed) > 0


def test_it_is_taken_as_it_is_by_all_that_take_drafts(target, many, tmp_path):
    assistant = MAKERS["near"](target)
    expected = [alone(target, prompt) for prompt in many]
    for done in generate_many(target, assistant, many, batch_size=3, **GREEDY):
        assert done.error is None and done.token_ids.tolist() == expected[done.index]
    batch = padded(many)
    output = target.generate(**batch, custom_generate=decode_with(assistant), **GREEDY)
    assert_rows(output, batch["input_ids"].shape[1], expected)
    assistant.save_pretrained(tmp_path)
    for given, kwargs in ((assistant, {}), (str(tmp_path), {"block_size": 3}), (tmp_path, {"dtype": "bfloat16"})):
        with attach(target, given, **kwargs) as attached:
            assert_rows(target.generate(**batch, **GREEDY), batch["input_ids"].shape[1], expected)
            assert (attached.num_assisted, attached.num_plain) == (1, 0)
            assert attached.draft.config.block_size == kwargs.get("block_size", 5)
            assert str(attached.draft.dtype) == f"torch.{kwargs.get('dtype', 'float32')}"
    detach(target)


def test_the_assistant_is_left_as_it_was(target, many):
    assistant = disturbed(target, 0.15)
    ids, names, config = torch.tensor(many[:1]), set(vars(assistant)), assistant.config.to_dict()
    before, attends = assistant.generate(ids, **GREEDY), assistant.config._attn_implementation
    draft = copy.deepcopy(AssistantDraft(assistant).bind(target))
    for each in (AssistantDraft(assistant), draft):
        target.generate(ids, assistant_model=each, num_assistant_tokens=2, **GREEDY)
        assert max(each.last_stats.proposed) == 2
    assert torch.equal(assistant.generate(ids, **GREEDY), before) and assistant.config.to_dict() == config
    assert set(vars(assistant)) == names and assistant.config._attn_implementation == attends
    assert_no_hooks(assistant)
    with pytest.raises(TypeError, match="save its assistant"):
        draft.save_pretrained("anywhere")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [62, 71])
def test_unused_rows_of_one_tokenizer_may_differ(target, many, rows):
    assistant = copy.deepcopy(target)
    assistant.resize_token_embeddings(rows, mean_resizing=False)
    draft = AssistantDraft(assistant, vocab_size=64)
    assert_as_alone(target, draft, many)
    assert_as_alone(target, draft, [[63, 5, 63]])
    assert draft.last_stats.rounds > 0


def test_texts_may_be_longer_than_the_assistant_has_positions(target, many):
    draft = AssistantDraft(gpt2(n_positions=16))
    draft.decoding = DecodingOptions(policy=FullBlock())
    assert_as_alone(target, draft, many[:3])
    assert draft.last_stats.rounds > 0


def test_transformers_loop_takes_its_drafts(target, many):
    draft = AssistantDraft(copy.deepcopy(target))
    draft.decoding = DecodingOptions(policy=FullBlock(), use_transformers_loop=True)
    assert_as_alone(target, draft, many[:1])
    assert draft.last_stats.loop == "transformers" and draft.last_stats.tau > 4


def recurrent():
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes))


def encoder_decoder(d_model=16):
    sizes = {"vocab_size": 64, "d_model": d_model, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))


def alibi():
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (encoder_decoder, ValueError, "decoder-only, got the encoder-decoder 't5'"),
        (recurrent, ValueError, "keeps states that cannot go back .*attention alone"),
        (alibi, ValueError, "attention of its own .*one sequence at a time"),
        (lambda: LlamaModel(llama().config), TypeError, "got LlamaModel"),
        (lambda: "a-name", TypeError, "that is loaded, got str"),
        (lambda: AssistantDraft(llama()), TypeError, "got AssistantDraft"),
    ],
)
def test_what_cannot_draft_is_refused_when_it_is_wrapped(make, error, message):
    with pytest.raises(error, match=message):
        AssistantDraft(make())


def test_another_vocabulary_is_refused_before_work_starts(target, tmp_path):
    other = llama(80)
    other.save_pretrained(tmp_path)
    message = "vocab_size: draft 80, target 64.*needs the target's tokenizer"
    for given in (other, str(tmp_path)):
        with pytest.raises(ValueError, match=message) as raised:
            attach(target, given)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=message):
        generate_many(target, other, [[1]])
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[1]]), assistant_model=AssistantDraft(other), max_new_tokens=2)
    with pytest.raises(ValueError, match="block_size must lie in"):
        AssistantDraft(other, block_size=0)


# ---- distributions

PROCESSORS = {"none": [], "cut": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]}


@pytest.fixture
def tiny(make_target):
    """A target of three tokens, and an assistant that is often wrong."""
    target = make_target(vocab_size=VOCAB, pad_token_id=None)
    return target, AssistantDraft(gpt2(VOCAB, initializer_range=0.5), block_size=2).bind(target)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", [FullBlock(), ConfidenceThreshold(0.5), Scheduler(CLIFF, trees=False, skip=False)])
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
def test_a_round_leaves_the_target_distribution_unchanged(tiny, policy, processors):
    assert distance_from_target(*tiny, policy, processors) < ROUNDING


def test_enumeration_catches_a_test_against_the_wrong_distribution(tiny):
    flat = torch.full((2, VOCAB), 1.0 / VOCAB, dtype=torch.double)
    assert distance_from_target(*tiny, FullBlock(), claimed_distribution=lambda block: flat) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [FullBlock(), pytest.param(Scheduler(SLOPE, trees=False, skip=False), marks=pytest.mark.slow)]
)
def test_two_rows_have_the_joint_distribution_of_both(monkeypatch, tiny, policy):
    assert enumerate_rounds(monkeypatch, *tiny, policy)[0] < 5e-6
