"""Run the cases of `trainbox health` on the NVML stub.

`python -P -m tests.support.health_table` prints the table of docs/reference/health-rules.md.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.commands import Trainbox
from tests.support.health_cases import CASES, CRITICAL, INFO, NA, PASS, UNKNOWN, WARN, Case
from tests.support.nvml_stub.build import build_stub, stub_env, write_config


def run_case(case: Case, library_dir: Path, trainbox: Trainbox) -> tuple[dict[str, Any], int]:
    """Run `trainbox health --gate` on the case; return the verdict and the exit code."""
    config = write_config(
        trainbox.folder / "nvml.conf",
        case.profile,
        dict(case.keys),
        **({} if "mig" in case.profile else {"count": 2}),
    )
    words = ["health", "--gate", "--json", *case.words]
    if case.limits:
        (trainbox.folder / "limits.toml").write_text(case.limits + "\n")
        words += ["--health-limits", "limits.toml"]
    ended = trainbox(*words, env={**stub_env(library_dir, config), **case.env})
    assert ended.err == "", ended.err
    return json.loads(ended.out), ended.code


def result_of(verdict: Mapping[str, Any], check: str) -> str:
    """Return the worst result of the check."""
    order = [NA, PASS, INFO, WARN, UNKNOWN, CRITICAL]
    return max((f["result"] for f in verdict["findings"] if f["check"] == check), key=order.index)


def row(case: Case, result: str, code: int) -> str:
    profile = "" if case.profile == "h100" else case.profile
    limits = (
        f"{case.injected}; limits `{case.limits}`"
        if case.limits and "limit" not in case.injected
        else case.injected
    )
    words = (
        f", `{' '.join(case.words)}`"
        if case.words and not set(case.words) & set(case.injected.replace("`", " ").split())
        else ""
    )
    return f"| {case.check} | {profile} | {limits}{words} | {result} | {code} |"


def main() -> None:
    """Print the rows of the table, from real runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = build_stub(folder / "stub")
        for case in CASES:
            verdict, code = run_case(case, library.parent, Trainbox(folder))
            print(row(case, result_of(verdict, case.check), code), flush=True)


if __name__ == "__main__":
    main()
