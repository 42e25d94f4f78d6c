"""Dimensions of a Matrix-Game 2.0 model. Listing them imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from seko_export.config.model import ModelConfig
from seko_export.config.sizes import check_sizes
from seko_export.errors import UsageError
from seko_export.families.wan_layout.picture_sizes import check_condition

HEAD = 64  # numbers of an action head; the first eight turn with time
TURNED = 8
MOUSE = 2  # numbers of the mouse: pitch, yaw
UNIVERSAL, GTA, TEMPLE_RUN = "universal", "gta", "templerun"
GAMES = {(4, True): UNIVERSAL, (2, True): GTA, (7, False): TEMPLE_RUN}
"""The game by the keyboard's numbers, and whether the model has a mouse."""


def no_game(keyboard: int, mouse: bool) -> str:
    """Return the words for a keyboard that no game has."""
    sizes = [
        f"{keys} numbers with{'' if moves else 'out'} a mouse" for keys, moves in (*GAMES, (keyboard, mouse))
    ]
    return f"a keyboard of {sizes[-1]}, expected one of {', '.join(sizes[:-1])}"


@dataclass(frozen=True)
class MatrixGameModel(ModelConfig):
    """Dimensions of a Matrix-Game 2.0 model.

    Parameters
    ----------
    image_dim, image_tokens : int
        Width and number of CLIP's features of the picture, to which all cross-attention attends.
    image_eps : float
        Epsilon of the norms of ``img_emb``.
    action_layers : int
        Number of first layers that have an action module.
    action_heads : int
        Heads of both attentions of an action module, 64 numbers each.
    keyboard : int
        Numbers of the keyboard of a video frame.
    keyboard_width : int
        Width to which a video frame's keyboard is embedded.
    mouse : bool
        Whether the model also takes a mouse.
    seen_latents : int
        Number of latent frames whose video frames' actions a latent frame sees.
    action_theta : float
        Base of the action modules' rotary frequencies.

    Raises
    ------
    UsageError
        If two sizes of the model contradict each other, or no game has such a keyboard.
    """

    in_channels: int = 36
    text_dim: int = 0
    text_tokens: int = 0
    image_dim: int = 1280
    image_tokens: int = 257
    image_eps: float = 1e-5
    action_layers: int = 15
    action_heads: int = 16
    keyboard: int = 4
    keyboard_width: int = 128
    mouse: bool = True
    seen_latents: int = 3
    action_theta: float = 256.0
    family: str = field(default="matrix_game", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_condition(self)
        if self.takes_text:
            raise UsageError(f"text_tokens is {self.text_tokens}, expected 0: Matrix-Game takes no text")
        sizes = (
            "image_dim",
            "image_tokens",
            "action_layers",
            "action_heads",
            "keyboard_width",
            "seen_latents",
        )
        check_sizes(self, sizes)
        if self.action_layers > self.layers:
            raise UsageError(f"action_layers is {self.action_layers}, expected 1 to the {self.layers} layers")
        if not self.image_eps > 0 or not self.action_theta > 1:
            raise UsageError(
                f"image_eps {self.image_eps} must be above 0 and action_theta {self.action_theta} above 1"
            )
        if (self.keyboard, self.mouse) not in GAMES:
            raise UsageError(no_game(self.keyboard, self.mouse))

    @property
    def game(self) -> str:
        """The game, by which keys are bound."""
        return GAMES[self.keyboard, self.mouse]

    @property
    def action_width(self) -> int:
        """Width of the action modules' attentions."""
        return self.action_heads * HEAD

    @property
    def picture_features(self) -> tuple[int, int]:
        """Number and width of CLIP's features of the picture."""
        return (self.image_tokens, self.image_dim)
