"""What every training run has: optimisers, EMA, learning rate, loss log, and its state on disk.

State is one safetensors file, never pickle. The learning rate warms up, then falls to a twentieth until the last step.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STATE = "state.safetensors"  # in a run's folder
LOSSES = "losses.jsonl"
WARMUP_STEPS = 100
SAVE_EVERY = 60.0  # seconds
REHEARSED_STEPS = 3
BETAS, WEIGHT_DECAY = (0.9, 0.98), 0.01
ADAMW, MUON = "adamw", "muon"
_BLOCK_MATRIX = re.compile(r"(.*\.)?blocks\.[0-9]+\..*weight")

Groups = Mapping[str, Mapping[str, Tensor]]  # tensors by group and name


@dataclass(frozen=True)
class Options:
    """How all stages run.

    Parameters
    ----------
    device : str
        Where they train.
    rehearse : bool
        Tiny sizes and few steps, which try every stage on a CPU.
    """

    device: str
    rehearse: bool = False

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled, which pays from a minute on."""
        return self.device.startswith("cuda") and not self.rehearse

    def steps(self, whole: int) -> int:
        """Return how many of a stage's steps are taken."""
        return REHEARSED_STEPS if self.rehearse else whole


class Run:
    """A training run in a folder: parameters, optimisers, EMA. It goes on where the folder stands.

    Parameters
    ----------
    folder : Path
        Of the run.
    module : nn.Module
        Whose parameters are trained, in float32; shared ones count once.
    learning_rate, ema_decay : float
        Peak rate; share that EMA keeps of itself a step.
    steps : int
        Of the run in all, over every process that goes on with it; the learning rate follows them.
    also : nn.Module or None
        A second network that is trained beside the first (the fake score), saved but without EMA or moments.
    optimizer : str
        See `make_optimizers`.
    """

    def __init__(
        self, folder: Path, module: nn.Module, learning_rate: float, ema_decay: float, steps: int, *,
        also: nn.Module | None = None, optimizer: str = ADAMW,
    ) -> None:  # fmt: skip
        self.folder, self.module, self.also = folder, module, also
        self.learning_rate, self.ema_decay, self.last_step = learning_rate, ema_decay, steps
        self.parameters = dict(module.named_parameters())
        self.ema = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizers = make_optimizers(optimizer, self.parameters, learning_rate)
        self.step, self.seconds = 0, 0.0
        self.facts: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / STATE).exists():
            self._load()

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.step >= self.last_step

    def steps(self) -> Iterator[int]:
        """Yield step numbers until the run is finished; saves on the way and at the end."""
        mark = saved = time.monotonic()
        while not self.finished:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.rate()
            yield self.step
            self.step += 1
            now = time.monotonic()
            self.seconds, mark = self.seconds + now - mark, now
            if now - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()
        self.save()

    def share(self) -> float:
        """Return how much of the run is done, 0..1."""
        return min(1.0, self.step / self.last_step)

    def rate(self) -> float:
        """Return the learning rate now: warm-up, then a cosine down to a twentieth."""
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.share()))
        return self.learning_rate * cosine * min(1.0, (self.step + 1) / WARMUP_STEPS)

    def descend(self, loss: Tensor) -> None:
        """Take one step down the loss; EMA follows."""
        descend(loss, self.optimizers, self.parameters.values())
        decay = min(self.ema_decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.parameters.values()), 1 - decay)

    def log(self, every: int = 20, turns: int = 1, **numbers: Tensor | float) -> None:
        """Append to the loss log, ``turns`` lines each ``every * turns`` steps: reading a loss waits for the device."""
        if self.step // turns % every:
            return
        line = {"step": self.step, "seconds": round(self.seconds, 2), "rate": self.rate()}
        line |= {name: float(torch.as_tensor(value).detach()) for name, value in numbers.items()}
        if not all(math.isfinite(value) for value in line.values()):
            raise FloatingPointError(
                f"a loss is not finite: {line}; lower the learning rate, go on from {self.folder}"
            )
        with (self.folder / LOSSES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def report(self) -> dict[str, Any]:
        """Return what a stage says of its run."""
        return {"step": self.step, "seconds": round(self.seconds, 1)}

    def save(self) -> None:
        """Write the whole state."""
        groups: dict[str, Mapping[str, Tensor]] = {"weights": self.parameters, "ema": self.ema}
        if self.also is not None:
            groups["fake"] = dict(self.also.named_parameters())
        for number, optimizer in enumerate(self.optimizers):
            groups[f"optimizer{number}"] = {
                f"{index}.{name}": tensor
                for index, moments in optimizer.state_dict()["state"].items()
                for name, tensor in moments.items()
            }
        self.facts |= {"step": self.step, "seconds": self.seconds}
        write_state(self.folder, groups, self.facts)

    def _load(self) -> None:
        groups, self.facts = read_state(self.folder)
        self.step, self.seconds = self.facts["step"], self.facts["seconds"]
        fill(self.ema, groups["ema"])
        fill(self.parameters, groups["weights"])
        if self.also is not None:
            fill(dict(self.also.named_parameters()), groups["fake"])
        for number, optimizer in enumerate(self.optimizers):
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            state: dict[int, dict[str, Tensor]] = defaultdict(dict)
            for key, tensor in groups[f"optimizer{number}"].items():
                index, name = key.split(".")
                p = trained[int(index)]
                # In the memory order of the parameter, which the fused kernel wants.
                state[int(index)][name] = (
                    torch.empty_like(p).copy_(tensor) if tensor.shape == p.shape else tensor
                )
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def make_optimizers(
    kind: str, parameters: Mapping[str, Tensor], learning_rate: float
) -> list[torch.optim.Optimizer]:
    """Return what trains named parameters.

    Parameters
    ----------
    kind : str
        ``adamw``, or ``muon``: the matrices of ``blocks.N`` by Muon, all else by AdamW.
    parameters : mapping of str to Tensor
        By name.
    learning_rate : float
        Peak rate of both: Muon's update is scaled to the RMS of AdamW's.
    """
    matrices = [
        name for name, p in parameters.items() if kind == MUON and p.ndim == 2 and _BLOCK_MATRIX.fullmatch(name)
    ]  # fmt: skip
    rest = [p for name, p in parameters.items() if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=rest[0].device.type == "cuda"
        )
    ]
    if matrices:
        mine = [parameters[name] for name in matrices]
        optimizers.append(torch.optim.Muon(mine, learning_rate, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def descend(loss: Tensor, optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> None:
    """Take one step down a loss, its gradient clipped to norm 1."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(list(parameters), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def fill(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy tensors by name.

    Raises
    ------
    KeyError
        If the names differ.
    """
    if set(into) != set(values):
        odd = sorted(set(into) ^ set(values))
        raise KeyError(f"state and model differ in {len(odd)} names, first {odd[:4]}; was it another config?")
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(values[name])


def write_state(folder: Path, groups: Groups, facts: Mapping[str, Any]) -> None:
    """Write a run's tensors and facts, whole: a killed write leaves the state before."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{group}:{name}": tensor.detach().cpu().contiguous()
        for group, of_group in groups.items()
        for name, tensor in of_group.items()
    }
    fresh = folder / f".{STATE}"
    save_file(tensors, fresh, {"facts": json.dumps(facts)})
    fresh.replace(folder / STATE)


def read_state(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Return a run's tensors and facts.

    Raises
    ------
    FileNotFoundError
        If the folder holds no state.
    """
    path = folder / STATE
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no training state; run that stage first")
    with safe_open(path, "pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["facts"])
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in load_file(path).items():
        group, _, name = key.partition(":")
        groups[group][name] = tensor
    return groups, facts


def read_ema(folder: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return a run's EMA, float32, and its facts."""
    groups, facts = read_state(folder)
    return groups["ema"], facts


class Pool(Protocol):
    """Samples that a training draws from once all are made, ``batch`` at a time; ``written`` counts them."""

    size: int
    batch: int
    written: int

    def renew(self) -> None:
        """Make the next few samples, in place of those that were made longest ago."""


class Renewals:
    """Fills a pool, then tells when it is time to renew some of it, for a share of a run's time.

    Parameters
    ----------
    pool : Pool
        To fill.
    share : float
        Of the steps' time that renewals may take.
    device : str
        Where the pool's samples are made.
    """

    def __init__(self, pool: Pool, share: float, device: str) -> None:
        self._share, self._count = share, 0
        began = time.monotonic()
        while pool.written < pool.size:
            pool.renew()
        if device.startswith("cuda"):
            torch.cuda.synchronize()  # so that the clock sees its work
        self._seconds = (time.monotonic() - began) * pool.batch / pool.size  # of one

    def due(self, run: Run) -> bool:
        """Tell whether the next one is due, which is then counted."""
        due = self._count * self._seconds < self._share * run.seconds
        self._count += due
        return due


def step_generator(device: str, seed: int, step: int) -> torch.Generator:
    """Return the generator of one step: a resumed run draws what the unbroken one would have drawn."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + step)


def autocast(device: str) -> torch.autocast:
    """Return bfloat16 matmuls on a GPU, float32 on a CPU."""
    return torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=device.startswith("cuda"))


def compile_layers(layers: Iterable[nn.Module], options: Options, *, dynamic: bool = False) -> None:
    """Compile each layer in place, for static shapes or any: layers share their code, so depth costs no time."""
    if not options.compiles:
        return
    torch._dynamo.config.recompile_limit = 64  # one entry a layout, cache length and gradient mode
    for layer in layers:
        layer.compile(dynamic=dynamic)
