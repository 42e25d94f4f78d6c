"""The option ``--model-folder``: one folder with all files of a model, each found by its content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
)
from seko_export.checkpoints.json_files import CONFIG_FILE, read_config, read_json_object
from seko_export.checkpoints.lora_files import open_lora
from seko_export.checkpoints.readers import variant_file
from seko_export.checkpoints.sources import Layout
from seko_export.errors import CheckpointError
from seko_export.families.model_files import recognise_checkpoint, refuse_experts
from seko_export.families.registry import families
from seko_export.media.clip.files import clip_config_of
from seko_export.media.hubert.files import hubert_config_of
from seko_export.media.layouts import CLIP_LAYOUT, PREPROCESSOR, TEXT_LAYOUT
from seko_export.media.umt5.dimensions import text_config_of
from seko_export.media.vaes import vae_config_of, vaes
from seko_export.options.build_files import find_tokenizer
from seko_export.options.declaration import BuildOptions, flag

# Fields of `BuildOptions`.
_BESIDE = ("audio_adapter", "vae", "text_encoder", "tokenizer", "audio_encoder", "image_encoder")
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".gguf")
_SHARD = "-of-"  # in the name of a shard, which its folder stands for


@dataclass(frozen=True)
class ModelFolder:
    """The files that were found in a model folder, by the fields of `BuildOptions`. A field is None if the folder has
    no file of its kind.

    Parameters
    ----------
    checkpoint, vae, text_encoder, tokenizer, audio_encoder, image_encoder : Path or None
        File or folder of each model, in the form that the build option with the same name takes.
    audio_adapter : Path or None
        File of the audio adapter, if this file is in the folder and the transformer in a subfolder.
    loras : tuple of Path
        LoRAs, which only `--lora` merges.
    unknown : tuple of Path
        Weight files that hold none of these models.
    refusals : tuple of str
        Why weights are no transformer, if the folder has none.
    """

    checkpoint: Path | None = None
    vae: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    audio_encoder: Path | None = None
    image_encoder: Path | None = None
    audio_adapter: Path | None = None
    loras: tuple[Path, ...] = ()
    unknown: tuple[Path, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about weight files that the build does not use."""
        loras = [f"{path.name} is a LoRA, which --lora {path} merges" for path in self.loras]
        names = ", ".join(path.name for path in self.unknown)
        return [*loras, f"not used, since they are of no known kind: {names}"] if names else loras

    @property
    def companions(self) -> dict[str, Path]:
        """The files of the other models in the folder, by option."""
        return _by_option(self)


def with_model_folder(options: BuildOptions) -> tuple[BuildOptions, tuple[str, ...]]:
    """Return the options with the files found in ``--model-folder``, and sentences on the files used. Files that an
    option names are not replaced.

    Raises
    ------
    CheckpointError
        If the folder holds no model, or two models of one kind.
    """
    if options.model_folder is None:
        return options, ()
    files = find_files(
        options.model_folder,
        transformer=options.checkpoint is None,
        entry=options.entry,
        adapter=options.audio_adapter,
        variant=options.variant,
    )
    checkpoint = options.checkpoint or files.checkpoint
    if checkpoint is None:
        raise CheckpointNotFoundError(
            f"--model-folder {options.model_folder} holds no transformer of a known family; found "
            f"{', '.join(f'{option} {path.name}' for option, path in files.companions.items()) or 'nothing'}: name its "
            "file or folder itself, beside this option"
            + "".join(f"\n  hint: {refusal}" for refusal in files.refusals)
        )
    taken = replace(
        options,
        model_folder=None,
        checkpoint=checkpoint,
        audio_adapter=options.audio_adapter or files.audio_adapter or _adapter_of(options),
        vae=options.vae or (None if options.no_vae else files.vae),
        text_encoder=options.text_encoder or (None if options.no_text else files.text_encoder),
        tokenizer=options.tokenizer or (None if options.text_encoder or options.no_text else files.tokenizer),
        audio_encoder=options.audio_encoder or files.audio_encoder,
        image_encoder=options.image_encoder or files.image_encoder,
    )
    named = ", ".join(f"{option} {path}" for option, path in _by_option(taken).items())
    return taken, (
        f"from {options.model_folder}: transformer {checkpoint}, {named or 'nothing beside it'}",
        *files.notes,
    )


