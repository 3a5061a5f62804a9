"""What a JSON schema may not say although its compiler takes it: it would be taken and then not kept, or never end."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

UNWRITABLE = {chr(c) for c in range(0x20)} - set("\b\f\n\r\t")  # these have no short escape
Where = tuple[str, ...]


def faults_of(schema: dict[str, Any]) -> list[str]:
    """Everything of that kind in `schema`, a phrase for each; empty when there is none."""
    return [*_unkept(schema, ()), *_endless(schema)]


def _at(where: Where) -> str:
    return "/".join(("#", *where))


def _unkept(node: Any, where: Where) -> Iterator[str]:
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _unkept(item, (*where, str(number)))
    if isinstance(node, str) and UNWRITABLE & set(node):
        yield f"{_at(where)} holds a control character, which is never written"
    if not isinstance(node, dict):
        return
    if "x-guidance" in node:
        yield f"x-guidance at {_at(where)} is not a keyword of JSON Schema"
    least, sure = node.get("minProperties"), len(set(_names(node.get("required"))))
    closed = node.get("additionalProperties") is False and "patternProperties" not in node
    if isinstance(least, int) and least > sure + 1 and not closed:
        yield f"minProperties {least} at {_at(where)}, where {sure} are required, could be met by repeating a key"
    for key, item in node.items():
        if UNWRITABLE & set(key):
            yield f"a name at {_at(where)} holds a control character, which is never written"
        yield from _unkept(item, (*where, key))


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _endless(schema: dict[str, Any]) -> list[str]:
    """References that no finite text satisfies: they lead round in a circle, or each level requires another one.

    A subschema can end when what it needs can end; this is the least set with that property. Where something cannot be
    followed from here (a reference by name), it counts as one that can: the compiler has the last word.
    """
    nodes = {id(node): (where, node) for where, node in _objects(schema, ())}
    waiting = {key: _needs(node, schema) for key, (_, node) in nodes.items()}
    dependents: dict[int, list[int]] = {}
    for key, groups in waiting.items():
        for group in groups:
            for needed in group:
                dependents.setdefault(needed, []).append(key)
    ends: set[int] = set()
    ready = list(nodes)
    while ready:
        key = ready.pop()
        if key not in ends and all(ends & group for group in waiting[key]):
            ends.add(key)
            ready += dependents.get(key, [])
    return [
        f"the $ref at {_at(where)} describes nothing that ends"
        for key, (where, node) in nodes.items()
        if key not in ends and isinstance(node.get("$ref"), str)
    ]


def _objects(node: Any, where: Where) -> Iterator[tuple[Where, dict[str, Any]]]:
    if isinstance(node, dict):
        yield where, node
        for key, item in node.items():
            yield from _objects(item, (*where, key))
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _objects(item, (*where, str(number)))


def _needs(node: dict[str, Any], schema: dict[str, Any]) -> list[set[int]]:
    """Groups of subschemas, by `id`, of each of which one at least must be able to end for `node` to end."""
    every: list[Any] = [_target(schema, node["$ref"])] if isinstance(node.get("$ref"), str) else []
    every += node["allOf"] if isinstance(node.get("allOf"), list) else []
    properties = node.get("properties")
    if isinstance(properties, dict):
        every += [properties.get(name) for name in _names(node.get("required"))]
    count, prefix = node.get("minItems"), node.get("prefixItems")
    if isinstance(count, int) and count > 0:
        first = prefix[:count] if isinstance(prefix, list) else []
        every += first if len(first) >= count else [*first, node.get("items")]
    groups = [{id(item)} for item in every if isinstance(item, dict)]
    for word in ("anyOf", "oneOf"):
        options = node.get(word)
        if isinstance(options, list) and all(isinstance(option, dict) for option in options):
            groups.append({id(option) for option in options})
    return groups


def _target(schema: dict[str, Any], ref: str) -> Any:
    """What a pointer into the same schema leads to; None for any other reference."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    node: Any = schema
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node
