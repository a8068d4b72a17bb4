"""`pipeline(..., assistant_model=...)`: a draft, or the name of its repository."""

import subprocess
import sys

import pytest
from transformers import pipeline

ASK = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture
def answer(pair, prompt_ids, tokenizer):
    """Answer the first prompt through a pipeline."""

    def run(**assistant):
        made = pipeline("text-generation", model=pair[0], tokenizer=tokenizer, **assistant)
        return made(tokenizer.decode(prompt_ids[0][0]), **ASK), made.assistant_model

    return run


def test_pipeline_takes_a_draft_or_its_name(answer, pair, fixtures):
    plain = answer()[0]
    assert answer(assistant_model=pair[1]) == (plain, pair[1])
    assisted, draft = answer(assistant_model=str(fixtures / "deepspec" / "trained" / "draft"))
    assert assisted == plain and draft.last_stats.tau > 2


def test_drafts_need_no_special_tokens_in_a_pipeline(answer, pair):
    config = pair[1].config
    before = config.eos_token_id, config.bos_token_id
    config.eos_token_id, config.bos_token_id = None, 7
    try:
        assert answer(assistant_model=pair[1])[0] == answer()[0]
    finally:
        config.eos_token_id, config.bos_token_id = before


def test_other_assistants_are_left_to_transformers(answer, fixtures):
    with pytest.raises(OSError):
        answer(assistant_model=str(fixtures / "nothing_here"))


def test_importing_the_package_imports_no_pipelines_and_wraps_them_later():
    program = (
        "import sys, hf_dspark; assert 'transformers.pipelines.base' not in sys.modules; "
        "from transformers.pipelines.base import load_assistant_model as load; assert hasattr(load, '__wrapped__'); "
        "from hf_dspark.decoding import pipelines; pipelines.install(); "
        "assert sys.modules['transformers.pipelines.base'].load_assistant_model is load"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
