"""Add packages beside requirements.lock, whose packages keep their versions.

`requirements.py lock my.txt` writes my.lock, with the versions and hashes of the packages that
my.txt needs beside the locked ones.

`requirements.py install my.txt --into /opt/venv` installs the packages of my.lock.

uv decides both, and a requirement that would move a locked package is refused with code 2. Only the
standard library is imported. docs/decisions/0024-extra-packages-keep-the-lock.md has the reasons.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

OLDEST_PYTHON = "3.11"  # requires-python in pyproject.toml
RECORD = "extra.lock"  # the copy of my.lock in the environment, whose digest manifests have
OWN_PACKAGES = ("entrypoint", "trainbox", "trainer")
_LOCK = Path(__file__).parent / "../../requirements.lock"
_ORIGIN = "make lock REQUIREMENTS=my.txt"  # uv writes this into the header of my.lock
# A name with extras, versions and a marker, without options of pip, addresses and hashes.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*\s*(\[[^]]*\])?\s*([<>=!~][^@\\]*)?(;[^@\\]*)?")


class Refused(Exception):
    """The file with the requirements or its lock cannot be used; the message has the remedy."""


def checked(text: str, file: Path) -> str:
    """Return the requirements of a file, after a check that each line is a name with versions.

    Raises:
        Refused: The file has no requirements, or a line is something else.
    """
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        if line and ("--" in line or not _REQUIREMENT.fullmatch(line)):
            raise Refused(
                f"{file}:{number}: {line!r} is not a requirement: write a name with versions on "
                "one line, such as einops>=0.8, without options, hashes, addresses and folders "
                "(your own code is mounted and not installed)"
            )
    if not any(lines):
        raise Refused(f"{file} has no requirements: add lines such as einops>=0.8")
    return "\n".join(lines)


def names(lock: str, but_not: str = "") -> set[str]:
    """Return the packages of a lock of uv, except packages only for the platform `but_not`."""
    found = re.findall(r"^([\w.-]+)==\S+(?: ; (.*?))?(?: \\)?$", lock, re.MULTILINE)
    return {name for name, marker in found if marker != f"sys_platform == '{but_not}'"}


def lock(file: Path, locked: Path, uv: str, upgrade: bool) -> Path:
    """Write the lock of `file` if it does not match yet, and return its path.

    Args:
        file: The requirements.
        locked: The file requirements.lock.
        uv: The program uv.
        upgrade: Resolve again, also if the lock matches, and prefer no earlier version.

    Raises:
        Refused: The requirements cannot be installed beside the locked packages.
    """
    path, requested, old, digest = _read(file, locked)
    if old and _ORIGIN not in old:
        raise Refused(
            f"{path} exists, and make did not write it: rename {file.name}, or remove the lock if "
            "it is a damaged one"
        )
    if digest in old and not upgrade:
        return path
    command = [uv, "pip", "compile", "-", "--universal", "--generate-hashes", "--no-annotate"]
    command += ["--python", sys.executable, "--python-version", OLDEST_PYTHON]
    command += ["--constraints", str(locked.absolute()), "--output-file", "my.lock"]
    command += ["--custom-compile-command", f"{_ORIGIN}, of {digest}"]
    command += ["--quiet", "--color", "never", *["--upgrade"] * upgrade]
    # The environment has these packages. my.lock has the same other platforms as Trainbox's lock.
    for name in sorted(names(locked.read_text(encoding="utf-8"), but_not="win32")):
        command += ["--no-emit-package", name]
    # In another folder, uv finds no settings of the user's project.
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / "my.lock"
        new.write_text(
            old, encoding="utf-8"
        )  # uv prefers the versions of the file that it replaces
        done = subprocess.run(
            command, cwd=folder, input=requested, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Refused(
                f"uv cannot add {file} to the packages of requirements.lock, whose versions never "
                f"change: change the requirement that uv names\n{done.stderr.strip()}"
            )
        shutil.copyfile(new, path.with_name(f"{path.name}.new"))
    path.with_name(f"{path.name}.new").replace(path)
    count = len(names(path.read_text(encoding="utf-8"), but_not="win32"))
    print(f"trainbox: wrote {path} with {count} package{'s' * (count != 1)}", file=sys.stderr)
    return path


def install(file: Path, locked: Path, uv: str, into: Path) -> None:
    """Install the packages of the lock of `file` in the environment `into`.

    Packages of another lock that this function has installed before are removed.

    Raises:
        Refused: The lock does not match, or a package would hide a package of Trainbox.
        subprocess.CalledProcessError: uv failed, and has printed why.
    """
    path, _, text, digest = _read(file, locked)
    if digest not in text:
        reason = (
            "does not match the requirements and requirements.lock" if text else "does not exist"
        )
        raise Refused(f"{path} {reason}: run make lock REQUIREMENTS={file}")
    record = into / RECORD
    before = record.read_text(encoding="utf-8") if record.exists() else ""
    if before == text:
        return
    python = ["--quiet", "--python", str(into / "bin/python")]
    kept, added = names(locked.read_text(encoding="utf-8")), names(text)
    remove = [uv, "pip", "uninstall", *python]
    if old := names(before) - added - kept:
        subprocess.run([*remove, *sorted(old)], check=True)
    # The constraints refuse a version of a locked package that was written into my.lock by hand.
    command = [uv, "pip", "install", *python, "--constraints", str(locked), "--compile-bytecode"]
    command += ["--require-hashes", "--no-deps", "--requirements", str(path.absolute())]
    subprocess.run(command, check=True)
    sites = [str(site) for site in into.glob("lib/python3*/site-packages")]
    if hidden := [name for name in OWN_PACKAGES if PathFinder.find_spec(name, sites)]:
        subprocess.run([*remove, *sorted(added - kept)], check=True)
        record.unlink(missing_ok=True)
        raise Refused(
            f"{file} installs a module {hidden[0]}, which hides the module of Trainbox with the "
            "same name: remove the requirement that installs it"
        )
    record.write_text(text, encoding="utf-8")


def _read(file: Path, locked: Path) -> tuple[Path, str, str, str]:
    """Return the path of the lock, the requirements, the lock or "", and the digest of both inputs.

    The lock is current if it has the digest.
    """
    path = file.with_suffix(".lock") if file.name else file
    if not file.is_file() or path == file:
        raise Refused(
            f"{file} is not a file with requirements: set REQUIREMENTS to such a file, such as "
            "my.txt, and with Compose REQUIREMENTS_DIR to its folder"
        )
    try:
        requested = checked(file.read_text(encoding="utf-8-sig"), file)
    except UnicodeDecodeError:
        raise Refused(f"{file} is not text in UTF-8: save it as UTF-8") from None
    lock = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    digest = hashlib.sha256(requested.encode() + b"\n" + locked.read_bytes()).hexdigest()
    return path, requested, lock, f"sha256:{digest}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=["lock", "install"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--copy-to", type=Path)
    parser.add_argument("--into", type=Path, default=Path(sys.prefix))
    parser.add_argument("--locked", type=Path, default=_LOCK)
    parser.add_argument("--uv", default=str(Path(sys.prefix) / "bin/uv"))
    given = parser.parse_args(arguments)
    try:
        if given.verb == "lock":
            path = lock(given.file, given.locked, given.uv, given.upgrade)
            if given.copy_to:
                given.copy_to.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(given.file, given.copy_to / "requirements.txt")
                shutil.copyfile(path, given.copy_to / "requirements.lock")
        else:
            install(given.file, given.locked, given.uv, given.into)
    except Refused as error:
        print(f"trainbox: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"trainbox: uv failed with code {error.returncode} (see above)", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"trainbox: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
