"""Run one program of the matrix against one subject, and judge how it left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.zygotes import ZYGOTES
from tests.torch_utils.hazards.row import Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TIMEOUT_S = 400  # Where the machine is busy, torch alone takes a minute to import.
PRELUDE = "from tests.torch_utils.hazards.subjects import close, is_alive, log, make\n"
NEEDS_TORCH = ("retriever", "model")


@dataclass(frozen=True)
class Outcome:
    """What a program did, and what is wrong with that; ``problems`` is empty if nothing."""

    row: Row
    subject: str
    returncode: int
    stdout: str
    stderr: str
    log: str

    @property
    def problems(self) -> list[str]:
        found: list[str] = []
        if self.returncode != self.row.returncode:
            found.append(f"exit code {self.returncode}, not {self.row.returncode}")
        if not re.fullmatch(self.row.stderr, self.stderr):
            found.append(f"stderr: {self.stderr[-1500:]!r}")
        events = Counter(tuple(line.split()) for line in self.log.splitlines())
        made = [key[1:] for key in events if key[0] == "made"]
        if not made:
            found.append("nothing was made")
        for identity in made:
            released = ("released", *identity)
            count = events[released]
            if count != self.row.released:
                found.append(f"released {count} times, not {self.row.released}")
        strangers = {k[1:] for k in events if k[0] == "released"} - set(made)
        if strangers:
            found.append("released in a process that did not make it")
        if any(key[0] == "alive" and key[2] != "True" for key in events):
            found.append("was closed before the program's own atexit callback")
        return found

    def __str__(self) -> str:
        return (
            f"{self.row.name} with {self.subject}: {'; '.join(self.problems) or 'fine'}\n"
            f"--- program\n{self.row.program}\n--- stdout\n{self.stdout}\n"
            f"--- stderr\n{self.stderr}\n--- log\n{self.log}"
        )


class Runner:
    """Runs programs; those with torch are forked from interpreters that have imported it."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.tiny_model: Path | None = None  # For the subject "model".

    def run(self, row: Row, subject: str, python: str = sys.executable) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("log", "stdout", "stderr")}
            for file in files.values():
                file.touch()
            env = {
                "HAZARD_SUBJECT": subject,
                "HAZARD_LOG": str(files["log"]),
                "HAZARD_MODEL": str(self.tiny_model),
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(ROOT),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            if row.late:
                env["HAZARD_LATE"] = "1"
            program = PRELUDE + row.program
            uses_torch = row.needs_torch or subject in NEEDS_TORCH
            if row.own_process or row.options or not uses_torch:
                path = Path(folder, "program.py")
                path.write_text(program)
                returncode = _run_alone(
                    [python, *row.options, str(path)], env, files, self.timeout_s
                )
            else:
                returncode = ZYGOTES.run(
                    program,
                    env=env,
                    stdout=files["stdout"],
                    stderr=files["stderr"],
                    timeout_s=self.timeout_s,
                    preload="sentence_transformers" if subject == "model" else "torch",
                )
            texts = {name: file.read_text(errors="replace") for name, file in files.items()}
        return Outcome(row, subject, returncode, texts["stdout"], texts["stderr"], texts["log"])


def _run_alone(
    command: list[str], env: dict[str, str], files: dict[str, Path], timeout_s: float
) -> int:
    # Files rather than pipes: a remaining process cannot keep this waiting.
    with files["stdout"].open("w") as stdout, files["stderr"].open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **env},
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
