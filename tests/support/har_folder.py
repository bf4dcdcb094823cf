"""A small folder in UCI HAR's layout, with made-up subjects who walk, climb, sit, stand and lie.

Each subject moves differently.
"""

from pathlib import Path

import numpy
from numpy.typing import NDArray

CHANNELS = [
    f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
]
_WINDOWS = 10  # for each subject and activity

_Numbers = NDArray[numpy.float64]

# Shape suffixes: N windows, C channels, T readings, F features.


def write_folder(folder: Path) -> None:
    """Write `UCI HAR Dataset` into `folder`.

    The classes are similar on purpose:

    - Up and down stairs are mirrored in time, with the same spectrum and the same values.
    - Sitting and standing sway in small circles in opposite directions, which only the gyroscope
      measures.
    - Lying differs by gravity, which only the total acceleration contains.
    """
    random = numpy.random.default_rng(0)
    for part, numbers in (("train", range(1, 9)), ("test", range(9, 13))):
        signals, labels, subjects = [], [], []
        for number in numbers:
            pace, force, tilt = (
                random.uniform(0.85, 1.15),
                random.uniform(0.7, 1.4),
                random.normal(0, 0.1, (3, 1)),
            )
            for label in range(1, 7):
                signals += [_window(random, label, pace, force, tilt) for _ in range(_WINDOWS)]
                labels += [label] * _WINDOWS
                subjects += [number] * _WINDOWS
        _write_part(folder / "UCI HAR Dataset", part, numpy.stack(signals), labels, subjects)


def _write_part(
    folder: Path, part: str, signals_NCT: _Numbers, labels: list[int], subjects: list[int]
) -> None:
    place = folder / part
    (place / "Inertial Signals").mkdir(parents=True, exist_ok=True)
    for channel, name in enumerate(CHANNELS):
        _write(place / "Inertial Signals" / f"{name}_{part}.txt", signals_NCT[:, channel])
    _write(place / f"X_{part}.txt", _features(signals_NCT))
    (place / f"y_{part}.txt").write_text("".join(f"{label}\n" for label in labels))
    (place / f"subject_{part}.txt").write_text("".join(f"{subject}\n" for subject in subjects))


def _write(path: Path, numbers: _Numbers) -> None:
    """Write columns of 16 characters with exponents of three digits, as UCI HAR has them."""
    lines = ("".join(f"{number:15.7e}" for number in row) for row in numbers)
    path.write_text(
        "".join(
            f"{line.replace('e-', ' e-0').replace('e+', ' e+0').replace(' e', 'e')}\n"
            for line in lines
        )
    )


def _window(
    random: numpy.random.Generator, label: int, pace: float, force: float, tilt_C1: _Numbers
) -> _Numbers:
    """Return (9, 128): body acceleration, rotation and total acceleration, at 50 Hz."""
    seconds = numpy.arange(128) / 50
    turns = 2 * numpy.pi * (1.7 * pace * seconds + random.uniform())
    gravity_C1 = tilt_C1 + numpy.array(
        [[0.1], [0.8], [0.6]] if label == 6 else [[0.95], [-0.15], [0.1]]
    )
    body, gyro = numpy.zeros((3, 128)), numpy.zeros((3, 128))
    if label <= 3:
        saw = numpy.sum([numpy.sin(k * turns) / k for k in range(1, 5)], 0)
        shape = numpy.cos(turns) + 0.4 * numpy.cos(2 * turns) if label == 1 else saw
        body = (
            0.4
            * force
            * numpy.stack([shape, 0.5 * numpy.sin(turns / 2), 0.5 * numpy.roll(shape, 8)])
        )
        gyro = 0.6 * force * numpy.stack([numpy.sin(turns), numpy.cos(turns), numpy.sin(turns / 2)])
    else:
        sway = 2 * numpy.pi * (1.7 * pace * seconds * (1 if label == 4 else -1) + random.uniform())
        gyro[:2] = 0.22 * force * numpy.stack([numpy.sin(sway), numpy.cos(sway)])
    if label == 3:
        body, gyro = body[:, ::-1].copy(), gyro[:, ::-1].copy()
    drift_C1 = random.normal(0, 0.1, (3, 1))
    body += drift_C1 * (seconds - 1.28) + random.normal(0, 0.12, body.shape)
    gyro += random.normal(0, 0.08, gyro.shape)
    return numpy.concatenate([body, gyro, body + gravity_C1])


def _features(signals_NCT: _Numbers) -> _Numbers:
    """Return (N, 561) features.

    Each channel gives its mean, its deviation, the skewness of 3 slopes and 50 values of its
    spectrum. The gyroscope also gives 22 rotations.
    """
    of_channels = [signals_NCT.mean(2), signals_NCT.std(2)]
    for lag in (3, 6, 9):
        slopes_NCT = signals_NCT[:, :, lag:] - signals_NCT[:, :, :-lag]
        of_channels.append(numpy.mean(slopes_NCT**3, 2) / slopes_NCT.std(2) ** 3)
    spectrum_NCF = numpy.log(numpy.abs(numpy.fft.rfft(signals_NCT))[:, :, 1:51])
    gyro_NCT = signals_NCT[:, 3:6]
    length_N1 = (gyro_NCT**2).sum(1).mean(1)[:, None]
    turnings = [
        numpy.cross(gyro_NCT[:, :, :-lag], gyro_NCT[:, :, lag:], axis=1).mean(2) / length_N1
        for lag in range(1, 23)
    ]
    return numpy.concatenate(
        [*of_channels, spectrum_NCF.reshape(len(signals_NCT), -1), *turnings], 1
    )
