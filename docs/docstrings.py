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

    def on_class_members(self, *, cls: griffe.Class, **kwargs: object) -> None:
        """Show the defaults of fields, which are no parameters of an `__init__` that is written out."""
        defaults = {}
        for name, member in cls.attributes.items():
            if isinstance(member.value, griffe.ExprCall) and str(member.value.function) == "argument":
                member.value = member.value.arguments[0]
            if member.value is not None:
                defaults[name] = str(member.value)

        def told(found: re.Match[str]) -> str:
            values = [defaults[name] for name in found[1].replace(" ", "").split(",") if name in defaults]
            return f"{found[1]}({_plain(found[2])}, default {', '.join(values)}):" if values else found[0]

        if cls.docstring is not None and "dataclass" not in cls.labels:
            cls.docstring.value = TYPE_OF_ARGUMENT.sub(told, cls.docstring.value)


def _plain(types: str) -> str:
    return types.replace("`", "").replace("*", "")
