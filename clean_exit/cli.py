"""The command clean-exit."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from clean_exit import formats
from clean_exit.findings import FINDINGS
from clean_exit.options import (
    Parser,
    compile_pattern,
    explain,
    output_file,
    print_out,
    read_table,
    version,
    write,
)
from clean_exit.report import NOT_EXECUTABLE, NOT_FOUND, UNCLEAN, USAGE
from clean_exit.supervisor_client import CheckerError

_EPILOG = """\
exit codes: 0 clean exit; 120 the program's code is 0 but its exit was not clean; 124 timeout;
125 wrong usage or checker error; 126 not executable; 127 not found; else the program's own code,
or 128+n for signal n. [tool.clean-exit] in pyproject.toml sets defaults."""
SETTINGS: dict[str, type] = {
    **dict.fromkeys(("timeout", "max-shutdown"), float),
    **dict.fromkeys(("resource-warnings", "github"), bool),
    **dict.fromkeys(("children", "report-json"), str),
    "ignore": list,
    "error-exitcode": int,
}
"""The options that the table in pyproject.toml may set."""
CHECKED = ("timeout_s", "max_shutdown_s", "resource_warnings", "ignore", "children")
"""The options of `clean_exit.check` that the command and the marker of pytest have."""
_STOPPING = ("stop_signal", "stop_after_s", "stop_when")


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        USAGE,
        prog="clean-exit",
        usage="clean-exit [options] [--] COMMAND...   (or FILE.py, -m MODULE, -c CODE)",
        description="Run a program and report whether it exited cleanly.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    limit = "kill the program after S seconds and report a hang"
    add("--timeout", dest="timeout_s", type=_seconds, metavar="S", help=limit)
    slow = "report a shutdown that takes longer than S seconds (default 5)"
    add("--max-shutdown", dest="max_shutdown_s", type=_seconds, metavar="S", default=5.0, help=slow)
    stop = "stop a server with the signal SIG (such as TERM, INT or 2)"
    add("--stop-signal", type=_stop_signal, metavar="SIG", help=stop)
    after = "send the stop signal after S seconds"
    add("--stop-after", dest="stop_after_s", type=_seconds, metavar="S", help=after)
    when = "send the stop signal when a line of the output matches (within 60 s or --timeout)"
    add("--stop-when", type=_pattern, metavar="REGEX", help=when)
    add("--resource-warnings", action="store_true", help="report ResourceWarnings too")
    only = "ignore matching findings; the summary shows how many; may be repeated"
    add("--ignore", action="append", type=_pattern, metavar="REGEX", default=[], help=only)
    own = "ignore: count the program itself only, not its child processes (default count)"
    add("--children", choices=("count", "ignore"), default="count", help=own)
    code = "exit code for findings if the program exits with 0 (default 120)"
    add("--error-exitcode", type=_exit_code, metavar="N", default=UNCLEAN, help=code)
    add("--report-json", type=output_file, metavar="FILE", help="write a JSON report")
    add("--github", action="store_true", help="print annotations for GitHub Actions")
    add("--explain", metavar="ID", help="explain a finding and how to fix it, and exit")
    add("-q", "--quiet", action="store_true", help="print no report")
    add("--version", action="store_true", help="print the version and exit")
    return parser


def _seconds(text: str) -> float:
    """Convert a duration above 0 seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text!r}")
    return value


def _exit_code(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 255:  # 0 would hide the findings.
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 255, got {text!r}")
    return int(text)


def _stop_signal(text: str) -> int:
    name = text.upper()
    try:
        if name.isdecimal():
            return signal.Signals(int(name)).value
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"].value
    except (KeyError, ValueError):
        wanted = "a signal name or number such as TERM or 15"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}") from None


def _pattern(text: str) -> str:
    try:
        return compile_pattern(text).pattern
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_settings(folder: Path | None = None) -> argparse.Namespace:
    """Return the options that pyproject.toml sets, and the defaults of the others.

    Raises:
        ValueError: The file cannot be read, or a setting is invalid.
    """
    table = read_table("clean-exit", SETTINGS, folder)
    path = table.pop("", Path())
    words: list[str] = []
    if "report-json" in table:
        table["report-json"] = str(path.parent / table["report-json"])
    for name, value in table.items():
        if isinstance(value, bool):
            words += [f"--{name}"] * value
        else:
            words += [f"--{name}={one}" for one in (value if name == "ignore" else [value])]
    return make_parser().parse_settings(words, f"{path}: [tool.clean-exit]")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the options of clean-exit from the program's command line.

    The command begins after "--", at -m or -c, or at the first word that is not an option.
    """
    takes_value = {
        option
        for action in make_parser()._actions
        if action.nargs is None
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
    """Run the command and return its exit code."""
    own, command = split_arguments(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    options = parser.parse_args(own)
    try:
        if options.version:
            print_out(f"clean-exit {version()}")
            return 0
        if options.explain is not None:
            lines = {one: f"{one}: {summary}" for one, summary in FINDINGS.items()}
            print_out(explain("catalogue.md", options.explain, lines))
            return 0
        options = parser.parse_args(own, read_settings())
    except ValueError as error:
        parser.error(str(error))
    if not command:
        parser.error("there is no command to run")
    if options.report_json is not None:
        # Checked before the program runs, so that no report is lost after it.
        try:
            Path(options.report_json).open("wb").close()
        except OSError as error:
            reason = f"the report {options.report_json!r} cannot be written: {error.strerror}"
            parser.error(reason)
    try:
        return _run(parser, options, command)
    except ImportError as error:  # Windows.
        _print_line(f"clean-exit: {error}")
        return USAGE


def _run(parser: Parser, options: argparse.Namespace, command: list[str]) -> int:
    from clean_exit.checker import check  # Here, because it cannot be imported on Windows.
    from clean_exit.signals import ForwardedSignals, open_closed_files

    open_closed_files()
    with ForwardedSignals():
        try:
            chosen = {name: vars(options)[name] for name in (*CHECKED, *_STOPPING)}
            report = check(command, **chosen, copy_stdout=False, echo=True)
        except ValueError as error:
            parser.error(str(error))
        except CheckerError as error:
            _print_line(f"clean-exit: {error}")
            return USAGE
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            reason = "was not found" if is_missing else f"cannot be executed: {error.strerror}"
            _print_line(f"clean-exit: {command[0]!r} {reason}")
            return NOT_FOUND if is_missing else NOT_EXECUTABLE
        if not options.quiet:
            _print_line(f"clean-exit: {report}")
        if options.github and report.findings:
            _print_line(formats.to_github(report))
        try:
            if options.report_json:
                Path(options.report_json).write_text(formats.to_json(report), encoding="utf-8")
        except OSError as error:
            _print_line(f"clean-exit: the report cannot be written: {error}")
            return USAGE
    is_unclean = report.exit_code == UNCLEAN and report.returncode != UNCLEAN
    return options.error_exitcode if is_unclean else report.exit_code


def _print_line(text: str) -> None:
    """Write to stderr, ignoring errors: the exit code has the verdict too."""
    write(sys.stderr, text + "\n")
