"""A workload that is not video, outside the package: a small recurrent net that turns words into samples."""
