"""Which kinds of drafts there are, and loading one of whatever kind.

Knows nothing of who loads it, or what for.
"""

import os
from typing import Any

from .checkpoint_files import HUB_ARGUMENTS, read_config
from .checkpoint_formats import draft_model_type
from .draft_model import DraftModel
from .modeling_dspark import DSparkDraftModel
from .modeling_eagle3 import Eagle3DraftModel

DRAFTS: dict[str, type[DraftModel]] = {
    model.config_class.model_type: model for model in (DSparkDraftModel, Eagle3DraftModel)
}


def load_draft(name_or_path: str | os.PathLike, **kwargs: Any) -> DraftModel:
    """Load a draft of whatever kind, of any format that `from_pretrained` reads.

    Args:
        name_or_path (`str` or `PathLike`): A folder, or a repository on the Hub.
        kwargs: For [`DraftModel.from_pretrained`].

    Raises:
        ValueError: If there is another kind of model, or as there.
    """
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    kind = draft_model_type(read_config(name_or_path, **hub))
    if kind not in DRAFTS:
        raise ValueError(
            f"{name_or_path} holds a {kind!r} model, which is no draft: pass one of the kinds {sorted(DRAFTS)}"
        )
    return DRAFTS[kind].from_pretrained(name_or_path, **kwargs)
