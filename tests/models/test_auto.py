"""What is taken for a draft, and what is said of something else."""

import copy

import pytest

from hf_dspark import calibrate, evaluate, generate_many, profile_throughput
from hf_dspark.evaluation.evaluate import measure_acceptance
from hf_dspark.models.auto import is_draft, require_pair

TAKING_A_PAIR = {
    "calibrate": lambda target, draft: calibrate(target, draft, [[1, 2]]),
    "evaluate": lambda target, draft: evaluate(target, draft, {"task": ["a"]}, None),
    "generate_many": lambda target, draft: generate_many(target, draft, [[1, 2]]),
    "measure_acceptance": lambda target, draft: measure_acceptance(target, draft, [[1, 2]]),
    "profile_throughput": profile_throughput,
}


@pytest.fixture(params=sorted(TAKING_A_PAIR))
def taking_a_pair(request):
    return TAKING_A_PAIR[request.param]


def test_drafts_are_told_by_their_config(pair):
    target, draft = pair
    assert is_draft(draft) and not is_draft(target) and not is_draft("draft")


def test_draft_in_the_place_of_the_target_is_named(pair, taking_a_pair):
    target, draft = pair
    with pytest.raises(TypeError, match="the target comes first and its draft second, got the draft DSparkDraftModel"):
        taking_a_pair(draft, target)


def test_what_is_no_draft_is_named(pair, taking_a_pair):
    target, _ = pair
    with pytest.raises(TypeError, match=f"Eagle3DraftModel is needed, got {type(target).__name__}$"):
        taking_a_pair(target, target)


def test_names_are_to_be_loaded_first(pair, taking_a_pair):
    target, draft = pair
    with pytest.raises(TypeError, match="got the name 'me/draft': load it, DSparkDraftModel.from_pretrained"):
        taking_a_pair(target, "me/draft")
    with pytest.raises(TypeError, match="got the name 'me/target': load it, AutoModelForCausalLM.from_pretrained"):
        taking_a_pair("me/target", draft)


def test_generate_refuses_the_name_of_a_draft(pair):
    target, _ = pair
    with pytest.raises(TypeError, match="got the name 'me/draft': load it"):
        target.generate(assistant_model="me/draft", max_new_tokens=2)


def test_draft_asked_to_generate_says_who_does(pair):
    target, draft = pair
    with pytest.raises(TypeError, match="assistant_model=draft"):
        draft.generate(assistant_model=target)
    assert not draft.can_generate()


def test_wrapped_targets_that_generate_are_targets(pair):
    target, draft = pair

    class Wrapped:
        generate, config = target.generate, copy.copy(target.config)

    require_pair(Wrapped(), draft)
