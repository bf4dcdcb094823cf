"""What of an environment may be pasted in public: a table, each kind of secret in it."""

import secrets

import pytest

from entrypoint.doctor.redaction import NOT_SHOWN, hidden_words, redacted, shown_environment

HEX = "3fa94c0b7715d2e8a6610fb49c8d27e05b13aa9f"
RANDOM = "wJalrXUtnFEMIK7MDENGbPxRfiCY3EXAMPLE"
SLASHES = "wJalr/XUtn7FEMI+K7MDENG/bPxRfiCYEXAMPLE4"
GPU = "GPU-8f3a1c20-77aa-4b1e-9c55-0123456789ab"
DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # by its name
        ("TRAINBOX_API_KEY", "abc"),
        ("TRAINBOX_PIN", "abc"),
        ("TORCH_PW", "abc"),
        ("NVIDIA_LICENSE", "abc"),
        ("TORCH_WEBHOOK", "https://example.org/abc"),
        ("TORCH_HUB_TOKEN", "abc"),
        ("NCCL_X_TOK", "abc"),
        ("NCCL_SECRET", "abc"),
        ("TRAINBOX_DB_PASSWORD", "abc"),
        ("NVIDIA_CREDENTIALS", "abc"),
        ("PET_auth", "abc"),
        ("CUDA_Api_Key", "abc"),
        ("SLURM_JOB_USER", "abc"),
        ("SLURM_JOB_ACCOUNT", "abc"),
        # by its shape
        *(
            ("SET", f"width=64 name={token}")
            for token in (
                "hf_abcDEFghi",
                "ghp_0123456789abcdef",
                "github_pat_11AAAA0",
                "glpat-xyzxyzxyz",
                "AKIAIOSFODNN7EXAMPLE",
                "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig",
                "sk-abcdefghijklmnop",
                "xoxb-123-abcdefg",
            )
        ),
        # by its look
        ("TASK", HEX),
        ("TASK", HEX.upper()),
        ("TASK", f"a {RANDOM} b"),
        ("SET", SLASHES),
        ("SET", "8f3a1c20-77aa-4b1e-9c55-0123456789ab"),
        ("TRAINBOX_RUN", f"run-{RANDOM}"),
    ],
)
def test_not_shown_at_all(name: str, value: str) -> None:
    assert shown_environment({name: value})[0] == (name, NOT_SHOWN)


def test_what_a_machine_draws_is_not_shown() -> None:
    drawn = [
        draw(length)
        for draw in (secrets.token_urlsafe, secrets.token_hex)
        for length in (24, 32)
        for _ in range(200)
    ]
    told = [word for word in drawn if shown_environment({"SET": word})[0][1] != NOT_SHOWN]
    assert len(told) <= len(drawn) // 100, told  # it is a guess by the look


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("width=64 api_key=abc lr=1", "width=64 api_key=(not shown) lr=1"),
        ("width=64,api_key=abc", "width=64,api_key=(not shown)"),
        ("--set x=token=abc", "--set x=token=(not shown)"),
        ("width=64 PASSWORD='a b'", "width=64 PASSWORD=(not shown)"),
        ('{"token": "abc", "width": 64}', '{"token": (not shown), "width": 64}'),
        ("--auth-token abc --epochs 3", "--auth-token (not shown) --epochs 3"),
        ("Authorization: Bearer abc", "Authorization: (not shown) (not shown)"),
        ("bearer abc", "bearer (not shown)"),
        ("https://karo:pw@host:29400/x", "https://(not shown)@host:29400/x"),
        ("postgresql://karo:p@w/d@host/db", "postgresql://(not shown)@host/db"),
        ("https://token@host", "https://(not shown)@host"),
        ("karo:pw@host:1", "(not shown)@host:1"),
        ("a\x1b[31m\nb\x00", "a?[31m b?"),
        ("", "(set, empty)"),
    ],
)
def test_cut_out_of_a_value(value: str, shown: str) -> None:
    assert ("SET", shown) in shown_environment({"SET": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", f"{GPU},{GPU},MIG-{GPU}"),
        ("TRAINBOX_IMAGE_DIGEST", DIGEST),
        ("SET", "0.1.0, revision 57897c5b0e9b4a6f8d0c2e1a3b5c7d9e0f1a2b3c-dirty"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
        (
            "LD_LIBRARY_PATH",
            "/usr/local/cuda-13/lib64:/opt/venv/lib/python3.11/site-packages/nvidia/cu13/lib",
        ),
        ("SET", "width=64 name=resnet50-imagenet-lr0001-batch256-seed42"),
        ("TASK", "my_tasks/gestures.py:Gestures"),
        ("SLURM_JOB_NODELIST", "gpu-a100-[01-04,17]"),
        ("RDZV_ENDPOINT", "node0:29400"),
        ("NVIDIA_REQUIRE_CUDA", "cuda>=13.0 brand=unknown,driver>=535,driver<536"),
    ],
)
def test_what_a_helper_needs_is_shown(name: str, value: str) -> None:
    assert shown_environment({name: value})[0] == (name, value)


def test_other_variables_are_not_looked_at() -> None:
    env = {
        "AWS_REGION": "x",
        "MY_GPUS": "x",
        "GPUS_": "x",
        "SSH_CONNECTION": "x",
        "PATH": "x",
        "GPUS": "2",
        "TP_SOCKET_IFNAME": "y",
    }
    assert [name for name, _ in shown_environment(env)] == ["GPUS", "TP_SOCKET_IFNAME", "proxies"]


def test_proxies_are_set_or_not() -> None:
    rows = dict(shown_environment({"HTTPS_PROXY": "http://karo:pw@proxy", "no_proxy": ""}))
    assert rows == {"proxies": "http_proxy unset, https_proxy set, no_proxy unset"}


@pytest.mark.timeout(30)  # an expression that backtracks takes minutes on some of these
@pytest.mark.parametrize(
    "part", ["word ", "key", "key=", "--key ", "a:", "x@", "GPU-", "a1", "http://a:", 'key="']
)
def test_a_long_value_is_cut(part: str) -> None:
    ((_, shown), _) = shown_environment({"SET": part * (10**5 // len(part))})
    assert len(shown) < 300


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/karoline", "~"),
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
def test_people_and_machines_are_hidden(text: str, shown: str) -> None:
    hidden = hidden_words(
        ["/home/karoline/", "/tmp", ""],
        ["karoline", "li", "trainbox", "root", ""],
        ["login07.physics.example", "localhost"],
    )
    assert redacted(text, hidden) == shown
