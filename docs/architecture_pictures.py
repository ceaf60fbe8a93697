"""Draw the architecture from the imports: ``python -m docs.architecture_pictures``.

Each box is a group of modules. An arrow is an import of one group by another that does not also
follow from other arrows. tests/test_docs.py fails if a picture is not up to date, if a module has
no group, or if groups import each other in a circle.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# For each package: the title of each group, its modules, and what it is for.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "torch_utils": {
        "Adapters": ("fastapi prometheus pytest_plugin __main__", "the library in other programs"),
        "Hosts": (
            "hosting.host hosting.pool hosting.lease hosting.state_machine hosting.threads "
            "hosting.arguments hosting.__init__",
            "load, lend, unload, replace",
        ),
        "Loaded models": (
            "hosting.loaded_model hosting.process hosting.child hosting.wire hosting.sleep "
            "hosting.footprint",
            "here or in a process",
        ),
        "Scopes": ("_cleanup", "with SafePyTorchCleanup()"),
        "Census": ("_census _growth", "live_memory, no_growth"),
        "Release": ("_release.*", "release()"),
        "Reports": ("_report", "what was freed, what is held"),
        "Timing": ("_timing", "measure"),
        "Resources": ("_resource _registry _signals", "closed once, at exit at the latest"),
        "Devices and memory": ("_memory _oom", "checks, caches, memory errors"),
        "Core": ("_runtime errors _version", "the interpreter, and torch if it is loaded"),
    },
    "clean_exit": {
        "Command and plugin": ("cli __main__ pytest_plugin leaves", "clean-exit, pytest"),
        "Linter": ("lint.*", "reads code, runs nothing"),
        "Check": ("checker formats report", "a report of all observations"),
        "Run": ("run streams command", "from start to end"),
        "Supervisor": ("supervisor supervisor_client signals", "a process around the program"),
        "Probe": ("_startup.*", "inside the program"),
        "What was seen": ("probe_record stderr", "by the probe, and on stderr"),
        "Base": ("findings options processes", "ids, options, /proc"),
    },
    "rag_demo": {
        "Commands": ("cli __main__ commands.*", "rag-demo"),
        "Service": ("service.*", "HTTP"),
        "Retrievers": (
            "retriever *_retriever neighbors open_index",
            "what programs use, and how an index is opened",
        ),
        "Models": ("embedding_model reranker ray_embedder", "embed, rerank"),
        "Stores": ("stores.*", "documents, vectors, words, files"),
        "Exact search": ("exact_search.*", "one pass and a bound"),
        "Requests": ("search_request", "what a store is asked, and the fusion"),
        "Encoding": ("encoding.*", "from texts to vectors"),
        "Reading": ("reading.*", "files, passages"),
        "Base": ("errors vectors threads database printable", "types and helpers"),
    },
}
# What is started as a process or loaded by path, and not imported.
STARTS = {("clean_exit", "Run", "Probe")}
WIDTH, MARGIN, GAP, BETWEEN = 860, 16, 18, 44
NAME_CHARS, NAME_PX, LINE = 7.3, 12, 16
STYLE = """
    .paper { fill: #ffffff; }
    .box { fill: #f4f6fa; stroke: #5b6b86; }
    text { font-family: "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1c2430; }
    .title { font-size: 13px; font-weight: bold; }
    .name { font-size: 12px; font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; }
    .note { font-size: 11px; fill: #4a5568; }
    .arrow { stroke: #5b6b86; stroke-width: 1.3; fill: none; marker-end: url(#head); }
    .behind { stroke: #5b6b86; stroke-width: 1; stroke-dasharray: 3 4; fill: none; opacity: 0.5; }
"""
HEAD = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M 0 0 L 10 5 L 0 10 z" fill="#5b6b86"/></marker>'
    "</defs>"
)


@dataclass
class Box:
    """A group in the picture. Lengths are in pixels."""

    title: str
    note: str
    files: list[str]
    level: int = 0
    x: float = 0
    y: float = 0
    width: float = 0
    lines: list[str] = field(default_factory=list)

    @property
    def height(self) -> float:
        """The height with title, note and names."""
        return 44 + LINE * len(self.lines)

    @property
    def middle(self) -> float:
        """The middle of its width."""
        return self.x + self.width / 2


def modules_of(package: str) -> dict[str, Path]:
    """Return the modules of a package by name, without the one that only passes on public names."""
    folder = ROOT / package
    paths = sorted(set(folder.rglob("*.py")) - {folder / "__init__.py"})
    names = (".".join(path.relative_to(folder).with_suffix("").parts) for path in paths)
    return dict(zip(names, paths, strict=True))


def imports_of(path: Path, package: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports when it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}".removeprefix(f"{package}.")
                yield node.module.removeprefix(f"{package}.")


def group_of(package: str) -> dict[str, str]:
    """Return the group of each module.

    Raises:
        ValueError: A module has no group, or several.
    """
    found = {}
    for name in modules_of(package):
        titles = [
            title
            for title, (patterns, _) in GROUPS[package].items()
            if any(fnmatch(name, pattern) for pattern in patterns.split())
        ]
        if len(titles) != 1:
            raise ValueError(f"{package}.{name} is in the groups {titles}; see {__file__}")
        (found[name],) = titles
    return found


def edges_of(package: str) -> set[tuple[str, str]]:
    """Return the imports between groups."""
    groups, edges = group_of(package), set[tuple[str, str]]()
    for name, path in modules_of(package).items():
        for imported in imports_of(path, package):
            if imported in groups and groups[imported] != groups[name]:
                edges.add((groups[name], groups[imported]))
    return edges | {(a, b) for of, a, b in STARTS if of == package}


def below(edges: set[tuple[str, str]], start: str, seen: tuple[str, ...] = ()) -> set[str]:
    """Return the groups that one reaches.

    Raises:
        ValueError: Groups import each other in a circle.
    """
    if start in seen:
        raise ValueError(f"groups in a circle: {' -> '.join([*seen, start])}")
    direct = {b for a, b in edges if a == start}
    return direct.union(*(below(edges, each, (*seen, start)) for each in direct))


def boxes_of(package: str, edges: set[tuple[str, str]]) -> dict[str, Box]:
    """Return the boxes of a package in rows: each is below all that import it."""
    groups = group_of(package)
    boxes = {
        title: Box(title, note, [name for name, group in groups.items() if group == title])
        for title, (_, note) in GROUPS[package].items()
    }
    for _ in boxes:
        for a, b in edges:
            boxes[b].level = max(boxes[b].level, boxes[a].level + 1)
    for title in boxes.keys() - {b for _, b in edges}:  # As low as what they import allows.
        boxes[title].level = min(boxes[b].level for a, b in edges if a == title) - 1
    y: float = MARGIN
    for level in range(max(box.level for box in boxes.values()) + 1):
        row = [box for box in boxes.values() if box.level == level]
        room = WIDTH - 2 * MARGIN - GAP * (len(row) - 1)
        sizes = [12 + sum(len(short(name)) + 4 for name in box.files) ** 0.5 for box in row]
        x: float = MARGIN
        for box, size in zip(row, sizes, strict=True):
            box.width = room * size / sum(sizes)
            names = ", ".join(short(name) for name in box.files if "__init__" not in name)
            box.lines = textwrap.wrap(names, int((box.width - 20) / NAME_CHARS))
            box.x, box.y = x, y
            x += box.width + GAP
        y += max(box.height for box in row) + BETWEEN
    return boxes


def short(name: str) -> str:
    """Return the name of a module without its folder."""
    return name.rpartition(".")[2]


def picture(package: str) -> str:
    """Return the picture of a package as SVG."""
    edges = edges_of(package)
    boxes = boxes_of(package, edges)
    shown = {(a, b) for a, b in edges if not any(b in below(edges, c) for d, c in edges if d == a)}
    height = max(box.y + box.height for box in boxes.values()) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img">',
        f"<title>Modules of {package}: an arrow is an import</title>",
        f"<style>{STYLE}</style>{HEAD}",
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}" rx="8"/>',
    ]
    behind: list[str] = []  # Arrows that pass behind boxes show through them.
    order = sorted(shown, key=lambda edge: ([boxes[each].middle for each in edge], edge))
    for a, b in order:
        starts = [edge for edge in order if edge[0] == a]
        ends = [edge for edge in order if edge[1] == b]
        start = place(boxes[a], starts.index((a, b)), len(starts))
        end = place(boxes[b], ends.index((a, b)), len(ends))
        top, bottom = boxes[a].y + boxes[a].height, boxes[b].y
        bend = (bottom - top) / 2
        line = (
            f'd="M {start:.0f} {top:.0f} C {start:.0f} {top + bend:.0f} '
            f'{end:.0f} {bottom - bend:.0f} {end:.0f} {bottom:.0f}"/>'
        )
        parts.append(f'<path class="arrow" {line}')
        if boxes[b].level > boxes[a].level + 1:
            behind.append(f'<path class="behind" {line}')
    for box in boxes.values():
        left, top = box.x + 10, box.y
        parts.append(
            f'<rect class="box" x="{box.x:.0f}" y="{top:.0f}" width="{box.width:.0f}" '
            f'height="{box.height:.0f}" rx="5"/>'
        )
        rows = [("title", box.title), ("note", box.note), *(("name", line) for line in box.lines)]
        for number, (kind, text) in enumerate(rows):
            y = top + 18 + LINE * number
            parts.append(f'<text class="{kind}" x="{left:.0f}" y="{y:.0f}">{text}</text>')
    return "\n".join([*parts, *behind, "</svg>", ""])


def place(box: Box, number: int, count: int) -> float:
    """Return where an arrow meets a box, of several beside each other."""
    return box.x + box.width * (number + 1) / (count + 1)


def main() -> None:
    """Write all pictures again."""
    for package in GROUPS:
        path = ROOT / "docs" / "architecture" / f"{package}.svg"
        path.write_text(picture(package), encoding="utf-8")


if __name__ == "__main__":
    main()
