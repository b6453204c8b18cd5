"""Draws docs/overlap.svg and docs/overlap-dark.svg, the README's picture: `python tools/draw_overlap.py`.

Eight rollouts of unequal length and one trainer, to scale, once lazy and once streamed. The trainer's boxes come from
the same first-come queue in both; only the moment at which it may begin differs. An illustration, not a measurement.
"""

from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"

# Seconds of a made-up unit: (group, spans of generation and tool use in turn).
ROLLOUTS = [
    ("A", [0.8, 0.4, 0.8]),
    ("A", [0.9, 0.7, 0.6, 0.4, 0.6]),
    ("A", [0.7, 1.1, 0.7, 0.8, 0.8]),
    ("A", [1.0, 0.9, 0.9, 1.4, 0.8, 0.4, 0.6]),
    ("B", [0.8, 0.7, 1.1]),
    ("B", [1.1, 0.6, 0.9, 0.4, 0.7]),
    ("B", [0.6, 1.0, 0.8, 1.2, 0.7, 0.3, 0.6]),
    ("B", [0.9, 1.6, 0.8, 1.9, 0.9, 1.5, 0.6, 0.2, 0.6]),
]
BACKWARD, COMMIT = 1.0, 0.45
END = 18.6

LEFT, SCALE, LANE, BAR = 92, 47.5, 15, 10
WIDTH, PANEL, TOP = 1000, 196, 16


@dataclass(frozen=True)
class Theme:
    paper: str
    ink: str
    muted: str
    faint: str
    groups: dict[str, str]
    commit: str


LIGHT = Theme("#ffffff", "#1f2328", "#59636e", "#d1d9e0", {"A": "#2f6fde", "B": "#c9701a"}, "#1a7f37")
DARK = Theme("#0d1117", "#e6edf3", "#9198a1", "#3d444d", {"A": "#5b9bff", "B": "#e3a04f"}, "#3fb950")


def duration(spans: list[float]) -> float:
    return sum(spans)


def passes(*, streamed: bool) -> list[tuple[str, float]]:
    """(group, start) of each backward: first come, first served, from the first reward or from the last."""
    rewards = sorted((duration(spans), group) for group, spans in ROLLOUTS)
    free = 0.0 if streamed else rewards[-1][0]
    starts = []
    for reward_at, group in rewards:
        start = max(free, reward_at)
        starts.append((group, start))
        free = start + BACKWARD
    return starts


def x(at: float) -> float:
    return round(LEFT + at * SCALE, 1)


def box(start: float, end: float, y: float, height: float, fill: str, extra: str = "") -> str:
    end = min(end, END)
    width = round((end - start) * SCALE, 1)
    return f'<rect x="{x(start)}" y="{y}" width="{width}" height="{height}" rx="2" fill="{fill}" {extra}/>'


def words(at_x: float, y: float, text: str, fill: str, *, size: int = 12, extra: str = "") -> str:
    return f'<text x="{at_x}" y="{y}" font-size="{size}" fill="{fill}" {extra}>{text}</text>'


def lanes(theme: Theme, y: float, offset: float, opacity: float) -> list[str]:
    """The rollouts of one step that begins at `offset`: solid while the engine generates, pale while a tool runs."""
    drawn = []
    for index, (group, spans) in enumerate(ROLLOUTS):
        at, lane_y = offset, y + index * LANE
        for turn, span in enumerate(spans):
            if at >= END:
                break
            shade = opacity if turn % 2 == 0 else opacity * 0.35
            drawn.append(box(at, at + span, lane_y, BAR, theme.groups[group], f'opacity="{shade:.2f}"'))
            at += span
        if at < END and opacity == 1.0:
            drawn.append(f'<circle cx="{x(at)}" cy="{lane_y + BAR / 2}" r="3.6" fill="{theme.ink}"/>')
    return drawn


