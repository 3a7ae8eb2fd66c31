"""Settings that must stand before a test imports torch, numpy or starts a process."""

import os

# One intra-op thread, here and in every process a test starts: the order of a sum, and so its
# bits, depends on the number of threads, and several ranks share few cores. As an environment
# variable it costs the tests of the pure layers no import of torch.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis

# No time limit per example and the same examples in every run, by hand and in CI.
hypothesis.settings.register_profile("stretto", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("stretto")
