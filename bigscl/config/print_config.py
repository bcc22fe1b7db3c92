"""The reference of all settings, made from the sentences below them in the sources.

`python -m bigscl.config.print_config > docs/settings.md` writes the page again.
"""

import ast
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import yaml
from pydantic import TypeAdapter

from bigscl.config.load import to_yaml
from bigscl.config.schema import Config

HEAD = """# All settings

Every setting of a run, as `section.key` in a YAML file, or as `--section.key value` on the command line of
`bigscl train` and `bigscl plan`. `bigscl train CONFIG --print-config`
prints those of one config with these sentences.

This page is made from the sources: `python -m bigscl.config.print_config > docs/settings.md`.
"""
WIDTH = 100
NUMBERS = {"integer": "integer", "number": "number"}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
# Bounds that only keep numbers within 64 bits.
HUGE = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, or the title of a section."""

    path: str
    """Its dotted path."""
    text: str
    """The sentence below it in the sources."""
    kind: str
    """The values it takes, in words; empty for a section."""
    default: str | None
    """Its default as YAML; None if it must be given."""

    @property
    def is_section(self) -> bool:
        """Whether settings follow that belong to it."""
        return not self.kind


def all_settings() -> Iterator[Setting]:
    yield from _settings(Config, "")


def _settings(kind: type[Any], prefix: str) -> Iterator[Setting]:
    """Yield the settings of a dataclass with its own defaults: a section that is given gets them."""
    sentences, hints = _sentences(kind), typing.get_type_hints(kind)
    properties = TypeAdapter(kind).json_schema()["properties"]
    nested = []
    for field in fields(kind):
        default = _default(field)
        path, text = f"{prefix}{field.name}", " ".join(sentences[field.name].split())
        inner = _section_in(hints[field.name])
        if inner is not None:
            shown = None if default is MISSING else ("null" if default is None else _where_left_out(default))
            nested.append((inner, Setting(path=path, text=text, kind="", default=shown)))
        else:
            words = _words(properties[field.name])
            yield Setting(path=path, text=text, kind=words, default=_as_yaml(default))
    for inner, section in nested:
        yield section
        yield from _settings(inner, f"{section.path}.")


def _where_left_out(section: Any) -> str:
    """Return the settings of a section that is left out, where one that is given needs them; else nothing."""
    needed = [field.name for field in fields(section) if _default(field) is MISSING]
    return ", ".join(f"{name}: {_as_yaml(getattr(section, name))}" for name in needed)


def _sentences(kind: type[Any]) -> dict[str, str]:
    """Return the sentence of each field: the text below it in the source, or the one in its metadata."""
    sentences = {field.name: str(field.metadata["text"]) for field in fields(kind) if field.metadata}
    for part in kind.__mro__[:-1]:
        if vars(part).get("__annotations__", {}).keys() - sentences.keys():
            sentences |= _sentences_below(part)
    return sentences


def _sentences_below(kind: type[Any]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for node, after in itertools.pairwise(body.body):
        match node, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                sentences[name] = str(text)
    return sentences


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _section_in(hint: Any) -> type[Any] | None:
    return next((part for part in (hint, *typing.get_args(hint)) if is_dataclass(part)), None)  # type: ignore[return-value]


def _as_yaml(value: Any) -> str | None:
    if value is MISSING:
        return None
    plain = TypeAdapter(type(value)).dump_python(value, mode="json")
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _words(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_words(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("prefixItems")
        return "list of texts" if items is None else f"{len(items)} values, each {_words(items[0])}"
    if schema.get("type") in NUMBERS:
        bounds = [
            f"{word} {schema[name]:g}" for name, word in BOUNDS.items() if abs(schema.get(name, HUGE)) < HUGE
        ]
        return ", ".join([NUMBERS[schema["type"]], *bounds])
    return {"boolean": "`true`, `false`", "null": "`null`"}.get(
        schema.get("type", ""), "path" if "format" in schema else "text"
    )


def settings_page() -> str:
    lines = [HEAD, "| setting | default | values | |", "|---|---|---|---|"]
    for setting in all_settings():
        if setting.is_section:
            left_out = (
                " Default: none." if setting.default == "null" and "Default" not in setting.text else ""
            )
            if setting.default not in (None, "null", ""):
                left_out = f" A config without this section has `{setting.default}`."
            lines += ["", f"## {setting.path}", "", setting.text + left_out, ""]
            lines += ["| setting | default | values | |", "|---|---|---|---|"]
        else:
            default = "**required**" if setting.default is None else f"`{setting.default}`"
            text = setting.text.replace("|", "\\|")
            lines.append(f"| `{setting.path}` | {default} | {setting.kind} | {text} |")
    return "\n".join(lines) + "\n"


def commented_yaml(config: Config) -> str:
    """Return the resolved config as YAML with the sentence of each setting; `load_config` reads it back."""
    texts = {setting.path: setting.text for setting in all_settings()}
    return "\n".join(_commented(yaml.safe_load(to_yaml(config)), texts, "", 0)) + "\n"


def _commented(values: dict[str, Any], texts: dict[str, str], prefix: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in values.items():
        path = f"{prefix}{name}"
        comment = textwrap.wrap(texts.get(path, ""), WIDTH - len(indent))
        yield from (f"{indent}# {line}" for line in comment)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _commented(value, texts, f"{path}.", depth + 1)
        else:
            flow = None if isinstance(value, list) else False
            plain = yaml.safe_dump({name: value}, default_flow_style=flow, width=10**6).strip()
            yield textwrap.indent(plain, indent)


if __name__ == "__main__":
    print(settings_page(), end="")
