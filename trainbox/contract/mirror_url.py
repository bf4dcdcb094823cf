"""The value of --mirror."""

from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainbox.contract.secret_rule import without_secrets

OPTION = "--mirror"


def check_url(url: str, runs_dir: Path | None = None) -> None:
    """Check the value of --mirror without a connection.

    Raises:
        WrongUse: The URL is wrong, its scheme is unknown, its package is not installed, or it is a
            folder in `runs_dir`, which would be lost together with the runs.
    """
    scheme, separator, rest = url.partition("://")
    shown = without_secrets(url)
    if scheme == "memory":
        raise WrongUse(f"{OPTION} {shown!r} ends with the process: write s3://bucket/prefix")
    if not separator and (Path(url).is_absolute() or Path(url).is_dir()):
        where = f"file://{Path(shown).absolute()}"
        raise WrongUse(f"{OPTION} {shown!r} is a path: for a folder, write '{where}'")
    if not separator or "::" in url or not rest.strip("/") or not url.isprintable():
        raise WrongUse(f"{OPTION} {shown!r} is not a storage: write s3://bucket/prefix")
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        raise WrongUse(
            f"{OPTION} {scheme}://... contains a login, which other users can see: use the "
            "environment or the configuration of the storage's package"
        )
    from fsspec import get_filesystem_class, url_to_fs

    try:
        get_filesystem_class(scheme)
    except ValueError:
        raise WrongUse(
            f"{OPTION} {shown!r} has an unknown scheme: use one of fsspec, such as s3, gs, abfs "
            "or file"
        ) from None
    except ImportError as error:
        raise WrongUse(
            f"{OPTION} {shown!r}: {error}: write the package to a file my.txt, and install it "
            "with `make extra-venv REQUIREMENTS=my.txt` or pip"
        ) from error
    if runs_dir is not None and scheme in ("file", "local"):
        folder = Path(url_to_fs(url)[1]).resolve()  # fsspec knows ~ and relative paths
        if folder.is_relative_to(runs_dir.resolve()):
            raise WrongUse(
                f"{OPTION} {shown!r} is in the folder of the runs ({runs_dir.resolve()}), and "
                "would be lost with it: use a folder on another disk, or s3://bucket/prefix"
            )
