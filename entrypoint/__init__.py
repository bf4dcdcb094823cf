"""The launcher, which decides on GPUs, strategy and processes. It never imports torch."""
