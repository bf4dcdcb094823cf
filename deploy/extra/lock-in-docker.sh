#!/bin/sh
# Write the lock of a file with requirements by the image's own stage `uv`, so that the host needs
# only Docker:
#   lock-in-docker.sh STAGE COPIES [--upgrade] -- FILE
set -eu

stage=$1 copies=$2
shift 2
for file in "$@"; do :; done # the last argument
[ -n "$stage" ] || exit 1    # docker build has printed why
if [ ! -f "$file" ]; then
    echo "trainbox: $file is not a file: set REQUIREMENTS to a file with requirements" >&2
    exit 2
fi
options=
case $1 in --upgrade) options=--upgrade ;; esac

absolute() {
    (cd -- "$1" && pwd -P)
}
mount() { # SOURCE TARGET, in the form of CSV
    printf 'type=bind,"source=%s",target=%s' "$(absolute "$1")" "$2"
}
checkout=$(dirname -- "$0")/../..
mkdir -p "$copies"
# shellcheck disable=SC2086 # empty without an option
exec docker run --rm --user "$(id -u):$(id -g)" --env HOME=/tmp --workdir /requirements \
    --mount "$(mount "$checkout" /checkout),readonly" \
    --mount "$(mount "$(dirname -- "$file")" /requirements)" \
    --mount "$(mount "$copies" /copies)" \
    "$stage" /opt/uv/bin/python -P /checkout/deploy/extra/requirements.py lock \
    $options --copy-to /copies -- "$(basename -- "$file")"
