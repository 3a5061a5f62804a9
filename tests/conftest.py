"""Settings that make every test deterministic, offline and considerate of a two-core machine."""

import os
import tempfile

# Before numpy, torch or openvino start their thread pools. One thread each: pytest-xdist provides the parallelism, and
# a sum that is split among a varying number of threads is not the same sum.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a test that wants the network is a fault
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)
_CACHE = tempfile.TemporaryDirectory(prefix="anechain-test-cache-")  # what is kept between starts is this run's own
os.environ["XDG_CACHE_HOME"] = _CACHE.name

import random  # noqa: E402
import sys  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("anechain", derandomize=True, deadline=None, database=None, print_blob=False)
settings.load_profile("anechain")


def pytest_report_header() -> str:
    return "engines: reference and cpu for real; coreml through a double, which proves the protocol, not Core ML"


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The global generators start each test from the same point, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
