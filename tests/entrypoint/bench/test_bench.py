"""The bench's cases and tables, from values."""

import html
from typing import Any

import markdown as renderer
import pytest

from entrypoint.bench.report import markdown
from entrypoint.bench.tables import (
    BenchCase,
    BenchResult,
    Line,
    Measured,
    Spread,
    cases,
    check_strategies,
    choose_counts,
    doubling,
    lines,
    measurement_order,
    own_defaults,
    rows,
    training_arguments,
)
from trainbox.errors import WrongUse
from trainbox.processes.streams import last_message

ONE, TWO = BenchCase(1, "single", 64, 4), BenchCase(2, "ddp", 64, 4)
FACTS = {"command": "trainbox bench digits", "unit": "GPU", "rounds": 2, "seconds": 10.0}


def measured(speed: float, **others: Any) -> Measured:
    usual: dict[str, Any] = {
        "steps": 10,
        "seconds": 2.0,
        "data_seconds": [0.2],
        "exchange_seconds": None,
        "memory_mib": [100.0],
    }
    usual |= {
        "device": "cuda",
        "batch_size": 64,
        "accumulation": 1,
        "workers": 4,
        "threads": 1,
        "precision": "bf16",
    }
    return Measured(speed, **(usual | {"examples": 1000} | others))


def outcome(*speeds: float, **others: Any) -> BenchResult:
    return BenchResult({number: measured(speed, **others) for number, speed in enumerate(speeds)})


def test_the_counts_are_those_of_gpus_or_of_processes() -> None:
    assert choose_counts(None, None, gpus=4, cpus=8) == (False, (1, 2, 4))
    assert choose_counts((1, 3), None, gpus=3, cpus=8) == (False, (1, 3))
    assert choose_counts((0,), None, gpus=0, cpus=2) == (True, (1, 2))
    assert choose_counts(None, (1, 3), gpus=0, cpus=8) == (True, (1, 3))
    with pytest.raises(WrongUse, match="--gpus 0 is the CPU"):
        choose_counts((0, 1), None, gpus=1, cpus=8)


