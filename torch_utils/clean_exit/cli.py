"""The command clean-exit."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._version import __version__
from . import formats
from .catalogue import explain
from .checker import check
from .keeping import KeeperLostError
from .report import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    UNCLEAN,
    USAGE,
    ExitReport,
)
from .run import IN_STEAD, Stead
from .settings import read_settings
from .signals import Signals, fill_closed_files
from .values import COLORS, count, exit_code, pattern, seconds, seconds_or_none, stop_signal

_EPILOG = """\
exit codes: 0 clean; 120 the program said 0 but did not leave cleanly; 124 timeout; 125 wrong
usage; 126 not executable; 127 not found; else the program's own, 128+n for signal n.
[tool.clean-exit] in pyproject.toml sets defaults."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(USAGE, f"clean-exit: {message}; see clean-exit --help\n")

    def print_help(self, file: Any = None) -> None:
        self.exit(_write(self.format_help()))


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = _Parser(
        prog="clean-exit",
        usage="clean-exit [options] [--] COMMAND...   (or FILE.py, -m MODULE, -c CODE)",
        description="Run a program, and say whether it left cleanly.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--timeout",
        type=seconds,
        metavar="S",
        help="end the program after S seconds: a hang",
    )
    add("--max-shutdown", type=seconds, metavar="S", default=5.0, help="default 5")
    add(
        "--stop-signal",
        type=stop_signal,
        metavar="SIG",
        help="for servers: send SIG (TERM, INT, 2)",
    )
    add("--stop-after", type=seconds_or_none, metavar="S", help="... after S seconds")
    add(
        "--stop-when",
        type=pattern,
        metavar="REGEX",
        help="... when a line of its output matches",
    )
    add("--repeat", type=count, metavar="N", default=1, help="run it N times")
    add("--resource-warnings", action="store_true", help="report ResourceWarnings too")
    add(
        "--ignore",
        action="append",
        type=pattern,
        metavar="REGEX",
        help="only count matching findings",
    )
    add(
        "--error-exitcode",
        type=exit_code,
        metavar="N",
        default=UNCLEAN,
        help="N instead of 120",
    )
    add("--report-json", metavar="FILE", help="write a report as JSON")
    add("--report-junit", metavar="FILE", help="write a report as JUnit XML")
    add("--github", action="store_true", help="write annotations for GitHub Actions")
    add("--explain", metavar="ID", help="say what a finding means and how to mend it, and no more")
    add("-q", "--quiet", action="store_true", help="no report, only the exit code")
    add("-v", "--verbose", action="store_true", help="all of the evidence")
    add("--color", choices=COLORS, default="auto")
    add("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split what belongs to clean-exit from the program's command line, which begins at "--",
    at -m or -c, or at the first word that is no option.
    """
    takes_value = {
        option
        for action in make_parser()._actions
        if action.nargs is None and action.option_strings
        for option in action.option_strings
    }
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        if word.startswith(("-m", "-c")) or not word.startswith("-"):
            break
        position += 2 if word in takes_value else 1
    return list(arguments[:position]), list(arguments[position:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    own, command = split_arguments(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    if "--explain" not in " ".join(own) and "--version" not in own:  # Those need no settings.
        try:
            parser.set_defaults(**read_settings())
        except ValueError as error:
            parser.error(str(error))
    options = parser.parse_args(own)
    if options.explain is not None:
        return _explain(parser, options.explain)
    if not command:
        parser.error("there is no command to run")
    moments = [m for m in (options.stop_after, options.stop_when) if m is not None]
    if len(moments) != (options.stop_signal is not None):
        parser.error(
            "--stop-signal needs one of --stop-after and --stop-when, and they need it: "
            "they say when to send it"
        )
    paths = [p for p in (options.report_json, options.report_junit) if p is not None]
    if len({os.path.normpath(path) for path in paths}) < len(paths):
        parser.error("the two reports need a file each")
    for path in paths:
        # Said before the program runs, rather than when its report is lost.
        if not path:
            parser.error("a report needs the name of a file, not ''")
        if obstacle := _why_not_writable(Path(path)):
            parser.error(f"the report {path!r} cannot be written: {obstacle}")
    return _run_repeatedly(parser, options, command)


def _why_not_writable(path: Path) -> str:
    """Say what keeps a file from being written; nothing if nothing does."""
    if path.is_dir():
        return "it is a folder"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "it may not be written to"
    try:
        folder = path.absolute().parent
    except OSError:
        return "the current folder has been removed"
    if not folder.is_dir():
        return f"there is no folder {os.fspath(folder)!r}"
    return "" if os.access(folder, os.W_OK) else f"{os.fspath(folder)!r} may not be written to"


def _explain(parser: argparse.ArgumentParser, name: str) -> int:
    try:
        text = explain(name)
    except ValueError as error:
        parser.error(str(error))
    return _write(text + "\n")


def _write(text: str) -> int:
    """Write what was asked for to stdout, and return the exit code."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        if sys.stdout is not None:  # As in _say.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):  # Who has read enough, as head has, is content.
            _say(f"clean-exit: stdout cannot be written to: {error.strerror}")
            return USAGE
    return 0


def _run_repeatedly(
    parser: argparse.ArgumentParser, options: argparse.Namespace, command: list[str]
) -> int:
    reports: list[ExitReport] = []
    closed = fill_closed_files()
    with Signals() as signals:
        IN_STEAD.set(Stead(closed, signals.mask, signals.attach, signals.hand_up, signals.stop))
        for _ in range(options.repeat):
            try:
                report = _check_once(options, command)
            except ValueError as error:
                parser.error(str(error))
            except KeeperLostError as error:
                _say(f"clean-exit: {error}")
                return USAGE
            except OSError as error:
                return _cannot_start(command, error)
            reports.append(report)
            if not options.quiet:
                _print(report, options)
            if signals.asked_to_end:
                break
    try:
        if options.report_json:
            Path(options.report_json).write_text(formats.to_json(reports), encoding="utf-8")
        if options.report_junit:
            Path(options.report_junit).write_text(formats.to_junit(reports), encoding="utf-8")
    except OSError as error:
        _say(f"clean-exit: the report cannot be written: {error}")
        return USAGE
    return _exit_code(reports, options.error_exitcode)


def _check_once(options: argparse.Namespace, command: list[str]) -> ExitReport:
    return check(
        command,
        timeout_s=options.timeout,
        max_shutdown_s=options.max_shutdown,
        stop_signal=options.stop_signal,
        stop_after_s=options.stop_after,
        stop_when=options.stop_when,
        resource_warnings=options.resource_warnings,
        ignore=options.ignore or (),
        copy_stdout=False,
        echo=True,
    )


def _cannot_start(command: list[str], error: OSError) -> int:
    name = command[0]
    missing = isinstance(error, FileNotFoundError)
    if not missing:
        # Not by Path, which raises where a folder on the way may not be entered.
        is_folder = os.path.isdir(name)  # noqa: PTH112
        what = "is a folder" if is_folder else f"cannot be executed ({error.strerror})"
    elif len(command) == 1 and any(map(str.isspace, name)):
        what = f"was not found: it is one word; try clean-exit -- {name}"
    elif os.path.exists(name):  # noqa: PTH110
        what = "cannot be executed: the interpreter that its first line names was not found"
    elif os.sep in name:
        what = "was not found"
    else:
        here = "no such file here, and " if name.endswith(".py") else ""
        what = f"was not found: there is {here}no such command in PATH"
    _say(f"clean-exit: {shlex.quote(name)} {what}")
    return NOT_FOUND if missing else NOT_EXECUTABLE


def _print(report: ExitReport, options: argparse.Namespace) -> None:
    color = options.color == "always" or (
        options.color == "auto" and os.isatty(2) and "NO_COLOR" not in os.environ
    )
    text = formats.to_text(report, verbose=options.verbose, color=color)
    if options.github and report.findings:
        text += "\n" + formats.to_github(report)
    _say(text)


def _say(text: str) -> None:
    """Write to stderr; nobody has to read it, for the exit code says it all the same."""
    if sys.stderr is None:
        return
    try:
        # Characters that the stream cannot show must not cost the whole report.
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stderr.flush()
    except OSError:
        # What is left in the buffer would make Python exit with 120 when it flushes that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _exit_code(reports: list[ExitReport], unclean: int) -> int:
    """Return the code of the first run that was not well."""
    for report in reports:
        if report.exit_code == UNCLEAN and report.returncode != UNCLEAN:
            return unclean
        if report.exit_code:
            return report.exit_code
    return 0
