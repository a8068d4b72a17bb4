"""An option is an option, wherever it comes from: an argument, a generation config, the target's own config."""

import copy

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, SynthIDTextWatermarkingConfig

from hf_dspark import DSparkConfig, DSparkDraftModel, decode_with, generate_many

BATCH = {
    "input_ids": torch.tensor([[0, 0, 0, 9, 8], [3, 4, 5, 3, 4], [0, 7, 7, 30, 7]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1], [1] * 5, [0, 1, 1, 1, 1]]),
}
DEFAULT = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": 5}
COUNTING = {  # columns, which begin with padding
    "min_length": 12, "min_new_tokens": 7, "forced_eos_token_id": 13,
    "exponential_decay_length_penalty": (3, 1.7), "begin_suppress_tokens": list(range(20)),
    "encoder_repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "repetition_penalty": 1.9,
}  # fmt: skip
OPTIONS = COUNTING | {
    "max_length": 11, "forced_bos_token_id": 11, "encoder_no_repeat_ngram_size": 2,
    "sequence_bias": [[[8], 4.0], [[9, 8], -5.0]], "bad_words_ids": [[8], [3, 4]], "suppress_tokens": [1, 2, 8],
    "eos_token_id": [5, 8, 9, 21], "max_new_tokens": 3, "renormalize_logits": True, "remove_invalid_values": True,
    "prefill_chunk_size": 2, "max_time": 60.0, "output_logits": True, "num_assistant_tokens": 2,
    "assistant_confidence_threshold": 0.4,
}  # fmt: skip
REFUSED = {
    "num_beams": 2, "use_cache": False, "cache_implementation": "static", "guidance_scale": 1.5,
    "num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 3, "use_mtp": True,
    "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=2, keys=[3, 4]),
}  # fmt: skip
FOR_DRAFTS = {"num_assistant_tokens", "assistant_confidence_threshold"}


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    target = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, pad_token_id=0, eos_token_id=5, bos_token_id=None))
    for parameter in target.parameters():
        parameter.data.mul_(4)
    config = DSparkConfig.from_target(target.config, block_size=3, num_hidden_layers=1, markov_rank=4)
    return target.eval(), DSparkDraftModel(config).eval()


def ways(target, **option):
    """Yield targets and arguments by which an option reaches `generate()`."""
    yield target, option
    yield target, {"generation_config": GenerationConfig(**option)}
    other = copy.deepcopy(target)
    other.generation_config.update(**option)
    yield other, {}


def decoded(target, given, arguments, **others):
    # What comes from a config must not be overwritten by an argument.
    config = arguments.get("generation_config", target.generation_config)
    usual = {k: v for k, v in DEFAULT.items() if k not in arguments and getattr(config, k) in (None, 0, 5)}
    usual = {k: v for k, v in usual.items() if not (k == "max_new_tokens" and config.max_length not in (None, 20))}
    usual |= {} if "max_length" not in arguments else {"max_new_tokens": None}
    return target.generate(**given, **usual, **arguments, return_dict_in_generate=True, **others)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_the_same_from_everywhere(pair, name):
    target, draft = pair
    usual = decoded(target, BATCH, {}).sequences
    for source, arguments in ways(target, **{name: OPTIONS[name]}):
        plain_arguments = {} if name in FOR_DRAFTS else arguments
        plain = decoded(target if name in FOR_DRAFTS else source, BATCH, plain_arguments)
        ours = decoded(source, BATCH, arguments, assistant_model=draft)
        assert torch.equal(ours.sequences, plain.sequences)
        if name in COUNTING:
            assert not torch.equal(usual, plain.sequences), "the option changes nothing here"
        if name == "num_assistant_tokens":
            assert max(draft.last_stats.proposed) <= 2
        if name == "max_length":
            continue
        more = torch.cat([plain.sequences, torch.tensor([[7, 9]] * 3)], dim=1)
        mask = torch.cat([BATCH["attention_mask"], (more[:, 5:] != 0).long()], dim=1)
        mask[:, -2:] = 1
        turn = {"input_ids": more, "attention_mask": mask}
        expected = decoded(target if name in FOR_DRAFTS else source, turn, plain_arguments)
        again = decoded(source, turn, arguments, past_key_values=ours.past_key_values, assistant_model=draft)
        assert torch.equal(again.sequences, expected.sequences)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_from_everywhere(pair, name):
    target, draft = pair
    for source, arguments in ways(target, **{name: REFUSED[name]}):
        if not arguments and name in ("cache_implementation", "num_assistant_tokens_schedule"):
            continue  # left out, see below
        words = "beam|use_cache|dynamic cache|Guidance|schedule|other drafts|Watermark"
        with pytest.raises(ValueError, match=words) as refusal:
            decoded(source, BATCH, arguments, assistant_model=draft)
        assert name.removesuffix("_implementation") in str(refusal.value)
        assert (f"set target.generation_config.{name} = None" in str(refusal.value)) == (not arguments)


