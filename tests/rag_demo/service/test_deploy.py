"""The files for deployment, as far as they can be tested without a container."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, free_port
from tests.support.rag_command import succeed
from tests.support.serving import ask, read_settings

DEPLOY = ROOT / "docs" / "deploy"
CLOSING_S = 10  # docs/rag_demo/service.md


def test_health_check_needs_a_service(index: Path) -> None:
    from tests.support.browsing import serving_on_a_port

    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    command = json.loads(re.findall(r"^ +CMD (\[.*\])$", text, re.M)[0])
    with serving_on_a_port(index) as url:
        program = command[-1].replace("http://127.0.0.1:8000", url)
        assert program != command[-1]
        assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 1


def documents_of(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: the dependency group service-test")
    text = (DEPLOY / name).read_text(encoding="utf-8")
    return [each for each in yaml.safe_load_all(text) if each]


def test_kubernetes_names_existing_options_ports_and_probes(index: Path) -> None:
    files = [f"kubernetes/{file.name}" for file in (DEPLOY / "kubernetes").iterdir()]
    kinds = {each["kind"]: each["spec"] for file in files for each in documents_of(file)}
    assert set(kinds) == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "ServiceMonitor",
        "HorizontalPodAutoscaler",
    }
    pod = kinds["Deployment"]["template"]
    (container,) = pod["spec"]["containers"]
    settings = options_of(container["args"])
    seconds = container["lifecycle"]["preStop"]["sleep"]["seconds"] + settings.grace + CLOSING_S
    assert pod["spec"]["terminationGracePeriodSeconds"] >= seconds
    names = {each["name"] for each in container["ports"]}
    assert [each["containerPort"] for each in container["ports"]] == [settings.port]
    assert {each["targetPort"] for each in kinds["Service"]["ports"]} == names
    probes = [container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")]
    assert {each["port"] for each in probes} <= names
    paths = [*(each["path"] for each in probes), "/metrics"]
    *answers, metrics = ask(index, *(("GET", path, {}) for path in paths))
    assert [each.status_code for each in answers] == [200, 200]
    metric = kinds["HorizontalPodAutoscaler"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric in metrics.text
    labels = pod["metadata"]["labels"]
    for name in ("Deployment", "PodDisruptionBudget", "ServiceMonitor"):
        assert kinds[name]["selector"]["matchLabels"] == labels
    assert kinds["Service"]["selector"] == labels


def options_of(arguments: list[str]) -> Any:
    words = (each.removeprefix("--").partition("=") for each in arguments if "-file=" not in each)
    options = {name.replace("-", "_"): value or "true" for name, _, value in words}
    return read_settings(**options)


def test_compose_names_existing_options() -> None:
    (compose,) = documents_of("compose.yaml")
    service = compose["services"]["rag-demo"]
    settings = options_of(service["command"])
    assert int(service["stop_grace_period"].rstrip("s")) >= settings.grace + CLOSING_S
    assert service["deploy"]["replicas"] > 1
    (job,) = documents_of("prometheus/prometheus.yaml")[0]["scrape_configs"]
    assert job["dns_sd_configs"][0]["port"] == settings.port
    assert job["authorization"]["credentials_file"].endswith("/token")
    pytest.importorskip("psycopg")
    (compose,) = documents_of("compose.postgres.yaml")
    assert options_of(compose["services"]["rag-demo"]["command"]).index
    shown = succeed("index", "--help")
    words = compose["services"]["documents"]["command"]
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    assert names and all(f"{name} " in shown for name in names)


def test_systemd_unit_starts_the_service(index: Path) -> None:
    """Its variables and options are read by the settings."""
    text = (DEPLOY / "systemd" / "rag-demo@.service").read_text(encoding="utf-8")
    variables = dict(re.findall(r"RAG_DEMO_(\w+)=(\S+)", text.replace("%i", "1")))
    settings = read_settings(
        index=index, **{name.lower(): value for name, value in variables.items()}
    )
    assert settings.port == 8001
    stop = int(re.findall(r"TimeoutStopSec=(\d+)", text)[0])
    assert stop >= settings.grace + CLOSING_S
    options = re.findall(r" --([\w-]+)", re.findall(r"ExecStart=(.*)", text)[0])
    assert {each.replace("-", "_") for each in options} <= set(type(settings).model_fields)


def test_promtool_accepts_configuration_and_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    for kind, file in (("config", "prometheus.yaml"), ("rules", "alerts.yaml")):
        command = [promtool, "check", kind, str(DEPLOY / "prometheus" / file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_and_dashboard_name_exported_metrics(index: Path) -> None:
    (text,) = ask(index, ("GET", "/metrics", {}))
    rules = (DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8")
    dashboard = (ROOT / "docs" / "grafana-service.json").read_text(encoding="utf-8")
    assert rules.count("- alert:") == 4
    for source in (rules, dashboard):
        names = set(re.findall(r"rag_demo_\w+", source))
        assert len(names) >= 4
        assert [name for name in names if f"# TYPE {base(name)} " not in text.text] == []


def base(name: str) -> str:
    """Return the metric of a sample."""
    return re.sub(r"_(total|bucket|count|sum)$", "", name) + ("_total" * name.endswith("_total"))


PROXIES = {
    "nginx": ("nginx.conf", ["-t", "-c"], ["-g", "daemon off; pid PID;", "-c"]),
    "caddy": (
        "Caddyfile",
        ["validate", "--adapter", "caddyfile", "--config"],
        ["run", "--adapter", "caddyfile", "--config"],
    ),
}
TOKEN = "token-of-a-client"


@pytest.mark.parametrize("name", PROXIES)
def test_proxy_forwards_with_tls_and_token(name: str, index: Path, tmp_path: Path) -> None:
    import httpx

    from tests.support.browsing import serving_on_a_port

    program, openssl = shutil.which(name), shutil.which("openssl")
    if program is None or openssl is None:
        pytest.skip(f"{name} or openssl is not installed: apt-get install {name} openssl")
    file, check, run = PROXIES[name]
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    key, certificate, made = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / file
    make = [openssl, *"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes".split()]
    make += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"]
    subprocess.run([*make, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, stderr=-3)
    trusted = ssl.create_default_context(cafile=str(certificate))
    with serving_on_a_port(index, host="0.0.0.0", token=(TOKEN,)) as url:
        text = (DEPLOY / "proxy" / file).read_text(encoding="utf-8")
        text = text.replace("RAG_DEMO", url.removeprefix("http://")).replace("LISTEN", address)
        text = text.replace("CERTIFICATE", str(certificate)).replace("KEY", str(key))
        made.write_text("\n".join(line for line in text.splitlines() if line[:1] != "#"))
        done = subprocess.run([program, *check, made], env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        options = [each.replace("PID", str(tmp_path / "pid")) for each in run]
        proxy = subprocess.Popen(
            [program, *options, made], env=environment, stderr=subprocess.DEVNULL
        )
        try:
            transport = httpx.HTTPTransport(verify=trusted, retries=10)  # It waits for the port.
            base: Any = {"base_url": f"https://{address}", "timeout": 60}
            with httpx.Client(transport=transport, **base) as client:
                assert client.get("/readyz").status_code == 200
                body, bearer = {"query": "memory"}, {"authorization": f"Bearer {TOKEN}"}
                assert client.post("/search", json=body).status_code == 401
                assert client.post("/search", json=body, headers=bearer).status_code == 200
                assert client.get("/admin/models", headers=bearer).status_code == 404
        finally:
            proxy.terminate()
            proxy.wait(60)
