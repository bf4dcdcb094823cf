"""The arguments of a command without secrets."""

import pytest

from trainbox.disclosure.secret_rule import arguments_without_secrets, without_secrets

HEX = "3fa94c0b7715d2e8a6610fb49c8d27e05b13aa9f"


# fmt: off
_ARGUMENTS = [
    (["--api-key", "abc", "--lr", "1"], ["--api-key", "(not shown)", "--lr", "1"]),
    (["-token", "-3"], ["-token", "(not shown)"]),
    (["--api-key=abc", "d"], ["--api-key=(not shown)", "d"]),
    (["--password=a b"], ["--password=(not shown)"]),
    (["--no-auth", "--lr", "1"], ["--no-auth", "--lr", "1"]),
    (["--token", "a", "b"], ["--token", "(not shown)", "b"]),
    (["token", "abc"], ["token", "abc"]),
    (["--set", "api_key=abc"], ["--set", "api_key=(not shown)"]),
    (["hf_abcDEFghi"], ["(not shown)"]),
    (["--max-tokens", "512", "--tokenizer", "a"], ["--max-tokens", "512", "--tokenizer", "a"]),
    (["--new-token", "a", "--new-tokens", "2"],
     ["--new-token", "(not shown)", "--new-tokens", "2"]),
    (["--num_keypoints", "17", "--passes=2"], ["--num_keypoints", "17", "--passes=2"]),
    (["--tokens", "a", "--hf_token", "b"],
     ["--tokens", "(not shown)", "--hf_token", "(not shown)"]),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "shown"), _ARGUMENTS)
def test_a_value_is_hidden_after_its_option(arguments: list[str], shown: list[str]) -> None:
    assert arguments_without_secrets(arguments) == shown
    assert arguments_without_secrets(arguments, to_copy=True) == shown


def test_a_value_that_looks_random_stays_in_a_command_to_copy() -> None:
    assert arguments_without_secrets(["--init", HEX]) == ["--init", "(not shown)"]
    assert arguments_without_secrets(["--init", HEX], to_copy=True) == ["--init", HEX]


@pytest.mark.parametrize(
    "text", [",".join(map(str, range(20000))), "z" * 10**5, "x:y," * 10**4, "a://x," * 10**4]
)
def test_a_long_text_without_a_secret_is_shown_as_it_is(text: str) -> None:
    """A search whose time grew with the square of the length would take minutes."""
    assert without_secrets(f"{text} @") == f"{text} @"


def test_the_login_at_the_end_of_a_long_text_is_not_shown() -> None:
    text = ",".join(map(str, range(20000)))
    assert without_secrets(f"{text} user:pw@host") == f"{text} (not shown)@host"