def panel(theme: Theme, y: float, *, streamed: bool) -> list[str]:
    title = "Streamed" if streamed else "Lazy"
    rest = (
        ": each rollout's backward runs as soon as its reward lands"
        if streamed
        else ": the trainer waits for the slowest rollout, then the engines wait for the trainer"
    )
    lanes_y, trainer_y = y + 12, y + 12 + len(ROLLOUTS) * LANE + 8
    starts = passes(streamed=streamed)
    done = starts[-1][1] + BACKWARD
    last_reward = max(duration(spans) for _, spans in ROLLOUTS)
    heading = f'<tspan font-weight="600" fill="{theme.ink}">{title}</tspan>{rest}'
    drawn = [words(LEFT, y, heading, theme.muted, size=14)]
    for label, at_y in (("group A", lanes_y + 26), ("group B", lanes_y + 26 + 4 * LANE), ("trainer", trainer_y + 15)):
        fill = theme.groups.get(label[-1], theme.ink)
        drawn.append(words(LEFT - 12, at_y, label, fill, extra='text-anchor="end"'))

    drawn += lanes(theme, lanes_y, 0.0, 1.0)
    drawn += lanes(theme, lanes_y, done + COMMIT, 0.3)
    drawn.append(box(0.0, END, trainer_y, 22, "none", f'stroke="{theme.faint}"'))
    idle = starts[0][1]
    drawn.append(words(x(idle / 2), trainer_y + 15, "idle", theme.muted, extra='text-anchor="middle"'))
    if not streamed:
        middle = x((last_reward + done) / 2)
        text = "engines idle"
        drawn.append(words(middle, lanes_y + 4 * LANE, text, theme.muted, extra='text-anchor="middle"'))
    for group, start in starts:
        drawn.append(box(start, start + BACKWARD, trainer_y, 22, theme.groups[group], f'stroke="{theme.paper}"'))
    drawn.append(box(done, done + COMMIT, trainer_y, 22, theme.commit, f'stroke="{theme.paper}"'))
    line_x, line_end = x(done + COMMIT), trainer_y + 28
    dashes = f'stroke="{theme.commit}" stroke-width="1.5" stroke-dasharray="4 3"'
    drawn.append(f'<line x1="{line_x}" y1="{lanes_y - 4}" x2="{line_x}" y2="{line_end}" {dashes}/>')
    drawn.append(words(line_x + 6, y, "next step", theme.commit))
    for group, start in starts:
        again = done + COMMIT + start
        if again < END:
            drawn.append(box(again, again + BACKWARD, trainer_y, 22, theme.groups[group], 'opacity="0.3"'))
    return drawn


def legend(theme: Theme, y: float) -> list[str]:
    blue = theme.groups["A"]
    entries = [
        (f'<rect y="-9" width="22" height="10" rx="2" fill="{blue}"/>', "generation", 22),
        (f'<rect y="-9" width="22" height="10" rx="2" fill="{blue}" opacity="0.35"/>', "tool running", 22),
        (f'<circle cx="5" cy="-4" r="3.6" fill="{theme.ink}"/>', "reward lands", 10),
        (f'<rect y="-13" width="22" height="18" rx="2" fill="{blue}"/>', "backward of one rollout", 22),
        (f'<rect y="-13" width="12" height="18" rx="2" fill="{theme.commit}"/>', "commit: the one optimizer step", 12),
    ]
    drawn, at = [], float(LEFT)
    for mark, text, width in entries:
        drawn.append(f'<g transform="translate({at} {y})">{mark}</g>')
        drawn.append(words(at + width + 7, y, text, theme.muted))
        at += width + 7 + 6.4 * len(text) + 24
    drawn.append(words(WIDTH - 24, y, "time &#8594;", theme.muted, extra='text-anchor="end"'))
    return drawn


def draw(theme: Theme) -> str:
    height = TOP + 2 * PANEL + 44
    font = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
    label = (
        "Timelines of one step: eight rollouts in two groups. Lazy: the trainer is idle until the slowest rollout has "
        "its reward, then the engines are idle until the last backward. Streamed: backward passes fill the time while "
        "slower rollouts still run, so the commit comes much earlier."
    )
    body = [
        *panel(theme, TOP + 14, streamed=False),
        *panel(theme, TOP + 14 + PANEL, streamed=True),
        *legend(theme, height - 20),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="{font}" role="img" aria-label="{label}">',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{theme.paper}"/>',
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    (DOCS / "overlap.svg").write_text(draw(LIGHT))
    (DOCS / "overlap-dark.svg").write_text(draw(DARK))
