"""`python -m trainbox`: the command `trainbox`, for a Python whose commands are not in PATH."""

from trainbox_start import main

main()
