"""The distribution of what recurrent and hybrid targets decode with drafts is their own, round after round."""

import pytest

from hf_dspark import FullBlock
from hf_dspark.targets.recurrent import Mixer
from tests.decoding.test_lossless_batches import enumerate_rounds
from tests.distributions import PROMPT, make_pair
from tests.hybrids import HAVE_PROTOCOL, build

pytestmark = pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
KINDS = ["qwen3_5_text", pytest.param("falcon_h1", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def pair(request):
    return make_pair(lambda seed, **options: build(request.param, seed, **options), gamma=1, seed=5, depth=None)


def forget_rejections(monkeypatch):
    """Let recurrent layers take every token of a block for an accepted one."""
    advance = Mixer._advance

    def careless(self, rows, accepted):
        for row in rows:
            if row.num_waiting:
                row.position += accepted - row.num_waiting
        advance(self, rows, rows[0].num_waiting)

    monkeypatch.setattr(Mixer, "_advance", careless)


def distance(monkeypatch, pair):
    return enumerate_rounds(monkeypatch, *pair, FullBlock(), prompts=PROMPT.tolist(), rounds=2, length=4)[0]


def test_two_rounds_have_the_targets_distribution(pair, monkeypatch):
    assert distance(monkeypatch, pair) < 5e-6


def test_enumeration_catches_the_state_of_a_rejected_token_left_in_place(pair, monkeypatch):
    forget_rejections(monkeypatch)
    assert distance(monkeypatch, pair) > 1e-3
