"""How do numbers get to the device and back without the host waiting where it need not?"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. From pinned memory the copy runs beside what the host does next."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> NDArray[np.float32]:
    """The numbers as float32 on the host, of a copy into pinned memory; waits for them."""
    if tensor.device.type != "cuda":
        return tensor.float().numpy()
    arrived = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True)
    arrived.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return arrived.numpy()
