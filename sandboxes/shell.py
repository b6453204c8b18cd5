"""A bash session over any sandbox: folder, variables and functions of one command are there for the next.

No process is kept, so that nothing a command does (`exit`, `exec`, `set -e`, a syntax error, running late) can end the
session: each command begins by reading what the one before has saved. Needs bash in the sandbox.
"""

import secrets
import shlex

import msgspec

from sandboxes.base import Command, Result, Sandbox

# Not carried over: what bash makes itself, and what cannot be set. Options and traps are each command's own.
_RUN = r"""
__session_state=@STATE@
__session_save() {
  set +eux
  [ -z "$__session_saved" ] || return 0
  __session_saved=1
  (
    printf 'cd -- %q\n' "$PWD"
    compgen -v | while IFS= read -r __session_name; do
      case $__session_name in
        __session_*|BASH*|COMP_*|EPOCH*|_|DIRSTACK|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTERR|OPTIND|PIPESTATUS) ;;
        PPID|PWD|RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|IFS) ;;
        *) case ${!__session_name@a} in *r*) ;; *) declare -p -- "$__session_name" ;; esac ;;
      esac
    done
    declare -p IFS
    unset -f __session_save
    declare -f
  ) >|"$__session_state.new" 2>/dev/null && mv -f -- "$__session_state.new" "$__session_state"
}
[ ! -r "$__session_state" ] || . "$__session_state"
@SETTINGS@
trap __session_save EXIT
eval -- @SCRIPT@
__session_code=$?
__session_save
exit $__session_code
"""


class ShellSession:
    """Commands of one session, as the sandbox's ordinary user. Any number of sessions may share a sandbox.

    A command that is killed (its deadline, `kill -9 $$`) or replaces its shell (`exec`) saves nothing: the next one
    finds things as they were before it.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._state = f"/tmp/.session-{secrets.token_hex(6)}"

    async def run(self, command: Command) -> Result:
        """Run the next command. Its `cwd` and `env` are set before it where given; `user` is always `agent`.

        Raises: SandboxGone.
        """
        settings = [f"cd -- {shlex.quote(command.cwd)} || exit 126"] if command.cwd else []
        settings += [f"export {name}={shlex.quote(value)}" for name, value in command.env.items()]
        script = _RUN.replace("@STATE@", self._state).replace("@SETTINGS@", "\n".join(settings))
        script = script.replace("@SCRIPT@", shlex.quote(command.script))
        return await self._sandbox.run(msgspec.structs.replace(command, script=script, cwd="", user="agent"))
