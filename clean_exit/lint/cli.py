"""The command clean-exit-lint."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clean_exit.catalogue import RULES as CATALOGUE
from clean_exit.lint import baseline
from clean_exit.lint.files import python_files
from clean_exit.lint.findings import BY_CODE, RULES, UNUSED
from clean_exit.lint.formats import WRITERS, counted, summary, to_statistics, to_text
from clean_exit.lint.linter import Result, check, selected_rules
from clean_exit.options import nonempty, output_file, read_table, version, write

FINDINGS, USAGE, INTERRUPTED = 1, 2, 130
_LISTS = ("select", "ignore", "exclude", "paths")
_TEXTS = ("baseline", "format")
_PER_FILE = "per-file-ignores"
_EPILOG = """\
exit codes: 0 no findings; 1 findings; 2 wrong usage or the output failed; 130 Ctrl-C.
[tool.clean-exit-lint] in pyproject.toml sets defaults.
"# clean-exit-lint: ignore[RULE]" on a line hides its findings."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(USAGE, f"clean-exit-lint: {message}; see clean-exit-lint --help\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="clean-exit-lint",
        description="Find destructors and exit callbacks that cannot work. Runs none of the code.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files and folders (default .); - for stdin")
    add("--format", choices=WRITERS, help="the format of the report (default text)")
    rules: dict[str, Any] = {"action": "extend", "type": _rules, "default": [], "metavar": "RULE"}
    chosen = "check only these rules, or all; repeat or separate by commas"
    add("--select", help=chosen + " (default: those that are not opt-in)", **rules)
    add("--ignore", help="do not check these rules", **rules)
    hidden: dict[str, Any] = {"action": "append", "type": _file_rules, "default": []}
    files = "do not check these rules in these files"
    add(f"--{_PER_FILE}", metavar="GLOB:RULE", help=files, **hidden)
    excluded = "skip these files and folders"
    add("--exclude", action="append", default=[], metavar="GLOB", help=excluded)
    add("--baseline", type=nonempty, metavar="FILE", help="report only findings not in FILE")
    file: dict[str, Any] = {"type": output_file, "metavar": "FILE"}
    add("--write-baseline", help="write the findings to FILE and report none", **file)
    add("--output", help="write the report to FILE and print a summary", **file)
    add("--statistics", action="store_true", help="print the number of findings of each rule")
    add("--exit-zero", action="store_true", help="exit with 0 even if there are findings")
    add("--explain", type=nonempty, metavar="RULE", help="explain a rule and exit")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("-q", "--quiet", action="store_true", help="print no notes and no summary")
    add("--version", action="store_true", help="print the version and exit")
    return parser


