"""What float64 become float32 costs, before TensorRT has a say: the narrowed embed against the form's own."""

from __future__ import annotations

import torch

from seko_export.backends.tensorrt_plans.form import plan_form
from seko_export.families.layers.pieces import make_pieces
from tests.onnx import forms
from tests.onnx.forms import ROWS

LAST_FRAME = 4800  # five minutes at 16 video frames a second, 4 of them a latent frame


def test_angles_in_float32_are_as_far_off_as_float32_is() -> None:
    """RoPE's angle of frame n is at most n, the time's at most 1000: that times 2**-24, twice rounded."""
    piece = make_pieces(forms.config_of("fp4", ROWS))["embed"]
    model = forms.model_of("fp4", ROWS, "embed")
    form = plan_form(model)
    assert form.narrowed > 0
    assert form.plugins == {}
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for argument in piece.signature:
        if argument.name == "frames":
            inputs.append(torch.arange(LAST_FRAME - argument.shape[1], LAST_FRAME).expand(argument.shape))
        elif argument.name == "timestep":
            inputs.append(torch.full(argument.shape, 937.5))
        elif argument.dtype.is_floating_point:
            inputs.append(torch.randn(argument.shape, generator=generator) * 0.1)
        else:
            inputs.append(torch.zeros(argument.shape, dtype=argument.dtype))
    names = [argument.name for argument in piece.outputs]
    wide = dict(zip(names, forms.run_model(model, *inputs), strict=False))
    narrow = dict(zip(names, forms.run_model(form.model, *inputs), strict=False))
    for name in ("cos", "sin"):
        assert (wide[name] - narrow[name]).abs().max() <= 2 * LAST_FRAME * 2.0**-24
        assert not torch.equal(wide[name], narrow[name])
    assert (wide["time"] - narrow["time"]).norm() / wide["time"].norm() <= 2 * 1000 * 2.0**-24
