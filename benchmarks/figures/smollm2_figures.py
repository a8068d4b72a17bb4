"""SmolLM2-135M: what drafts of three kinds commit that were trained alike, and whether the shipped one knows it."""

from typing import Any

from confidence import draw_reliability, draw_thresholds
from drafts import FEWEST_ROUNDS, KINDS, draw_acceptance
from matplotlib.figure import Figure
from style import drawn, finish, handles_of, load, panels

DOMAINS = ("mathematics", "code", "chat")
TARGET = "SmolLM2-135M-Instruct, prompts of the paper's evaluation."


def over_tasks(rows: list[dict[str, Any]]) -> tuple[list[float | None], list[int]]:
    """Return the acceptance of each position over all tasks of a domain, and how many rounds came to it."""
    counts = [sum(numbers) for numbers in zip(*(row["reached"] for row in rows), strict=True)]
    rates: list[float | None] = []
    for place, count in enumerate(counts):
        accepted = sum(row["reached"][place] * (row["acceptance"][place] or 0.0) for row in rows)
        rates.append(accepted / count if count else None)
    return rates, counts


@drawn
def smollm2_acceptance() -> Figure:
    """Draw the acceptance of each position by domain, as the paper's Figure 2."""
    figure, axes = panels([list(DOMAINS)], 3.3, sharey=True)
    found = load("smollm2_tau_paper")["rows"]
    for domain, axis in axes.items():
        for key, kind in KINDS.items():
            rows = [row for row in found if (row["kind"], row["regime"]) == (key, "sampled")]
            draw_acceptance(axis, kind, kind, *over_tasks([row for row in rows if row["domain"] == domain]))
        axis.set_title(domain)
    axes["mathematics"].set_ylabel("conditional acceptance")
    return finish(
        figure,
        "What three kinds of drafts commit after the same training",
        f"{TARGET} Temperature 1, γ = 7. Positions that {FEWEST_ROUNDS} rounds or more reached.",
        axes["mathematics"],
    )


@drawn
def smollm2_confidence() -> Figure:
    """Draw predicted against realised survival of the first token, and tokens against thresholds, by domain."""
    names = [[f"{domain}, {part}" for domain in DOMAINS] for part in ("reliability", "thresholds")]
    figure, axes = panels(names, 5.4)
    found = {row["domain"]: row for row in load("smollm2_confidence")["rows"] if row["regime"] == "sampled"}
    for domain, row in found.items():
        reliability, thresholds = (axes[f"{domain}, {part}"] for part in ("reliability", "thresholds"))
        draw_reliability(reliability, row["raw"][0], row["calibrated"][0])
        reliability.set(title=domain, xlabel="predicted survival")
        draw_thresholds(thresholds, row["thresholds"])
        thresholds.set_ylim(0, 8.6)
    axes["mathematics, reliability"].set_ylabel("realised survival")
    axes["mathematics, thresholds"].set_ylabel("tokens of a round:\ncommitted, rejected")
    return finish(
        figure,
        "How far the shipped draft's confidence can be trusted, by domain",
        f"{TARGET} Temperature 1, whole blocks; none of these prompts was calibrated on. Survival of the first draft "
        "token. Shaded: share of rounds. Hatched: drafts that are verified and rejected.",
        handles_of([axes["mathematics, reliability"]]),
    )
