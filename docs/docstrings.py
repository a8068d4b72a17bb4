"""Docstrings name things as transformers does, [`Name`] and (`type`, *optional*); the site shows them as code."""

import re

import griffe

REFERENCE = re.compile(r"\[`~?(?:[\w.]+\.)?(\w+)`\]")
TYPE_OF_ARGUMENT = re.compile(r"^( +[\w, ]+ )\((.*)\):(?= |$)", re.MULTILINE)


class TransformersDocstrings(griffe.Extension):
    """Turns references of docstrings into code, and types of arguments into what the site sets as code itself."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = REFERENCE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = TYPE_OF_ARGUMENT.sub(lambda found: f"{found[1]}({_plain(found[2])}):", text)


def _plain(types: str) -> str:
    return types.replace("`", "").replace("*", "")
