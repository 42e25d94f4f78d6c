"""Write random weights of the model: ``python -m weather FILE.safetensors``."""

import sys

import torch
from safetensors.torch import save_file

from seko_export.checkpoints.random import random_weight
from weather.family import MODEL, shapes, spread

save_file(
    {
        name: random_weight(name, shape, seed=0, dtype=torch.float32, spread=spread)
        for name, shape in shapes(MODEL).items()
    },
    sys.argv[1],
)
