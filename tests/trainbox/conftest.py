from tests.support.here import here  # noqa: F401 - a fixture
from tests.support.storages import faulty  # noqa: F401 - a fixture
