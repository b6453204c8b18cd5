"""What `execs` runs in a container that has no python3, in the plainest shell there is. Text only.

Arguments are `$1`, `$2`, ..., never part of the text. `READ` and the packing of folders end with MISSING or IRREGULAR.
"""

MISSING, IRREGULAR = 44, 45

# `kill -1` in process 1 takes everything else, forks under way included; each empty subshell makes the shell wait,
# and waiting collects the dead. The sleeper that ends the sandbox in time is killed too, so it is begun again.
INIT = r"""
end=$(( $(date +%s) + $1 ))
trap 'exit 0' TERM
sleeper() { ( trap - TERM; sleep $(( end - $(date +%s) )); kill -TERM 1 ) </dev/null >/dev/null 2>&1 & }
oom_kills() {
  n=0
  for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r $f ] && while read -r key value; do [ "$key" = oom_kill ] && n=$value; done <$f
  done
}
sleeper
oom_kills
echo "$n"
while read -r word; do
  tries=0
  while kill -9 -1 2>/dev/null && [ $tries -lt 2000 ]; do (:); tries=$((tries + 1)); done
  sleeper
  oom_kills
  echo "$n"
done
"""

RUN = r"""
echo 1000 2>/dev/null >/proc/self/oom_score_adj
cd -- "$1" || exit 126
shift
if [ "$1" = bash ] && ! command -v bash >/dev/null; then shift; set -- sh "$@"; fi
exec "$@"
"""

_MAKE = r"""
umask 022
make() {
  [ -d "$1" ] && return
  make "$(dirname -- "$1")" && mkdir -- "$1" && chown "$(stat -c %u:%g -- "$(dirname -- "$1")")" -- "$1"
}
"""

FOLDERS = (
    _MAKE
    + r"""
while [ $# -gt 0 ]; do
  make "$1" && chmod "$2" -- "$1" && { [ "$1" = / ] || chown -R "$3:$3" -- "$1"; } || exit 1
  shift 3
done
"""
)

WRITE = (
    _MAKE
    + r"""
folder=$(dirname -- "$1")
make "$folder" || exit 1
if [ -d "$1" ] && ! [ -L "$1" ]; then echo "is a directory: $1" >&2; exit 1; fi
partial=$folder/.partial.$$
rm -f -- "$partial"  # a link that was planted there would be followed
{ cat >"$partial" && chown "$(stat -c %u:%g -- "$folder")" -- "$partial" && chmod "$2" -- "$partial" &&
  rm -f -- "$1" && mv -f -- "$partial" "$1"; } || { rm -f -- "$partial"; exit 1; }
"""
)

READ = r"""
[ -e "$1" ] || exit 44
[ -f "$1" ] || exit 45
size=$(wc -c <"$1") || exit 1
echo $size
[ $size -gt "$2" ] || cat -- "$1"
"""

# A link planted in a folder's place must not lead what follows elsewhere.
TARGET = (
    _MAKE
    + r"""
make "$1" || exit 1
stat -c %u -- "$1"
while IFS= read -r folder; do
  if [ -L "$1/$folder" ] || { [ -e "$1/$folder" ] && ! [ -d "$1/$folder" ]; }; then rm -f -- "$1/$folder"; fi
done
"""
)

UNTAR = 'cd -- "$1" && tar -xpf -'
TAR = '[ -d "$1" ] || exit 44; cd -- "$1" && tar -cf - .'
