#!/usr/bin/env python3
"""Writes the table of values in redeliver/README.md from the comments in redeliver/values.yaml.

    values-table.py           writes the table
    values-table.py --check   fails if the table is not up to date

A comment above a key describes it. `# == TITLE` begins a section, with comments that belong to no key below it.
"""

import pathlib
import re
import sys

CHART = pathlib.Path(__file__).parent / "redeliver"
BEGIN, END = "<!-- values -->\n", "<!-- end of values -->\n"
KEY = re.compile(r"^( *)([A-Za-z_]+):(?: (.*))?$")


def table(lines):
    """The sections of the file as Markdown."""
    out, comment, path = [], [], []
    described = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("# == "):
            title = line[5:]
            text = []
            while number < len(lines) and lines[number].startswith("#"):
                text.append(lines[number].lstrip("# "))
                number += 1
            out.append(f"\n### {title}\n")
            if any(text):
                out.append(" ".join(filter(None, text)) + "\n")
            out.append("| value | default | |\n|---|---|---|")
            comment = []
            continue
        if not line.strip():
            comment = []
            continue
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip().lstrip("#").strip())
            continue
        match = KEY.match(line)
        if match is None:
            sys.exit(f"values.yaml line {number}: neither a comment nor a key: {line}")
        indent, key, default = len(match[1]), match[2], match[3]
        path = path[: indent // 2] + [key]
        described, comment = " ".join(comment), []
        nested = lines[number] if number < len(lines) else ""
        is_parent = default is None and re.match(rf" {{{indent + 2}}}(# |[A-Za-z_]+:)", nested)
        if is_parent and has_comment(lines, number, indent):
            if described:
                out.append(f"| `{'.'.join(path)}` | | {described} |")
            continue
        if default is None:
            # The value follows as a list or a map without comments.
            value = []
            while number < len(lines) and re.match(rf" {{{indent + 2}}}", lines[number]):
                value.append(lines[number].strip())
                number += 1
            default = "; ".join(value)
        if not described:
            sys.exit(f"values.yaml line {number}: {'.'.join(path)} has no description")
        out.append(f"| `{'.'.join(path)}` | `{default}` | {described} |")
    return "\n".join(out).lstrip("\n") + "\n"


def has_comment(lines, number, indent):
    """Whether the map that begins here describes its keys."""
    for line in lines[number:]:
        if line.strip() and not line.startswith(" " * (indent + 2)):
            return False
        if line.lstrip().startswith("#"):
            return True
    return False


def main():
    readme = CHART / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    lines = (CHART / "values.yaml").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("# == "))
    updated = before + BEGIN + "\n" + table(lines[first:]) + "\n" + END + after
    if sys.argv[1:] == ["--check"]:
        if updated != text:
            sys.exit("README.md: the table of values is not up to date; run values-table.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        readme.write_text(updated)


main()
