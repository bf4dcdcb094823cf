"""The suggestions of the bench and the cases that it tries next, from values."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from entrypoint.bench.suggest import further, pays, suggestions
from entrypoint.bench.tables import BenchCase, BenchResult, Measured

CPUS = 8


def measured(case: BenchCase, speed: float, **others: Any) -> Measured:
    usual: dict[str, Any] = {
        "steps": 10,
        "seconds": 2.0,
        "data_seconds": [0.2],
        "exchange_seconds": None,
        "memory_mib": [9.0],
    }
    usual |= {
        "device": "cuda",
        "accumulation": 1,
        "threads": 1,
        "precision": "bf16",
        "examples": 1000,
    }
    usual |= {"batch_size": case.batch_size or 32, "workers": case.workers or 0}
    return Measured(speed, **(usual | others))


def outcome(case: BenchCase, *speeds: float, **others: Any) -> BenchResult:
    return BenchResult(
        {number: measured(case, speed, **others) for number, speed in enumerate(speeds)}
    )


def by_batch(**speeds: float) -> dict[BenchCase, BenchResult]:
    """Return cases of one GPU, by `b<batch>w<workers>`."""
    named = {
        BenchCase(1, "single", *map(int, name.lstrip("b").split("w"))): speed
        for name, speed in speeds.items()
    }
    return {case: outcome(case, speed) for case, speed in named.items()}


ONE, TWO = BenchCase(1, "single", 64, 4), BenchCase(2, "ddp", 64, 4)


@pytest.mark.parametrize(
    ("speeds", "yes"),
    [
        ((105.0, 105.0), True),
        ((104.0, 104.0), False),
        ((150.0, 99.0), False),
        ((101.0, 120.0), True),
        ((), False),
    ],
)
def test_a_case_pays_if_it_is_faster_in_every_round(speeds: tuple[float, ...], yes: bool) -> None:
    assert pays(outcome(ONE, *speeds), outcome(ONE, 100.0, 100.0)) is yes


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({"b64w0": 100, "b128w0": 150, "b256w0": 152}, "--batch-size 128 --workers 0"),
        # compared with the last case that paid
        ({"b64w0": 100, "b128w0": 103, "b256w0": 106}, "--batch-size 256 --workers 0"),
        ({"b64w0": 100, "b64w4": 200, "b64w8": 204}, "--batch-size 64 --workers 4"),
        ({"b64w0": 100, "b64w4": 90, "b128w0": 110, "b128w4": 160}, "--batch-size 128 --workers 4"),
        ({"b64w0": 100, "b128w0": 60}, "--batch-size 64 --workers 0"),
    ],
)
def test_the_best_case_is_the_largest_that_pays(speeds: dict[str, float], chosen: str) -> None:
    (advice,) = suggestions(by_batch(**speeds), "GPU", 1, CPUS)
    assert advice.startswith(f"1 GPU single: {chosen}; ")


def test_reasons() -> None:
    outcomes = by_batch(b64w0=100, b128w0=150, b64w4=100, b128w4=151)
    outcomes[BenchCase(1, "single", 256, 0)] = BenchResult(
        failure="the GPU's memory is used up", exit_code=5
    )
    assert suggestions(outcomes, "GPU", 2, CPUS) == [
        "1 GPU single: --batch-size 128 --workers 0; --batch-size 256 has no result (the "
        "GPU's memory is used up); "
        "--batch-size 64 gives 0.67x (0.67 to 0.67) of its samples/s; --workers 4 gives "
        "1.01x (1.01 to 1.01) of its samples/s; "
        "it waits for data 10% of the time"
    ]


@pytest.mark.parametrize(
    ("case", "others", "text"),
    [
        (
            BenchCase(1, "single", 64, 2),
            {},
            "a larger batch was not tried; it waits for data 10% "
            "of the time, "
            "and more workers were not tried",
        ),  # a signal arrived first
        (
            BenchCase(1, "single", 64, 2),
            {"examples": 127},
            "twice its batch is more than the 127 examples; it waits for data 10%",
        ),
        (
            BenchCase(1, "single", 64, 2),
            {"data_seconds": [0.09]},
            "it waits for data 4% of the time, and more workers cannot pay",
        ),
        (
            BenchCase(1, "single", 64, None),
            {},
            "and the data is in memory, which needs no workers",
        ),
        # With DataParallel, one process loads the data of all GPUs.
        (BenchCase(4, "dp", 64, 4), {}, ", and more workers were not tried"),
        (BenchCase(4, "dp", 64, 5), {}, ", and twice the workers are more than the 8 CPUs"),
        (BenchCase(1, "single", 64, 4), {}, ", and more workers were not tried"),
        (BenchCase(1, "single", 500, 2), {}, "a larger batch was not tried"),
        (
            BenchCase(1, "single", 64, 2),
            {"workers": 0},
            "and the data is in memory, which needs no workers",
        ),
        (
            BenchCase(2, "ddp", 64, 3),
            {},
            "it waits for data 10% of the time, and twice the workers are more than the 8 CPUs",
        ),
    ],
)
def test_the_reason_not_to_try_a_larger_value(
    case: BenchCase, others: dict[str, Any], text: str
) -> None:
    assert text in suggestions({case: outcome(case, 100.0, **others)}, "GPU", 1, CPUS)[0]


@pytest.mark.parametrize(
    ("speed", "advice"),
    [
        (
            190.0,
            "2 GPUs ddp pays: 1.90x (1.90 to 1.90) of 1, each at its best settings, an "
            "efficiency of 95%",
        ),
        (
            110.0,
            "2 GPUs ddp pays: 1.10x (1.10 to 1.10) of 1, each at its best settings, an "
            "efficiency of 55%",
        ),
        (
            90.0,
            "2 GPUs ddp does not pay: use 1: 0.90x (0.90 to 0.90) of 1, each at its best "
            "settings, an efficiency of 45%",
        ),
    ],
)
def test_the_advice_on_more_gpus(speed: float, advice: str) -> None:
    assert (
        suggestions({ONE: outcome(ONE, 100.0), TWO: outcome(TWO, speed)}, "GPU", 1, CPUS)[-1]
        == advice
    )


def test_a_group_without_a_result_has_no_suggestion() -> None:
    failed = {ONE: BenchResult(failure="out of memory")}
    assert suggestions(failed, "GPU", 1, CPUS) == ["1 GPU single: no case has a result"]
    assert suggestions({ONE: BenchResult()}, "GPU", 1, CPUS) == []
    assert further(failed, 1, CPUS) == further({ONE: BenchResult()}, 1, CPUS) == []


def searched(
    given: list[BenchCase], measure: Callable[[BenchCase], Measured | str], rounds: int = 2
) -> tuple[dict[BenchCase, BenchResult], list[list[BenchCase]]]:
    """Measure `given`, then the further cases until there are no more.

    `measure` returns a case's speed on the machine, or a failure as text.
    """
    outcomes: dict[BenchCase, BenchResult] = {}
    cases, history = given, []
    while cases:
        history.append(cases)
        first = (len(history) - 1) * rounds
        for case in cases:
            result = measure(case)
            if isinstance(result, str):
                outcomes[case] = BenchResult(failure=result)
            else:
                outcomes.setdefault(case, BenchResult()).rounds.update(
                    dict.fromkeys(range(first, first + rounds), result)
                )
        cases = further(outcomes, rounds, CPUS)
    return outcomes, history


def of_one(batch_size: int | None, workers: int | None) -> BenchCase:
    return BenchCase(1, "single", batch_size, workers)


def test_the_search_doubles_the_batch_while_this_pays() -> None:
    speeds = {32: 100.0, 64: 180.0, 128: 300.0, 256: 310.0}
    outcomes, history = searched(
        [of_one(None, None)],
        lambda case: measured(case, speeds[case.batch_size or 32], data_seconds=[0.0]),
    )
    assert history == [
        [of_one(None, None)],
        [of_one(None, None), of_one(64, None)],
        [of_one(64, None), of_one(128, None)],
        [of_one(128, None), of_one(256, None)],
    ]
    assert suggestions(outcomes, "GPU", 2, CPUS) == [
        "1 GPU single: --batch-size 128; --batch-size 256 gives 1.03x (1.03 to 1.03) of "
        "its samples/s; "
        "--batch-size 64 gives 0.60x (0.60 to 0.60) of its samples/s; it waits for data 0% "
        "of the time, and more workers "
        "cannot pay"
    ]


def test_the_search_ends_at_a_batch_that_does_not_fit() -> None:
    def machine(case: BenchCase) -> Measured | str:
        return "too large" if case.batch_size == 256 else measured(case, case.batch_size or 0)

    _, history = searched([of_one(64, 0)], machine)
    assert history[-1] == [of_one(128, 0), of_one(256, 0), of_one(128, 1)]
    assert len(history) == 3


def test_the_search_ends_at_the_size_of_the_dataset() -> None:
    _, history = searched(
        [of_one(64, None)],
        lambda case: measured(case, case.batch_size or 0, data_seconds=[0], examples=300),
    )
    assert history[-1] == [of_one(128, None), of_one(256, None)]


def test_the_search_doubles_the_workers_while_data_is_the_bottleneck() -> None:
    """Each worker adds the same speed up to three workers. A larger batch adds none."""

    def machine(case: BenchCase) -> Measured:
        workers = case.workers or 0
        return measured(
            case, 100.0 * min(workers + 1, 4), data_seconds=[2.0 * (1 - min(workers + 1, 4) / 4)]
        )

    outcomes, history = searched([of_one(64, 0)], machine)
    assert history == [
        [of_one(64, 0)],
        [of_one(64, 0), of_one(128, 0), of_one(64, 1)],
        [of_one(64, 1), of_one(128, 1), of_one(64, 2)],
        [of_one(64, 2), of_one(128, 2), of_one(64, 4)],
        [of_one(64, 4), of_one(128, 4)],  # the case no longer waits for data
    ]
    (line,) = suggestions(outcomes, "GPU", 2, CPUS)
    assert line.startswith(
        "1 GPU single: --batch-size 64 --workers 4; --batch-size 128 gives 1.00x"
    )


def test_the_search_ends_at_the_number_of_cpus() -> None:
    case = BenchCase(2, "ddp", 64, 4)
    outcomes, history = searched([case], lambda case: measured(case, 10.0, data_seconds=[1.5]))
    assert history == [[case], [case, BenchCase(2, "ddp", 128, 4)]]
    assert (
        "and twice the workers are more than the 8 CPUs" in suggestions(outcomes, "GPU", 2, CPUS)[0]
    )


def test_each_count_is_searched_alone_and_the_best_cases_are_compared_last() -> None:
    speeds: Mapping[int, dict[int, float]] = {
        1: {64: 100.0, 128: 101.0},
        2: {64: 120.0, 128: 160.0, 256: 200.0, 512: 190.0},
    }
    given = [BenchCase(1, "single", 64, None), BenchCase(2, "ddp", 64, None)]
    outcomes, history = searched(
        given,
        lambda case: measured(case, speeds[case.count][case.batch_size or 0], data_seconds=[0]),
    )
    assert history[-1] == [
        BenchCase(1, "single", 64, None),
        BenchCase(2, "ddp", 256, None),
        BenchCase(2, "ddp", 512, None),
    ]
    lines = suggestions(outcomes, "GPU", 2, CPUS)
    assert (
        lines[-1] == "2 GPUs ddp pays: 2.00x (2.00 to 2.00) of 1, each at its best settings, an "
        "efficiency of 100%"
    )


@pytest.mark.parametrize("batch_size", [None, 64])
@pytest.mark.parametrize("workers", [None, 1, 4])
def test_the_search_raises_batch_and_workers_together(
    batch_size: int | None, workers: int | None
) -> None:
    """If all figures are exact, no neighbour of the suggested case pays."""

    def machine(case: BenchCase) -> Measured | str:
        batch, loaders = case.batch_size or 32, case.workers or 2
        if batch > 512:
            return "too large"
        loaded, computed = 300.0 * loaders, 1e4 * batch / (batch + 200)
        return measured(
            case,
            min(loaded, computed),
            workers=loaders,
            data_seconds=[2.0 * max(0.0, 1 - loaded / computed)],
        )

    outcomes, _ = searched([of_one(batch_size, workers)], machine)
    (line,) = suggestions(outcomes, "GPU", 2, CPUS)
    assert line.startswith("1 GPU single: ")
    ratios = [float(ratio) for ratio in re.findall(r"gives ([0-9.]+)x", line)]
    assert ratios
    assert max(ratios) < 1.05
    assert " --workers 8;" in line


def test_a_best_case_that_fails_later_is_replaced() -> None:
    small, best, more = of_one(64, None), of_one(128, None), of_one(256, None)
    outcomes = {
        small: outcome(small, 100.0),
        best: BenchResult({0: measured(best, 200.0), 1: measured(best, 200.0)}, failure="lost"),
        more: BenchResult({1: measured(more, 400.0)}),
    }
    (line,) = suggestions(outcomes, "GPU", 1, CPUS)
    assert line.startswith("1 GPU single: --batch-size 256; --batch-size 128 has no result (lost)")


def test_a_signal_in_a_later_round_keeps_the_earlier_best_case() -> None:
    small, best, more = of_one(64, None), of_one(128, None), of_one(256, None)
    outcomes = {
        small: outcome(small, 100.0),
        best: outcome(best, 200.0),
        more: BenchResult({1: measured(more, 400.0)}),
    }
    (line,) = suggestions(outcomes, "GPU", 1, CPUS)
    assert line.startswith(
        "1 GPU single: --batch-size 128; --batch-size 256 was not measured in the same round; "
    )


def test_all_new_cases_of_the_last_rounds_failed() -> None:
    small, best, more = of_one(64, None), of_one(128, None), of_one(256, None)
    outcomes = {
        small: outcome(small, 100.0),
        best: BenchResult({0: measured(best, 200.0)}, "lost"),
        more: BenchResult(failure="lost"),
    }
    assert suggestions(outcomes, "GPU", 1, CPUS)[0].startswith(
        "1 GPU single: --batch-size 64; --batch-size 128 has no result (lost)"
    )


def test_a_case_that_fails_in_a_later_round_is_not_chosen() -> None:
    best, fails, more = of_one(128, 1), of_one(256, 1), of_one(128, 2)
    outcomes = {
        of_one(64, 1): outcome(of_one(64, 1), 100.0, 100.0),
        best: outcome(best, 200.0, 200.0, 200.0, 200.0),
        fails: BenchResult({2: measured(fails, 900.0)}, failure="lost"),
        more: BenchResult({2: measured(more, 300.0), 3: measured(more, 300.0)}),
    }
    assert suggestions(outcomes, "GPU", 2, CPUS)[0].startswith(
        "1 GPU single: --batch-size 128 --workers 2; "
    )
