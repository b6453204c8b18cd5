"""Tells from a checker's output that it could not get its own tools, so that its zero says nothing of the agent.

Most published terminal tasks install curl, uv and pytest from the internet while they score, and write 0 when that
fails. What the agent left calls programs too, while it is tested, and is not excused where they are missing: a package
or program counts only if the checker's own words name it. Refuses to decide what follows: whoever asks has looked
whether any test ran. Text in, a sentence out.
"""

import re

# A service that the agent should have started fails too: only other hosts count.
_FAR = r"(?!localhost|127\.|0\.0\.0\.0|::1|\[)"
_BUSY = r"(?:5\d\d|429)"
_NETWORK = (
    r"Could not resolve host(: \S+)?",
    r"Temporary failure (in name resolution|resolving '[^']+')",
    r"Name or service not known",
    r"failed to lookup address information",
    r"dns error",
    r"Failed to establish a new connection(?!: \[Errno 111\])",  # not a refusal, which says no host
    rf"ConnectionPool\(host='{_FAR}[^']+', port=\d+\): (Read timed out|Max retries exceeded)",
    r"Network is unreachable",
    r"No route to host",
    rf"(Could not|Failed to) connect to {_FAR}[\w-]+\.[\w.-]+( port \d+)?",
    rf"Failed to fetch:? `?https?://{_FAR}\S+",
    r"Failed to download distribution due to network timeout",
    rf"HTTP status (server|client) error \({_BUSY}[^)]*\) for url \(https?://{_FAR}\S+\)",
    rf"{_BUSY} (Server|Client) Error: .* for url: https?://{_FAR}\S+",
    rf"HTTP error {_BUSY} while getting https?://{_FAR}\S+",
    rf"error sending request for url \(https?://{_FAR}\S+\)",
    r"Could not fetch URL \S+",
    r"unable to access 'https?://[^']+'",
    r"(SSL|TLS)\S* (certificate|handshake) \S*(failed|error)",
    r"npm (ERR!|error) network\b.*",
    rf"npm (ERR!|error) code E{_BUSY}",
    r"getaddrinfo (ENOTFOUND|EAI_AGAIN) \S+",
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded|E: You don't have enough free space in \S+")
# Groups hold what is missing, and what asked for it. Where there is none, it is apt that does not work.
_PACKAGES = (
    r"No matching distribution found for ([\w.-]+)\S*",
    r"Could not find a version that satisfies the requirement ([\w.-]+)\S*(?: \(from (?!versions:)([\w.-]+))?",
    r"E: Unable to locate package ([\w.+-]+)",
    r"E: Package '([^']+)' has no installation candidate",
    r"E: (?:Unable to fetch some archives|Some index files failed to download).*",
    r"E: Could not open lock file \S+.*",
    r"E: List directory \S+ is missing.*",
    r"No module named '?(pytest)'?",
)
_PROGRAMS = (
    r"(?:^|: )(uvx?|pytest|python3?|pip3?|curl|wget|apt-get|npm|npx|node|cargo|go|jq|git|bash): (?:command )?not found",
    r"/usr/bin/env: [‘'\"]?(\w+)[’'\"]?: No such file or directory",
    r"(\.local/bin/env): No such file or directory",
    r"/bin/([\w.-]+): \S+: bad interpreter: .*",
)
_ALWAYS = [re.compile(each, re.IGNORECASE) for each in _NETWORK]
_IF_NAMED = (
    ("a package", [re.compile(each) for each in _PACKAGES]),
    ("a program", [re.compile(each, re.MULTILINE) for each in _PROGRAMS]),
)


def missing_tool(output: str, *, wanted_by: str | None = None) -> str:
    """What the checker lacked, e.g. `network: Could not resolve host: astral.sh`; empty if nothing points to that.

    `wanted_by`: the checker's own words, which must name a package or program that is to count; None: all count.
    """
    for pattern in _ALWAYS:
        if match := pattern.search(output):
            return _sentence("network", match)
    for kind, patterns in _IF_NAMED:
        for pattern in patterns:
            for match in pattern.finditer(output):
                names = [name for name in match.groups() if name] or ["apt"]
                if wanted_by is None or any(_names(wanted_by, name) for name in names):
                    return _sentence(kind, match)
    return ""


def told_of_full_disk(output: str) -> str:
    """As `missing_tool`, of a full disk. What is under test may print it too: `disk.is_full` looks."""
    match = _DISK.search(output)
    return _sentence("disk", match) if match else ""


def _sentence(kind: str, match: re.Match[str]) -> str:
    return f"{kind}: {match[0].strip(': ')[:160]}"


def _names(words: str, name: str) -> bool:
    """Whether `name` is one of them; package indexes take `_`, `-` and `.` for the same."""
    alike = re.sub(r"[-_.]", "[-_.]", re.escape(name).replace(r"\-", "-").replace(r"\.", "."))
    return re.search(rf"(?<![\w-]){alike}(?!\w)", words, re.IGNORECASE) is not None


def wants_network(script: str) -> list[str]:
    """What a script fetches while it runs, by reading it: a hint for people, not a proof."""
    found: dict[str, None] = {}
    for host in re.findall(r"https?://([\w-]+(?:\.[\w-]+)+)", script):
        if host not in ("localhost", "127.0.0.1", "0.0.0.0"):
            found[host] = None
    for pattern, name in (
        (r"\bapt(-get)?\s+(-\S+\s+)*(install|update)", "apt"),
        (r"\bpip3?\s+install", "pip"),
        (r"\buv\s+(add|pip|sync)|\buvx\b|\buv\s+run\s+\S+\.py", "uv"),
        (r"\b(npm|yarn|pnpm)\s+(i|install|add)\b", "npm"),
        (r"\bgit\s+clone\b", "git clone"),
    ):
        if re.search(pattern, script):
            found[name] = None
    return list(found)
