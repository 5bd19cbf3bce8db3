"""Settings for the whole suite: nothing is fetched while testing, and tiny models need no crowd of threads."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)  # the models of most tests are tiny; threads would only get in their way
