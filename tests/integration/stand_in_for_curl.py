"""What runs the curl examples where there is no curl? As much of it as they use, over httpx."""

import argparse
import sys
from pathlib import Path
from typing import Any

import httpx


def main() -> None:
    """`python stand_in_for_curl.py URL -s -X … -H … -d … -F … -o …`"""
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    parser.add_argument("-F", dest="form", action="append", default=[])
    parser.add_argument("-o", dest="output", type=Path)
    asked = parser.parse_args()
    method = asked.method or ("POST" if asked.data or asked.form else "GET")
    content: dict[str, Any] = {"content": asked.data} if asked.data else form(asked.form)
    headers = dict(header.split(": ", 1) for header in asked.headers)
    reply = httpx.request(method, asked.url, headers=headers, timeout=60, **content)
    if asked.output is None:
        sys.stdout.write(reply.text)
    else:
        asked.output.write_bytes(reply.content)


def form(fields: list[str]) -> dict[str, Any]:
    """`name=value` as data, `name=@path` as a file."""
    pairs = [field.split("=", 1) for field in fields]
    paths = {name: Path(value[1:]) for name, value in pairs if value.startswith("@")}
    return {
        "data": {name: value for name, value in pairs if name not in paths},
        "files": {name: (path.name, path.read_bytes()) for name, path in paths.items()},
    }


if __name__ == "__main__":
    main()
