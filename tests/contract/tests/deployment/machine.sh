#!/usr/bin/env bash
# A machine run by systemd: this machine's disk with changes that are discarded, and its own processes, network and
# control groups.
#
#   machine.sh FOLDER REPOSITORY PROGRAMS    boots, writes its pid to FOLDER/pid, and runs until its standard input ends
#
# The clone that a reader of the documentation would have is at /clone. Nothing is left over: mounts and processes end
# with their namespaces, also if the test is killed, and the control group is removed.
set -eu
folder=$1 repository=$2 programs=$3

# Runs in its own mount namespace: waits for the end, then cleans up.
supervise() {
  # Ctrl-C is meant for the test, and its end is ours too. Ending here would leave the machine running.
  trap '' INT TERM HUP
  mkdir "$folder/cgroup"
  mount -t cgroup2 cgroup2 "$folder/cgroup"
  group=$folder/cgroup/modelrelay-test-$$
  mkdir "$group"
  # The machine must not share our standard input, which a shell would close for a background process.
  unshare --mount --pid --net --ipc --uts --fork --kill-child bash "$0" "$folder" "$repository" "$programs" boot "$group" < /dev/null &
  machine=$!
  read -r _ || true
  kill -KILL "$machine" 2> /dev/null || true
  wait "$machine" || true
  # A killed process leaves its group a moment later.
  for _ in $(seq 100); do
    find "$group" -depth -type d -exec rmdir {} + 2> /dev/null || true
    if [ ! -d "$group" ]; then
      umount "$folder/cgroup"
      # The test removes this folder, but it may no longer exist.
      rm -rf --one-file-system "$folder"
      return
    fi
    sleep 0.1
  done
  echo "$group is left" >&2
  return 1
}

# Runs as the machine's first process, which becomes systemd.
boot() {
  echo 0 > "$group/cgroup.procs"
  local root=$folder/root device
  mkdir "$folder/changes" "$root"
  mount -t tmpfs -o mode=755 tmpfs "$folder/changes"
  mkdir "$folder/changes/upper" "$folder/changes/work"
  mount -t overlay -o "lowerdir=/,upperdir=$folder/changes/upper,workdir=$folder/changes/work" overlay "$root"
  # None of this machine's services, disks and settings belong to the new one.
  rm -rf "$root"/etc/systemd/system/* "$root"/etc/rc?.d "$root/etc/fstab" "$root/etc/crypttab" "$root/var/log/journal" \
    "$root/etc/modelrelay" "$root"/var/lib/{,private/}modelrelay
  mount -t proc proc "$root/proc"
  mount --bind "$root/proc/sys" "$root/proc/sys"
  mount -o remount,bind,ro "$root/proc/sys"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  for device in null zero full random urandom tty; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
  done
  mkdir "$root/dev/shm" "$root/dev/pts"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"
  for device in dev/shm run tmp; do mount -t tmpfs -o mode=1777 tmpfs "$root/$device"; done
  chmod 755 "$root/run"
  mkdir -p "$root/clone/target/release" "$root/clone/deploy"
  mount --bind "$programs" "$root/clone/target/release"
  mount --bind "$repository/deploy" "$root/clone/deploy"
  # Root needs no sudo.
  printf '#!/bin/sh\nexec "$@"\n' > "$root/usr/local/sbin/sudo"
  chmod 755 "$root/usr/local/sbin/sudo"
  # The old /proc shows our pid in the namespace of the test.
  local number
  read -r number _ < /proc/self/stat
  echo "$number" > "$folder/pid.new"
  mv "$folder/pid.new" "$folder/pid"
  cd "$root"
  pivot_root . mnt
  umount -l /mnt
  # A service gets its credentials through mounts that other processes have to see.
  mount --make-rshared /
  exec unshare --cgroup sh -c 'mount -t cgroup2 cgroup2 /sys/fs/cgroup &&
    exec env -i container=modelrelay-test PATH="$PATH" /lib/systemd/systemd --unit=multi-user.target --log-target=journal --show-status=no'
}

if [ "${4-}" = boot ]; then
  group=$5
  boot
else
  supervise
fi
