# For the rehearsals of deploy/, which source it: podman with storage, configuration and a network namespace of its own, all removed at the end.
#
# Needs root, podman, runc, netavark, aardvark-dns, iptables and iproute2; an archive of a Debian 12 root with libfabric1 and systemd in BASE_ARCHIVE
# (mmdebstrap --variant=minbase --include=libfabric1,systemd,systemd-sysv bookworm FILE), so that nothing is fetched; the two binaries in BINARIES.
# `cargo xtask deploy` sees to all of these.
set -euo pipefail
: "${BINARIES:?the folder of quarry and raft-admin}" "${BASE_ARCHIVE:?an archive of a Debian 12 root with libfabric1 and systemd}"
for tool in podman runc ip iptables nsenter "$@"; do
    command -v "$tool" >/dev/null || { echo "skipped: $tool is not installed"; exit 0; }
done

work=$(mktemp -d /var/tmp/quarry-rehearsal-XXXXXX)
namespace=quarry-${work##*-}
base=localhost/quarry-base:rehearsal

# runc, and limits that need no privilege to raise: containers within containers have cgroups and rights that crun does not take.
mkdir -p "$work/bin"
cat >"$work/containers.conf" <<CONF
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=10000:10000", "nproc=10000:10000"]
CONF
cat >"$work/bin/podman" <<WRAPPER
#!/bin/sh
export CONTAINERS_CONF=$work/containers.conf DISABLE_HC_SYSTEMD=true
exec nsenter --net=/run/netns/$namespace $(command -v podman) --root $work/storage --runroot $work/run --tmpdir $work/tmp --network-config-dir $work/networks "\$@"
WRAPPER
chmod +x "$work/bin/podman"
export PATH="$work/bin:$PATH"

began_at=$SECONDS
step() { echo "==> $* ($((SECONDS - began_at)) s)"; }
# Until a command succeeds, at most for so many seconds.
within() {
    local until=$((SECONDS + $1)); shift
    until "$@" >"$work/last" 2>&1; do
        [ "$SECONDS" -lt "$until" ] || { echo "gave up: $*"; cat "$work/last"; return 1; }
        read -r -t 0.3 <> <(:) || true
    done
}
clean() {
    status=$?
    if [ "$status" -ne 0 ]; then
        for name in $(podman ps -a --format '{{.Names}}' 2>/dev/null); do
            echo "--- $name"; podman logs --tail 8 "$name" 2>&1 || true
        done
    fi
    podman rm --all --force --time 0 >/dev/null 2>&1 || true
    podman network rm --force quarry_quarry >/dev/null 2>&1 || true
    podman system reset --force >/dev/null 2>&1 || true
    ip netns delete "$namespace" 2>/dev/null || true
    umount -R "$work/storage/overlay" 2>/dev/null || true
    rm -rf "$work"
    exit "$status"
}
trap clean EXIT
ip netns add "$namespace"
ip -n "$namespace" link set lo up
podman import --quiet "$BASE_ARCHIVE" "$base" >/dev/null
