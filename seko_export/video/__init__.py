"""The video workload: its part of the manifest, goldens, calibration, and the estimate of memory and time."""
