"""The target of a build: the machine, and the kernels of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from seko_export.config.attention import ATTENTIONS, TORCH, Attention
from seko_export.config.pool import with_commas
from seko_export.errors import UsageError

if TYPE_CHECKING:  # configurations are read before torch is imported
    import torch

MOST_RANKS = 8  # most GPUs in one machine


@dataclass(frozen=True)
class TargetConfig:
    """The target machine for which engines are compiled, and the kernels of their layers.

    Parameters
    ----------
    device : str
        Kind of the target device: ``cpu`` or ``cuda``.
    archs : tuple of str
        Architectures of the target GPUs, such as ``sm_89``, which need not be present; empty: this machine's device.
    ranks : int
        Number of ranks: processes, one for each GPU, that run each call together. Each rank has a share of the tokens;
        in attention and in the KV cache, each rank has a share of the heads.
    fused : bool
        Whether the layers run in Seko's own kernels (`families.layers.fused_block`); otherwise they run in plain torch.
    fp8 : bool
        Whether the matmuls of fused layers are in fp8, both weights and activations.
    fp8_except : tuple of int
        Numbers of the layers whose matmuls are not in fp8, ascending.
    attention : str
        Name of the attention, one of `config.attention.ATTENTIONS`. ``torch`` is torch's attention. ``bf16`` is Seko's
        16-bit kernel. ``fp8`` reads the frames of an FP4 cache in 8 bits and the call's own tokens unquantised.
    convolutions : str
        Architecture of the GPU, such as ``sm_90``, for which the VAE runs in Seko's own convolutions where they were
        measured to be faster (`seko_kernels.tuned_conv`); empty: all convolutions are torch's.
    resident_window : bool
        Whether the cached frames of all layers are converted to 8 bits once for all passes over the same tokens,
        instead of in every pass.
    past_share : float
        Share of the tiles of cached keys to which a tile of queries attends, above 0 and at most 1; 1: queries attend
        to all cached frames.
    offload_text, offload_layers : bool
        Whether the weights of the text encoder, and those of the transformer's layers, stay on the host, from where
        they are copied to the device layer by layer.
    decode_frames : int
        Most latent frames that the VAE decodes in one call; 0: as many as it can.

    Raises
    ------
    UsageError
        If an attention is not known, or two options contradict each other.
    """

    device: str
    archs: tuple[str, ...] = ()
    ranks: int = 1
    fused: bool = False
    fp8: bool = False
    fp8_except: tuple[int, ...] = ()
    attention: str = TORCH.name
    convolutions: str = ""
    resident_window: bool = False
    past_share: float = 1.0
    offload_text: bool = False
    offload_layers: bool = False
    decode_frames: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UsageError(
                f"--attention {self.attention!r} is not known: expected one of {', '.join(ATTENTIONS)}"
            )
        if self.fp8_except and not self.fp8:
            raise UsageError(f"--fp8-except {with_commas(self.fp8_except)}: it belongs to --fp8")
        if not 0 < self.past_share <= 1:
            raise UsageError(f"--past-share {self.past_share:g}: expected a share above 0, and at most 1")
        if self.offloads_weights and self.ranks > 1:
            option = "--offload-layers" if self.offload_layers else "--offload-text"
            raise UsageError(
                f"{option} is for one GPU, and --ranks {self.ranks} for several: leave one of them out"
            )

    @property
    def offloads_weights(self) -> bool:
        """Whether some weights stay on the host."""
        return self.offload_text or self.offload_layers

    @property
    def attention_kind(self) -> Attention:
        """The kind of attention over the KV cache."""
        return ATTENTIONS[self.attention]

    @property
    def eager_device(self) -> str:
        """The device on which the results of the eager model (goldens) are recorded: the CPU, if the target's GPUs need
        not be in this machine."""
        return "cpu" if self.archs else self.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the engines: bfloat16 on a GPU, float32 on a CPU."""
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def exact_scheme(self) -> str:
        """Name of the exact format of KV caches, that of the compute dtype."""
        return "bf16" if self.device == "cuda" else "fp32"

    @property
    def plain(self) -> TargetConfig:
        """Return this target for one rank, with transformer layers in plain torch. It takes the same weights of text
        encoder and VAE; the latter depend on how many frames a call decodes, as the table of convolutions does."""
        return TargetConfig(
            self.device,
            self.archs,
            convolutions=self.convolutions,
            offload_text=self.offload_text,
            decode_frames=self.decode_frames,
        )
