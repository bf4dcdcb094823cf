"""Measure what docs/benchmarks.md claims: `python -P -m benchmarks [PART ...]`.

Only the ratios of one run compare.
"""

import importlib

import click

PARTS = (
    "startup",
    "loop",
    "data_path",
    "checkpoint",
    "shards",
    "digests",
    "deterministic",
    "sweep",
)


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
def main(parts: tuple[str, ...]) -> None:
    """Print one Markdown table for each of PARTS (default: all).

    \b
    Examples:
      python -m benchmarks
      python -m benchmarks loop checkpoint
    """
    for part in parts or PARTS:
        click.echo(f"\n## {part.replace('_', ' ')}\n")
        # A process's threads and allocator keep the marks of the part before, so each part is
        # imported when it runs.
        for line in importlib.import_module(f"benchmarks.{part}").measure():
            click.echo(line)


main()
