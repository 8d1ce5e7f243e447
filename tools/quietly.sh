# shellcheck shell=bash
# For ./demo and tools/install, which source it: `die`, and commands that nobody needs to read unless they fail.

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

quietly() { # WHAT LOG COMMAND...
  local what=$1 log=$2 since=$SECONDS
  shift 2
  printf '%-7s %s ...\n' "${0##*/}" "$what"
  if ! "$@" </dev/null >"$log" 2>&1; then
    grep -E '(error|FAILED|Error):? ' "$log" | head -n 20 >&2
    tail -n 15 "$log" >&2
    die "$what failed; all of it is in $log"
  fi
  printf '%-7s %s: %d s\n' "${0##*/}" "$what" $((SECONDS - since))
}
