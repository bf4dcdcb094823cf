from tests.trainer.here import here  # noqa: F401 - a fixture
