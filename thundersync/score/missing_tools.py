"""Tells from a checker's output that it could not get its own tools, so that its zero says nothing of the agent.

Most published terminal tasks install curl, uv and pytest from the internet while they score, and write 0 when that
fails. Refuses to decide what follows: whoever asks has looked whether any test ran. Text in, a sentence out.
"""

import re

_NETWORK = (
    r"Could not resolve host(: \S+)?",
    r"Temporary failure (in name resolution|resolving '[^']+')",
    r"Name or service not known",
    r"failed to lookup address information",
    r"dns error",
    r"Failed to establish a new connection",
    r"Network is unreachable",
    r"No route to host",
    # A service that the agent should have started refuses too: only other hosts count.
    r"(Could not|Failed to) connect to (?!localhost|127\.|0\.0\.0\.0|::1|\[)[\w-]+\.[\w.-]+( port \d+)?",
    r"Failed to fetch (http\S+|`?https?://\S+)",
    r"error sending request for url \(\S+\)",
    r"Could not fetch URL \S+",
    r"unable to access 'https?://[^']+'",
    r"(SSL|TLS)\S* (certificate|handshake) \S*(failed|error)",
    r"npm (ERR!|error) network\b.*",
    r"getaddrinfo (ENOTFOUND|EAI_AGAIN) \S+",
)
_PACKAGES = (
    r"No matching distribution found for \S+",
    r"Could not find a version that satisfies the requirement \S+",
    r"E: Unable to locate package \S+",
    r"E: Package '[^']+' has no installation candidate",
    r"E: (Unable to fetch some archives|Some index files failed to download).*",
    r"E: Could not open lock file \S+.*",
    r"E: List directory \S+ is missing.*",
    r"No module named '?pytest'?",
)
_PROGRAMS = (
    r"(?:^|: )(uvx?|pytest|python3?|pip3?|curl|wget|apt-get|npm|npx|node|cargo|go|jq|git|bash): (command )?not found",
    r"/usr/bin/env: [‘'\"]?\w+[’'\"]?: No such file or directory",
    r"\.local/bin/env: No such file or directory",
    r"bad interpreter: .*",
)
_KINDS = (
    ("network", [re.compile(each, re.IGNORECASE) for each in _NETWORK]),
    ("a package", [re.compile(each) for each in _PACKAGES]),
    ("a program", [re.compile(each, re.MULTILINE) for each in _PROGRAMS]),
)


def missing_tool(output: str) -> str:
    """What the checker lacked, e.g. `network: Could not resolve host: astral.sh`; empty if nothing points to that."""
    for kind, patterns in _KINDS:
        for pattern in patterns:
            if match := pattern.search(output):
                return f"{kind}: {match[0].strip(': ')[:160]}"
    return ""


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
