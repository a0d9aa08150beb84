from __future__ import annotations

import pytest

from eagle3_serve.core.secrets import is_secret_name, redact_argv, redact_environment


@pytest.mark.parametrize(
    "name",
    [
        "--api-key",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "admin_api_key",
        "DB_PASSWORD",
        "PGPASSWORD",
        "PASSPHRASE",
        "AUTH",
        "GITHUB_PAT",
        "MYTOKEN",
        "SECRETKEY",
        "OPENAI_APIKEY",
    ],
)
def test_names_that_hold_secrets_are_recognised(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["--tokenizer-path", "--max-total-tokens", "--speculative-token-map", "SSH_KEY_FILE", "--num-draft-tokens"]
)
def test_names_that_only_sound_like_it_stay_visible(name: str) -> None:
    assert not is_secret_name(name)


def test_values_of_secret_arguments_are_hidden_in_both_spellings() -> None:
    argv = ["python", "--api-key", "hunter2", "--admin-api-key=hunter3", "--port", "80"]
    assert redact_argv(argv) == ["python", "--api-key", "***", "--admin-api-key=***", "--port", "80"]


def test_secret_variables_are_hidden() -> None:
    assert redact_environment({"HF_TOKEN": "x", "NCCL_PROTO": "LL"}) == {"HF_TOKEN": "***", "NCCL_PROTO": "LL"}


def test_a_secret_that_looks_like_an_option_is_hidden_and_the_next_option_is_not() -> None:
    assert redact_argv(["--ssl-keyfile-password", "--x", "--port", "80"]) == [
        "--ssl-keyfile-password",
        "***",
        "--port",
        "80",
    ]


def test_credentials_in_a_url_are_hidden() -> None:
    environment = {"HTTPS_PROXY": "http://user:hunter2@proxy:3128"}
    assert redact_environment(environment) == {"HTTPS_PROXY": "http://***@proxy:3128"}
    assert redact_argv(["--url", "https://me:hunter2@host/x"]) == ["--url", "https://***@host/x"]
