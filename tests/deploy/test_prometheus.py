"""The alert rules and the dashboard use the metrics and labels of the monitor."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from entrypoint.health.metrics import Latest
from entrypoint.health.trainings import Trainings
from entrypoint.health.verdict import Finding, Mode, Result, Verdict
from tests.support.leases import kill
from trainbox.folders.lease import Lease

PROMTOOL = shutil.which("promtool")
FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
GPU = {"gpu": "0", "uuid": "GPU-0", "name": "H100"} | dict.fromkeys(
    (
        *("memory_mib", "memory_used_mib", "ecc_uncorrected", "utilization_percent", "power_w"),
        *("temperature_c", "nvlink_errors", "pcie_replays"),
    ),
    1,
)


def _samples(folder: Path) -> dict[str, set[str]]:
    """Return the labels of each sample of the monitor."""
    latest = Latest(stale_s=600)
    findings = (Finding("xid", Result.PASS, "none", gpu="0", uuid="GPU-0"),)
    latest.put(Verdict(Mode.MONITOR, findings, (GPU,)), {})
    trainings = Trainings(folder)
    for name in ("r", "k"):
        (folder / name).mkdir()
        Lease(folder / name)
    kill(folder / "k")
    trainings.read()
    return {
        sample.name: {*sample.labels, "instance"}
        for collector in (latest, trainings)
        for metric in collector.collect()
        for sample in metric.samples
    }


def test_each_metric_and_label_of_the_dashboard_exists(tmp_path: Path) -> None:
    samples, expressions = _samples(tmp_path), []
    for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]:
        (target,) = panel["targets"]
        names = set(re.findall(r"trainbox_\w+", target["expr"]))
        assert names <= samples.keys(), panel["title"]
        used = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        used |= set(re.findall(r"(\w+)=~?\"", target["expr"]))
        assert all(used <= samples[name] for name in names), panel["title"]
        # Each panel follows the choice of hosts.
        assert target["expr"].count('{instance=~"$instance"}') == len(names), panel["title"]
        expressions.append(target["expr"].replace("$instance", ".*"))
    if PROMTOOL is not None:
        rules = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(expressions)]
        file = tmp_path / "panels.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
        subprocess.run([PROMTOOL, "check", "rules", file], check=True)


def test_each_metric_and_label_of_the_rules_exists(tmp_path: Path) -> None:
    samples = _samples(tmp_path)
    (group,) = yaml.safe_load((FOLDER / "trainbox-rules.yml").read_text())["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"trainbox_\w+", rule["expr"]))
        assert names <= samples.keys(), rule["alert"]
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert all(shown <= samples[name] for name in names), rule["alert"]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH (Debian 12: `prometheus`)")
def test_promtool_accepts_the_files_and_runs_the_tests_of_the_rules() -> None:
    """Debian's build does not know Kubernetes, so it does not check kubernetes.yml."""
    for words in (("check", "config", "prometheus.yml"), ("test", "rules", "tests.yml")):
        subprocess.run([PROMTOOL, *words], cwd=FOLDER, check=True)


def test_the_pod_monitor_selects_the_daemon_set() -> None:
    monitor = yaml.safe_load((FOLDER / "podmonitor.yaml").read_text())["spec"]
    manifest = FOLDER.parent / "kubernetes/monitor/monitor.yaml"
    pod = next(yaml.safe_load_all(manifest.read_text()))["spec"]["template"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert monitor["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    (job,) = (each for each in endpoint["relabelings"] if each["targetLabel"] == "job")
    assert f'job="{job["replacement"]}"' in (FOLDER / "trainbox-rules.yml").read_text()


def test_each_alert_has_a_test() -> None:
    (group,) = yaml.safe_load((FOLDER / "trainbox-rules.yml").read_text())["groups"]
    tests = yaml.safe_load((FOLDER / "tests.yml").read_text())["tests"]
    fires = {
        each["alertname"]
        for test in tests
        for each in test["alert_rule_test"]
        if each["exp_alerts"]
    }
    assert fires == {rule["alert"] for rule in group["rules"]}
