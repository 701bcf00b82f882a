"""Reads a page into a tree that tests can search: html.parser, which knows void elements and raw scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "img", "hr"}


@dataclass
class Node:
    """An element: its attributes (those without a value are "") and its parts in order, text as strings."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    parts: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text below."""
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    def all(self, tag: str = "", **attributes: str) -> list[Node]:
        """The elements below of a tag and with these attributes (`_` stands for `-`), in order."""
        wanted = {name.strip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            node
            for node in self._walk()
            if tag in ("", node.tag) and all(node.attributes.get(name) == value for name, value in wanted.items())
        ]

    def one(self, tag: str = "", **attributes: str) -> Node:
        """The only such element."""
        [found] = self.all(tag, **attributes)
        return found

    def _walk(self) -> Iterator[Node]:
        for part in self.parts:
            if isinstance(part, Node):
                yield part
                yield from part._walk()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("")
        self.path = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        assert len(node.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self.path[-1].parts.append(node)
        if tag not in VOID:
            self.path.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.path[-1].tag == tag, f"<{self.path[-1].tag}> ends as </{tag}>"
        self.path.pop()

    def handle_data(self, data: str) -> None:
        self.path[-1].parts.append(data)


def read_html(text: str) -> Node:
    """The tree of a page or of a piece of one. Asserts that every element is closed in its place."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.path == [reader.root], f"<{reader.path[-1].tag}> is not closed"
    return reader.root


def table_cells(table: Node) -> list[list[str]]:
    """The text of a table, line by line."""
    return [[cell.text for cell in line.parts if isinstance(cell, Node)] for line in table.all("tr")]
