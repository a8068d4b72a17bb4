"""Published configurations: each is read as what it is, or refused by name."""

import pytest

from tests.formats.drafts_page import PAGE, read, with_tables
from tests.formats.public_configs import PUBLIC_CONFIGS, PublicConfig


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", PUBLIC_CONFIGS, ids=lambda row: f"{row.project}-{row.where}")
def test_public_configs_are_read_as_what_they_are_or_refused_by_name(row: PublicConfig, tmp_path):
    if not row.is_read:
        with pytest.raises(ValueError, match=row.result):
            read(row, tmp_path)
        return
    config = read(row, tmp_path)
    assert {name: getattr(config, name) for name in row.result} == row.result


def test_the_manual_lists_what_becomes_of_every_file():
    page = PAGE.read_text()
    assert with_tables(page) == page, "make it anew: python -m tests.formats.drafts_page"
