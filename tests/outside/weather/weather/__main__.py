"""Write random weights of the model: ``python -m weather FILE.safetensors``."""

import sys
from pathlib import Path

import torch

from weather.family import FAMILY, MODEL

FAMILY.write_random(Path(sys.argv[1]), MODEL, seed=0, format=None, dtype=torch.float32, device="cpu")
