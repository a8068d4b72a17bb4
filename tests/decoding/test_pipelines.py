"""`pipeline(..., assistant_model=...)`: a draft, or the name of its repository."""

from transformers import (
    PreTrainedTokenizerFast,
    pipeline,
)

from tests.rows import EOS


def test_pipeline_accepts_the_draft(pair, prompt_ids):
    from tokenizers import Tokenizer, models, pre_tokenizers

    target, draft = pair
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}", pad_token="w0")
    text = tokenizer.decode(prompt_ids[0][0])
    ask = {"do_sample": False, "max_new_tokens": 20}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **ask)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)(text, **ask)
    assert assisted == plain
