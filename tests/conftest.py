import pytest
import torch
from helpers import CONTROL, load


@pytest.fixture(params=CONTROL)
def script(request):
    """Each of the control scripts, as a module."""
    return load(request.param)


@pytest.fixture
def ppo():
    return load("ppo_continuous")


@pytest.fixture
def vaco():
    return load("vaco_continuous")


@pytest.fixture(autouse=True)
def seeded():
    """Random tensors of a test are the same every time."""
    torch.manual_seed(0)
