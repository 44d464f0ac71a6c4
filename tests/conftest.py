"""One thread per process: tests share two cores with the processes they start."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)

# Wall-clock deadlines fail on a busy machine; derandomized, so that a failure is the same for everybody.
settings.register_profile("midflight", deadline=None, derandomize=True)
settings.load_profile("midflight")