# What files of targets hold that was written for other assistants and other caches, and whether that is told.
DEAD = [
    ({"num_assistant_tokens_schedule": "heuristic"}, True),
    ({"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.4}, True),
    ({"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant"}, False),
    ({"assistant_lookbehind": 10, "target_lookbehind": 10, "max_matching_ngram_size": 2}, False),
    ({"top_k": 50, "temperature": 0.6}, False),
    *(
        ({"cache_implementation": name}, True)
        for name in ("static", "offloaded", "offloaded_static", "hybrid_chunked")
    ),
    *(({"cache_implementation": name}, False) for name in ("hybrid", "dynamic")),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("door", ["assistant_model", "custom_generate", "generate_many"])
@pytest.mark.parametrize(("facts", "is_told"), DEAD, ids=[str(facts) for facts, _ in DEAD])
def test_dead_values_of_a_targets_files_neither_stop_nor_slow_a_call(pair, facts, is_told, door, recwarn):
    target, draft = copy.deepcopy(pair[0]), pair[1]
    draft.config.block_size, usual = 6, draft.config.block_size
    try:
        ids = BATCH["input_ids"][1:2]
        plain = target.generate(ids, **DEFAULT)[0, 5:].tolist()
        target.generation_config.update(**facts)
        if door == "generate_many":
            found = next(iter(generate_many(target, draft, ids.tolist(), progress=False, **DEFAULT))).token_ids
        else:
            given = {door: draft if door == "assistant_model" else decode_with(draft)}
            found = target.generate(ids, **DEFAULT, **given)[0, 5:]
        assert found.tolist() == plain and max(draft.last_stats.proposed) == 6
        told = [str(each.message) for each in recwarn if "generation_config.json" in str(each.message)]
        silent = door == "custom_generate" and "cache_implementation" not in facts  # there it may be transformers' own
        assert bool(told) == (is_told and not silent) and all(str(each) in told[0] for each in facts if told)
    finally:
        draft.config.block_size = usual


@pytest.mark.parametrize("door", ["custom_generate", "generate_many"])
def test_every_door_drafts_as_much_as_a_call_says(pair, door):
    target, draft = pair
    ids, said = BATCH["input_ids"][1:2], {"num_assistant_tokens": 2}
    if door == "generate_many":
        next(iter(generate_many(target, draft, ids.tolist(), progress=False, **DEFAULT, **said)))
    else:
        target.generate(ids, **DEFAULT, **said, custom_generate=decode_with(draft))
    assert max(draft.last_stats.proposed) == 2


def test_batches_of_transformers_say_that_they_leave_the_draft_out(pair, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(type(target), "continuous_batching_context_manager", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning, match="without its assistant_model.*attach"), pytest.raises(ArithmeticError):
        target.generate_batch([[1, 2]], assistant_model=draft)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(COUNTING))
def test_a_queue_follows_an_option_from_everywhere(pair, name):
    target, draft = pair
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*BATCH.values(), strict=True)]
    for source, arguments in ways(target, **{name: OPTIONS[name]}):
        for done in generate_many(source, draft, prompts, batch_size=2, progress=False, **DEFAULT, **arguments):
            plain = source.generate(torch.tensor([prompts[done.index]]), **DEFAULT, **arguments)
            assert done.error is None and done.token_ids.tolist() == plain[0, len(prompts[done.index]) :].tolist()


def test_options_that_are_none_ask_for_nothing(pair):
    target, draft = pair
    # Without those, plain generate() fails, or reads all tokens anew.
    needed = {"num_beams", "num_return_sequences", "use_cache", "transformers_version"}
    for name in sorted(GenerationConfig().to_dict().keys() - needed):
        options = BATCH | DEFAULT | {"max_new_tokens": 4} | {name: None}
        plain = target.generate(**options)
        assert torch.equal(target.generate(assistant_model=draft, **options), plain), name
