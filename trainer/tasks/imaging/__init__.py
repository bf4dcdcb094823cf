"""The parts of the task `images`: its folder, decoding, damaged files and models."""
