import sys

if not sys.flags.safe_path:
    # `-m` puts the current folder first, where a user's click.py would replace the library.
    del sys.path[0]

from entrypoint.start import main

main()
