#!/usr/bin/env bash
# tools/install leaves folders that are there as they are, whatever the umask, and what it makes can be read by all.
# usage: install_modes.sh SOURCE FOLDER GENERATOR
set -euo pipefail
source=$1 folder=$2 generator=$3
rm -rf "$folder"
mkdir -p "$folder/src"
cat >"$folder/src/CMakeLists.txt" <<'TEXT'
cmake_minimum_required(VERSION 3.20)
project(small NONE)
add_custom_target(to_install)
install(PROGRAMS cohort DESTINATION bin)
install(FILES a.h DESTINATION include/cohort)
install(FILES a.h DESTINATION lib/here)
install(FILES a.h DESTINATION share)
TEXT
printf '#!/bin/sh\necho cohort 0\n' >"$folder/src/cohort"
touch "$folder/src/a.h"
cmake -G "$generator" -S "$folder/src" -B "$folder/build" >/dev/null

modes() { (cd "$1" && find . -printf '%m %y %P\n' | sort -k 3); }
expect() {
  [[ $1 == "$2" ]] && return
  diff <(printf '%s\n' "$2") <(printf '%s\n' "$1") >&2 || true
  exit 1
}
for mask in 077 002; do
  prefix=$folder/prefix-$mask
  mkdir -p "$prefix"/{bin,share} "$folder/elsewhere-$mask"
  ln -s "$folder/elsewhere-$mask" "$prefix/lib"
  echo old >"$prefix/bin/cohort"
  chmod 0755 "$prefix" "$folder/elsewhere-$mask"
  chmod 2775 "$prefix/bin"
  chmod 0700 "$prefix/share"
  (umask $mask; "$source/tools/install" --prefix "$prefix" --build "$folder/build" >"$folder/log-$mask")
  expect "$(modes "$prefix")" "755 d 
2775 d bin
755 f bin/cohort
755 d include
755 d include/cohort
644 f include/cohort/a.h
777 l lib
700 d share
644 f share/a.h"
  expect "$(modes "$prefix/lib/.")" "755 d 
755 d here
644 f here/a.h"
done

# A copy that fails leaves no folder of its own behind.
prefix=$folder/full
mkdir -p "$prefix/share/a.h"
if "$source/tools/install" --prefix "$prefix" --build "$folder/build" >"$folder/log-full" 2>&1; then
  echo "a folder was replaced by a file" >&2
  exit 1
fi
[[ ! -e $(echo "$prefix"/.cohort-install.*) ]]