def with_pipeline(options: BuildOptions) -> BuildOptions:
    """Return the options. If a diffusers pipeline was passed as CHECKPOINT, it is moved to ``--model-folder``."""
    folder = options.checkpoint
    if folder is None or options.model_folder is not None or not is_pipeline(folder):
        return options
    return replace(options, checkpoint=None, model_folder=folder)


def is_pipeline(folder: Path) -> bool:
    """Return whether a folder is a diffusers pipeline, that is, has a subfolder with a transformer beside other
    subfolders."""
    others = any((folder / name).is_dir() for name in ("vae", "text_encoder", "image_encoder"))
    return (folder / "transformer").is_dir() and others


def with_variant(options: BuildOptions) -> BuildOptions:
    """Return the options with the files that ``--variant`` selects in place of their folders.

    Raises
    ------
    CheckpointError
        If a folder has no files of this variant.
    """
    if options.variant is None:
        return options
    transformers = tuple(
        dict.fromkeys(name for family in families().values() for name in family.keys.subfolders)
    )
    layouts = {
        "checkpoint": Layout("", transformers),
        "vae": Layout("", tuple(dict.fromkeys(name for vae in vaes() for name in vae.layout.subfolders))),
        "text_encoder": TEXT_LAYOUT,
        "image_encoder": CLIP_LAYOUT,
    }
    chosen: dict[str, Any] = {
        name: variant_file(folder, layout, options.variant)
        for name, layout in layouts.items()
        if (folder := getattr(options, name)) is not None and folder.is_dir()
    }
    if not chosen:
        raise CheckpointNotFoundError(
            f"--variant {options.variant} chooses among the files of a folder, and none was named; leave it out"
        )
    return replace(options, **chosen)


def _adapter_of(options: BuildOptions) -> Path | None:
    """Return the folder's audio adapter for a transformer that the user named and that has no adapter beside it."""
    if options.checkpoint is None or options.model_folder is None:
        return None
    try:
        recognise_checkpoint(options.checkpoint, entry=options.entry)
    except CheckpointNotFoundError:
        return _adapter_in(options.model_folder)
    except CheckpointError:  # said later
        return None
    return None


def _by_option(paths: ModelFolder | BuildOptions) -> dict[str, Path]:
    """Return the files beside the transformer that exist, by option."""
    by_option = {flag(name): getattr(paths, name) for name in _BESIDE}
    return {option: path for option, path in by_option.items() if path is not None}


def find_files(
    folder: Path,
    *,
    transformer: bool = True,
    entry: str | None = None,
    adapter: Path | None = None,
    variant: str | None = None,
) -> ModelFolder:
    """Return the model files in a folder and in its direct subfolders, identified by their headers.

    Parameters
    ----------
    folder : Path
        Folder of the model. Transformer, VAE and encoders are files in it, or subfolders; at most one of each kind.
    transformer : bool
        Whether to look for a transformer, too.
    entry : str, optional
        The entry of a `.pt` that holds the transformer.
    adapter : Path, optional
        File of the transformer's audio adapter, if the user named it.
    variant : str, optional
        The variant, such as ``fp16``, by which folders with several are known.

    Raises
    ------
    CheckpointError
        If the folder does not exist, two files are models of the same kind, or a file is damaged.
    """
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"--model-folder {folder} is no folder: give that of a model's files")
    if transformer:
        refuse_experts(folder)
    places = [path for path in _places(folder) if adapter is None or path.resolve() != adapter.resolve()]
    taken: set[Path] = set()

    def of_variant(read: Callable[..., object], **options: Any) -> Callable[[Path], object]:
        return lambda path: read(_file_of_variant(path, variant), **options)

    audio = _the_one("an audio encoder", [path for path in places if _hears(path)], taken)
    vae = _the_one("a VAE", _known(places, taken, of_variant(vae_config_of)), taken)
    image = _the_one("an image encoder", _known(places, taken, of_variant(clip_config_of)), taken)
    text = _the_one("a text encoder", _known(places, taken, of_variant(_read_text)), taken)
    model = tokenizer = None
    files = {path for path in places if path.is_file()}
    recognise, refused = partial(of_variant, recognise_checkpoint, entry=entry), dict[Path, CheckpointError]()
    if transformer and _opens(folder, recognise(companion=adapter), refused):
        model = folder
        taken |= {path for path in files if path.suffix == ".safetensors"}
    elif transformer:
        for path in (None, _adapter_in(folder)) if adapter is None else (adapter,):  # a subfolder's own first
            known = _known(places, taken, recognise(companion=path), refused)
            model = model or _the_one("a transformer", known, taken)
            adapter = path
            if model is not None:
                break
    if text is not None:
        with suppress(CheckpointNotFoundError):  # the build asks for it
            tokenizer = find_tokenizer(text, None)
    left = sorted(files - taken) if transformer else []
    loras = _known(left, taken, open_lora)
    return ModelFolder(
        *(model, vae, text, tokenizer, audio, image, adapter),
        loras=tuple(loras),
        unknown=tuple(path for path in left if path not in loras),
        refusals=tuple(str(refused[path]) for path in refused if model is None and _has_weights(path)),
    )


