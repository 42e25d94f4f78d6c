"""What a person steers a session with: one class for each kind of control, which alone knows the kind's events, files
and inputs. Numpy only."""

from seko_runtime.controls.base import Control, Event
from seko_runtime.controls.registry import Controls, controls_of

__all__ = ["Control", "Controls", "Event", "controls_of"]
