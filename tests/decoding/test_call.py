"""Batches through `generate()`: each row as if it were alone, and everything a call may ask for besides tokens."""

import threading

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_dspark import DecodingOptions, FullBlock
from tests.rows import (
    EOS,
    GREEDY,
    EndsAfterTwo,
    alone,
    assert_as_alone,
    assert_rows,
    assert_same_tokens,
    padded,
)


@pytest.mark.parametrize("loop", ["own", "transformers"])
def test_greedy_decoding_leaves_the_random_numbers_of_others_alone(target, draft, prompts, loop):
    draft.decoding = DecodingOptions(use_transformers_loop=loop == "transformers")
    before = torch.get_rng_state()
    target.generate(**padded(prompts[:1]), assistant_model=draft, **GREEDY)
    assert torch.equal(torch.get_rng_state(), before)
    target.generate(**padded(prompts[:1]), assistant_model=draft, **GREEDY | {"do_sample": True})
    assert not torch.equal(torch.get_rng_state(), before)


def test_constraints_are_asked_about_the_right_row(target, draft, prompts):
    batch = padded(prompts[:3])

    def allowed(row, ids):
        return [10 + row, 20 + row]

    output = target.generate(**batch, assistant_model=draft, prefix_allowed_tokens_fn=allowed, **GREEDY)
    for row, tokens in enumerate(output[:, batch["input_ids"].shape[1] :].tolist()):
        assert set(tokens) <= {10 + row, 20 + row}


def test_lengths_count_holes_in_the_mask_as_padding(target, draft, prompts):
    ids = torch.tensor([[*prompts[0], 0, 0, 0, 9, 33]])
    mask = torch.tensor([[1] * len(prompts[0]) + [0, 0, 0, 1, 1]])
    options = GREEDY | {"max_new_tokens": 9, "min_new_tokens": 9, "forced_eos_token_id": EOS}
    output = target.generate(ids, attention_mask=mask, assistant_model=draft, **options)
    assert output[0, ids.shape[1] :].tolist() == alone(target, [*prompts[0], 9, 33], **options)


def test_several_sequences_per_prompt_differ_and_keep_to_their_prompt(target, draft, prompts):
    batch = padded(prompts[:2])
    torch.manual_seed(3)
    output = target.generate(
        **batch, assistant_model=draft, do_sample=True, top_k=0, temperature=3.0, num_return_sequences=3,
        max_new_tokens=12, pad_token_id=0,
    )  # fmt: skip
    width = batch["input_ids"].shape[1]
    assert output[:, :width].tolist() == batch["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in output[:, width:].tolist()}) == 6


def test_prompts_of_several_sequences_keep_their_own_ngrams(target, draft, prompts):
    options = {"encoder_no_repeat_ngram_size": 2, "num_return_sequences": 2, "do_sample": True, "max_new_tokens": 20}
    output = target.generate(**padded(prompts[:2]), assistant_model=draft, pad_token_id=0, **options)
    width = max(map(len, prompts[:2]))
    for row, tokens in enumerate(output[:, width:].tolist()):
        prompt = prompts[row // 2]
        assert not set(zip(prompt, prompt[1:], strict=False)) & set(zip(tokens, tokens[1:], strict=False)) - {(0, 0)}


def test_custom_criteria_cut_at_the_exact_token_of_each_row(target, draft, prompts):
    batch, ends = padded(prompts), EndsAfterTwo()
    output = target.generate(**batch, assistant_model=draft, stopping_criteria=[ends], **GREEDY)
    assert_rows(output, batch["input_ids"].shape[1], [alone(target, prompt)[:2] for prompt in prompts])
    assert ends.calls == 2  # never asked about a token after the end


def test_criteria_get_the_scores_they_would_get_from_plain_generate(target, draft, prompts):
    class Watcher(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append((input_ids.shape, len(scores), scores[-1].shape))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    seen = []
    for assistant in ({}, {"assistant_model": draft}):
        watcher, ask = Watcher(), {"output_scores": True, "return_dict_in_generate": True}
        target.generate(torch.tensor(prompts[:1]), stopping_criteria=[watcher], **GREEDY, **ask, **assistant)
        seen.append(watcher.seen)
    assert seen[0] == seen[1]


class AnyAfter(StoppingCriteria):
    """Looks for a token among what is new, after the columns of the prompt."""

    def __init__(self, width, token):
        self.width, self.token = width, token

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, self.width :] == self.token).any(dim=1)


def test_criteria_see_the_padding_as_in_plain_generate(target, draft, prompts):
    batch = padded(prompts)
    plain = target.generate(**batch, **GREEDY)
    width = batch["input_ids"].shape[1]
    for row in range(len(prompts)):
        ends = [AnyAfter(width, int(plain[row, width + 2]))]
        expected = target.generate(**batch, stopping_criteria=ends, **GREEDY)
        assert torch.equal(target.generate(**batch, assistant_model=draft, stopping_criteria=ends, **GREEDY), expected)


class LaterLength(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids[:, 2:], scores, **kwargs)


class NoEnd(EosTokenCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "criterion", [LaterLength(max_length=20), NoEnd(eos_token_id=7)], ids=lambda each: type(each).__name__
)
def test_subclasses_of_known_criteria_are_asked(target, draft, prompts, criterion, rows):
    batch, options = padded(prompts[:rows]), GREEDY | {"stopping_criteria": [criterion]}
    expected = target.generate(**batch, **options)
    assert torch.equal(target.generate(**batch, assistant_model=draft, **options), expected)


def test_criteria_that_answer_for_other_rows_are_refused(target, draft, prompts):
    class Flags(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(2, dtype=torch.bool)

    for rows in (1, 3):
        with pytest.raises(ValueError, match=rf"answered for 2 rows and was given {rows} \(Flags\)"):
            target.generate(**padded(prompts[:rows]), assistant_model=draft, stopping_criteria=[Flags()], **GREEDY)


def test_criteria_that_cannot_be_copied_are_asked(target, draft, prompts):
    class Button(StoppingCriteria):
        pressed = None

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), self.pressed.is_set())

    button = Button()
    button.pressed = threading.Event()
    button.pressed.set()
    output = target.generate(**padded(prompts), assistant_model=draft, stopping_criteria=[button], **GREEDY)
    assert output.shape[1] == max(map(len, prompts)) + 1


