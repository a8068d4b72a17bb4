"""Sequential temperature scaling and its measures."""

from dataclasses import replace

import pytest
import scipy.stats
import torch

from hf_dspark.scheduling.calibration import (
    TEMPERATURE_GRID,
    CalibrationRounds,
    calibrated_confidence,
    conditional_auc,
    expected_calibration_error,
    fit_confidence,
    fit_temperatures,
    measure_calibration,
    roc_auc,
)


def drawn_rounds(temperatures, count=20_000):
    """Rounds of a head whose logits are `temperatures` times too large: the truth is sigmoid(logit / T)."""
    generator, gamma = torch.Generator().manual_seed(0), len(temperatures)
    true_logits = 1.0 + 1.5 * torch.randn(count, gamma, generator=generator)
    acceptance = true_logits.sigmoid()
    accepted = (torch.rand(count, gamma, generator=generator) < acceptance).long().cumprod(-1).sum(-1)
    logits = true_logits * torch.tensor(temperatures)
    return CalibrationRounds(logits, acceptance, accepted, torch.full_like(accepted, gamma))


def fits_of(temperatures):
    return [(1 / temperature, 0.0) for temperature in temperatures]


def test_fit_finds_the_temperatures_of_an_overconfident_head():
    rounds = drawn_rounds([2.0, 3.0, 0.5, 1.0])
    temperatures = fit_temperatures(rounds)
    assert temperatures == pytest.approx([2.0, 3.0, 0.5, 1.0], rel=0.13)  # one step of the grid
    assert all(part.ece < 0.02 for part in measure_calibration(rounds, fits_of(temperatures)))
    assert min(part.ece for part in measure_calibration(rounds)[:3]) > 0.02


def test_fit_goes_left_to_right_and_prefers_no_change_among_equals():
    rounds = drawn_rounds([2.0, 3.0, 0.5], count=2000)
    lengths = (rounds.num_accepted.clamp_max(1), rounds.proposed.clamp_max(1))
    first = CalibrationRounds(rounds.logits[:, :1], rounds.acceptance[:, :1], *lengths)
    assert fit_temperatures(rounds)[0] == fit_temperatures(first)[0]
    equal = CalibrationRounds(
        torch.zeros(4, 2), torch.full((4, 2), 0.5), torch.tensor([2, 2, 0, 0]), torch.full((4,), 2)
    )
    assert fit_temperatures(equal) == [1.0, 1.0]
    assert (len(TEMPERATURE_GRID), *TEMPERATURE_GRID[::40]) == pytest.approx((41, 0.1, 10.0))  # SGLang's


def test_calibration_preserves_the_order_and_without_fits_is_the_sigmoid():
    logits = torch.randn(100, 3)
    for position, scaled in enumerate(calibrated_confidence(logits, [(0.3, 0.0), (1.0, -2.0), (4.0, 1.0)]).unbind(-1)):
        assert torch.equal(scaled.argsort(), logits[:, position].argsort())
    by_temperature = calibrated_confidence(logits, fits_of([0.5, 1.0, 2.0]))
    torch.testing.assert_close(by_temperature, (logits / torch.tensor([0.5, 1.0, 2.0])).sigmoid())
    torch.testing.assert_close(calibrated_confidence(logits.bfloat16(), None), logits.bfloat16().float().sigmoid())


# ---- slopes and offsets


def with_offset(rounds, offset):
    """The same rounds of a head whose logits are too large by `offset`."""
    return replace(rounds, logits=rounds.logits + offset)


def test_fit_finds_slope_and_offset_of_a_head_that_promises_too_much():
    fits = fit_confidence(with_offset(drawn_rounds([2.0, 0.5, 1.0]), 1.0))
    slopes, offsets = zip(*fits, strict=True)
    assert slopes == pytest.approx([0.5, 2.0, 1.0], rel=0.1)  # sigmoid((logit - 1) / T)
    assert offsets == pytest.approx([-0.5, -2.0, -1.0], rel=0.1)


def test_an_offset_mends_what_no_temperature_can():
    rounds = with_offset(drawn_rounds([1.0], count=4000), 2.0)  # many logits are on the wrong side of one half
    temperatures, fits = fit_temperatures(rounds), fit_confidence(rounds)
    by_temperature = measure_calibration(rounds, fits_of(temperatures))[0].ece
    assert measure_calibration(rounds, fits)[0].ece < 0.02 < 0.05 < by_temperature


def test_position_that_no_round_reached_keeps_the_raw_head():
    rounds = drawn_rounds([2.0, 2.0], count=500)
    none_reached = replace(rounds, num_accepted=torch.zeros(500, dtype=torch.long))
    assert fit_confidence(none_reached)[1] == (1.0, 0.0)


# ---- labels


