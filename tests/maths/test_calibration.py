"""Sequential temperature scaling and its measures."""

import pytest
import scipy.stats
import torch

from hf_dspark.maths.calibration import (
    TEMPERATURE_GRID,
    CalibrationRounds,
    calibrated_confidence,
    conditional_auc,
    expected_calibration_error,
    fit_temperatures,
    measure_calibration,
    reliability_bins,
    roc_auc,
)


def drawn_rounds(temperatures, count=20_000, seed=0):
    """Rounds of a head whose logits are `temperatures` times too large: the truth is sigmoid(logit / T)."""
    generator = torch.Generator().manual_seed(seed)
    gamma = len(temperatures)
    true_logits = 1.0 + 1.5 * torch.randn(count, gamma, generator=generator)
    acceptance = true_logits.sigmoid()
    accepted = (torch.rand(count, gamma, generator=generator) < acceptance).long().cumprod(-1).sum(-1)
    return CalibrationRounds(
        true_logits * torch.tensor(temperatures), acceptance, accepted, torch.full_like(accepted, gamma)
    )


@pytest.mark.parametrize("realised", [False, True])
def test_fit_finds_the_temperatures_of_an_overconfident_head(realised):
    scaling = fit_temperatures(drawn_rounds([2.0, 3.0, 0.5]), realised)
    assert scaling.temperatures == pytest.approx([2.0, 3.0, 0.5], rel=0.13)  # one step of the grid
    assert all(after < 0.02 < before for before, after in zip(scaling.ece_before, scaling.ece_after, strict=True))


def test_fit_leaves_a_calibrated_head_alone():
    assert fit_temperatures(drawn_rounds([1.0, 1.0])).temperatures == pytest.approx([1.0, 1.0], rel=0.13)


def test_fit_prefers_no_change_among_equals():
    rounds = CalibrationRounds(
        torch.zeros(4, 2), torch.full((4, 2), 0.5), torch.tensor([2, 2, 0, 0]), torch.full((4,), 2)
    )
    assert fit_temperatures(rounds).temperatures == [1.0, 1.0]


def test_fit_keeps_the_positions_before_fixed():
    """Left to right: the first temperature does not depend on what comes behind it."""
    rounds = drawn_rounds([2.0, 3.0, 0.5], count=2000)
    lengths = (rounds.num_accepted.clamp_max(1), rounds.proposed.clamp_max(1))
    first = CalibrationRounds(rounds.logits[:, :1], rounds.acceptance[:, :1], *lengths)
    assert fit_temperatures(rounds).temperatures[0] == fit_temperatures(first).temperatures[0]


def test_the_grid_is_sglangs():
    assert len(TEMPERATURE_GRID) == 41
    assert TEMPERATURE_GRID[0] == pytest.approx(0.1) and TEMPERATURE_GRID[-1] == pytest.approx(10.0)


def test_calibration_preserves_the_order():
    logits = torch.randn(100, 3)
    for position, scaled in enumerate(calibrated_confidence(logits, [0.3, 1.0, 4.0]).unbind(-1)):
        assert torch.equal(scaled.argsort(), logits[:, position].argsort())


def test_uncalibrated_confidence_is_the_sigmoid():
    logits = torch.randn(5, 3, dtype=torch.bfloat16)
    torch.testing.assert_close(calibrated_confidence(logits, None), logits.float().sigmoid())


# ---- labels


def test_labels_follow_the_accepted_prefix():
    rounds = CalibrationRounds(
        torch.zeros(2, 3), torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]), torch.tensor([1, 3]), torch.tensor([3, 3])
    )
    assert rounds.realised_labels().tolist() == [[1, 0, 0], [1, 1, 1]]
    torch.testing.assert_close(rounds.integrated_labels(), torch.tensor([[0.9, 0.8, 0.0], [0.6, 0.5, 0.4]]).double())


def test_integrated_labels_have_the_mean_of_the_realised_ones_and_less_variance():
    rounds = drawn_rounds([1.0, 1.0, 1.0])
    integrated, realised = rounds.integrated_labels(), rounds.realised_labels()
    torch.testing.assert_close(integrated.mean(0), realised.mean(0), atol=0.01, rtol=0)
    assert (integrated.var(0) < realised.var(0)).all()


