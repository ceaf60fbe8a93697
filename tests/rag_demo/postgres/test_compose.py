"""docs/deploy/compose.postgres.yaml: its commands, run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.programs import ROOT
from tests.support.rag_command import fail, info, succeed

yaml = pytest.importorskip("yaml", reason="needs PyYAML: see CONTRIBUTING.md")


def test_commands_index_a_folder_and_start_the_service(
    server: PostgresServer,
    table: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    compose = yaml.safe_load((ROOT / "docs" / "deploy" / "compose.postgres.yaml").read_text())
    url = f"postgresql://tester@127.0.0.1:{server.port}/postgres?table={table}"
    (tmp_path / "note.md").write_text("words of a note")
    (tmp_path / ".token").write_text("secret-of-the-service")

    def here(name: str) -> list[Any]:
        """Return a command of a service with places of this machine."""
        places = {
            "postgresql://rag@postgres/rag": url,
            "/documents": str(tmp_path),
            "/run/secrets/token": str(tmp_path / ".token"),
            "/run/secrets/admin-token": str(tmp_path / ".token"),
        }
        parts = [part.rpartition("=") for part in compose["services"][name]["command"]]
        return [f"{option}{sign}{places.get(value, value)}" for option, sign, value in parts]

    succeed("index", *here("documents"), "--model", tiny_model, "--no-cache")
    assert info(url)["texts"] == 1
    # All other options are known and valid.
    assert "--port" in fail("serve", *here("rag-demo"), "--port", "wrong")
