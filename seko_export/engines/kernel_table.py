"""The table of the kernels and tile sizes in a build's layers, which `doctor` shows and an artifact contains.

The tile sizes in the table are compiled into the engines. The table of kernels is for people; opening an artifact does
not read the table.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seko_export.config.video import VideoBuild
from seko_export.host.environment import Finding, Target, has_fp8, local_gpu_arch, local_target
from seko_kernels import tuned, tuned_bf16
from seko_kernels.attention import scratch_tokens
from seko_kernels.tuned import measured_tiles, safe_tiles, shape_class, tiles_for

KERNEL_TABLE = "engines/kernels.json"


def kernel_table(config: VideoBuild, target: Target) -> dict[str, Any]:
    """Return a description of the kernels that the layers of a build use.

    Parameters
    ----------
    config : VideoBuild
        The configuration of the build.
    target : Target
        The device for which the artifact is built.

    Returns
    -------
    dict
        The field ``layers`` is ``fused`` or ``plain``. The field ``matmuls`` is ``fp8`` or the compute dtype. The
        fields ``fp8_except``, ``attention`` and ``resident_window`` have the values of these fields in `TargetConfig`.
        The field ``attention_tiles`` has the tile sizes of the 8-bit attention. Only builds that attend to a share of
        the cached keys have the field ``past_share``.
    """
    tiled = config.target.attention_kind.past_in_8_bits and target.device == "cuda"
    return {
        "arch": target.arch,
        "layers": "fused" if config.target.fused else "plain",
        "matmuls": "fp8" if config.target.fp8 else str(config.target.dtype).removeprefix("torch."),
        "fp8_except": list(config.target.fp8_except),
        "attention": config.target.attention,
        "resident_window": config.target.resident_window,
        **({"past_share": config.target.past_share} if config.target.past_share < 1 else {}),
        "attention_tiles": attention_tiles(config, target) if tiled else [],
    }


def attention_tiles(config: VideoBuild, target: Target) -> list[dict[str, Any]]:
    """Return the tile sizes of the 8-bit attention on a GPU, and whether these tile sizes were measured on the GPU.

    The list of tile sizes has an entry for each combination of batch size and cache size, because layer groups differ
    in cache size.
    """
    streams = [config.of_layer_group(group).workload.stream for group in config.layer_groups]
    pasts = sorted(
        {scratch_tokens(stream.cache_tokens - stream.chunk_tokens) for stream in streams}, reverse=True
    )
    model, rows_of_table = config.model, []
    for rows, shape in _calls(config):
        for cached_tokens in pasts:
            place = (target.arch, model.head_dim, shape, cached_tokens)
            measured = measured_tiles(*place) is not None
            entry = {"rows": rows, "past_tokens": cached_tokens, "shape_class": shape, "measured": measured}
            rows_of_table.append({**entry, "tiles": asdict(tiles_for(*place))})
    return rows_of_table


def bf16_is_faster(config: VideoBuild, target: Target) -> bool:
    """Return, for each batch size of a build's engine calls, whether Seko's 16-bit attention was measured to be faster
    than torch's attention."""
    head_dim = config.model.head_dim
    return all(tuned_bf16.is_faster(target.arch, head_dim, shape) for _, shape in _calls(config))


def _calls(config: VideoBuild) -> list[tuple[int, str]]:
    """Return the numbers of rows that calls have, each with the `shape_class` of its attention."""
    sizes = (config.workload.stream.batch,) if config.workload.pool is None else config.workload.pool.buckets
    tokens = config.workload.stream.chunk_tokens
    return [(rows, shape_class(rows, config.model.heads // config.target.ranks, tokens)) for rows in sizes]


def write_kernel_table(folder: Path, config: VideoBuild) -> None:
    """Write the table of `kernel_table` into an artifact's folder, if the build has fused layers."""
    if config.target.fused:
        target = local_target(config.target.device)
        text = json.dumps(kernel_table(config, target), indent=1, sort_keys=True) + "\n"
        (folder / KERNEL_TABLE).write_text(text, encoding="utf-8")


def examine_kernels() -> Finding:
    """Return the line of `doctor` about the kernels that builds for this machine's GPU use by default."""
    arch = local_gpu_arch()
    if arch is None:
        return Finding("kernels", True, "torch's own: there is no GPU")
    if not has_fp8(Target("cuda", arch)):
        status = f"fused layers with torch's attention; no fp8, since {arch} has no such numbers"
        return Finding("kernels", True, status)
    sizes = [f"{dim} channels, {shape}" for (a, dim, shape) in sorted(tuned.tuned_table()) if a == arch]
    safe = safe_tiles(arch)
    rest = f"else safe ones, {safe.block_m} x {safe.block_n}"
    measured = f"tiles measured for heads of {'; '.join(sizes)}" if sizes else f"no tiles measured for {arch}"
    classes = ", ".join(shape for (a, _, shape) in sorted(tuned_bf16.faster_table()) if a == arch)
    exact = f"; 16-bit attention over other caches in calls of class {classes}" if classes else ""
    return Finding(
        "kernels",
        True,
        f"fused layers; 8-bit attention over an FP4 cache where measured ({measured}; {rest}){exact}",
    )
