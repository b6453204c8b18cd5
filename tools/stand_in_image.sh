#!/usr/bin/env bash
# Writes the root file system of an image that can take the place of the base images of published terminal tasks, for
# `python -m thundersync tasks check --stand-in`, where neither a registry nor the tasks' own downloads can be reached.
#
#   tools/stand_in_image.sh OUT.tar
#   docker import -c 'ENV PATH=/opt/stand-in:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8' OUT.tar stand-in
#
# It holds what most of their test scripts would install (pytest, its ctrf plugin, curl, git, ...), and small programs
# that take the place of apt, pip and uv: installing does nothing, `uvx pytest` and `uv run pytest` run what is there.
# So a task that needs anything else fails, and its check says so. Needs apt with current lists, pip, and root.
set -euo pipefail
out=$(realpath -m "${1:?usage: stand_in_image.sh OUT.tar}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$work/debs/partial" "$root"/usr/{bin,sbin,lib,lib64}
: >"$work/status"

apt-get -qq -y --no-install-recommends --download-only \
  -o Dir::State::status="$work/status" -o Dir::Cache::archives="$work/debs/" \
  -o APT::Sandbox::User=root -o Debug::NoLocking=1 install \
  bash coreutils dash findutils grep sed mawk diffutils tar gzip patch procps util-linux libc-bin ncurses-base \
  passwd adduser python3 git tmux curl jq openssl bc bzip2 xz-utils unzip file less >/dev/null

for folder in bin sbin lib lib64; do ln -s usr/$folder "$root/$folder"; done
for package in "$work"/debs/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -xC "$root" --keep-directory-symlink \
    --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*'
done
python3 -m pip install -q --disable-pip-version-check --no-compile --only-binary :all: --python-version 3.11 \
  --target "$root/usr/local/lib/python3.11/dist-packages" pytest==8.4.1 pytest-json-ctrf==0.3.5

cd "$root"
mkdir -p etc proc sys dev run tmp var/tmp root/.local/bin work home/agent/.local/bin opt/stand-in
chmod 1777 tmp var/tmp
chmod 700 root
printf '%s\n' root:x:0:0::/root:/bin/bash agent:x:1000:1000::/home/agent:/bin/bash nobody:x:65534:65534::/:/bin/false >etc/passwd
printf '%s\n' root:x:0: tty:x:5: shadow:x:42: agent:x:1000: nogroup:x:65534: >etc/group
printf '%s\n' 'root:*:19000:0:99999:7:::' >etc/shadow
chmod 640 etc/shadow
[ -e bin/sh ] || ln -s dash bin/sh
ln -sf mawk usr/bin/awk
ln -sf python3 usr/bin/python

program() { cat >"opt/stand-in/$1"; chmod 755 "opt/stand-in/$1"; }
for name in apt apt-get add-apt-repository update-alternatives pip pip3; do
  printf '%s\n' '#!/bin/sh' "# stand-in: installs nothing" 'case " $* " in *" --version "*) echo "stand-in 0";; esac' 'exit 0' | program "$name"
done
printf '%s\n' '#!/bin/sh' 'exec python3 -m pytest "$@"' | program pytest
program curl <<'END'
#!/bin/sh
# stand-in: uv is here already
case "$*" in *astral.sh/uv*) echo ':'; exit 0 ;; esac
exec /usr/bin/curl "$@"
END
program uvx <<'END'
#!/bin/bash
# stand-in: runs the pytest that is here
while [ $# -gt 0 ]; do
  case "$1" in
    --with | -w | --python | -p | --from) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
[ "${1%%[=@]*}" = pytest ] || { echo "uvx: $1: not found in the stand-in image" >&2; exit 127; }
shift
exec python3 -m pytest "$@"
END
program uv <<'END'
#!/bin/bash
# stand-in: makes no environments; `uv run` runs with what is here
case "$1" in
  run) shift; while [ "${1#-}" != "$1" ]; do case "$1" in --with | -p | --python) shift 2 ;; *) shift ;; esac; done
    if [ "$1" = pytest ]; then shift; exec python3 -m pytest "$@"; fi
    case "$1" in *.py) exec python3 "$@" ;; esac
    exec "$@" ;;
  tool) shift; [ "$1" = run ] && shift; exec uvx "$@" ;;
esac
exit 0
END
for home in root home/agent; do echo 'export PATH="/opt/stand-in:$PATH"' >$home/.local/bin/env; done
chown -R 1000:1000 work home/agent

mkdir -p "$(dirname "$out")"
partial=$out.$$.partial # several may make it at once: each its own, and the last one stays
tar --numeric-owner -cf "$partial" .
mv "$partial" "$out"
