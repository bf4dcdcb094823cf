"""Decides: which GPUs, which strategy, how many processes. Never imports torch."""