def test_slots_behind_the_verified_ones_are_not_read():
    rounds = drawn_rounds([2.0, 2.0], count=4000)
    spoilt = CalibrationRounds(
        torch.cat([rounds.logits, torch.tensor([[5.0, -50.0]]).expand(4000, -1)]),
        torch.cat([rounds.acceptance, torch.tensor([[0.9, 0.123]]).expand(4000, -1)]),
        torch.cat([rounds.num_accepted, torch.ones(4000, dtype=torch.long)]),
        torch.cat([rounds.proposed, torch.ones(4000, dtype=torch.long)]),
    )
    second = [measure_calibration(part, [2.0, 2.0])[1] for part in (rounds, spoilt)]
    assert second[0] == second[1] and second[1].num_rounds == 4000


# ---- measures


def test_calibration_error_by_hand():
    predicted, labels = torch.tensor([0.05, 0.05, 0.95, 0.95]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert expected_calibration_error(predicted, labels) == pytest.approx(0.5 * 0.45 + 0.5 * 0.05)


def test_calibration_error_is_zero_for_the_truth_and_counts_the_last_bin():
    probabilities = torch.rand(1000).double()
    assert expected_calibration_error(probabilities, probabilities) == pytest.approx(0.0)
    assert expected_calibration_error(torch.tensor([1.0]), torch.tensor([0.0])) == 1.0


def test_reliability_bins_are_the_parts_of_the_calibration_error():
    rounds = drawn_rounds([2.0], count=3000)
    predicted, labels = rounds.logits.sigmoid()[:, 0].double(), rounds.integrated_labels()[:, 0]
    bins = reliability_bins(predicted, labels)
    assert sum(count for *_, count in bins) == 3000
    error = sum(count * abs(mean - label) for mean, label, count in bins) / 3000
    assert error == pytest.approx(expected_calibration_error(predicted, labels))


def test_auc_agrees_with_the_rank_test_ties_included():
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(300, generator=generator) * 20).round()
    labels = (torch.rand(300, generator=generator) < scores / 20).double()
    statistic = scipy.stats.mannwhitneyu(scores[labels == 1], scores[labels == 0]).statistic
    assert roc_auc(scores, labels) == pytest.approx(statistic / (labels.sum() * (1 - labels).sum()).item())


def test_auc_is_nothing_without_both_outcomes():
    assert roc_auc(torch.rand(5), torch.ones(5)) is None


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


def test_empty_calibration_sets_are_refused():
    empty = torch.zeros(0, 3)
    with pytest.raises(ValueError, match="no round to calibrate on"):
        CalibrationRounds(empty, empty, torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="the calibration set is empty"):
        CalibrationRounds.concatenate([])


def test_rounds_of_different_block_sizes_are_refused():
    with pytest.raises(ValueError, match=r"different block sizes γ.*\[1, 2\]"):
        CalibrationRounds.concatenate([drawn_rounds([1.0], 5), drawn_rounds([1.0, 1.0], 5)])


def test_rounds_must_agree_in_shape():
    with pytest.raises(ValueError, match="must describe the same rounds"):
        CalibrationRounds(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2))


def test_logits_must_be_numbers():
    with pytest.raises(ValueError, match="finite"):
        CalibrationRounds(torch.full((1, 1), torch.nan), torch.zeros(1, 1), torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize(
    ("acceptance", "accepted", "proposed", "message"),
    [
        (1.5, 1, 1, r"acceptance must lie in \[0, 1\]"),
        (float("nan"), 1, 1, r"acceptance must lie in \[0, 1\]"),
        (0.5, 2, 1, "num_accepted <= proposed"),
        (0.5, 0, 3, "proposed <= γ = 2"),
        (0.5, -1, 1, "0 <= num_accepted"),
    ],
)
def test_impossible_rounds_are_refused(acceptance, accepted, proposed, message):
    with pytest.raises(ValueError, match=message):
        CalibrationRounds(
            torch.zeros(1, 2), torch.full((1, 2), acceptance), torch.tensor([accepted]), torch.tensor([proposed])
        )


def test_positions_that_were_never_verified_cannot_be_fitted():
    rounds = drawn_rounds([1.0, 1.0], count=10)
    short = CalibrationRounds(rounds.logits, rounds.acceptance, torch.zeros(10), torch.ones(10))
    with pytest.raises(ValueError, match="no round verified draft position 2"):
        fit_temperatures(short)


def test_measuring_needs_one_temperature_per_position():
    with pytest.raises(ValueError, match="1 temperatures for blocks of 2"):
        measure_calibration(drawn_rounds([1.0, 1.0], count=10), [1.0])
