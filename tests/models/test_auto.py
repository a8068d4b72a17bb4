"""What is taken for a draft, and what is said of something else."""

import copy

import pytest
import torch

from hf_dspark import (
    DSparkCandidateGenerator,
    DSparkTrainer,
    PromptLookup,
    attach,
    calibrate,
    check_target,
    evaluate,
    generate_many,
    profile_throughput,
    regenerate,
)
from hf_dspark.models.auto import is_draft, require_pair
from hf_dspark.training.target_states import cache_features
from tests.training.tiny import tiny_arguments


def test_drafts_are_told_by_their_config_and_targets_by_their_generation(pair):
    target, draft = pair
    assert is_draft(draft) and not is_draft(target) and not is_draft("draft")

    class Wrapped:
        generate, config = target.generate, copy.copy(target.config)

    require_pair(Wrapped(), draft)


taking_a_pair = pytest.mark.parametrize(
    "taking_a_pair",
    [
        lambda target, draft: calibrate(target, draft, [[1, 2]]),
        lambda target, draft: evaluate(target, draft, {"task": ["a"]}, None),
        lambda target, draft: generate_many(target, draft, [[1, 2]]),
        profile_throughput,
        DSparkCandidateGenerator,
    ],
    ids=["calibrate", "evaluate", "generate_many", "profile_throughput", "DSparkCandidateGenerator"],
)


@taking_a_pair
def test_a_draft_without_weights_is_refused_by_every_door(pair, taking_a_pair):
    with pytest.raises(ValueError, match="the draft is on the meta device, offloaded or without weights"):
        taking_a_pair(pair[0], copy.deepcopy(pair[1]).to("meta"))


@pytest.mark.parametrize(
    "taking_a_target",
    [
        lambda target, draft, folder: evaluate(target, None, {"task": ["a"]}, None),
        lambda target, draft, folder: regenerate(target, [[1, 2]], None, folder / "answers.jsonl"),
        lambda target, draft, folder: DSparkTrainer(draft, target, tiny_arguments(str(folder)), [{"input_ids": [1]}]),
        lambda target, draft, folder: cache_features(target, draft.config, [[1, 2]], folder / "states"),
        lambda target, draft, folder: PromptLookup(target),
        lambda target, draft, folder: attach(target, draft),
        lambda target, draft, folder: check_target(target),
    ],
    ids=["evaluate", "regenerate", "DSparkTrainer", "cache_features", "PromptLookup", "attach", "check_target"],
)
def test_what_is_no_target_is_named_by_every_door(pair, taking_a_target, tmp_path):
    for given in (3, type(pair[0]), pair[0].config, torch.nn.Linear(2, 2), pair[1]):
        with pytest.raises(TypeError, match="a target is needed, got|the target comes first"):
            taking_a_target(given, pair[1], tmp_path)


@taking_a_pair
def test_what_is_no_pair_of_loaded_models_is_named(pair, taking_a_pair):
    target, draft = pair
    for given, message in (
        ((draft, target), "the target comes first and its draft second, got the draft DSparkDraftModel"),
        ((target, target), f"Eagle3DraftModel is needed, got {type(target).__name__}$|the target is its own draft"),
        ((type(target), draft), "a target is needed, got the class Qwen3ForCausalLM$"),
        ((target, type(draft)), "Eagle3DraftModel is needed, got the class DSparkDraftModel$"),
        ((target, "me/draft"), "got the name 'me/draft': load it, DSparkDraftModel.from_pretrained"),
        (("me/target", draft), "got the name 'me/target': load it, AutoModelForCausalLM.from_pretrained"),
    ):
        with pytest.raises(TypeError, match=message):
            taking_a_pair(*given)


def test_generation_needs_a_target_that_generates_and_a_draft_that_is_loaded(pair):
    target, draft = pair
    with pytest.raises(TypeError, match="assistant_model=draft"):
        draft.generate(assistant_model=target)
    assert not draft.can_generate()
    with pytest.raises(TypeError, match="got the name 'me/draft': load it"):
        target.generate(assistant_model="me/draft", max_new_tokens=2)
    containers = ([draft], (draft,), {"draft": draft}, torch.nn.Sequential(draft), torch.nn.DataParallel(draft))
    for held in (*containers, type(draft), draft.config, draft.state_dict(), False):
        with pytest.raises(TypeError, match="Eagle3DraftModel is needed, got (the class )?[a-zA-Z0-9]+$"):
            target.generate(assistant_model=held, max_new_tokens=2)
