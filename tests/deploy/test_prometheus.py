"""The alert rules for Prometheus use the metrics and labels of the monitor."""

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from entrypoint.health.metrics import Latest
from entrypoint.health.verdict import Finding, Mode, Result, Verdict

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
GPU = {"gpu": "0", "uuid": "GPU-0", "name": "H100", "memory_mib": 1, "ecc_uncorrected": 0}


def test_each_metric_and_label_of_the_rules_exists() -> None:
    latest = Latest(stale_s=600)
    findings = (Finding("xid", Result.PASS, "none", gpu="0", uuid="GPU-0"),)
    latest.put(Verdict(Mode.MONITOR, findings, (GPU,)), {})
    samples = {
        sample.name: {*sample.labels, "instance"}
        for metric in latest.collect()
        for sample in metric.samples
    }
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