def _file_of_variant(path: Path, variant: str | None) -> Path:
    """Return the file of a variant in a folder; the path itself, if it has none."""
    if variant is not None and path.is_dir():
        with suppress(CheckpointError):
            return variant_file(path, Layout("", ()), variant)
    return path


def _places(folder: Path) -> Iterator[Path]:
    """Yield the files and subfolders that may hold weights, without shards and companions of a transformer."""
    extra = companion_names()
    for path in sorted(folder.iterdir()):
        if path.is_dir() or (
            path.suffix in WEIGHT_SUFFIXES and _SHARD not in path.name and path.name not in extra
        ):
            yield path


def companion_names() -> list[str]:
    """Return the file names of further weights of a transformer, of any family."""
    return [
        name
        for family in families().values()
        for companion in family.keys.companions
        for name in companion.names
    ]


def _adapter_in(folder: Path) -> Path | None:
    return next((folder / name for name in companion_names() if (folder / name).is_file()), None)


def _has_weights(path: Path) -> bool:
    """Return whether a path is a file, or a folder with the files that a folder is opened for."""
    return path.is_file() or any(path.glob("*.safetensors*"))


def _known(
    places: list[Path],
    taken: set[Path],
    read: Callable[[Path], object],
    refused: dict[Path, CheckpointError] | None = None,
) -> list[Path]:
    return [path for path in places if path not in taken and _opens(path, read, refused)]


def _opens(
    path: Path, read: Callable[[Path], object], refused: dict[Path, CheckpointError] | None = None
) -> bool:
    """Return whether a path can be read; add the first reason why it cannot to ``refused``."""
    try:
        read(path)
    except DamagedCheckpointError:  # of whatever kind it is, it is damaged
        raise
    except CheckpointError as fault:
        if refused is not None:
            refused.setdefault(path, fault)
        return False
    return True


def _read_text(path: Path) -> None:
    """Raise a CheckpointError if a path holds no UMT5 encoder; a config.json must say so, because any file may be
    there."""
    config_json = read_config(path, TEXT_LAYOUT)
    if config_json is not None and config_json.get("model_type") != "umt5":
        raise NotACheckpointError(f"{path} is of a {config_json.get('model_type')}, expected a umt5")
    text_config_of(path)


def _hears(path: Path) -> bool:
    """Return whether a folder's config.json describes an audio encoder; raises an error for an audio encoder of an
    unsupported layout."""
    if not (path / PREPROCESSOR).is_file() or not (path / CONFIG_FILE).is_file():
        return False
    if read_json_object(path / CONFIG_FILE).get("model_type") != "hubert":
        return False
    hubert_config_of(path)
    return True


def _the_one(what: str, paths: list[Path], taken: set[Path]) -> Path | None:
    if len(paths) > 1:
        raise AmbiguousCheckpointError(
            f"{paths[0].parent} holds {what} {len(paths)} times: {', '.join(path.name for path in paths)}; name the "
            "right one with its own option, or leave only one there"
        )
    taken.update(paths)
    return paths[0] if paths else None
