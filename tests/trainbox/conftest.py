from tests.support.here import here  # noqa: F401 - a fixture
