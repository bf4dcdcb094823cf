"""Add packages to those of requirements.lock, without moving one of these.

`requirements.py lock my.txt` writes my.lock, with the versions and hashes of the packages that
my.txt needs beside the locked ones.

`requirements.py install my.txt --into /opt/venv` installs the packages of my.lock.

A requirement that would move a locked package is refused with code 2. Only the standard library is
imported. docs/decisions/0024-extra-packages-keep-the-lock.md has the reasons.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

OLDEST_PYTHON = "3.11"  # requires-python in pyproject.toml
RECORD = "extra.lock"  # the copy of my.lock in the environment, whose digest manifests have
OWN_PACKAGES = ("entrypoint", "trainbox", "trainer")
_LOCK = Path(__file__).parent / "../../requirements.lock"
_HEADER = """\
# Written by make from a file with requirements. Commit both files.
# requirements: sha256:{}
# requirements.lock: sha256:{}
"""
_HEADER_LINES = re.compile(re.escape(_HEADER).replace(r"\{\}", "([0-9a-f]{64})"))
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"(?:===|[=~!<>]=|[<>])\s*[\w.*+!-]+"
_REQUIREMENT = re.compile(
    rf"({_NAME})\s*(?:\[[\w\s,.-]*\])?\s*(?:{_VERSION}(?:\s*,\s*{_VERSION})*)?\s*(?:;(?!.*--)[^\\]*)?"
)
_PIN = re.compile(rf"({_NAME})==([^\s;\\]+)(?: ; (.*?))?(?: \\)?")


class Refused(Exception):
    """The file with the requirements or its lock cannot be used; the message has the remedy."""


class Unsolvable(Exception):
    """uv found no versions that satisfy all requirements; the message is uv's."""


@dataclass(frozen=True)
class Pin:
    """A package of a lock: its version, the platforms that it is for, and its lines."""

    name: str
    version: str
    marker: str
    text: str


