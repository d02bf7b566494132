"""The syntax tree of a shell's text, by tree-sitter's grammar of bash; here-documents stand in it as files."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.core.errors import InputError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

HEREDOC = re.compile(r"@heredoc-(\d+)@")
UNKNOWN = (  # to the grammar, and what is kept of it
    re.compile(rb"(;;?)&(?=\s*esac\b)"),
    re.compile(rb"()`[ \t]*#[^`\n]*`"),  # a substitution that is a comment, between lines of a command
    re.compile(rb"()\b\d+#(?=\$)"),  # `$((10#$NUMBER))`
)
MAX_BYTES = 2**20


class Heredoc(Struct, frozen=True):
    """A here-document's text; `plain`: nothing is expanded in it."""

    text: str
    plain: bool


class Source:
    """A text with its tree. `first_line`: of the file in which the text stands."""

    def __init__(self, file: str, text: str, first_line: int, heredocs: list[Heredoc]) -> None:
        self.file, self.first_line, self.heredocs = file, first_line, heredocs
        data = text.encode()
        if len(data) > MAX_BYTES:
            raise InputError(f"{file}:{first_line}: is longer than {MAX_BYTES:,} bytes")
        tree = _tree(data)
        if "<<" in text:
            data = self._with_strings(data, tree)
            tree = _tree(data)
        self.data, self.root = data, tree
        if tree.has_error:
            where = _first_error(tree)
            line = self.text_of(where).strip().partition("\n")[0][:40]
            raise InputError(f"{file}:{self.line_of(where)}: cannot be read as bash, near '{line}'")

    def text_of(self, node: Node) -> str:
        return self.data[node.start_byte : node.end_byte].decode()

    def between(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def line_of(self, node: Node) -> int:
        return self.first_line + int(node.start_point[0])

    def _with_strings(self, data: bytes, tree: Node) -> bytes:
        """The text with `<` and a name in place of each `<<`, and as many empty lines in place of what follows it."""
        edits: list[tuple[int, int, bytes]] = []
        nodes, found, ended = [tree], [], 0
        while nodes:
            nodes += (node := nodes.pop()).children
            found += [node] if node.type == "heredoc_redirect" else []
        for node in sorted(found, key=lambda node: node.start_byte):
            by_type = {child.type: child for child in node.children}
            start, end = by_type.get("heredoc_start"), by_type.get("heredoc_end")
            sign = by_type.get("<<") or by_type.get("<<-")
            if start is None or end is None or sign is None:
                continue
            first = max(data.index(b"\n", start.end_byte), ended) + 1
            ended = data.find(b"\n", end.start_byte) if b"\n" in data[end.start_byte :] else len(data)
            first = min(first, end.start_byte)
            text = data[first : end.start_byte].decode()
            if sign.type == "<<-":
                text = re.sub(r"(?m)^\t+", "", text)
            quoted = re.search(r"[\"'\\]", data[start.start_byte : start.end_byte].decode()) is not None
            edits.append((sign.start_byte, start.end_byte, f"< @heredoc-{len(self.heredocs)}@".encode()))
            edits.append((first, end.end_byte, b"\n" * data.count(b"\n", first, end.end_byte)))
            self.heredocs.append(Heredoc(text, quoted))
        for first, last, new in sorted(edits, reverse=True):
            data = data[:first] + new + data[last:]
        return data


def _tree(data: bytes) -> Node:
    """The tree of a text, in which as many other characters stand for what the grammar does not know."""
    for unknown in UNKNOWN:
        data = unknown.sub(lambda found: found[1] + b" " * (len(found[0]) - len(found[1])), data)
    return _parser().parse(data).root_node


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _first_error(node: Node) -> Node:
    while True:
        inner = next((child for child in node.children if child.has_error or child.is_missing), None)
        if inner is None or node.type == "ERROR":
            return node
        node = inner
