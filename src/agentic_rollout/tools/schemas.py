"""What a tool tells a model about itself, and the check of a call's arguments against it."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

import jsonschema
import referencing
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentic_rollout.errors import SettingsError, ToolError

logger = logging.getLogger(__name__)

Check = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_MAX_PROBLEMS = 3
_MAX_PROBLEM_CHARS = 200


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool's description.

    Attributes:
        description: what it does, for the model.
        parameters: the JSON schema of its arguments, an object.
        check: the arguments as the tool takes them; raises `ToolError` (`bad_arguments`) where they do not fit.
    """

    description: str
    parameters: Mapping[str, Any]
    check: Check

    def as_function(self, name: str) -> dict[str, Any]:
        """As OpenAI's API describes functions."""
        function = {"name": name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tool_schema(tool: object) -> ToolSchema:
    """The schema of a tool: its attribute `schema`, or its docstring and arguments of any kind.

    Raises:
        SettingsError: the attribute is neither a `ToolSchema` nor a mapping with a JSON schema.
    """
    schema = getattr(tool, "schema", None)
    if isinstance(schema, ToolSchema):
        return schema
    description, _ = _read_docstring(type(tool))
    if schema is None:
        return ToolSchema(description, {"type": "object"}, check=lambda arguments: arguments)
    if not isinstance(schema, Mapping) or not isinstance(schema.get("parameters"), Mapping):
        expected = "a mapping with `description` and `parameters`, a JSON schema"
        raise SettingsError(f"{type(tool).__qualname__}.schema", schema, expected, "Correct the tool's class.")
    return json_schema(str(schema.get("description", description)), schema["parameters"])


def json_schema(description: str, parameters: Mapping[str, Any]) -> ToolSchema:
    """The schema of a tool whose arguments a JSON schema describes.

    Raises:
        SettingsError: `parameters` is no valid JSON schema.
    """
    parameters = _without_titles(dict(parameters))
    cls = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise SettingsError("parameters", parameters, "a JSON schema", f"It said: {error.message}.") from error
    validator = cls(parameters, registry=referencing.Registry())  # fetches nothing that a schema refers to

    def check(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            errors = sorted(validator.iter_errors(dict(arguments)), key=lambda error: list(map(str, error.path)))
        except referencing.exceptions.Unresolvable:
            logger.warning("arguments are not checked: their schema refers to what is not part of it")
            return arguments
        if errors:
            raise _bad_arguments((_json_problem(error, parameters) for error in errors), parameters)
        return arguments

    return ToolSchema(description, parameters, check)


def signature_schema(function: Callable[..., Any], *, without: Iterable[str] = ()) -> ToolSchema:
    """The schema of a typed function: its signature and docstring (sections as Google's style has them).

    Types may be whatever pydantic knows; `Annotated[int, Field(ge=1, description=…)]` says more.

    Args:
        function: takes its arguments by keyword.
        without: parameters that the model does not give.

    Raises:
        SettingsError: the signature has a parameter that cannot be given by keyword or described in JSON.
    """
    name = getattr(function, "__qualname__", repr(function))
    description, entries = _read_docstring(function)
    try:
        model, fields = _model(function, frozenset(without), entries)
        parameters = _without_titles(model.model_json_schema())
    except Exception as error:  # pydantic raises errors of many kinds for types that it does not know
        expected = "parameters with types that JSON can hold, given by keyword"
        raise SettingsError(name, str(inspect.signature(function)), expected, f"It said: {error}.") from error
    parameters.pop("description", None)

    def check(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            values = model.model_validate(dict(arguments))
        except ValidationError as error:
            problems = (_pydantic_problem(item, parameters) for item in error.errors(include_url=False))
            raise _bad_arguments(problems, parameters) from None
        return {name: getattr(values, field) for name, field in fields.items()}

    return ToolSchema(description, parameters, check)


def _model(
    function: Callable[..., Any], without: frozenset[str], descriptions: Mapping[str, str]
) -> tuple[type[BaseModel], dict[str, str]]:
    """A model of a signature, and its field for each parameter: names that pydantic reserves are free to parameters."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in without:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the parameter {name!r} cannot be given by keyword")
        fields[name] = f"parameter_{len(fields)}"
        hint = hints.get(name, Any)
        known: dict[str, Any] = {"alias": name}
        if name in descriptions and get_origin(hint) is not Annotated:
            known["description"] = descriptions[name]
        default = ... if parameter.default is parameter.empty else parameter.default
        definitions[fields[name]] = (hint, Field(default, **known))
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **definitions), fields


def _read_docstring(documented: Any) -> tuple[str, dict[str, str]]:
    """What comes before the sections, and the entries of the section on arguments."""
    text = inspect.getdoc(documented) or ""
    before, *sections = _SECTION.split(text)
    entries: dict[str, str] = {}
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        if not title.startswith("Arg"):
            continue
        name, indent = "", None
        for line in section.splitlines():
            entry = _ENTRY.match(line)
            if entry is not None and (indent is None or entry[1] == indent):
                indent, name = entry[1], entry[2]
                entries[name] = entry[3]
            elif name and line.strip():
                entries[name] += f" {line.strip()}"
    return before.strip(), entries


def _without_titles(schema: Any) -> Any:
    """A JSON schema without titles, which pydantic makes of names; a property called `title` stays."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_titles(item) for name, item in schema.items() if not (name == "title" and isinstance(item, str))
    }


def _bad_arguments(problems: Iterable[str], parameters: Mapping[str, Any]) -> ToolError:
    told = [problem[:_MAX_PROBLEM_CHARS] for problem in dict.fromkeys(problems)]
    more = f"; {len(told) - _MAX_PROBLEMS} more" if len(told) > _MAX_PROBLEMS else ""
    text = f"wrong arguments: {'; '.join(told[:_MAX_PROBLEMS])}{more}. The arguments are: {_summary(parameters)}"
    return ToolError(text, "bad_arguments")


def _summary(parameters: Mapping[str, Any]) -> str:
    required = parameters.get("required", ())
    arguments = (
        f"{name} ({_kind(schema)}{'' if name in required else ', optional'})"
        for name, schema in parameters.get("properties", {}).items()
    )
    return ", ".join(arguments) or "none"


def _kind(schema: Any) -> str:
    """The type in a JSON schema, as a word or two."""
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    kinds = schema.get("type") or [_kind(choice) for choice in schema.get("anyOf", ())] or "any"
    return kinds if isinstance(kinds, str) else " or ".join(dict.fromkeys(map(str, kinds)))


def _missing(name: str) -> str:
    return f"{name!r} is missing"


def _surplus(name: str, parameters: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(name, parameters.get("properties", {}), n=1)
    return f"there is no argument {name!r}" + (f", did you mean {nearest[0]!r}?" if nearest else "")


def _json_problem(error: jsonschema.ValidationError, parameters: Mapping[str, Any]) -> str:
    path = ".".join(map(str, error.absolute_path))
    if error.validator == "required":
        names = [name for name in error.validator_value if name not in error.instance]
        return ", ".join(_missing(f"{path}.{name}" if path else name) for name in names)
    if error.validator == "additionalProperties" and not path:
        names = [name for name in error.instance if name not in parameters.get("properties", {})]
        return ", ".join(_surplus(name, parameters) for name in names)
    if error.validator in ("type", "anyOf", "enum"):
        return f"{path!r} must be {_kind(error.schema)}, not {_json_type(error.instance)}"
    return f"{path!r}: {error.message}"


def _pydantic_problem(error: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return _missing(path)
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return _surplus(path, parameters)
    if error["type"].endswith(("_type", "_parsing")):
        expected = error["msg"].removeprefix("Input should be ").partition(",")[0]
        return f"{path!r} must be {expected}, not {_json_type(error['input'])}"
    return f"{path!r}: {error['msg']}"


def _json_type(value: Any) -> str:
    """What a value is in JSON, and short ones themselves."""
    names = {dict: "an object", list: "an array", type(None): "null"}
    if type(value) in names:
        return names[type(value)]
    text = json.dumps(value, ensure_ascii=False, default=str)
    kind = "the string" if isinstance(value, str) else "the boolean" if isinstance(value, bool) else "the number"
    return f"{kind} {text}" if len(text) <= 40 else kind.replace("the", "a")
