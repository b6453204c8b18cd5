#!/usr/bin/env bash
# Writes the root file system of a small sandbox image to OUT.tar: bash, coreutils, tmux, python3 and pytest from
# this machine's own Debian packages, without a registry and without debootstrap (which takes a minute; this takes 10 s).
# There is no package database inside, so apt cannot install into it later.
#
#   tools/base_image.sh OUT.tar && docker import -c 'WORKDIR /workspace' OUT.tar thundersync/base:test
#
# Needs apt with current package lists, and root.
set -euo pipefail
out=$(realpath -m "${1:?usage: base_image.sh OUT.tar}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$work/debs/partial" "$root"/usr/{bin,sbin,lib,lib64}
: >"$work/status"

apt-get -qq -y --no-install-recommends --download-only \
  -o Dir::State::status="$work/status" -o Dir::Cache::archives="$work/debs/" \
  -o APT::Sandbox::User=root -o Debug::NoLocking=1 install \
  bash coreutils dash findutils grep sed mawk diffutils tar gzip patch procps util-linux libc-bin ncurses-base \
  python3 python3-pytest tmux >/dev/null

for folder in bin sbin lib lib64; do ln -s usr/$folder "$root/$folder"; done
for package in "$work"/debs/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -xC "$root" --keep-directory-symlink \
    --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*'
done

cd "$root"
mkdir -p etc proc sys dev run tmp var/tmp root work home/agent
chmod 1777 tmp var/tmp
chown 1000:1000 work home/agent
printf '%s\n' root:x:0:0::/root:/bin/bash agent:x:1000:1000::/home/agent:/bin/bash nobody:x:65534:65534::/:/bin/false >etc/passwd
printf '%s\n' root:x:0: tty:x:5: shadow:x:42: agent:x:1000: nogroup:x:65534: >etc/group
printf '%s\n' 'root:*:19000:0:99999:7:::' >etc/shadow
chmod 640 etc/shadow
[ -e bin/sh ] || ln -s dash bin/sh
ln -sf mawk usr/bin/awk
ln -sf python3 usr/bin/python

mkdir -p "$(dirname "$out")"
partial=$out.$$.partial # several may make it at once: each its own, and the last one stays
tar --numeric-owner -cf "$partial" .
mv "$partial" "$out"
