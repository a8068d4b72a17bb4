"""Published configurations: each is read as what it is, or refused by name."""

import json

import pytest

from hf_dspark.formats.checkpoint import Checkpoint
from hf_dspark.formats.translate import draft_model_type
from hf_dspark.models.auto import DRAFTS
from hf_dspark.models.configuration_dspark import DSparkConfig
from tests.formats.public_configs import PUBLIC_CONFIGS, PublicConfig


@pytest.mark.parametrize("row", PUBLIC_CONFIGS, ids=lambda row: f"{row.project}-{row.where}")
def test_public_configs_are_read_as_what_they_are_or_refused_by_name(row: PublicConfig, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(row.config))
    kind = DRAFTS.get(draft_model_type(Checkpoint(tmp_path).config))
    config_class = DSparkConfig if kind is None else kind.config_class
    if not row.is_read:
        with pytest.raises(ValueError, match=row.result):
            config_class.from_pretrained(tmp_path)
        return
    config = config_class.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in row.result} == row.result
