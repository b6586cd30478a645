#!/usr/bin/env bash
# Runs a command on Debian 13, whose Slurm is 24.11 (Debian 12: 22.05):  tests/cluster/debian13.sh COMMAND…
#
# The system lies in $SLUICE_DEBIAN13 (/var/tmp/sluice-debian13); the first call makes it, from the mirror that apt uses
# here: a minute, 1.4 GB, `rm -rf` ends it. The checkout and the Python behind .venv are mounted at the paths that
# they have outside, so neither torch nor anything else is installed again. Needs root, and a .venv whose Python is not
# Debian's own (pyenv, uv): that one would be Debian 13's inside.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
system=${SLUICE_DEBIAN13:-/var/tmp/sluice-debian13}
[ $# -gt 0 ] || { echo "usage: $0 COMMAND…" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "$0: needs root (namespaces, mounts)" >&2; exit 1; }
python=$("$checkout/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
[ "$python" != /usr ] || { echo "$0: .venv was made with /usr/bin/python, which is another one inside" >&2; exit 1; }

if [ ! -e "$system" ]; then
    new=$system.new # what was interrupted begins again
    # .ci/packages has what the tests need beyond a machine's usual things
    mapfile -t packages < <(sed 's/#.*//' "$checkout/.ci/packages" | tr -s '[:space:]' '\n' | sed '/^$/d')
    packages+=(ca-certificates git make procps)
    command -v mmdebstrap >/dev/null || apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null
    rm -rf "$new"
    mkdir -p "$new"
    # the sources of this machine, one release on; a mirror that is a snapshot may be past its date
    sed 's/bookworm bookworm-updates/trixie/; s/bookworm-security/trixie-security/' \
        /etc/apt/sources.list.d/debian.sources >"$new.sources"
    mmdebstrap --quiet --variant=minbase --mode=root --include="${packages[*]}" \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Check-Date "false"' \
        trixie "$new" "$new.sources"
    rm "$new.sources"
    mv "$new" "$system"
fi

# a worktree's own git folder holds little: the rest is in the repository it belongs to
git=$(cd "$checkout" && realpath "$(git rev-parse --git-common-dir)")
export system checkout python git
# all that is started inside ends with it; bash stays as process 1, for pytest would not reap orphans
# shellcheck disable=SC2016  # that shell expands them
exec unshare --mount --pid --ipc --fork --kill-child=KILL bash -c '
set -eu
mount --make-rprivate /
mount --bind "$system" "$system" # namespaces are only made from a root that is a mount
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
