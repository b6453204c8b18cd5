"""What stands around every view: the run's title, the views with their keys, the keys of the view. Pure."""

from rich.text import Text

from thundersync.monitor.app.known import VIEWS, Known
from thundersync.monitor.panel import span
from thundersync.monitor.shapes import DIM, GREEN, LINE, ORANGE, RED, SKY, YELLOW, padded

KEYS: dict[str, str] = {
    "overview": "",
    "overlap": "←→ step  end live  ↑↓ rollouts",
    "groups": "↑↓ group  ←→ rollout  enter read it",
    "rollout": "↑↓ scroll  ←→ rollout  t tokens  r again",
    "engines": "",
    "sandboxes": "",
    "warnings": "↑↓ scroll",
}


def title(known: Known, width: int, now_s: float) -> Text:
    """Who runs, and where it is."""
    view = known.view
    if view.run is None:
        return padded(Text.assemble(("thundersync", f"bold {YELLOW}"), ("  nothing heard yet", DIM)), width)
    colour = {"finished": GREEN, "stopped": RED, "evaluating": ORANGE}.get(view.phase, SKY)
    right = Text.assemble(
        (view.phase, f"bold {colour}"), f"  step {view.made + (view.step is not None)}/{view.max_steps}"
    )
    eta_s = view.eta_s(known.moment_s(now_s))
    right.append("  ETA ", DIM).append(span(eta_s), "bold") if eta_s is not None else None
    left = Text.assemble(("thundersync", f"bold {YELLOW}"), "  ", (view.run.name, "bold"))
    facts = (view.run.model.rstrip("/").rpartition("/")[2], view.run.algo, view.run.mode)
    for count in (3, 1):
        more = "  " + " · ".join(facts[:count])
        if left.cell_len + len(more) + right.cell_len + 2 <= width:
            left.append(more, SKY)
            break
    left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis", pad=True)
    return left.append(" ").append_text(right)


def tabs(known: Known, width: int) -> Text:
    """The views; the one that is open stands out, warnings are counted."""
    line = Text()
    warnings = len(known.view.warnings) + len(known.failures)
    for index, word in enumerate(VIEWS):
        here = index == known.cursor.view
        count = f" {warnings}" if word == "warnings" and warnings else ""
        text = f"{index + 1} {word}{count}"
        wide = f" {text} " if here or width >= 90 else f" {text}"  # 80 cells hold all seven, but no more
        line.append(wide, "bold reverse" if here else YELLOW if count else "")
    return padded(line, width)


def foot(known: Known, width: int) -> Text:
    """Keys, or what the reader should know of the connection."""
    keys = KEYS[VIEWS[known.cursor.view]]
    right = Text.assemble(("1-7", "bold"), (" views  ", DIM), ("q", "bold"), (" quit", DIM))
    left = Text().append(known.notice, f"bold {ORANGE}") if known.notice else _pairs(keys)
    left.truncate(max(0, width - right.cell_len - 2), overflow="ellipsis", pad=True)
    return left.append("  ", LINE).append_text(right)


def _pairs(keys: str) -> Text:
    line = Text()
    for pair in keys.split("  "):
        key, _, word = pair.partition(" ")
        line.append(key, "bold").append(f" {word}  " if word else "", DIM)
    return line
