"""Small films of a blob in noise, for the task `video`.

The classes differ only by motion: a single frame does not show the class.
"""

from pathlib import Path

import numpy
from numpy.typing import NDArray

SIDE, FRAMES, CLIPS = 32, 9, 4  # a film has CLIPS clips of FRAMES frames
FIELDS = {"size": SIDE, "frames": FRAMES, "width": 8}

# The number of films of each class; one class is rare.
COUNTS = {"horizontal": 32, "pulse": 10, "rest": 54, "vertical": 18}


def film(kind: str, seed: int, frames: int = FRAMES * CLIPS) -> NDArray[numpy.uint8]:
    """Return a film (frames, SIDE, SIDE) of a blob that rests, moves or changes its size.

    A mirrored film has the same class. A blob that leaves at one edge enters at the opposite edge.
    """
    draw = numpy.random.default_rng(seed)
    t, across = numpy.arange(frames)[:, None, None], numpy.arange(SIDE)
    way = draw.choice([-1, 1]) * draw.uniform(1.5, 2.5) * t
    x, y = draw.uniform(0, SIDE, 2)
    x_T = x + way * (kind == "horizontal")
    y_T = y + way * (kind == "vertical")
    radius_T = draw.uniform(2, 6) + 0 * t
    if kind == "pulse":
        radius_T = 4 + 2 * numpy.sin(draw.uniform(0, 6.28) + 6.28 * t / draw.uniform(6, 10))
    dx, dy = (
        (place - centre + SIDE / 2) % SIDE - SIDE / 2
        for place, centre in ((across, x_T), (across[:, None], y_T))
    )
    light = draw.uniform(80, 150) * numpy.exp(-((dx**2 + dy**2) / radius_T**2) / 2)
    return numpy.clip(60 + light + draw.normal(0, 10, (frames, SIDE, SIDE)), 0, 255).astype(
        numpy.uint8
    )


def write_films(folder: Path, counts: dict[str, int] = COUNTS) -> None:
    """Write `counts` films of each class as `folder/CLASS/*.npy`."""
    for label, (kind, count) in enumerate(counts.items()):
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            numpy.save(folder / kind / f"{kind}-{number:02}.npy", film(kind, 1000 * label + number))


def encode(path: Path, frames_THW: NDArray[numpy.uint8], codec: str = "libx264") -> None:
    """Write the frames as a video; the suffix of `path` sets the container format."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30)
        stream.height, stream.width = frames_THW.shape[1:]
        stream.pix_fmt, stream.bit_rate = "yuv420p", 8_000_000
        for frame_HW in frames_THW:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_HW, format="gray")))
        container.mux(stream.encode())