@pytest.mark.parametrize(("most", "counts"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_default_counts(most: int, counts: tuple[int, ...]) -> None:
    assert doubling(most) == counts


def test_strong_scaling_keeps_the_batch_and_weak_scaling_its_share() -> None:
    table = [
        (line.scaling, line.case, line.base) for line in lines((1, 2), ("dp", "ddp"), (64,), (0,))
    ]
    one = BenchCase(1, "single", 64, 0)
    assert table == [
        ("strong", one, one),
        ("strong", BenchCase(2, "dp", 64, 0), one),
        ("strong", BenchCase(2, "ddp", 64, 0), one),
        ("weak", one, one),
        ("weak", BenchCase(2, "dp", 128, 0), one),
        ("weak", BenchCase(2, "ddp", 128, 0), one),
    ]


def test_without_a_count_of_one_the_smallest_count_is_the_base() -> None:
    _, strong, _, weak = lines((2, 4), ("ddp",), (64,), (None,))
    assert strong.base == BenchCase(2, "ddp", 64, None)
    assert (weak.case, weak.base) == (
        BenchCase(4, "ddp", 256, None),
        BenchCase(2, "ddp", 128, None),
    )


def test_one_count_gives_one_table_without_scaling() -> None:
    assert {line.scaling for line in lines((2,), ("ddp",), (64, 128), (0, 4))} == {""}
    assert len(lines((2,), ("ddp",), (64, 128), (0, 4))) == 4
    assert {line.scaling for line in lines((1, 2), ("ddp",), (None,), (None,))} == {"strong"}


def test_a_case_in_two_tables_is_measured_once() -> None:
    found = cases(lines((1, 2), ("ddp",), (64, 128), (None,)))
    assert found == [
        BenchCase(n, "single" if n == 1 else "ddp", b, None)
        for n, b in [(1, 64), (2, 64), (1, 128), (2, 128), (2, 256)]
    ]


def test_every_second_round_is_in_reverse_order() -> None:
    order = [(0, ONE), (0, TWO), (1, TWO), (1, ONE), (2, ONE), (2, TWO)]
    assert measurement_order([ONE, TWO], 3) == order


FOREVER = "--max-steps 1000000000 --eval-every 1000000000 --checkpoint-minutes 1000000000"
LENGTH = f"{FOREVER} --measure-seconds 2.5 --runs-dir d --run case --nnodes 1"


@pytest.mark.parametrize(
    ("case", "arguments", "cpu", "expected"),
    [
        (TWO, ["mnist", "--set", "width=8"], False,
         f"mnist --set width=8 --gpus 2 --batch-size 64 --workers 4 --strategy ddp {LENGTH}"),
        (BenchCase(1, "single", None, None), [], True,
         f"--device cpu --processes 1 {LENGTH}"),
        (BenchCase(2, "ddp", None, 0), ["digits"], True,
         f"digits --device cpu --processes 2 --workers 0 --strategy ddp {LENGTH}"),
    ],
)  # fmt: skip
def test_the_arguments_of_a_training(
    case: BenchCase, arguments: list[str], cpu: bool, expected: str
) -> None:
    assert training_arguments(case, arguments, cpu, "d", 2.5) == expected.split()


@pytest.mark.parametrize(
    ("given", "cpu", "added"),
    [
        ({}, False, "--accumulation=1 --no-rehearsal"),
        ({}, True, "--accumulation=1 --threads=3 --no-rehearsal"),
        ({"threads": 2}, True, "--accumulation=1 --no-rehearsal"),
        ({"accumulation": 4}, True, "--threads=3 --no-rehearsal"),
        ({"capture": "auto"}, False, "--accumulation=1"),
    ],
)
def test_the_defaults_of_the_bench(given: dict[str, Any], cpu: bool, added: str) -> None:
    usual = {"accumulation": None, "threads": None, "capture": "off"}
    assert own_defaults(usual | given, cpu, 3) == added.split()


@pytest.mark.parametrize(
    ("text", "cpu", "answer"),
    [
        ("ddp", True, ("ddp",)),
        ("dp,ddp,dp", False, ("dp", "ddp")),
        ("ddp,fsdq", False, "unknown strategy 'fsdq': give ddp, dp or both"),
        ("dp", True, "dp splits batches over GPUs, and the CPU is measured: drop dp"),
    ],
)
def test_strategies(text: str, cpu: bool, answer: tuple[str, ...] | str) -> None:
    if isinstance(answer, tuple):
        assert check_strategies(text, cpu) == answer
        return
    with pytest.raises(WrongUse, match=f"--strategies {text}: {answer}"):
        check_strategies(text, cpu)


def test_the_memory_is_the_maximum_over_the_rounds_for_each_gpu() -> None:
    both = BenchResult(
        {0: measured(1.0, memory_mib=[90.0, 85.0]), 1: measured(1.0, memory_mib=[80.0, 95.0])}
    )
    (row,) = rows([Line("", TWO, TWO)], {TWO: both})
    assert row.memory_mib == (90.0, 95.0)
    assert (row.speed_up, row.efficiency) == (None, None)


def test_the_efficiency_is_relative_to_the_base_count() -> None:
    four = BenchCase(4, "ddp", 64, 4)
    (row,) = rows([Line("strong", four, TWO)], {TWO: outcome(100.0), four: outcome(150.0)})
    assert (row.speed_up, row.efficiency) == (Spread(1.5, 1.5, 1.5), 0.75)


@pytest.mark.parametrize(
    "failed", [BenchResult(failure="out"), BenchResult({0: measured(5.0)}, "out"), BenchResult()]
)
def test_a_failed_case_has_no_figures_and_is_not_a_base(failed: BenchResult) -> None:
    table = [Line("strong", ONE, ONE), Line("strong", TWO, ONE)]
    one, two = rows(table, {ONE: failed, TWO: outcome(150.0)})
    assert (one.failure, one.samples_per_second) == (failed.failure or "not measured", None)
    assert two.samples_per_second == Spread(150, 150, 150)
    assert (two.speed_up, two.efficiency) == (None, None)


TABLE = """\
`trainbox bench digits`: H100, torch 2.15.0; bf16, 1 CPU thread(s) a process; 2 rounds of 10 s each, medians.

### Strong scaling: fixed batch of a step; against 1

| GPUs | strategy | batch | a GPU | workers | samples/s | least to most | an epoch, s | waits for data | exchange | memory of each, MiB | speed-up | efficiency |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 1 | single | 64 | 64 | 4 | 2,000 | 1,000 to 3,000 | 0.5 | 10.0% | - | 100 | 1.00 | 100% |
| 2 | ddp | 64 | 32 | 4 | 3,600 | 1,900 to 6,000 | 0.278 | 15.0% | 15.0% | 90 80 | 1.90 | 95% |
| 3 | ddp | 64 | 21 or 22 | 4 | no result | - | - | - | - | - | - | - |

No result:

- 3 GPUs ddp, batch 64, 4 workers: `3 GPUs requested, found 2`"""  # noqa: E501


def test_markdown() -> None:
    """The machine becomes faster during the bench, which does not change the ratios."""
    three = BenchCase(3, "ddp", 64, 4)
    outcomes = {
        ONE: outcome(1000.0, 2000.0, 3000.0),
        TWO: outcome(
            *(1900.0, 3600.0, 6000.0),
            data_seconds=[0.2, 0.4],
            exchange_seconds=[0.5, 0.1],
            memory_mib=[90.0, 80.0],
        ),
        three: BenchResult(failure="3 GPUs requested, found 2", exit_code=3),
    }
    table = [Line("strong", case, ONE) for case in (ONE, TWO, three)]
    facts = FACTS | {"hardware": "H100", "torch": "2.15.0"}
    assert markdown(rows(table, outcomes), facts) == TABLE


def test_texts_of_a_user_are_not_markup() -> None:
    bad = "a\n\n# <img src=x onerror=alert(1)>|`[a](b)"
    facts = FACTS | {"command": f"trainbox bench {bad}", "hardware": bad, "torch": "2.15.0"}
    text = markdown(rows([Line("", ONE, ONE)], {ONE: BenchResult(failure=bad)}), facts)
    page = renderer.markdown(text, extensions=["tables"])
    assert "<img" not in page and "<h1" not in page and "<a " not in page
    shown = html.unescape(page).replace("<code>", "").replace("</code>", "")
    assert shown.count("a # <img src=x onerror=alert(1)>|`[a](b)") == 3


def test_one_count_has_no_speed_up_and_reports_idle_workers() -> None:
    (row,) = rows([Line("", ONE, ONE)], {ONE: outcome(1000.0, accumulation=2, workers=0)})
    text = markdown([row], FACTS | {"unit": "process"})
    assert "speed-up" not in text
    assert "| 1 | single | 64 | 32 x 2 | 0 | 1,000 |" in text
    assert text.endswith(
        "The data is in memory and is loaded without workers: `--workers` has no effect."
    )


def test_the_last_message_of_a_training() -> None:
    output = "trainbox: a\ntrainbox: the GPU's memory is used up\nlater\n"
    assert last_message(output) == "the GPU's memory is used up"
    assert last_message("Traceback\nValueError: x\n\n") is last_message("") is None