def test_labels_follow_the_accepted_prefix():
    acceptance = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    rounds = CalibrationRounds(torch.zeros(2, 3), acceptance, torch.tensor([1, 3]), torch.tensor([3, 3]))
    assert rounds.realised_labels().tolist() == [[1, 0, 0], [1, 1, 1]]
    torch.testing.assert_close(rounds.integrated_labels(), torch.tensor([[0.9, 0.8, 0.0], [0.6, 0.5, 0.4]]).double())


def test_integrated_labels_have_the_mean_of_the_realised_ones_and_less_variance():
    rounds = drawn_rounds([1.0, 1.0, 1.0])
    integrated, realised = rounds.integrated_labels(), rounds.realised_labels()
    torch.testing.assert_close(integrated.mean(0), realised.mean(0), atol=0.01, rtol=0)
    assert (integrated.var(0) < realised.var(0)).all()


def test_slots_after_the_verified_ones_are_not_read():
    rounds = drawn_rounds([2.0, 2.0], count=4000)
    more, ones = torch.tensor([[5.0, 0.9]]).expand(4000, -1), torch.ones(4000, dtype=torch.long)
    spoilt = CalibrationRounds.concatenate([rounds, CalibrationRounds(10 * more, more / 6, ones, ones)])
    second = [measure_calibration(part, fits_of([2.0, 2.0]))[1] for part in (rounds, spoilt)]
    assert second[0] == second[1] and second[1].num_rounds == 4000


# ---- measures


def test_calibration_error_by_hand():
    predicted, labels = torch.tensor([0.05, 0.05, 0.95, 0.95]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert expected_calibration_error(predicted, labels) == pytest.approx(0.5 * 0.45 + 0.5 * 0.05)
    assert expected_calibration_error(predicted, predicted) == pytest.approx(0.0)
    assert expected_calibration_error(torch.tensor([1.0]), torch.tensor([0.0])) == 1.0  # the last bin counts


def test_reliability_bins_are_the_parts_of_the_calibration_error():
    measured = measure_calibration(drawn_rounds([2.0], count=3000))[0]
    assert sum(count for *_, count in measured.bins) == 3000
    assert measured.ece == pytest.approx(sum(count * abs(mean - label) for mean, label, count in measured.bins) / 3000)


def test_auc_agrees_with_the_rank_test_ties_included():
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(300, generator=generator) * 20).round()
    labels = (torch.rand(300, generator=generator) < scores / 20).double()
    statistic = scipy.stats.mannwhitneyu(scores[labels == 1], scores[labels == 0]).statistic
    assert roc_auc(scores, labels) == pytest.approx(statistic / (labels.sum() * (1 - labels).sum()).item())
    assert roc_auc(scores, torch.ones(300)) is None  # there is one outcome only


def test_conditional_auc_reads_reached_slots_only():
    logits = torch.tensor([[3.0, -3.0, 9.0], [2.0, 1.0, 9.0]])
    rounds = CalibrationRounds(logits, torch.ones(2, 3), torch.tensor([1, 2]), torch.tensor([3, 2]))
    # reached: 3.0 (+), -3.0 (-), 2.0 (+), 1.0 (+); the slots with 9.0 were not reached or not verified
    assert conditional_auc(rounds) == 1.0


def test_measures_name_the_brier_score_of_the_realised_outcome():
    rounds = CalibrationRounds(torch.zeros(2, 1), torch.tensor([[0.5], [0.5]]), torch.tensor([1, 0]), torch.ones(2))
    measured = measure_calibration(rounds)[0]
    assert (measured.brier, measured.ece, measured.auc) == (0.25, 0.0, 0.5)


# ---- bad input


EMPTY, TWO = torch.zeros(0, 3), drawn_rounds([1.0, 1.0], count=10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CalibrationRounds(EMPTY, EMPTY, torch.zeros(0), torch.zeros(0)), "no round to calibrate on"),
        (lambda: CalibrationRounds.concatenate([]), r"must be there, .* got those of \[\]"),
        (lambda: CalibrationRounds.concatenate([drawn_rounds([1.0], 5), TWO]), r"size γ, got those of \[1, 2\]"),
        (lambda: replace(TWO, acceptance=TWO.acceptance * torch.nan), r"acceptance must lie in \[0, 1\]"),
        (lambda: replace(TWO, logits=TWO.logits * torch.nan), "finite"),
        (lambda: fit_temperatures(replace(TWO, num_accepted=torch.zeros(10), proposed=torch.ones(10))),
         "no round verified draft position 2, .* larger max_new_tokens"),
    ],
)  # fmt: skip
def test_rounds_that_cannot_be_used_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_fits_that_fall_are_not_kept():
    rounds = drawn_rounds([2.0, 1.0], count=4000)
    falling = replace(rounds, logits=rounds.logits * torch.tensor([-1.0, 1.0]))
    assert fit_confidence(falling)[0] == (1.0, 0.0) and fit_confidence(falling)[1] == fit_confidence(rounds)[1]
