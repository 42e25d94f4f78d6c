"""The configuration of a build, which consists of three parts: model, workload and target.

Each part of the configuration is a frozen dataclass that validates its own fields. A workload derives its own class
from `BuildConfig`, which validates fields of several parts against each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from seko_export.config.target import TargetConfig


@dataclass(frozen=True)
class ModelIdentity:
    """Base class of the dimensions of a model: a name, and the family that builds the model. Each workload (kind of
    model) derives its own class from `ModelIdentity`.

    Parameters
    ----------
    name : str
        Name of the preset, for reports.
    family : str
        Name of the family, for `families.registry.family_named`.
    """

    workload: ClassVar[str]
    """Name of the workload, for `workloads.registry.workload_named`."""

    name: str
    family: str = field(kw_only=True)


@dataclass(frozen=True)
class WorkloadConfig(ABC):
    """Base class of a workload's part of a build. Each workload derives a frozen dataclass from `WorkloadConfig`."""

    @property
    @abstractmethod
    def state_rows(self) -> int:
        """Number of rows for which the artifact holds state, including a pool's spare row."""

    @property
    @abstractmethod
    def buckets(self) -> tuple[int, ...] | None:
        """Numbers of rows of a pool's calls, ascending; None if every call carries all rows."""


@dataclass(frozen=True)
class BuildConfig:
    """The configuration of a build: everything that determines one artifact.

    Parameters
    ----------
    model : ModelIdentity
        Dimensions of the model.
    workload : WorkloadConfig
        The workload's part of the build.
    target : TargetConfig
        The target machine, and the kernels of the layers.
    """

    model: ModelIdentity
    workload: WorkloadConfig
    target: TargetConfig

    @property
    def exact_scheme(self) -> str:
        """Name of the exact format of KV caches on the build's device."""
        return self.target.exact_scheme

    def changed(self, **values: Any) -> Self:
        """Return the same build with other values of its parts' fields, for example ``changed(fused=True, ranks=2)``.

        Raises
        ------
        TypeError
            If neither workload nor target has a field of this name, and no part of the build has the name.
        UsageError
            If the values contradict each other.
        """
        parts = {
            part_field.name: values.pop(part_field.name)
            for part_field in fields(self)
            if part_field.name in values
        }
        for name in ("workload", "target"):
            part = parts.get(name, getattr(self, name))
            own = {
                part_field.name: values.pop(part_field.name)
                for part_field in fields(part)
                if part_field.name in values
            }
            parts[name] = replace(part, **own)
        if values:
            raise TypeError(f"no part of a {type(self).__name__} has the fields {', '.join(values)}")
        return replace(self, **parts)
