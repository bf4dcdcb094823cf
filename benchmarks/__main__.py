"""Measure the tables of docs/reference/benchmarks.md with `python -P -m benchmarks [PART ...]`.

Compare only ratios from the same run, because machines and their loads differ.
"""

import importlib

import click

PARTS = (
    "startup",
    "loop",
    "host",
    "data_path",
    "images",
    "checkpoint",
    "shards",
    "digests",
    "deterministic",
    "sweep",
    "short_epochs",
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
        # Each part is imported when it runs, so that imports do not affect earlier parts.
        for line in importlib.import_module(f"benchmarks.{part}").measure():
            click.echo(line)


main()
