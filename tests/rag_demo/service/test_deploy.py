"""The files for deployment, as far as they can be tested without a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import ROOT, TIMEOUT_S
from support.serving import serving  # noqa: F401  (Skips where the service's packages are missing.)

DEPLOY = ROOT / "deploy"
MADE_BY_USER = {"../index", "./token"}


def test_dockerfile_names_user_init_and_extras() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^STOPSIGNAL SIGTERM$", text, re.M)
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.M)[0])
    assert entry[0] == "tini" and "tini" in re.findall(r"apt-get install .*", text)[0]
    user = re.findall(r"^USER (\w+)$", text, re.M)[-1]
    assert user != "root" and f"useradd --system --uid 10001 --no-create-home {user}" in text
    extras = re.findall(r"'\.\[(.*)\]'", text)[0].split(",")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras)


def test_health_check_needs_a_service(index: Path) -> None:
    from support.browsing import serving_on_a_port

    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    command = json.loads(re.findall(r"^ +CMD (\[.*\])$", text, re.M)[0])
    with serving_on_a_port(index) as url:
        program = command[-1].replace("http://127.0.0.1:8000", url)
        assert program != command[-1]
        assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 1


def test_compose_mounts_existing_files() -> None:
    text = re.sub("#.*", "", (DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    paths = set(re.findall(r"(?<![\w/])(\.\.?/[\w./-]+)", text)) - MADE_BY_USER
    assert "../docs/grafana-dashboard.json" in paths
    assert all((DEPLOY / path).exists() for path in paths), paths


def test_promtool_accepts_the_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    command = [promtool, "check", "config", "--syntax-only"]
    for file, code in ((DEPLOY / "prometheus/prometheus.yaml", 0), (DEPLOY / "compose.yaml", 1)):
        done = subprocess.run([*command, str(file)], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr


PROXIES = {
    "nginx": ("nginx.conf", ["-t", "-c"], ["-g", "daemon off; pid PID;", "-c"]),
    "caddy": (
        "Caddyfile",
        ["validate", "--adapter", "caddyfile", "--config"],
        ["run", "--adapter", "caddyfile", "--config"],
    ),
}


@pytest.mark.parametrize("name", PROXIES)
def test_proxy_forwards_a_search(name: str, index: Path, tmp_path: Path) -> None:
    import httpx

    from support.browsing import serving_on_a_port
    from support.waiting import wait_for

    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    file, check, run = PROXIES[name]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    with serving_on_a_port(index) as url:
        text = (DEPLOY / "proxy" / file).read_text(encoding="utf-8")
        text = text.replace("RAG_DEMO", url.removeprefix("http://")).replace("LISTEN", address)
        made = tmp_path / file
        made.write_text("\n".join(line for line in text.splitlines() if line[:1] != "#"))
        done = subprocess.run([program, *check, made], env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        options = [each.replace("PID", str(tmp_path / "pid")) for each in run]
        proxy = subprocess.Popen(
            [program, *options, made], env=environment, stderr=subprocess.DEVNULL
        )
        try:

            def answers() -> bool:
                try:
                    answer = httpx.get(f"http://{address}/livez", timeout=TIMEOUT_S)
                    return answer.status_code == 200
                except httpx.TransportError:
                    return False

            wait_for(answers)
            where = f"http://{address}/search"
            answer = httpx.post(where, json={"query": "memory"}, timeout=TIMEOUT_S)
            assert answer.status_code == 200
        finally:
            proxy.terminate()
            proxy.wait(60)