def requirements(text: str, file: str) -> list[str]:
    """Return the requirements of a file, without comments and empty lines.

    Args:
        text: The content of the file.
        file: Its name, for messages.

    Raises:
        Refused: The file has no requirements, or a line is not a name with versions.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        content = re.sub(r"(^|\s)#.*", "", line).strip()
        if not content:
            continue
        if not _REQUIREMENT.fullmatch(content):
            raise Refused(f"{file}:{number}: {_reason(content)}")
        found.append(content)
    if not found:
        raise Refused(f"{file} has no requirements: add lines such as einops>=0.8")
    return found


def _reason(content: str) -> str:
    """Return why a line is refused, with the remedy."""
    if content.endswith("\\"):
        return f"{content!r} continues on the next line: write it on one line, without hashes"
    if content.startswith(("-e", "--editable")) or re.match(r"[./~]|file:|[A-Za-z]:\\", content):
        return (
            f"{content!r} names a folder or file: remove this line, since your own code is mounted "
            "and not installed"
        )
    if "://" in content or "@" in content:
        return f"{content!r} is an address: use a version from the index, such as einops==0.8.2"
    if content.startswith("-") or "--" in content:
        return f"{content!r} has an option: use only requirements, such as einops>=0.8"
    return f"{content!r} is not a requirement: write a name with versions, such as einops>=0.8"


def normalized(name: str) -> str:
    """Return the name of a package in the form in which indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Return the normalized name of the package that a requirement is for."""
    return normalized(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def pins(lock: str) -> list[Pin]:
    """Return the packages of a lock in the form that uv writes."""
    blocks = re.split(r"^(?=[^\s#])", lock, flags=re.MULTILINE)
    matches = ((_PIN.fullmatch(block.partition("\n")[0]), block) for block in blocks)
    return [Pin(normalized(m[1]), m[2], m[3] or "", block) for m, block in matches if m]


def versions(locked: Iterable[Pin]) -> dict[str, list[str]]:
    """Return the locked versions of each package: several, if they differ by platform."""
    found: dict[str, list[str]] = {}
    for pin in locked:
        found.setdefault(pin.name, []).append(pin.version)
    return found


def constraints(locked: Sequence[Pin]) -> str:
    """Return the constraints that keep the locked versions.

    A version that is locked for some platforms only is kept on all platforms, if it is the only
    one.
    """
    several = {name for name, found in versions(locked).items() if len(found) > 1}
    return "".join(
        f"{pin.name}=={pin.version}{f' ; {pin.marker}' if pin.name in several else ''}\n"
        for pin in locked
    )


def moved(resolved: Iterable[Pin], locked: Iterable[Pin]) -> dict[str, tuple[str, str]]:
    """Return each package whose version is not a locked one, with this and the locked version."""
    kept = versions(locked)
    return {
        pin.name: (pin.version, " or ".join(kept[pin.name]))
        for pin in resolved
        if pin.version not in kept.get(pin.name, [pin.version])
    }


def added(resolved: Iterable[Pin], locked: Iterable[Pin]) -> list[Pin]:
    """Return the packages that are not installed for the same platforms by the lock."""
    known = {(pin.name, pin.version, pin.marker) for pin in locked}
    return [pin for pin in resolved if (pin.name, pin.version, pin.marker) not in known]


def changes(
    requested: Sequence[str], changed: dict[str, tuple[str, str]], direct: bool
) -> list[str]:
    """Return a sentence for each package that a requirement moves.

    Args:
        requested: The requirements.
        changed: The packages that they move, as `moved` returns them.
        direct: Name only requirements for these packages themselves.
    """
    return [
        f"{line} needs {name} {new}, but requirements.lock has {name} {old}"
        for name, (new, old) in changed.items()
        for line in requested
        if not direct or name_of(line) == name
    ]


def lock_text(requested: Sequence[str], locked: Sequence[Pin], extra: Iterable[Pin]) -> str:
    """Return the content of my.lock."""
    body = "".join(f"{pin.text.rstrip()}\n" for pin in extra)
    return _HEADER.format(*_digests(requested, locked)) + body


def outdated(lock: str, requested: Sequence[str], locked: Sequence[Pin]) -> str:
    """Return why a lock does not match, or an empty string if it matches."""
    header = _HEADER_LINES.match(lock)
    if header is None:
        return "it was not written by make"
    of_requirements, of_locked = _digests(requested, locked)
    if header[1] != of_requirements:
        return "the requirements have changed"
    return "" if header[2] == of_locked else "requirements.lock has changed"


def _digests(requested: Sequence[str], locked: Sequence[Pin]) -> tuple[str, str]:
    """Return the SHA-256 of the requirements and of the locked versions, in hex."""
    texts = ("\n".join(requested), constraints(locked))
    one, other = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return one, other


class Resolver:
    """uv with the locked packages."""

    def __init__(self, uv: str, locked: Sequence[Pin]) -> None:
        """Use the program `uv`."""
        self._uv, self._locked = uv, locked

    def resolve(
        self, requested: Iterable[str], preferred: Iterable[Pin], free: bool = False
    ) -> list[Pin]:
        """Return the packages that the requirements need, with the locked ones among them.

        Args:
            requested: The requirements.
            preferred: Versions to use if the requirements allow them.
            free: Let the requirements move locked packages.

        Raises:
            Unsolvable: No versions satisfy the requirements.
            Refused: uv failed for another reason, such as a wrong marker or no network.
        """
        with tempfile.TemporaryDirectory() as name:
            # Relative names, because uv writes them into its output.
            folder = Path(name)
            (folder / "requirements.txt").write_text("\n".join(requested) + "\n")
            (folder / "requirements.lock").write_text("" if free else constraints(self._locked))
            # uv prefers the versions of the file that it replaces.
            (folder / "out.lock").write_text(
                "".join(
                    f"{pin.name}=={pin.version}{f' ; {pin.marker}' if pin.marker else ''}\n"
                    for pin in preferred
                )
            )
            command = [self._uv, "pip", "compile", "requirements.txt", "--output-file", "out.lock"]
            command += ["--constraint", "requirements.lock", "--universal", "--generate-hashes"]
            command += ["--python", sys.executable, "--python-version", OLDEST_PYTHON]
            command += ["--no-header", "--no-emit-index-url", "--quiet", "--color", "never"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode == 1:
                raise Unsolvable(done.stderr.strip())
            if done.returncode:
                raise Refused(f"uv cannot resolve the requirements:\n{done.stderr.strip()}")
            return pins((folder / "out.lock").read_text())

    def explanation(self, requested: Sequence[str]) -> list[str]:
        """Return the requirements that would move a locked package, each with both versions."""
        try:
            free = self.resolve(requested, self._locked, free=True)
        except Unsolvable:
            return []
        changed = moved(free, self._locked)
        return changes(requested, changed, direct=True) or [
            sentence for line in requested for sentence in self._of_one(line)
        ]

    def _of_one(self, line: str) -> list[str]:
        try:
            self.resolve([line], [])
        except Unsolvable:
            free = self.resolve([line], self._locked, free=True)
            return changes([line], moved(free, self._locked), direct=False)
        return []


def lock(file: Path, locked: Sequence[Pin], uv: str, upgrade: bool) -> Path:
    """Write the lock of `file` if it does not match yet, and return its path.

    Args:
        file: The requirements.
        locked: The packages of requirements.lock.
        uv: The program uv.
        upgrade: Resolve again, also if the lock matches, and prefer no earlier version.

    Raises:
        Refused: The requirements cannot be installed beside the locked packages.
    """
    path, requested, old = _read(file)
    reason = "it did not exist" if old is None else outdated(old, requested, locked)
    if old is not None and not _HEADER_LINES.match(old):
        raise Refused(
            f"{path} exists, and make did not write it: rename {file.name}, or remove the lock if "
            "it is a damaged one"
        )
    if not reason and not upgrade:
        return path
    resolver = Resolver(uv, locked)
    try:
        resolved = resolver.resolve(requested, pins("" if upgrade else old or ""))
    except Unsolvable as error:
        if sentences := resolver.explanation(requested):
            remedy = "allow the locked version, or remove the requirement"
            raise Refused("\n".join(f"{file}: {line}: {remedy}" for line in sentences)) from None
        raise Refused(f"{file} cannot be installed beside requirements.lock:\n{error}") from None
    extra = added(resolved, locked)
    _replace(path, lock_text(requested, locked, extra))
    why = "upgrade" if upgrade else reason
    count = f"{len(extra)} package{'' if len(extra) == 1 else 's'}"
    print(f"trainbox: wrote {path} with {count} ({why})", file=sys.stderr)
    return path


def install(file: Path, locked: Sequence[Pin], uv: str, into: Path) -> None:
    """Install the packages of the lock of `file` in the environment `into`.

    Packages of another lock that this function has installed before are removed.

    Raises:
        Refused: The lock does not match, or a package would hide a package of Trainbox.
        subprocess.CalledProcessError: uv failed, and has printed why.
    """
    path, requested, text = _read(file)
    remedy = f"run make lock REQUIREMENTS={file}"
    if text is None:
        raise Refused(f"{path} does not exist: {remedy}")
    if reason := outdated(text, requested, locked):
        raise Refused(f"{path} does not match ({reason}): {remedy}")
    extra = pins(text)
    if changed := moved(extra, locked):
        raise Refused(f"{changes([str(path)], changed, direct=False)[0]}: {remedy}")
    record = into / RECORD
    before = record.read_text(encoding="utf-8") if record.exists() else ""
    if before == text:
        return
    python = ["--python", str(into / "bin/python")]
    names = {pin.name for pin in extra}
    _uninstall(uv, python, {pin.name for pin in pins(before)} - names - set(versions(locked)))
    options = ["--quiet", "--compile-bytecode", "--require-hashes", "--no-deps"]
    command = [uv, "pip", "install", *python, *options, "--requirements", str(path.absolute())]
    subprocess.run(command, check=True)
    if hidden := _hidden(into):
        _uninstall(uv, python, names - set(versions(locked)))
        record.unlink(missing_ok=True)
        raise Refused(
            f"{file} installs a module {hidden}, which hides the module of Trainbox with the same "
            "name: remove the requirement that installs it"
        )
    record.write_text(text, encoding="utf-8")


def _uninstall(uv: str, python: list[str], names: Collection[str]) -> None:
    if names:
        command = [uv, "pip", "uninstall", "--quiet", *python, *sorted(names)]
        subprocess.run(command, check=True)


def _hidden(into: Path) -> str | None:
    """Return the name of a module of Trainbox that an installed package also has."""
    return next(
        (
            name
            for site in into.glob("lib/python3*/site-packages")
            for name in OWN_PACKAGES
            if (site / name).exists() or (site / f"{name}.py").exists()
        ),
        None,
    )


def _read(file: Path) -> tuple[Path, list[str], str | None]:
    """Return the path of the lock, the requirements, and the content of the lock if it exists."""
    if not file.is_file():
        raise Refused(
            f"{file} is not a file: set REQUIREMENTS to a file with requirements, "
            "and with Compose REQUIREMENTS_DIR to its folder"
        )
    path = file.with_suffix(".lock")
    if path == file:
        raise Refused(f"{file} is a lock: set REQUIREMENTS to the file with the requirements")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise Refused(f"{file} is not text in UTF-8: save it as UTF-8") from None
    requested = requirements(text, str(file))
    lock = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    return path, requested, lock


def _replace(path: Path, text: str) -> None:
    """Write a file at once, so that nobody reads half of it."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


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
        locked = pins(given.locked.read_text(encoding="utf-8"))
        if given.verb == "lock":
            path = lock(given.file, locked, given.uv, given.upgrade)
            if given.copy_to:
                given.copy_to.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(given.file, given.copy_to / "requirements.txt")
                shutil.copyfile(path, given.copy_to / "requirements.lock")
        else:
            install(given.file, locked, given.uv, given.into)
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
