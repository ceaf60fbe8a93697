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

from clean_exit.arguments import filled, output_file
from clean_exit.catalogue import RULES as CATALOGUE
from clean_exit.lint import baseline
from clean_exit.lint.discover import python_files
from clean_exit.lint.findings import BY_CODE, RULES, UNUSED
from clean_exit.lint.formats import WRITERS, many, summary, to_text
from clean_exit.lint.lint import Result, check, chosen
from clean_exit.pyproject import read_table
from clean_exit.version import version

FINDINGS, USAGE, INTERRUPTED = 1, 2, 130
_LISTS = ("select", "ignore", "exclude", "paths")
_TEXTS = ("baseline", "format")
_EPILOG = """\
exit codes: 0 nothing found; 1 findings; 2 wrong usage or no output; 130 Ctrl-C.
[tool.clean_exit_lint] in pyproject.toml sets defaults.
"# clean-exit-lint: ignore[RULE]" on a line hides its findings."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(USAGE, f"clean-exit-lint: {message}; see clean-exit-lint --help\n")


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = _Parser(
        prog="clean-exit-lint",
        description="Read Python files, run nothing, and say which destructors cannot work.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files and folders (default .); - is stdin")
    add("--format", choices=WRITERS, help="default text")
    rules: dict[str, Any] = {"action": "extend", "type": _rules, "default": [], "metavar": "RULE"}
    add("--select", help="only these, by commas or repeated", **rules)
    add("--ignore", help="not these", **rules)
    left_out = "files and folders to leave out"
    add("--exclude", action="append", default=[], metavar="GLOB", help=left_out)
    add("--baseline", type=filled, metavar="FILE", help="report only what is not in it")
    file: dict[str, Any] = {"type": output_file, "metavar": "FILE"}
    add("--write-baseline", help="write what is found now, and report nothing", **file)
    add("--output", help="write there, and only a summary here", **file)
    add("--explain", type=filled, metavar="RULE", help="say what a rule means, and no more")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("-q", "--quiet", action="store_true", help="no notes and no summary")
    add("--version", action="store_true", help="print the version, and no more")
    return parser


def _rules(value: str) -> list[str]:
    """Return rules, by id or by code, that stand between commas."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    return [BY_CODE.get(name, name) for name in names] or [filled("")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    options = make_parser().parse_args(arguments)
    # Trees of syntax have no cycles, and there are millions of nodes to look through for them.
    had_gc = gc.isenabled()
    gc.disable()
    try:
        return _run(options)
    except ValueError as error:
        print(f"clean-exit-lint: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:  # Of stdout: errors of other files are ValueErrors.
        # What Python would flush at its end goes nowhere, without an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # The reader, such as head, has closed the pipe.
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
        _print(explain(options.explain))
        return 0
    _add_settings(options)
    files = list(python_files(options.paths, options.exclude))
    result = check(files, select=options.select, ignore=options.ignore)
    _note(options, *result.notes)
    if options.write_baseline:
        text = baseline.to_text(result.findings, Path(options.write_baseline))
        _write_file(options.write_baseline, text)
        count = many(len(result.findings), "finding")
        _print(f"clean-exit-lint: {options.write_baseline} has {count} now")
        return 0
    if options.baseline:
        rules = chosen(options.select, options.ignore)
        new, gone = baseline.subtract(result.findings, Path(options.baseline), files, rules)
        result = replace(result, findings=tuple(new))
        if gone:
            how = "write it anew, for all paths and rules, to forget them"
            _note(options, f"{many(gone, 'finding')} of the baseline no longer found; {how}")
    _write(result, options)
    return FINDINGS if result.findings else 0


def _add_settings(options: argparse.Namespace) -> None:
    """Fill in what the table in pyproject.toml says, and the defaults.

    Paths in it, and the baseline, are relative to the file.

    Raises:
        ValueError: The file cannot be read, or the table is invalid.
    """
    table = read_table("clean-exit-lint", (*_LISTS, *_TEXTS))
    file = table.pop("", None)
    for key, value in table.items():
        items = value if key in _LISTS else [value]
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            wanted = "a list of strings" if key in _LISTS else "a string"
            where = f"{file}: [tool.clean_exit_lint] {key}"
            raise ValueError(f"{where} must be {wanted}, not {value!r}")
    if "baseline" in table and not options.baseline:
        options.baseline = _from_here(file.parent / table["baseline"])
    options.paths = options.paths or [
        _from_here(file.parent / one) for one in table.get("paths", ())
    ]
    options.paths = options.paths or ["."]
    options.exclude = [*options.exclude, *table.get("exclude", ())]
    options.select = options.select or [
        one for text in table.get("select", ()) for one in _rules(text)
    ]
    options.ignore += [one for text in table.get("ignore", ()) for one in _rules(text)]
    options.format = options.format or table.get("format", "text")
    if options.format not in WRITERS:
        raise ValueError(f"there is no format {options.format!r}; there are {', '.join(WRITERS)}")
    chosen(options.select, options.ignore)


def _from_here(path: Path) -> str:
    """Return a path, relative if it is below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _note(options: argparse.Namespace, *notes: object) -> None:
    for note in notes if not options.quiet else ():
        print(f"clean-exit-lint: note: {note}", file=sys.stderr)


def _write(result: Result, options: argparse.Namespace) -> None:
    if options.format == "text":
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
        # Half a character, of a path that is not UTF-8, becomes an escape.
        Path(path).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _print(text: str) -> None:
    # A path or a line of source may have what the terminal's encoding has not.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def explain(name: str) -> str:
    """Return what the catalogue says about a rule, by its id or its code.

    Raises:
        ValueError: There is no such rule; the message has those that there are.
    """
    rules = (*RULES.values(), UNUSED)
    lines = {rule.id: f"{rule.id} ({rule.code}): {rule.summary}" for rule in rules}
    return CATALOGUE.explain(_rules(name)[0], lines)
