#!/usr/bin/env bash
# Run a command in a Debian 13 system, which has Slurm 24.11 (Debian 12 has 22.05):
#
#     tests/cluster/debian13.sh COMMAND…
#
# The system is a folder: $SLUICE_DEBIAN13, by default /var/tmp/sluice-debian13. The first call creates it from this
# machine's apt mirror, which takes a minute and 1.4 GB. Remove it with `rm -rf`.
#
# The checkout and the Python of .venv are mounted in the system at the same paths. Nothing in .venv is installed again.
# The script needs root. The Python of .venv must not be /usr/bin/python (use pyenv or uv), because the system has
# another one there.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
system=${SLUICE_DEBIAN13:-/var/tmp/sluice-debian13}
[ $# -gt 0 ] || { echo "usage: $0 COMMAND…" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "$0: needs root (namespaces, mounts)" >&2; exit 1; }
python=$("$checkout/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
[ "$python" != /usr ] || {
    echo "$0: .venv was made with /usr/bin/python, which is another Python in Debian 13; use pyenv or uv" >&2
    exit 1
}

if [ ! -e "$system" ]; then
    new=$system.new # renamed at the end, so that an interrupted call starts from scratch
    # Install the packages that the tests need, and those that this script needs inside.
    mapfile -t packages < <(sed 's/#.*//' "$checkout/.ci/packages" | tr -s '[:space:]' '\n' | sed '/^$/d')
    packages+=(ca-certificates git make procps)
    command -v mmdebstrap >/dev/null || apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null
    rm -rf "$new"
    mkdir -p "$new"
    # Use the apt sources of this machine for the next release. The mirror may be a snapshot with expired dates.
    sed 's/bookworm bookworm-updates/trixie/; s/bookworm-security/trixie-security/' \
        /etc/apt/sources.list.d/debian.sources >"$new.sources"
    mmdebstrap --quiet --variant=minbase --mode=root --include="${packages[*]}" \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Check-Date "false"' \
        trixie "$new" "$new.sources"
    rm "$new.sources"
    mv "$new" "$system"
fi

# In a git worktree, most of the git data is in the folder of the main repository, so that is mounted.
git=$(cd "$checkout" && realpath "$(git rev-parse --git-common-dir)")
export system checkout python git
# When bash (process 1) ends, all other processes end with it. bash also reaps orphans, which pytest does not do.
# shellcheck disable=SC2016  # the inner shell expands the variables
exec unshare --mount --pid --ipc --fork --kill-child=KILL bash -c '
set -eu
mount --make-rprivate /
mount --bind "$system" "$system" # `unshare --mount` of tests/cluster needs a root that is a mount
for folder in "$checkout" "$python" "$git" /etc/hosts /etc/resolv.conf; do
    if [ -d "$folder" ]; then mkdir -p "$system$folder"; else touch "$system$folder"; fi
    mount --bind "$folder" "$system$folder"
done
mount -t proc proc "$system/proc"
mount --rbind /sys "$system/sys"
mount --rbind /dev "$system/dev"
mount -t tmpfs tmpfs "$system/dev/shm"
mount -t tmpfs tmpfs "$system/run"
exec chroot "$system" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    LANG=C.UTF-8 TERM="${TERM:-dumb}" ${CI:+CI="$CI"} bash -c "cd \"\$0\" && \"\$@\"; exit \$?" "$checkout" "$@"
' debian13 "$@"
