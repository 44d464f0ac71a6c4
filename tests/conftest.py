"""One thread per process: tests share two cores with the processes they start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from midflight.testing.redis_server import RedisServer

torch.set_num_threads(1)

# Wall-clock deadlines fail on a busy machine; derandomized, so that a failure is the same for everybody.
settings.register_profile("midflight", deadline=None, derandomize=True)
settings.load_profile("midflight")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server
