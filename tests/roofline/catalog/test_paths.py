"""Where caches are, by the environment of their user."""

from pathlib import Path

import pytest

from ridgeplan.roofline.catalog.files import NoHomeFolder, cache_folder, expanded, hub_folder


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables that say where caches are, of a user whose home is /home/ada."""

    def say(**variables):
        for name in ("XDG_CACHE_HOME", "HF_HUB_CACHE", "HF_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/home/ada")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return say


@pytest.mark.parametrize(
    "variables, expected",
    [({}, "/home/ada/.cache/ridgeplan"), ({"XDG_CACHE_HOME": ""}, "/home/ada/.cache/ridgeplan"),
     ({"XDG_CACHE_HOME": "/var/cache/ada"}, "/var/cache/ada/ridgeplan")],
)  # fmt: skip
def test_the_package_caches_where_the_system_says(environment, variables, expected):
    environment(**variables)
    assert cache_folder() == Path(expected)


@pytest.mark.parametrize(
    "variables, expected",
    [({}, "/home/ada/.cache/huggingface/hub"), ({"HF_HOME": "/models"}, "/models/hub"),
     ({"HF_HOME": "/models", "HF_HUB_CACHE": "/fast"}, "/fast")],
)  # fmt: skip
def test_models_are_sought_where_their_library_keeps_them(environment, variables, expected):
    environment(**variables)
    assert hub_folder() == Path(expected)


def test_a_user_without_a_home_is_told_what_to_set(environment, monkeypatch):
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    environment()
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(NoHomeFolder, match="no home folder; allowed: HOME or XDG_CACHE_HOME"):
        cache_folder()
    environment(XDG_CACHE_HOME="/var/cache/ada", HF_HOME="/models")
    assert (cache_folder(), hub_folder()) == (Path("/var/cache/ada/ridgeplan"), Path("/models/hub"))


def test_a_tilde_is_the_home_folder_of_a_user_that_is_known(environment):
    environment()
    assert expanded("~/model") == Path("/home/ada/model")
    with pytest.raises(NoHomeFolder, match=r"'~no-such-user-here/model' is not known; allowed: a path without it"):
        expanded("~no-such-user-here/model")