def _rules(value: str) -> list[str]:
    """Return the ids of rules that are separated by commas, written as ids or codes."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    return [BY_CODE.get(name, name) for name in names] or [nonempty("")]


def _file_rules(value: str) -> tuple[str, list[str]]:
    """Return the pattern and the rules of ``GLOB:RULE,RULE``."""
    pattern, colon, rules = value.rpartition(":")
    if not colon or not pattern:
        raise argparse.ArgumentTypeError(f"must be GLOB:RULE, got {value!r}")
    return pattern, _rules(rules)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = make_parser().parse_args(arguments)
    # Syntax trees have no reference cycles, but the collector would visit millions of nodes.
    had_gc = gc.isenabled()
    gc.disable()
    try:
        return _run(options)
    except ValueError as error:
        print(f"clean-exit-lint: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:  # From stdout: errors of other files are ValueErrors.
        if isinstance(error, BrokenPipeError):  # A reader such as head has closed the pipe.
            return FINDINGS
        print(f"clean-exit-lint: stdout: {error.strerror}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if had_gc:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    if sys.stdout is None:
        raise ValueError("stdout is closed")
    if options.version:
        _print(f"clean-exit-lint {version()}")
        return 0
    if options.explain:
        rules = (*RULES.values(), UNUSED)
        lines = {rule.id: f"{rule.id} ({rule.code}): {rule.summary}" for rule in rules}
        _print(CATALOGUE.explain(_rules(options.explain)[0], lines))
        return 0
    _add_settings(options)
    files = list(python_files(options.paths, options.exclude))
    result = check(
        files,
        select=options.select,
        ignore=options.ignore,
        per_file_ignores=options.per_file_ignores,
    )
    _note(options, *result.notes)
    if options.write_baseline:
        text = baseline.to_text(result.findings, Path(options.write_baseline))
        _write_file(options.write_baseline, text)
        count = counted(len(result.findings), "finding")
        _print(f"clean-exit-lint: {options.write_baseline} has {count} now")
        return 0
    if options.baseline:
        selected = selected_rules(options.select, options.ignore)
        new, gone = baseline.subtract(result.findings, Path(options.baseline), files, selected)
        result = replace(result, findings=tuple(new))
        if gone:
            how = "run --write-baseline with all paths and rules to remove them"
            _note(options, f"no longer found: {counted(gone, 'finding')} of the baseline; {how}")
    _write(result, options)
    return FINDINGS if result.findings and not options.exit_zero else 0


def _add_settings(options: argparse.Namespace) -> None:
    """Add the settings of pyproject.toml, whose paths are relative to it, and the defaults.

    Raises:
        ValueError: The file cannot be read, or a setting is invalid.
    """
    table = read_table("clean-exit-lint", (*_LISTS, *_TEXTS, _PER_FILE))
    file = table.pop("", None)
    per_file = table.pop(_PER_FILE, {})
    if not isinstance(per_file, dict) or not all(isinstance(r, list) for r in per_file.values()):
        where = f"{file}: [tool.clean-exit-lint] {_PER_FILE}"
        raise ValueError(f"{where} must be a table of lists, got {per_file!r}")
    options.per_file_ignores = {
        glob: [one for text in rules for one in _rules(str(text))]
        for glob, rules in (*per_file.items(), *options.per_file_ignores)
    }
    for key, value in table.items():
        items = value if key in _LISTS else [value]
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            kind = "a list of strings" if key in _LISTS else "a string"
            where = f"{file}: [tool.clean-exit-lint] {key}"
            raise ValueError(f"{where} must be {kind}, got {value!r}")
    if "baseline" in table and not options.baseline:
        options.baseline = _relative(file.parent / table["baseline"])
    in_table = [_relative(file.parent / one) for one in table.get("paths", ())]
    options.paths = options.paths or in_table or ["."]
    options.exclude = [*options.exclude, *table.get("exclude", ())]
    rules = {
        key: [one for text in table.get(key, ()) for one in _rules(text)] for key in _LISTS[:2]
    }
    options.select = options.select or rules["select"]
    options.ignore += rules["ignore"]
    options.format = options.format or table.get("format", "text")
    if options.format not in WRITERS:
        formats = ", ".join(WRITERS)
        raise ValueError(f"there is no format {options.format!r}; the formats are {formats}")
    selected_rules(options.select, options.ignore)


def _relative(path: Path) -> str:
    """Return a path relative to the current folder if it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _note(options: argparse.Namespace, *notes: object) -> None:
    for note in notes if not options.quiet else ():
        print(f"clean-exit-lint: note: {note}", file=sys.stderr)


def _write(result: Result, options: argparse.Namespace) -> None:
    if options.statistics:
        text = to_statistics(result)
    elif options.format == "text":
        is_terminal = sys.stdout.isatty() and not options.output and "NO_COLOR" not in os.environ
        color = {"always": True, "never": False}.get(options.color, is_terminal)
        text = to_text(result, color=color, sums_up=not options.quiet)
    else:
        text = WRITERS[options.format](result)
    if options.output:
        _write_file(options.output, text)
        text = "" if options.quiet else summary(result)
    if text:
        _print(text)


def _write_file(path: str, text: str) -> None:
    try:
        # A path that is not UTF-8 has surrogates, which are written as escapes.
        Path(path).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _print(text: str) -> None:
    if error := write(sys.stdout, text + "\n"):
        raise error
