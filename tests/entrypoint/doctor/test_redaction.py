"""What a report may show of an environment and of a text: a table, with each kind of secret."""

import secrets

import pytest

from entrypoint.doctor.redaction import (
    NOT_SHOWN,
    other_hosts,
    private_names,
    redacted,
    shown_environment,
)

HEX = "3fa94c0b7715d2e8a6610fb49c8d27e05b13aa9f"
RANDOM = "wJalrXUtnFEMIK7MDENGbPxRfiCY3EXAMPLE"
SLASHES = "wJalr/XUtn7FEMI+K7MDENG/bPxRfiCYEXAMPLE4"
GPU = "GPU-8f3a1c20-77aa-4b1e-9c55-0123456789ab"
DIGEST = "sha256:" + "0123456789abcdef" * 4
CUT = "(not shown)"


# The environment: values of listed names only.


_HIDDEN = "TRAINBOX_API_KEY TRAINBOX_RUN TRAINBOX_DB_PASSWORD TORCH_HUB_TOKEN"
_HIDDEN += " TRAINBOX_SERVICE_HOST NCCL_TOKEN NCCL_DEBUG_FILE NVIDIA_LICENSE CUDA_auth PET_RDZV_ID"
_HIDDEN += " SLURM_JOB_USER SLURM_JOB_ACCOUNT SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_NODELIST"
_HIDDEN += " SLURM_STEP_NODELIST RDZV_ID SET http_proxy HTTPS_PROXY"


def test_of_other_variables_only_the_name_is_shown() -> None:
    names = sorted(_HIDDEN.split())
    assert shown_environment(dict.fromkeys(names, "2")) == [(name, NOT_SHOWN) for name in names]


# fmt: off
_SHOWN = [
    ("CUDA_VISIBLE_DEVICES", f"{GPU},{GPU},MIG-{GPU}"),
    ("TRAINBOX_IMAGE_DIGEST", DIGEST),
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
    ("LD_LIBRARY_PATH",
     "/usr/local/cuda-13/lib64:/opt/venv/lib/python3.11/site-packages/nvidia/cu13/lib"),
    ("TASK", "my_tasks/gestures.py:Gestures"),
    ("RDZV_ENDPOINT", "10.0.0.7:29400"),
    ("NVIDIA_REQUIRE_CUDA", "cuda>=13.0 brand=unknown,driver>=535,driver<536"),
]
# fmt: on


@pytest.mark.parametrize(("name", "value"), _SHOWN)
def test_the_value_of_a_listed_variable_is_shown(name: str, value: str) -> None:
    assert shown_environment({name: value}) == [(name, value)]


def test_variables_are_sorted_and_an_empty_value_is_marked_and_others_left_out() -> None:
    env = {"TP_SOCKET_IFNAME": "y", "GPUS": "", "NCCL_NEW_OPTION": "1"}
    env |= dict.fromkeys(("AWS_REGION", "HF_TOKEN", "MY_GPUS", "MY_NCCL_X", "gpus", "PATH"), "x")
    assert shown_environment(env) == [
        ("GPUS", "(set, empty)"),
        ("NCCL_NEW_OPTION", NOT_SHOWN),
        ("TP_SOCKET_IFNAME", "y"),
    ]


def test_a_name_cannot_break_the_report() -> None:
    ((name, shown),) = shown_environment({"TRAINBOX_\n## verdict\x1b[2J karoline": "x"}, KAROLINE)
    assert (name, shown) == ("TRAINBOX_ ## verdict\\x1b[2J [user]", NOT_SHOWN)


def test_names_of_variables_are_shown_and_their_values_redacted() -> None:
    hidden = private_names([], ["cuda", "nccl"], ["rdzv.timeout"])
    env = {"CUDA_HOME": "/usr/local/cuda", "NCCL_X": "1", "RDZV_TIMEOUT_S": "5"}
    assert shown_environment(env, hidden) == [
        ("CUDA_HOME", "/usr/local/[user]"),
        ("NCCL_X", NOT_SHOWN),
        ("RDZV_TIMEOUT_S", "5"),
    ]


