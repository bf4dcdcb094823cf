import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, put there by -m: a click.py of a user's is not ours

from entrypoint.cli.commands import main

main()
