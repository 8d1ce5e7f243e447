# shellcheck shell=bash
# For tools/release/test-bare-debian and tools/release/test-wheel, which source it: a system of minimal size in a folder, in which commands
# run in mount, process and host name namespaces of their own, so that nothing is left behind, whatever happens.
# Needs root, debootstrap and a network. apt's sources for Debian and certificates of this machine are handed in.
#
#   bare_system NAME PIP [DIR]    sets $root: DIR, which stays, or a folder that is removed when the script ends. PIP: wheel
#                                 (this machine's pip configuration with the folders that it names), or none
#   in_bare_system [--user NAME] COMMAND...

# shellcheck disable=SC2034 # of those who source this
bare_systems="debian-11 debian-12 debian-13 ubuntu-18.04 ubuntu-22.04 ubuntu-24.04"
binds=() pass_on=()

bare_archive() { # NAME: prints the archive of that system, which is made the first time
  local archive=${XDG_CACHE_HOME:-$HOME/.cache}/cohort/bare-$1.tar suite mirror=${UBUNTU_MIRROR-} new options=() script=
  if ! [[ -e $archive ]]; then
    case $1 in
      debian-11) suite=bullseye ;; debian-12) suite=bookworm ;; debian-13) suite=trixie ;;
      ubuntu-18.04) suite=bionic ;; ubuntu-22.04) suite=jammy ;; ubuntu-24.04) suite=noble ;;
    esac
    if [[ $1 == debian-* ]]; then
      # shellcheck disable=SC2016 # apt's, not the shell's
      mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null | sed -n 1p)
    else # whose key a Debian need not have; apt inside has it
      [[ $mirror ]] || { echo "bare    set UBUNTU_MIRROR to the address of a mirror of Ubuntu's" >&2; exit 1; }
      options=(--no-check-gpg "--components=main,universe")
      script=${DEBOOTSTRAP_DIR:-/usr/share/debootstrap}/scripts/gutsy # that of all Ubuntus, also of later ones
    fi
    echo "bare    making a $1 (once) ..." >&2
    mkdir -p "$(dirname "$archive")"
    new=$(mktemp -d "$(dirname "$archive")/new.XXXXXX")
    if ! debootstrap --variant=minbase "${options[@]}" "$suite" "$new/root" ${mirror:+"$mirror"} ${script:+"$script"} >"$new.log" 2>&1; then
      tail "$new.log" >&2
      rm -rf --one-file-system "$new" "$new.log"
      exit 1
    fi
    tar -C "$new/root" -cf "$new/archive" .
    mv "$new/archive" "$archive"
    rm -rf --one-file-system "$new" "$new.log"
  fi
  printf '%s\n' "$archive"
}

bare_system() {
  local archive path name value part
  ((EUID == 0)) || { echo "${0##*/}: needs root, for debootstrap and chroot" >&2; exit 1; }
  command -v debootstrap >/dev/null || { echo "${0##*/}: apt-get install debootstrap" >&2; exit 1; }
  archive=$(bare_archive "$1") || exit 1
  if [[ ${3-} ]]; then
    mkdir -p "$3"
    root=$(realpath "$3")
  else
    root=$(mktemp -d "${TMPDIR:-/tmp}/cohort-bare.XXXXXX")
    trap 'rm -rf --one-file-system "$root"' EXIT
  fi
  if ! [[ -e $root/etc/os-release ]]; then
    tar -C "$root" -xf "$archive"
    # Only the files that a machine of this network needs.
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    if [[ $1 == debian-12 ]]; then
      rm -f "$root/etc/apt/sources.list"
      for part in sources.list sources.list.d trusted.gpg.d auth.conf auth.conf.d; do
        [[ -e /etc/apt/$part ]] && cp -a "/etc/apt/$part" "$root/etc/apt/"
      done
    fi
    grep -lE '^ *Acquire' /etc/apt/apt.conf.d/* 2>/dev/null | xargs -r cp -t "$root/etc/apt/apt.conf.d/"
  fi

  # Certificates (a copy: the package that owns /etc/ssl/certs is installed inside), and pip's configuration with the
  # folders of this machine that it names.
  local bundle=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt} inside=/etc/certificates-of-the-host.crt
  if [[ -e $bundle ]]; then
    cp -L "$bundle" "$root$inside"
    echo "Acquire::https::CaInfo \"$inside\";" >"$root/etc/apt/apt.conf.d/99certificates"
    pass_on+=("SSL_CERT_FILE=$inside" "REQUESTS_CA_BUNDLE=$inside" "PIP_CERT=$inside")
  fi
  for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [[ ${!name-} ]] && pass_on+=("$name=${!name}")
  done
  if [[ $2 == wheel ]] && command -v pip >/dev/null; then
    {
      echo "[global]"
      pip config list 2>/dev/null | sed -nE "s/^global\.([a-z-]+)='(.*)'$/\1 = \2/p" | grep -v '^cert ' | sed 's/\\n/\n  /g'
    } >"$root/etc/pip.conf"
    while IFS='=' read -r name value; do
      pass_on+=("$name=$value")
    done < <(env | grep -E '^PIP_[A-Z_]+=' | grep -v '^PIP_CERT=')
    while read -r path; do
      [[ -e $path ]] && binds+=("$path")
    done < <(pip config list 2>/dev/null | grep -v cert= | grep -oE "(file://)?/[^ '\\\\]+" | sed -E 's#^file://##; s#/simple/?$##' | sort -u)
  else
    printf '[global]\nno-index = true\n' >"$root/etc/pip.conf"
  fi
}

# Mounts that vanish with the namespace, then the command.
# shellcheck disable=SC2016
inside_bare_system='
  set -e
  root=$1 user=$2; shift 2
  mount --make-rprivate /
  mount --bind "$root" "$root"
  mount -t proc proc "$root/proc"
  mount -t sysfs -o ro sysfs "$root/sys" 2>/dev/null || mount --rbind /sys "$root/sys"
  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  for device in null zero full random urandom tty; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
  ln -s /proc/self/fd "$root/dev/fd"; ln -s /proc/self/fd/0 "$root/dev/stdin"; ln -s /proc/self/fd/1 "$root/dev/stdout"
  ln -s /proc/self/fd/2 "$root/dev/stderr"; ln -s pts/ptmx "$root/dev/ptmx"
  mkdir "$root/dev/pts" "$root/dev/shm"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; touch "$root$1"; fi
    mount --rbind "$1" "$root$1"
    mount -o remount,bind,ro "$root$1"
    shift
  done
  shift
  cd /
  if [ "$user" != root ]; then
    if ! [ -x "$root/usr/bin/sudo" ]; then
      chroot "$root" sh -c "apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends sudo" >"$root/root/sudo.log" 2>&1
      echo "$user ALL=(ALL) NOPASSWD: ALL" >"$root/etc/sudoers.d/$user"
    fi
    set -- --userspec="$user:$user" / "$@"
  else
    set -- / "$@"
  fi
  # The root of the namespace, not of this process alone: whoever enters another mount namespace there begins at it.
  cd "$root"
  mkdir -p .root-before
  pivot_root . .root-before
  cd /
  umount -l /.root-before
  rmdir /.root-before
  exec chroot "$@"'

in_bare_system() {
  local user=root home=/root
  if [[ $1 == --user ]]; then
    user=$2
    shift 2
    [[ $user == root ]] || home=/home/$user
  fi
  env -i TERM=dumb HOME="$home" USER="$user" LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "${pass_on[@]}" unshare --mount --pid --fork --kill-child --uts \
    bash -c "$inside_bare_system" inside "$root" "$user" "${binds[@]}" -- "$@" </dev/null
}
