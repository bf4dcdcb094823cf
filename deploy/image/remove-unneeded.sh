#!/bin/sh
# Remove the files of unneeded.txt from an installation of the locked packages:
#   remove-unneeded.sh /opt/venv/lib/python3.12/site-packages
set -eu

list=$(cd "$(dirname "$0")" && pwd)/unneeded.txt
cd "$1"
while read -r pattern _; do
    case $pattern in
    '' | '#'*) continue ;;
    triton/*) [ -d triton ] || continue ;; # only images for --compile have triton
    esac
    # shellcheck disable=SC2086 # the pattern is expanded here
    set -- $pattern
    if [ ! -e "$1" ]; then
        echo "remove-unneeded.sh: $pattern does not exist in $PWD: correct $list" >&2
        exit 1
    fi
    rm -r "$@"
done <"$list"
