"""`generate_batch()` of a target with an attached draft: upstream's signature and results, by our queue."""

import pytest
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_dspark import attach, detach
from tests.rows import EOS, alone

PROMPTS = [[5, 6, 7], [9, 9, 9, 8], [20], [30, 31, 32, 33], [5, 6, 7, 8, 9]]


@pytest.fixture
def attached(pair):
    target, draft = pair
    yield attach(target, draft)
    detach(target)


def asked_for(target, **said) -> GenerationConfig:
    return GenerationConfig(**target.generation_config.to_dict() | {"do_sample": False, "max_new_tokens": 12} | said)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["arguments", "configuration", "model"])
def test_prompts_are_decoded_by_the_draft_and_come_in_their_order(pair, attached, way):
    target = pair[0]
    options = {
        "arguments": {"max_new_tokens": 12},
        "configuration": {"generation_config": asked_for(target)},
        "model": {
            "generation_config": asked_for(target, max_new_tokens=3),
            "max_new_tokens": 12,
            "progress_bar": False,
        },
    }[way]
    outputs = target.generate_batch(PROMPTS, **options)
    assert list(outputs) == [f"req_{index}" for index in range(len(PROMPTS))]
    for (name, output), prompt in zip(outputs.items(), PROMPTS, strict=True):
        assert isinstance(output, GenerationOutput) and output.request_id == name and output.is_finished()
        assert output.prompt_ids == prompt and output.error is None and output.lifespan[0] <= output.lifespan[1]
        assert output.generated_tokens == alone(
            target, prompt, max_new_tokens=12, eos_token_id=EOS, assistant_model=None
        )
    assert (attached.num_assisted, attached.num_plain) == (1, 0) and attached.draft.last_stats.tau > 1.5


def test_a_prompt_that_fails_fails_alone(pair, attached):
    long = [5] * (pair[0].config.max_position_embeddings + 1)
    good, bad = pair[0].generate_batch([PROMPTS[0], long], max_new_tokens=4).values()
    assert bad.status == RequestStatus.FAILED and "context" in bad.error and bad.generated_tokens == []
    assert good.generated_tokens == alone(
        pair[0], PROMPTS[0], max_new_tokens=4, eos_token_id=EOS, assistant_model=None
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"record_timestamps": True}, "record_timestamps"),
        ({"max_new_tokens": None}, "no max_new_tokens"),
        ({"generation_config": {"num_return_sequences": 2, "do_sample": True}}, "num_return_sequences"),
        ({"generation_config": {"stop_strings": ["x"]}}, "stop_strings"),
        ({"generation_config": {"use_cache": False}}, "use_cache"),
        ({"generation_config": {"eos_token_id": None}}, "eos_token_id, which generate() would take"),
    ],
)
def test_what_only_the_engine_of_transformers_does_is_left_to_it(pair, attached, monkeypatch, options, said):
    target = pair[0]
    monkeypatch.setattr(type(target), "continuous_batching_context_manager", lambda *_, **__: 1 / 0)
    options = {"max_new_tokens": 4} | options
    if "generation_config" in options:
        options["generation_config"] = asked_for(target, **options["generation_config"])
    before = target.generation_config.to_dict()
    with pytest.warns(UserWarning, match=said.replace("(", r"\(").replace(")", r"\)")), pytest.raises(ArithmeticError):
        target.generate_batch(PROMPTS, **options)
    assert (attached.num_assisted, attached.num_plain) == (0, 1) and target.generation_config.to_dict() == before


def test_no_prompts_are_no_outputs(pair, attached):
    assert pair[0].generate_batch([]) == {} and attached.num_assisted == 0


def test_samples_are_truncated_as_the_configuration_says_and_no_further(pair, attached, monkeypatch):
    target, asked = pair[0], []
    monkeypatch.setattr(
        "hf_dspark.decoding.batch.generate_many", lambda *_, generation_config: asked.append(generation_config) or []
    )
    target.generate_batch(PROMPTS, asked_for(target, do_sample=True, top_k=None))
    assert asked[0].do_sample and asked[0].top_k == 0
