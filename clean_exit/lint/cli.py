"""The command clean-exit-lint."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clean_exit.lint import baseline
from clean_exit.lint.files import python_files
from clean_exit.lint.findings import RULES
from clean_exit.lint.formats import WRITERS, counted, to_text
from clean_exit.lint.linter import check, selected_rules
from clean_exit.options import (
    Parser,
    explain,
    nonempty,
    output_file,
    print_out,
    read_table,
    version,
)

FINDINGS, USAGE, INTERRUPTED = 1, 2, 130
_PER_FILE = "per-file-ignores"
_SETTINGS = {"select": list, "ignore": list, "exclude": list, "paths": list, "baseline": str,
             "format": str, _PER_FILE: dict}  # fmt: skip
_EPILOG = """\
exit codes: 0 no findings; 1 findings; 2 wrong usage or the output failed; 130 Ctrl-C.
[tool.clean-exit-lint] in pyproject.toml sets defaults.
"# clean-exit-lint: ignore[RULE]" on a line hides its findings."""


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        USAGE,
        prog="clean-exit-lint",
        description="Find destructors and finalizers that cannot work. Runs none of the code.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files and folders (default .)")
    add("--format", choices=WRITERS, help="the format of the report (default text)")
    rules: dict[str, Any] = {"action": "extend", "type": _rules, "default": [], "metavar": "RULE"}
    chosen = "check only these rules; repeat or separate by commas (default: all)"
    add("--select", help=chosen, **rules)
    add("--ignore", help="do not check these rules", **rules)
    hidden: dict[str, Any] = {"action": "append", "type": _file_rules, "default": []}
    files = "do not check these rules in these files"
    add(f"--{_PER_FILE}", metavar="GLOB:RULE", help=files, **hidden)
    excluded = "skip these files and folders"
    add("--exclude", action="append", default=[], metavar="GLOB", help=excluded)
    add("--baseline", type=nonempty, metavar="FILE", help="report only findings not in FILE")
    written = "write the findings to FILE and report none"
    add("--write-baseline", type=output_file, metavar="FILE", help=written)
    add("--exit-zero", action="store_true", help="exit with 0 even if there are findings")
    add(
        "--explain",
        type=nonempty,
        metavar="RULE",
        help="explain a rule or a code and exit",
    )
    add("-q", "--quiet", action="store_true", help="print no notes and no summary")
    add("--version", action="store_true", help="print the version and exit")
    return parser


def _rules(value: str) -> list[str]:
    """Return the ids of rules that are separated by commas."""
    names = [name.strip() for name in value.split(",") if name.strip()] or [nonempty("")]
    try:
        selected_rules(names, ())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _file_rules(value: str) -> tuple[str, list[str]]:
    """Return the pattern and the rules of ``GLOB:RULE,RULE``."""
    pattern, colon, rules = value.rpartition(":")
    if not colon or not pattern:
        raise argparse.ArgumentTypeError(f"must be GLOB:RULE, got {value!r}")
    return pattern, _rules(rules)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    gc.disable()  # Syntax trees have no cycles, but the collector would visit all of their nodes.
    try:
        return _run(options, parser)
    except ValueError as error:
        print(f"clean-exit-lint: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        gc.enable()


def _run(options: argparse.Namespace, parser: Parser) -> int:
    if options.version:
        print_out(f"clean-exit-lint {version()}")
        return 0
    if options.explain:
        lines = {r.id: f"{r.id} ({r.code}): {r.summary}" for r in RULES.values()}
        name = next((r.id for r in RULES.values() if r.code == options.explain), options.explain)
        print_out(explain("lint-catalogue.md", name, lines))
        return 0
    _add_settings(options, parser)
    files = list(python_files(options.paths, options.exclude))
    result = check(
        files,
        select=options.select,
        ignore=options.ignore,
        per_file_ignores=dict(options.per_file_ignores),
    )
    for note in result.notes if not options.quiet else ():
        print(f"clean-exit-lint: note: {note}", file=sys.stderr)
    if options.write_baseline:
        text = baseline.to_text(result.findings, Path(options.write_baseline))
        path = Path(options.write_baseline)
        try:  # A path that is not UTF-8 has surrogates, which are written as escapes.
            path.write_text(text + "\n", "utf-8", "backslashreplace")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        count = counted(len(result.findings), "finding")
        print_out(f"clean-exit-lint: {options.write_baseline} has {count} now")
        return 0
    if options.baseline:
        new = baseline.subtract(result.findings, Path(options.baseline))
        result = replace(result, findings=tuple(new))
    if options.format != "text":
        print_out(WRITERS[options.format](result))
    elif text := to_text(result, sums_up=not options.quiet):
        print_out(text)
    return FINDINGS if result.findings and not options.exit_zero else 0


def _add_settings(options: argparse.Namespace, parser: Parser) -> None:
    """Add the settings of pyproject.toml, whose paths are relative to it, and the defaults.

    Raises:
        ValueError: The file cannot be read, or a setting is invalid.
    """
    table = read_table("clean-exit-lint", _SETTINGS)
    file = table.pop("", None)
    words: list[str] = []
    for key, value in table.items():
        if key == _PER_FILE:
            words += [f"--{key}={glob}:{','.join(of)}" for glob, of in value.items()]
        elif key == "paths":
            words += [_relative(file.parent / one) for one in value]
        else:
            words += [f"--{key}={one}" for one in ([value] if isinstance(value, str) else value)]
    settings = parser.parse_settings(words, f"{file}: [tool.clean-exit-lint]")
    if settings.baseline:
        settings.baseline = _relative(file.parent / settings.baseline)
    for name in ("paths", "select", "format", "baseline"):  # An option replaces the setting.
        setattr(options, name, getattr(options, name) or getattr(settings, name))
    for name in ("ignore", "exclude", "per_file_ignores"):
        setattr(options, name, getattr(settings, name) + getattr(options, name))
    options.paths = options.paths or ["."]
    options.format = options.format or "text"


def _relative(path: Path) -> str:
    """Return a path relative to the current folder if it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
