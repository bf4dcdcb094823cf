"""The alert rules and the dashboard use the metrics and labels of the monitor."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import yaml

from entrypoint.health.metrics import Latest
from entrypoint.health.verdict import Finding, Mode, Result, Verdict

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
GPU = {"gpu": "0", "uuid": "GPU-0", "name": "H100"} | dict.fromkeys(
    (
        *("memory_mib", "memory_used_mib", "ecc_uncorrected", "utilization_percent", "power_w"),
        *("temperature_c", "nvlink_errors", "pcie_replays"),
    ),
    1,
)


def _samples() -> dict[str, set[str]]:
    """Return the labels of each sample of the monitor."""
    latest = Latest(stale_s=600)
    findings = (Finding("xid", Result.PASS, "none", gpu="0", uuid="GPU-0"),)
    latest.put(Verdict(Mode.MONITOR, findings, (GPU,)), {})
    return {
        sample.name: {*sample.labels, "instance"}
        for metric in latest.collect()
        for sample in metric.samples
    }


def test_each_metric_and_label_of_the_dashboard_exists(tmp_path: Path) -> None:
    samples, expressions = _samples(), []
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
    if promtool := shutil.which("promtool"):
        rules = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(expressions)]
        file = tmp_path / "panels.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
        subprocess.run([promtool, "check", "rules", file], check=True)


def test_each_metric_and_label_of_the_rules_exists() -> None:
    samples = _samples()
    (group,) = yaml.safe_load((FOLDER / "trainbox-rules.yml").read_text())["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"trainbox_\w+", rule["expr"]))
        assert names <= samples.keys(), rule["alert"]
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert all(shown <= samples[name] for name in names), rule["alert"]


def test_promtool_accepts_the_files() -> None:
    """Where it is installed (Debian's package `prometheus`), it also runs the tests of the rules.

    Debian's build does not know Kubernetes, so it does not check kubernetes.yml.
    """
    if promtool := shutil.which("promtool"):
        for words in (("check", "config", "prometheus.yml"), ("test", "rules", "tests.yml")):
            subprocess.run([promtool, *words], cwd=FOLDER, check=True)
