"""What is a small valid body for an operation of the OpenAPI document?"""

from typing import Any


def body_of(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any]:
    """What httpx is to send, as its keyword arguments; none where no body is documented."""
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        return {"json": example(document, content["application/json"]["schema"])}
    if "multipart/form-data" in content:
        schema = resolved(document, content["multipart/form-data"]["schema"])
        parts = {name: schema["properties"][name] for name in schema["required"]}
        files = {name for name, part in parts.items() if part.get("format") == "binary"}
        return {
            "files": dict.fromkeys(files, ("a.jsonl", b"{}\n")),
            "data": {n: example(document, part) for n, part in parts.items() if n not in files},
        }
    return {}


def example(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """The smallest value that a person would think of; of an object, what it cannot lack."""
    schema = resolved(document, schema)
    for known in ("const", "default"):
        if known in schema:
            return schema[known]
    if "enum" in schema:
        return schema["enum"][0]
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return example(document, schema[union][0])
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return {n: example(document, properties[n]) for n in schema.get("required", [])}
        case "array":
            return [example(document, schema["items"])] * max(1, schema.get("minItems", 1))
        case "string":
            return "https://example.com/" if schema.get("format") == "uri" else "x"
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case _:
            return None


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, wherever it stands."""
    while "$ref" in schema:
        here: Any = document
        for step in schema["$ref"].removeprefix("#/").split("/"):
            here = here[step]
        schema = here
    return schema
