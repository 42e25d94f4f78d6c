"""The ONNX form of engines and passes: engines write nothing in place, and Seko's ops are ONNX functions made of
standard ops."""

# Options of a build whose engines or programs the form cannot say, for `Capabilities.lacks`.
LACKING = (
    "--pass-caches",
    "--layer-rings",
    "--window-positions",
    "--sink-average",
    "--rolling",
    "--reference-frames",
    "--vae-fp8",
    "--strength",
)
