"""Check the English of Markdown files, docstrings, comments and messages: ``make prose``.

Prints ``file:line: message`` for each finding, and ends with exit code 1 if there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LONGEST_SENTENCE = 30  # words; inline code counts as one
PHRASES = {
    r"(?<![Tt]here )\b(is|are|was|were|be) no (?!longer|more|less|\w+er )": (
        'write "is not a ..." or "has no ..."'
    ),
    r"\b(is|are|was|were) none\b": 'write "is missing", "is None" or "there is no ..."',
    r"\b[Ww]ho(so|m)?ever\b": "name the function, thread or caller",
    r"\bmend(s|ed|ing)?\b": 'write "fix"',
    r"\bleft over\b": 'write "remaining"',
    r"\bhouses?\b|\bhalls?\b|\bwings?\b": 'write "package", "module" or "subpackage"',
    r"\banew\b": 'write "again"',
    r"\bas ever\b": 'write "as before"',
}
Block = tuple[int, str]


def blocks(lines: list[str], first: int) -> Iterator[Block]:
    """Yield each paragraph, list item and docstring entry, with the number of its first line."""
    start, text, fence, literal = first, "", "", None
    for number, line in enumerate([*lines, ""], first):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        if literal is not None and (not stripped or indent > literal):
            continue
        literal = None
        if match := re.match(r"(`{3,}|~{3,}|:{3,})", stripped):
            fence = "" if fence and stripped.startswith(fence) else fence or match[1]
            stripped = ""
        elif fence or re.match(r"[|<>=]|.*\S {3,}\S|\$ |\[[^\]]+\]: ", stripped):
            stripped = ""
        item = re.match(r"([-*+] |\d+\. |#+ )+|\*{0,2}[\w`, *]+( \([^)]*\))?: (?=[A-Z])", stripped)
        if text and (not stripped or item or re.search(r"(?<!:):$", text)):
            yield start, text
            text = ""
        if stripped.endswith("::"):
            literal = indent
        if stripped:
            start, text = (
                (start if text else number),
                f"{text} {stripped[item.end() if item else 0 :]}",
            )


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a block, with inline code and links shortened."""
    text = re.sub(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"(`+).+?\1|<!--.*?-->|https?://\S+", "CODE", text)
    text = re.sub(r"\b(e\.g|i\.e|etc|vs)\.", r"\1", text)
    yield from re.split(r"(?<=[.!?:;])[\"')\]*_]*\s+", text.strip())


def phrases(text: str, line: int) -> Iterator[Block]:
    """Yield a finding for each phrase that PHRASES replaces."""
    for pattern, advice in PHRASES.items():
        for match in re.finditer(pattern, re.sub(r"(`+).+?\1", "CODE", text)):
            yield line, f'"{match[0].strip()}": {advice}'


def check_prose(lines: list[str], first: int) -> Iterator[Block]:
    """Yield the findings of a Markdown file or a docstring."""
    for line, text in blocks(lines, first):
        yield from phrases(text, line)
        for sentence in sentences(text):
            if (count := len(re.findall(r"\w[\w'-]*", sentence))) > LONGEST_SENTENCE:
                yield line, f"sentence of {count} words; write at most {LONGEST_SENTENCE}"


def check_python(source: str) -> Iterator[Block]:
    """Yield the findings of the docstrings, messages and comments of a Python file."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                docstrings.add(constant := node.body[0].value)  # type: ignore[attr-defined]
                yield from check_prose(text.splitlines(), constant.lineno)
        elif isinstance(node, ast.Constant) and node not in docstrings:
            yield from phrases(str(node.value), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from phrases(token.string, token.start[0])


def check(path: Path) -> Iterator[Block]:
    """Yield the line and the message of each finding in a file."""
    text = path.read_text(encoding="utf-8")
    yield from check_python(text) if path.suffix == ".py" else check_prose(text.splitlines(), 1)


def main(*names: str) -> int:
    """Check these files, and the Markdown and Python files of these folders."""
    found = 0
    for name in names:
        folder = Path(name)
        for path in sorted([*folder.rglob("*.md"), *folder.rglob("*.py")]) or [folder]:
            for line, message in check(path):
                found += 1
                sys.stdout.write(f"{path}:{line}: {message}\n")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
