"""The Triton kernels of `seko_kernels`, one in each file. Callers use the ops in `seko_kernels`, which check arguments
and choose the device."""
