"""The reference prompts of the trained pair, and a draft whose options every test leaves as they were."""

import json

import pytest
import torch

from hf_dspark import DecodingOptions


@pytest.fixture
def target(pair):
    return pair[0]


@pytest.fixture
def draft(pair):
    return pair[1]


@pytest.fixture(scope="session")
def reference(fixtures):
    return json.loads((fixtures / "deepspec" / "trained" / "generation.json").read_text())


@pytest.fixture(scope="session")
def prompts(reference):
    rows = reference["prompts"]
    return [*rows, rows[0][:3], rows[3][4:9]]


@pytest.fixture(scope="session")
def prompt_ids(reference):
    return [torch.tensor([ids]) for ids in reference["prompts"]]


@pytest.fixture(autouse=True)
def _options_as_before(request):
    draft = request.getfixturevalue("pair")[1] if "pair" in request.fixturenames else None
    yield
    if draft is not None:
        draft.decoding = DecodingOptions()
        draft.config.sts_temperatures = draft.config.confidence_fits = None


@pytest.fixture(params=[False, True], ids=["own", "transformers"])
def either_loop(request, pair):
    """Our loop, and transformers' own with the same drafting half: each is the other's oracle."""
    pair[1].decoding = DecodingOptions(use_transformers_loop=request.param)
