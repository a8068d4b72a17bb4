"""The plugin that repeats calls of transformers' tests reports what it is there to find."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import GenerationMixin

from hf_dspark.decoding import wraps
from tests.hybrids import HAVE_PROTOCOL, build

from .fetch import main
from .plugin import Repeater

PROMPTS = torch.tensor([[3, 4, 5, 3, 4, 5, 3], [6, 7, 8, 9, 6, 7, 8]])
OPTIONS = {"max_new_tokens": 6, "do_sample": False}
RECORDED = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}


@pytest.fixture
def repeater(monkeypatch):
    repeater = Repeater()
    monkeypatch.setattr(GenerationMixin, "generate", repeater.wrap(GenerationMixin.generate))
    return repeater


def kinds(repeater: Repeater) -> list[str]:
    return [outcome.kind for outcome in repeater.outcomes]


@pytest.mark.parametrize("options", [{}, RECORDED, {"do_sample": True}, {"repetition_penalty": 1.3}])
def test_plugin_reports_identical_calls_and_leaves_the_test_alone(repeater, target, options):
    torch.manual_seed(3)
    found = target.generate(PROMPTS, **OPTIONS | options)
    after = torch.rand(1)
    assert kinds(repeater) == ["identical", "identical"], list(repeater.table())
    torch.manual_seed(3)
    repeater._at_work = True  # nothing is repeated
    expected = target.generate(PROMPTS, **OPTIONS | options)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))


def test_plugin_leaves_the_cache_of_a_test_as_plain_decoding_does(repeater, target):
    cache = DynamicCache(config=target.config)
    target.generate(PROMPTS, past_key_values=cache, **OPTIONS)
    assert cache.get_seq_length() == PROMPTS.shape[1] + OPTIONS["max_new_tokens"] - 1
    assert kinds(repeater) == ["identical", "identical"]


@pytest.mark.skipif(not HAVE_PROTOCOL, reason="needs a later transformers")
def test_plugin_compares_a_next_turn_with_a_single_reading_of_the_text(repeater):
    """Plain decoding reads the text of a recurrent target a second time, over the states that its cache holds."""
    build("mamba2").generate(PROMPTS[:1], **OPTIONS, **RECORDED)
    assert kinds(repeater) == ["identical", "refused"], list(repeater.table())


def test_plugin_reports_other_tokens_as_a_difference(repeater, target, monkeypatch):
    decode_call = wraps.decode_call
    monkeypatch.setattr(wraps, "decode_call", lambda *given: (decode_call(*given) + 1) % 48)
    target.generate(PROMPTS, **OPTIONS)
    assert kinds(repeater) == ["different", "different"] and "row 0 differs" in repeater.faults[0].reason


def test_plugin_reports_other_scores_as_a_difference(repeater, target, monkeypatch):
    decode_call = wraps.decode_call

    def wrong(*given):
        output = decode_call(*given)
        output.scores = tuple(step + 0.1 for step in output.scores)
        return output

    monkeypatch.setattr(wraps, "decode_call", wrong)
    target.generate(PROMPTS, **OPTIONS, **RECORDED)
    assert kinds(repeater) == ["different", "different"] and "scores of step 0" in repeater.faults[0].reason


def test_plugin_tells_a_foreign_error_from_a_refusal(repeater, target, monkeypatch):
    target.generate(PROMPTS, **OPTIONS, num_beams=2)
    assert kinds(repeater) == ["refused", "refused"] and not repeater.faults
    monkeypatch.setattr(wraps, "decode_call", lambda *given: torch.zeros(2, 3) @ torch.zeros(2, 3))
    target.generate(PROMPTS, **OPTIONS)
    monkeypatch.setattr(wraps, "decode_call", lambda: None)  # our own frame is the last one, and raises nothing
    target.generate(PROMPTS, **OPTIONS)
    assert kinds(repeater)[2:] == ["foreign error"] * 4
    assert "RuntimeError" in repeater.faults[0].reason and "TypeError" in repeater.faults[2].reason


def test_plugin_accepts_another_token_only_where_two_are_equally_good(repeater, target):
    with torch.no_grad():
        target.lm_head.weight[1::2] = target.lm_head.weight[::2]  # each token has a twin
    decode_call = wraps.decode_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wraps, "decode_call", lambda *given: _last_twin(decode_call(*given)))
        target.generate(PROMPTS, **OPTIONS)
    assert kinds(repeater) == ["tie", "tie"]


def _last_twin(sequences: torch.Tensor) -> torch.Tensor:
    return torch.cat([sequences[:, :-1], sequences[:, -1:] ^ 1], dim=1)


def test_fetch_says_what_is_missing_without_a_checkout_or_a_network(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="no checkout of transformers"):
        main(["--from", str(tmp_path)])
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody answers there
    with pytest.raises(SystemExit, match="--from /path/to/transformers"):
        main(["--to", str(tmp_path / "upstream")])


def test_fetch_copies_the_tests_of_a_checkout(tmp_path):
    (tmp_path / "clone/tests/generation").mkdir(parents=True)
    (tmp_path / "clone/tests/generation/test_utils.py").touch()
    main(["--from", str(tmp_path / "clone"), "--to", str(tmp_path / "upstream")])
    assert (tmp_path / "upstream/tests/generation/test_utils.py").exists()
    assert (tmp_path / "upstream/src/transformers/__init__.py").exists()
