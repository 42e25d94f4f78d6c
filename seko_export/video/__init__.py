"""The video workload (the code for video models) on the build machine: its part of the manifest, recorded chunks,
calibration, and the estimate of memory and time."""
