"""One thread: small products are faster that way, and sums have one order."""

import torch

torch.set_num_threads(1)
