"""Every error of this package: a sentence with its facts, and a remedy. Knows nothing of its callers' errors.

A foreign error (Docker, the operating system) is wrapped once, where it enters, with `from`.
"""


class SandboxError(Exception):
    """Base of all errors raised on purpose here; `remedy` says what the user can do about it."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.remedy}" if self.remedy else self.message


class RuntimeUnavailable(SandboxError):
    """This kind of sandbox cannot run on this machine, or cannot give what a spec asks for."""


class DaemonGone(RuntimeUnavailable):
    """The Docker daemon answered before and does not now; what it held may be lost, new sandboxes may come later."""


class ImageMissing(SandboxError):
    """The image is neither here nor could it be pulled."""


class BuildFailed(SandboxError):
    """A sandbox's start state could not be built from its Dockerfile; carries the end of the build's output."""


class StartFailed(SandboxError):
    """A sandbox could not be started, or its agent did not answer."""


class SandboxGone(SandboxError):
    """The sandbox died, ran out of its lifetime, or lost step with its owner: discard it and start another."""

    def __init__(self, sandbox_id: str, reason: str) -> None:
        super().__init__(
            f"sandbox {sandbox_id} is gone: {reason}",
            remedy="Start a new sandbox and repeat the work; one that is gone never comes back.",
        )
        self.sandbox_id = sandbox_id
        self.reason = reason


class FileRefused(SandboxError):
    """A file cannot be written or read: bad path, not a regular file, no space, no permission."""


class FileMissing(FileRefused):
    """There is no file at this path."""


class FileTooLarge(FileRefused):
    """A file or folder is larger than the caller's limit."""


class DiskFull(FileRefused):
    """No room: on the sandbox's own disk, or on the one where the daemon keeps images and containers."""


class CloseFailed(SandboxError):
    """Something would not go away within the limit; names what is left."""
