"""Doors: objects of other distributions are found by entry points, and broken ones are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seko_runtime.doors import BrokenPluginWarning, Door
from seko_runtime.errors import UsageError
from tests.support.entry_points import Install, installing

GROUP = "seko.tests"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions whose entry points are given."""
    with installing(tmp_path, monkeypatch, GROUP) as install:
        yield install


def door(**more: Any) -> Door[Any]:
    return Door(GROUP, "colour", Colour, {"red": f"{__name__}:RED"}, named_by="name", **more)


class Colour:
    def __init__(self, name: str) -> None:
        self.name = name


RED, BLUE = Colour("red"), Colour("blue")


def test_own_objects_come_first_and_others_by_name(install: Install) -> None:
    install("paint", green="paints:GREEN", blue=f"{__name__}:BLUE")
    assert door().names() == ("red", "blue", "green")
    assert door().find("blue") is BLUE


def test_a_broken_one_is_left_out_of_a_list_and_refused_when_it_is_asked_for(install: Install) -> None:
    install("paint", blue="no_such_module:BLUE")
    with pytest.warns(
        BrokenPluginWarning, match=r"colour 'blue' of the distribution paint 1\.0 cannot be imported"
    ):
        assert [name for name, _ in door().every()] == ["red"]
    with pytest.raises(UsageError, match=r"paint 1\.0 cannot be imported: ModuleNotFoundError"):
        door().find("blue")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("GROUP", "is a str, expected a Colour"),
        ("RED", "calls itself 'red'; expected one name"),
        ("NONE", "cannot be imported: AttributeError"),
    ],
)
def test_what_is_no_such_object_is_refused_with_its_distribution(
    install: Install, place: str, words: str
) -> None:
    install("paint", blue=f"{__name__}:{place}")
    with pytest.raises(UsageError, match=f"the distribution paint 1.0 {words}"):
        door().find("blue")


def test_two_distributions_of_one_name_are_both_named(install: Install) -> None:
    install("paint", blue=f"{__name__}:BLUE")
    install("ink", blue=f"{__name__}:BLUE")
    with pytest.raises(UsageError, match=r"brought by .* and by .*; uninstall all but one") as error:
        door().find("blue")
    assert all(f"{name} 1.0" in str(error.value) for name in ("paint", "ink"))


def test_nobody_takes_the_name_of_an_own_object(install: Install) -> None:
    install("paint", red=f"{__name__}:BLUE")
    assert door().names() == ("red",)
    assert door().find("red") is RED


def test_a_place_is_a_name_only_where_it_is_allowed() -> None:
    place = f"{__name__}:RED"
    with pytest.raises(UsageError, match="is not known: expected one of red"):
        door().find(place)
    own = Door(GROUP, "colour", Colour, {}, places=True)
    assert own.find(place) is RED


def test_a_library_that_an_own_object_lacks_is_named_as_python_names_it() -> None:
    own = Door(GROUP, "colour", Colour, {"red": "no_such_library:RED"})
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        own.find("red")
