#!/usr/bin/env bash
# A machine for containers: `unshare --mount --propagation private bash mounts.sh FOLDER` mounts
# what programs need in FOLDER/root (.ci/containers made it), says "ready", and waits for the end
# of its input. Its mounts are its own, and end with it.
set -euo pipefail
root=$1/root
umount --recursive --lazy /sys/fs/cgroup # the containers' runtime takes no hybrid of both versions
mount -t cgroup2 none /sys/fs/cgroup
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount --bind "$1" "$root/work"
for one in run tmp; do mount -t tmpfs tmpfs "$root/$one"; done
for one in resolv.conf hosts; do mount --bind "/etc/$one" "$root/etc/$one"; done
mount --bind "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root/work/ca.crt"
# Not chroot: a container can't change its root from there, and what is executed in it would see this
# machine's own files.
cd "$root"
PATH=/usr/sbin:/usr/bin:/sbin:/bin
pivot_root . .
umount --lazy .
cd /
echo ready
cat >/dev/null
