"""On which device do these tests run? On CUDA, and nowhere else unless one asks.

`--device cpu` runs them without the kernel, to find mistakes before a device is at hand.
"""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", help="cuda, or cpu to try the tests themselves")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device's name; fails where there is none."""
    asked = str(request.config.getoption("--device", default="cuda"))
    if asked == "cuda" and not torch.cuda.is_available():
        pytest.fail(f"no CUDA device is visible to torch {torch.__version__}", pytrace=False)
    return asked


@pytest.fixture
def cuda() -> torch.device:
    """The device itself, for what runs on CUDA alone; fails where there is none."""
    if not torch.cuda.is_available():
        pytest.fail(f"no CUDA device is visible to torch {torch.__version__}", pytrace=False)
    return torch.device("cuda")
