"""The texts and the model of the task `text`."""
