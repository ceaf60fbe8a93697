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

from clean_exit.lint import baseline
from clean_exit.lint.catalogue import explain
from clean_exit.lint.discover import python_files
from clean_exit.lint.findings import RULES, UNUSED
from clean_exit.lint.lint import Result, check, chosen
from clean_exit.lint.machine import to_json, to_sarif
from clean_exit.lint.settings import read_settings
from clean_exit.lint.text import summary, to_github, to_text
from clean_exit.version import version

FINDINGS, USAGE, INTERRUPTED = 1, 2, 130
FORMATS = ("text", "json", "sarif", "github")
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
    add("--format", choices=FORMATS, help="default text")
    add("--select", action="append", metavar="RULE", help="only these, by commas or repeated")
    add("--ignore", action="append", metavar="RULE", help="not these")
    add("--exclude", action="append", metavar="GLOB", help="files and folders to leave out")
    add("--baseline", metavar="FILE", help="report only what is not in it")
    add("--write-baseline", metavar="FILE", help="write what is found now, and report nothing")
    add("--output", metavar="FILE", help="write there, and only a summary here")
    add("--explain", metavar="RULE", help="say what a rule means, and no more")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("-q", "--quiet", action="store_true", help="no notes and no summary")
    add("--version", action="store_true", help="print the version, and no more")
    return parser


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
    except OSError as error:  # Of stdout: whatever else is opened says so itself.
        # What Python would flush at its end goes nowhere, without an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # Who has read enough, as head has, is content.
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
    settings = read_settings()
    paths = options.paths or settings.get("paths") or ["."]
    form = options.format or settings.get("format", "text")
    if form not in FORMATS:
        raise ValueError(f"there is no format {form!r}; there are {', '.join(FORMATS)}")
    select = _split(options.select) or settings.get("select", [])
    ignore = [*_split(options.ignore), *settings.get("ignore", [])]
    exclude = [*(options.exclude or []), *settings.get("exclude", [])]
    chosen(select, ignore)
    result = check(python_files(paths, exclude), select=select, ignore=ignore)
    if not options.quiet:
        for note in result.notes:
            print(f"clean-exit-lint: note: {note}", file=sys.stderr)
    if options.write_baseline:
        return _write_baseline(options.write_baseline, result)
    known = options.baseline or settings.get("baseline")
    if known:
        new, gone = baseline.subtract(result.findings, baseline.load(Path(known)))
        result = replace(result, findings=tuple(new))
        if gone and not options.quiet:
            said = (
                f"{gone} findings of the baseline are gone; --write-baseline {known} forgets them"
            )
            print(f"clean-exit-lint: note: {said}", file=sys.stderr)
    _write(_formatted(result, form, options), options, result)
    return FINDINGS if result.findings else 0


def _formatted(result: Result, form: str, options: argparse.Namespace) -> str:
    if form == "json":
        return to_json(result)
    if form == "sarif":
        return to_sarif(result)
    if form == "github":
        return to_github(result)
    if options.quiet and not result.findings:
        return ""
    is_terminal = sys.stdout.isatty() and not options.output and "NO_COLOR" not in os.environ
    color = options.color == "always" or (options.color == "auto" and is_terminal)
    return to_text(result, color=color)


def _write(text: str, options: argparse.Namespace, result: Result) -> None:
    if not options.output:
        if text:
            _print(text)
        return
    try:
        Path(options.output).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"{options.output} cannot be written: {error.strerror}") from None
    if not options.quiet:
        _print(summary(result))


def _print(text: str) -> None:
    # A path or a line of source may have what the terminal's encoding has not.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _write_baseline(path: str, result: Result) -> int:
    try:
        count = baseline.write(Path(path), result.findings)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    _print(f"clean-exit-lint: {count} findings are in {path} now")
    return 0


def _split(values: list[str] | None) -> list[str]:
    """Return the rules of options, by id or by code, that may be repeated or have commas."""
    by_code = {rule.code: rule.id for rule in (*RULES.values(), UNUSED)}
    names = [name.strip() for value in values or () for name in value.split(",")]
    return [by_code.get(name, name) for name in names if name]
