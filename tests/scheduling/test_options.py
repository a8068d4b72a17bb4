"""Options of decoding, and the temperatures that a domain names."""

import pytest

from hf_dspark import ConfidenceThreshold, DecodingOptions, DSparkConfig, FullBlock, Scheduler


def test_what_is_no_policy_is_refused_by_name():
    cure = r"FullBlock\(\), ConfidenceThreshold\(0.5\), Scheduler\(cost\), .*, or None for the default"
    for wrong, found in (("scheduled", "'scheduled'"), (0.5, "0.5")):
        with pytest.raises(TypeError, match=f"policy must be a hf_dspark.Policy, got {found}: pass {cure}"):
            DecodingOptions(policy=wrong)
    with pytest.raises(TypeError, match="got the class Scheduler: call it"):
        DecodingOptions(policy=Scheduler)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (DecodingOptions, {"trees": "no"}),
        (DecodingOptions, {"prompt_lookup": 0}),
        (DecodingOptions, {"domain": 3}),
        (DecodingOptions, {"observer": "print"}),
        (DecodingOptions, {"use_transformers_loop": "false"}),
        (ConfidenceThreshold, {"threshold": "0.5"}),
        (ConfidenceThreshold, {"threshold": 0.5, "cumulative": 2}),
        (Scheduler, {"num_nodes": 3, "trees": "no"}),
        (Scheduler, {"num_nodes": 3, "skip": None}),
    ],
)
def test_options_of_another_type_are_refused_by_name_at_once(make, wrong):
    name, value = next(reversed(wrong.items()))
    with pytest.raises(TypeError, match=f"{name} of {make.__name__} must be .*, got {value!r}"):
        make(**wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tree'"):
        make(tree=False)


@pytest.mark.parametrize("name", ["policy", "domain", "observer", "other_tokens", "use_transformers_loop"])
def test_an_option_that_is_set_on_the_draft_itself_is_refused_with_the_place_where_it_belongs(draft, name):
    with pytest.raises(AttributeError, match=rf"set draft.decoding = DecodingOptions\({name}=...\)"):
        setattr(draft, name, None)
    assert not hasattr(draft, name)


@pytest.mark.parametrize("wrong", ["full", FullBlock(), {"policy": None}, DecodingOptions])
def test_decoding_options_of_another_type_are_refused(draft, wrong):
    with pytest.raises(TypeError, match=r"draft.decoding must be DecodingOptions\(policy=..., ...\), got"):
        draft.decoding = wrong
    assert draft.decoding == DecodingOptions()


def test_impossible_loads_and_windows_are_refused():
    for tokens in (-1, float("nan"), float("inf"), None, "5", lambda: -5):
        with pytest.raises(ValueError, match="other_tokens must be a number of tokens, 0 or more, got"):
            DecodingOptions(other_tokens=tokens).tokens_of_others()
    for window in (0, -1, "all", 2.5, True):
        with pytest.raises(ValueError, match="draft_window must be a number of tokens, 1 or more, 'auto', or None"):
            DecodingOptions(draft_window=window)


def test_a_domain_may_be_calibrated_for_one_regime(pair):
    config, gamma = pair[1].config, pair[1].config.block_size
    config.sts_temperatures = {"default": [1.0] * gamma, "math/greedy": [2.0] * gamma, "math": [4.0] * gamma}
    first = [config.confidence_fits_for("math", do_sample)[0] for do_sample in (False, True)]
    assert first == [(0.5, 0.0), (0.25, 0.0)]
    config.confidence_fits = {"math": [[2.0, -1.0]] * gamma}  # comes before temperatures of the same name
    first = [config.confidence_fits_for("math", do_sample)[0] for do_sample in (False, True)]
    assert first == [(0.5, 0.0), [2.0, -1.0]]


@pytest.mark.parametrize(
    ("temperatures", "message"),
    [
        ({"greedy": [1.0] * 7}, "have a 'default' entry"),
        ({"default": [1.0]}, "7 positive numbers, got .1.0.: calibrate"),
        ({"default": [0.0] * 7}, "7 positive numbers"),
    ],
)
def test_config_refuses_impossible_temperatures(temperatures, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig(sts_temperatures=temperatures)


@pytest.mark.parametrize("fits", [[[1.0, 0.0]], [[1.0]] * 7, [[1.0, float("nan")]] * 7, []])
def test_config_refuses_impossible_fits(fits):
    with pytest.raises(ValueError, match=r"confidence_fits\['default'\]: .* must be 7 pairs of slope and offset"):
        DSparkConfig(confidence_fits={"default": fits})
    with pytest.raises(ValueError, match="confidence_fits must be None without a confidence head"):
        DSparkConfig(enable_confidence_head=False, confidence_head_with_markov=False, confidence_fits={"default": []})
