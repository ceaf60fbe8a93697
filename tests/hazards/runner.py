"""Run one program of the matrix against one subject, and judge how it left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hazards.row import Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT_S = 400  # Where the machine is busy, torch alone takes a minute to import.
PRELUDE = "from hazards.subjects import close, is_alive, log, make\n"
NEEDS_TORCH = ("retriever", "model", "naive-torch")


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
            count = events[("released", *identity)]
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

    def __init__(self) -> None:
        self.tiny_model: Path | None = None  # For the subject "model".
        self._zygotes: dict[str, subprocess.Popen[str]] = {}

    def close(self) -> None:
        for zygote in self._zygotes.values():
            assert zygote.stdin is not None
            zygote.stdin.close()
            zygote.wait(TIMEOUT_S)
            assert zygote.stdout is not None
            zygote.stdout.close()

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
                "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE.parent}",
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            if row.late:
                env["HAZARD_LATE"] = "1"
            program = PRELUDE + row.program
            uses_torch = row.needs_torch or subject in NEEDS_TORCH
            if row.own_process or row.options or not uses_torch:
                path = Path(folder, "program.py")
                path.write_text(program)
                returncode = _run_alone([python, *row.options, str(path)], env, files)
            else:
                returncode = self._run_forked(program, subject, env, files)
            texts = {name: file.read_text(errors="replace") for name, file in files.items()}
        return Outcome(row, subject, returncode, texts["stdout"], texts["stderr"], texts["log"])

    def _run_forked(
        self, program: str, subject: str, env: dict[str, str], files: dict[str, Path]
    ) -> int:
        kind = "sentence_transformers" if subject == "model" else "torch"
        zygote = self._zygotes.get(kind)
        if zygote is None:
            zygote = self._zygotes[kind] = subprocess.Popen(
                [sys.executable, str(HERE / "zygote.py"), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **env},
            )
        job = {
            "program": program,
            "env": env,
            "stdout": str(files["stdout"]),
            "stderr": str(files["stderr"]),
        }
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        zygote.stdin.write(json.dumps(job) + "\n")
        zygote.stdin.flush()
        pid = int(zygote.stdout.readline())
        previous = signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
        signal.alarm(TIMEOUT_S)
        try:
            return int(zygote.stdout.readline())
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)


def _run_alone(command: list[str], env: dict[str, str], files: dict[str, Path]) -> int:
    # Files rather than pipes: a process that is left over cannot keep this waiting.
    with files["stdout"].open("w") as stdout, files["stderr"].open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **env},
        )
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