def test_stop_strings_cut_each_row_at_the_exact_token(target, draft, prompts, tokenizer):
    answers = assert_as_alone(target, draft, prompts, stop_strings=["Q", "Ld"], tokenizer=tokenizer)
    assert min(map(len, answers)) < 40


def test_processors_are_asked_only_about_prefixes_that_plain_decoding_visits(target, draft, prompts):
    """Nothing after an end-of-sequence token, nothing beyond the last length: a trie has no answer there."""

    def allowed(row, ids):
        generated = ids[len(prompts[0]) :].tolist()
        assert len(generated) < 12 and EOS not in generated, "plain decoding never asks"
        return [EOS] if len(generated) == 4 else [26, 42]

    for options in ({"max_new_tokens": 12}, {"eos_token_id": None, "max_new_tokens": 4}):
        assert_same_tokens(target, draft, torch.tensor(prompts[:1]), prefix_allowed_tokens_fn=allowed, **options)


def test_nucleus_sampling_may_need_the_whole_vocabulary_at_some_slots(target, draft, prompts, monkeypatch):
    monkeypatch.setattr("hf_dspark.decoding.logits_processing.TOP_P_CANDIDATES", 6)
    output = target.generate(
        **padded(prompts), assistant_model=draft, do_sample=True, top_k=0, top_p=0.9, temperature=1.5,
        max_new_tokens=12, pad_token_id=0,
    )  # fmt: skip
    assert output.shape[0] == len(prompts) and draft.last_stats.rounds > 0


def test_scores_logits_and_hidden_states_of_a_batch_are_those_of_plain_decoding(target, draft, prompts):
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    options = padded(prompts) | GREEDY | {"repetition_penalty": 1.2}
    plain, assisted = (target.generate(**options, **ask, **own) for own in ({}, {"assistant_model": draft}))
    assert len(assisted.scores) == len(plain.scores) == GREEDY["max_new_tokens"]
    is_token = [options["attention_mask"].bool()] + [torch.ones(len(prompts), 1, dtype=torch.bool)] * len(plain.scores)
    for step in range(len(plain.scores)):
        torch.testing.assert_close(assisted.scores[step], plain.scores[step], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(assisted.logits[step], plain.logits[step], atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(assisted.hidden_states[step], plain.hidden_states[step], strict=True):
            assert ours.shape == theirs.shape
            read = is_token[step]
            torch.testing.assert_close(ours[read], theirs[read], atol=1e-4, rtol=1e-4)


def test_truncated_scores_are_those_of_the_warpers(target, draft, prompts):
    ids = torch.tensor(prompts[:1])
    ask = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 12}
    output = target.generate(
        ids, assistant_model=draft, do_sample=True, temperature=0.7, top_k=9, top_p=0.8, pad_token_id=0, **ask
    )
    for scores, logits in zip(output.scores, output.logits, strict=True):
        distribution = (logits / 0.7).softmax(-1)
        kept = scores[0] > -torch.inf
        assert 1 <= kept.sum() <= 9 and distribution[0][kept].min() >= distribution[0][~kept].max()
        torch.testing.assert_close(scores[0][kept], logits[0][kept] / 0.7)


@pytest.mark.parametrize("with_ids", [False, True])
def test_left_padded_embeddings_are_decoded_like_their_ids(target, draft, prompts, with_ids):
    batch = padded(prompts)
    batch["inputs_embeds"] = target.get_input_embeddings()(batch["input_ids"]).detach()
    width = batch["input_ids"].shape[1] if with_ids else 0
    if not with_ids:
        del batch["input_ids"]
    output = target.generate(**batch, assistant_model=draft, **GREEDY)
    assert_rows(output, width, [alone(target, prompt) for prompt in prompts])


def test_processors_that_read_prefixes_get_none_before_the_first_token_of_embeddings(target, draft, prompts):
    embeds = target.get_input_embeddings()(torch.tensor(prompts[:1])).detach()
    reads_prefixes = GREEDY | {"min_new_tokens": 3, "no_repeat_ngram_size": 2}
    plain = target.generate(inputs_embeds=embeds, **reads_prefixes)
    assert torch.equal(target.generate(inputs_embeds=embeds, assistant_model=draft, **reads_prefixes), plain)


def test_a_full_memory_names_the_batch(target, draft, prompts, monkeypatch):
    honest, budget = torch.Tensor.new_zeros, [400_000]
    draft.decoding = DecodingOptions(policy=FullBlock())

    def scarce(self, *shape, **kwargs):
        result = honest(self, *shape, **kwargs)
        if result.dim() == 4:
            budget[0] -= result.nbytes
            if budget[0] < 0:
                raise torch.OutOfMemoryError("out of memory")
        return result

    monkeypatch.setattr(torch.Tensor, "new_zeros", scarce)
    with pytest.raises(MemoryError, match="in 6 sequences: use a smaller batch"):
        target.generate(**padded(prompts), assistant_model=draft, **GREEDY)
