"""Settings: flags over environment over defaults, and clear words for what is wrong."""

import argparse
from dataclasses import dataclass

import pytest

from shared.errors import SettingsError
from shared.settings import add_flags, byte_size, check_environment, load, power_of_two, setting


@dataclass(frozen=True, slots=True)
class Settings:
    block_size: int = setting(16, "Tokens.", minimum=1, maximum=256)
    memory: int | None = setting(None, "Bytes.", parse=byte_size)
    share: float = setting(0.5, "Share.", minimum=0, maximum=1)
    level: str = setting("info", "Level.", choices=("info", "debug"))
    remote: bool = setting(False, "Yes or no.")
    redis_url: str = setting("redis://x", "Redis.", env="REDIS_URL")


def test_defaults_environment_and_flags_in_that_order() -> None:
    assert load(Settings, {}, {}) == Settings()
    environ = {"PAGESTREAM_BLOCK_SIZE": "32", "PAGESTREAM_MEMORY": "2GiB", "REDIS_URL": "redis://y"}
    assert load(Settings, {}, environ) == Settings(32, 2 * 2**30, redis_url="redis://y")
    assert load(Settings, {"block_size": "64"}, environ).block_size == 64
    assert load(Settings, {"memory": "auto"}, environ).memory is None
    assert load(Settings, {"remote": "yes"}, {}).remote is True


@pytest.mark.parametrize(
    ("given", "is_remote"),
    [([], False), (["--remote"], True), (["--remote", "false"], False), (["--remote=yes"], True)],
)
def test_the_flag_of_a_switch_without_a_value_means_true(given: list[str], is_remote: bool) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    assert load(Settings, vars(parser.parse_args(given)), {}).remote is is_remote


@pytest.mark.parametrize(
    ("flags", "environ", "complaint"),
    [
        ({"block_size": "0"}, {}, "--block-size='0': must be at least 1"),
        ({}, {"PAGESTREAM_BLOCK_SIZE": "x"}, "PAGESTREAM_BLOCK_SIZE='x': expected a whole number"),
        ({"share": "inf"}, {}, "--share='inf': expected a finite number"),
        ({"memory": "lots"}, {}, "--memory='lots': expected a number of bytes"),
        ({"share": "nan"}, {}, "--share='nan': expected a finite number"),
        ({"level": "loud"}, {}, "--level='loud': expected one of info, debug"),
        ({"remote": "maybe"}, {}, "--remote='maybe': expected true or false"),
        ({"block_size": "auto"}, {}, "--block-size='auto': expected a whole number"),
    ],
)
def test_a_bad_value_is_refused_with_key_and_value(
    flags: dict[str, str], environ: dict[str, str], complaint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Settings, flags, environ)
    assert complaint in str(caught.value)


def test_a_misspelled_variable_is_refused() -> None:
    check_environment([Settings], {"PAGESTREAM_BLOCK_SIZE": "16", "HOME": "/root"})
    with pytest.raises(SettingsError, match="PAGESTREAM_BLOK_SIZE='16': there is no such setting"):
        check_environment([Settings], {"PAGESTREAM_BLOK_SIZE": "16"})


@pytest.mark.parametrize("text", ["0", "12", "-16", "x"])
def test_what_is_no_power_of_two(text: str) -> None:
    assert power_of_two("64") == 64
    with pytest.raises(ValueError, match=r"power of two|whole number"):
        power_of_two(text)


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("1k", 1024), ("1.5MiB", 1_572_864), ("2 GB", 2**31)]
)
def test_byte_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size