@pytest.mark.parametrize(
    ("endpoint", "hosts", "shown"),
    [
        ("node0:29400", ("node0",), "[host]:29400"),
        ("node0", ("node0",), "[host]"),
        ("https://node0.lab.example:1/", ("node0.lab.example",), "https://[host]:1/"),
        ("[fd00::7]:29400", (), "[fd00::7]:29400"),
        ("localhost:29400", ("localhost",), "localhost:29400"),
        ("", (), "(set, empty)"),
    ],
)
def test_other_machines_are_hidden_by_their_role(
    endpoint: str, hosts: tuple[str, ...], shown: str
) -> None:
    for name in ("RDZV_ENDPOINT", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"):
        env = {name: endpoint}
        assert other_hosts(env) == hosts
        assert shown_environment(env, private_names([], [], hosts)) == [(name, shown)]


# Free text: secrets are recognized by their form.


_TOKENS = "hf_abcDEFghi ghp_0123456789abcdef github_pat_11AAAA0 glpat-xyzxyzxyz"
_TOKENS += " AKIAIOSFODNN7EXAMPLE eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig sk-abcdefghijklmnop"
_TOKENS += " xoxb-123-abcdefg"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((f"width=64 name={token}", f"width=64 name={CUT}") for token in _TOKENS.split()),
        (HEX, CUT),
        (f"a {RANDOM} b", f"a {CUT} b"),
        (SLASHES, CUT),
        ("8f3a1c20-77aa-4b1e-9c55-0123456789ab", CUT),
        ("width=64 api_key=abc lr=1", "width=64 api_key=(not shown) lr=1"),
        ("--set x=token=abc", "--set x=token=(not shown)"),
        ("width=64 PASSWORD='a b'", "width=64 PASSWORD=(not shown)"),
        ('{"token": "abc", "width": 64}', '{"token": (not shown), "width": 64}'),
        ("--auth-token abc --epochs 3", "--auth-token (not shown) --epochs 3"),
        ("Authorization: Bearer abc", "Authorization: (not shown) (not shown)"),
        ("bearer abc", "bearer (not shown)"),
        ("https://karo:pw@host:29400/x", "https://(not shown)@host:29400/x"),
        ("postgresql://karo:p@w/d@host/db", "postgresql://(not shown)@host/db"),
        ("karo:pw@host:1", "(not shown)@host:1"),
        ("a\x1b[31m\nb\x00", "a\\x1b[31m b\\x00"),
    ],
)
def test_a_secret_is_cut_out_of_a_text(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_random_secrets_are_cut_out_of_a_text() -> None:
    drawn = [
        draw(length)
        for draw in (secrets.token_urlsafe, secrets.token_hex)
        for length in (24, 32)
        for _ in range(200)
    ]
    shown = [secret for secret in drawn if secret in redacted(f"the key {secret} is wrong")]
    assert len(shown) <= len(drawn) // 100, shown  # randomness is estimated


@pytest.mark.parametrize(
    "text",
    [
        "0.1.0, revision 57897c5b0e9b4a6f8d0c2e1a3b5c7d9e0f1a2b3c-dirty",
        "width=64 name=resnet50-imagenet-lr0001-batch256-seed42",
    ],
)
def test_public_values_are_kept_in_a_text(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "part", ["word ", "key", "key=", "--key ", "a:", "x@", "GPU-", "a1", "http://a:", 'key="']
)
def test_a_long_text_is_cut(part: str) -> None:
    assert len(redacted(part * (10**5 // len(part)))) < 300


KAROLINE = private_names(
    ["/home/karoline/", "/tmp", ""],
    ["karoline", "li", "trainbox", "root", ""],
    ["login07.physics.example", "localhost"],
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/karoline/runs:/home/karoline", "~/runs:~"),
        ("/home/karoline2/runs", "/home/[user]/runs"),
        ("/home/alice/x:/Users/bob", "/home/[user]/x:/Users/[user]"),
        ("db_pwd=abc password abc", "db_pwd=(not shown) password (not shown)"),
        ("/mnt/home/karoline/runs", "/mnt/home/[user]/runs"),
        ("/scratch/KAROLINE/x, karolines", "/scratch/[user]/x, [user]s"),
        ("login07.physics.example:29400", "[host]:29400"),
        ("login07:1 node3.physics.example:2", "[host]:1 node3.[domain]:2"),
        ("li and lithium, /li/x", "[user] and lithium, /[user]/x"),
        ("/tmp/cache by trainbox, root", "/tmp/cache by trainbox, root"),
    ],
)
def test_names_of_users_and_machines_are_hidden(text: str, shown: str) -> None:
    assert redacted(text, KAROLINE) == shown
