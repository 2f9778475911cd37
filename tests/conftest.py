"""Set up once a process: one thread, since the tests are many and small and run side by side."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("coresieve", deadline=None, derandomize=True)
settings.load_profile("coresieve")
