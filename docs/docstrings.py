"""Docstrings of this package name things as transformers does, [`Name`]; the site shows them as code."""

import re

import griffe

REFERENCE = re.compile(r"\[`~?(?:[\w.]+\.)?(\w+)`\]")


class PlainReferences(griffe.Extension):
    """Turns references of docstrings into code, which is what they are on this site."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = REFERENCE.sub(r"`\1`", obj.docstring.value)
