"""One Python file of a drop: decoded, parsed, and its absolute imports located to the byte."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from megamoe.drop.faults import Fault

SUFFIXES = (".py", ".pyi")
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_FROM = re.compile(rb"from(?:[ \t\f]|\\(?:\r\n|\r|\n))*")


Node = ast.Import | ast.ImportFrom | ast.Call | ast.Subscript
_NODES = (ast.Import, ast.ImportFrom, ast.Call, ast.Subscript)


class Unreadable(Exception):
    """A file that is not UTF-8 Python. Carries the :class:`Fault`."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault))


@dataclass(frozen=True, slots=True)
class Site:
    """An absolute import: where its module name starts.

    Attributes:
        module: the dotted name.
        offset: byte offset of the name in the file.
        line: its line.
    """

    module: str
    offset: int
    line: int


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed file. Bytes are kept as they came: BOM, CRLF and all.

    Attributes:
        path: relative to the root of the drop.
        data: the file.
        tree: its syntax tree; columns count UTF-8 bytes.
        nodes: its imports, calls and subscripts, found once, since walking a tree costs more than parsing it.
    """

    path: PurePosixPath
    data: bytes
    tree: ast.Module
    nodes: tuple[Node, ...]

    @property
    def package(self) -> tuple[str, ...]:
        """Parts of the dotted name of the package that holds the file: what one leading dot means."""
        return self.path.parts[:-1]

    def sites(self) -> Iterator[Site]:
        """Every absolute import that names a module, in no particular order."""
        skip = len(_BOM) if self.data.startswith(_BOM) else 0
        starts = [skip, *(end.end() for end in _LINE_END.finditer(self.data))]
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                keyword = _FROM.match(self.data, starts[node.lineno - 1] + node.col_offset)
                assert keyword, f"{self.path}:{node.lineno}: no 'from' where the parser saw one"
                yield Site(node.module, keyword.end(), node.lineno)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield Site(alias.name, starts[alias.lineno - 1] + alias.col_offset, alias.lineno)


def decode(data: bytes, shown: str) -> str:
    """The text of a file that must be UTF-8, without its BOM.

    Raises:
        Unreadable: it is not; names the line of the first bad byte.
    """
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        line = 1 + len(_LINE_END.findall(error.object[: error.start]))
        raise Unreadable(Fault(shown, line, f"is not UTF-8 (byte 0x{error.object[error.start]:02x})")) from None


def parse(data: bytes, path: str, shown: str) -> Module:
    """Parse one file without importing it.

    Args:
        data: the file.
        path: its path relative to the root of the drop.
        shown: its path for messages.

    Raises:
        Unreadable: not UTF-8, declared to be in another encoding, or not valid Python.
    """
    text = decode(data, shown)
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        if encoding not in ("utf-8", "utf-8-sig", "ascii"):
            line = 1 if b"coding" in _LINE_END.split(data, 1)[0] else 2
            raise Unreadable(Fault(shown, line, f"declares the encoding {encoding}, only UTF-8 is taken"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
            tree = ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(Fault(shown, error.lineno or 1, f"syntax error: {error.msg}")) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(Fault(shown, 1, f"cannot be parsed: {error}")) from None
    return Module(PurePosixPath(path), data, tree, tuple(_nodes(tree)))


def _nodes(tree: ast.Module) -> Iterator[Node]:
    # ast.walk takes twice as long, and walking is a good part of what an update costs.
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _NODES):
            yield node
        for value in vars(node).values():
            kind = type(value)
            if kind is list:
                pending.extend(item for item in value if isinstance(item, ast.AST))
            elif kind is not int and kind is not str and isinstance(value, ast.AST):
                pending.append(value)


def top(dotted: str) -> str:
    """The first part of a dotted name."""
    return dotted.partition(".")[0]
