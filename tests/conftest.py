"""Settings for the whole suite: nothing is fetched while testing, tiny models need no crowd of threads, and luck is the same each time."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)  # the models of most tests are tiny; threads would only get in their way


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Numbers that a test draws from torch are the same in every run."""
    torch.manual_seed(0)
