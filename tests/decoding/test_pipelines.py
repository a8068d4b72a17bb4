"""`pipeline(..., assistant_model=draft)`, and the draft of one call."""

import pytest
from transformers import pipeline

ASK = {"do_sample": False, "max_new_tokens": 20}


@pytest.mark.parametrize("when", ["made", "called"])
def test_pipeline_takes_a_draft(pair, prompt_ids, tokenizer, when):
    target, draft = pair
    made, text = pipeline("text-generation", model=target, tokenizer=tokenizer), tokenizer.decode(prompt_ids[0][0])
    plain, assistant = made(text, **ASK), {"assistant_model": draft}
    if when == "made":
        made = pipeline("text-generation", model=target, tokenizer=tokenizer, **assistant)
    assert made(text, **ASK, **(assistant if when == "called" else {})) == plain
    assert draft.last_stats.tau > 2
