"""Engines: what each generates, what of its prompts it had in its cache, how full that is. A view of the app, pure."""

import math

from rich.text import Text

from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.events import EngineGauge, Gauges
from thundersync.monitor.panel import span
from thundersync.monitor.shapes import DIM, GREEN, LINE, PURPLE, SKY, YELLOW, bar, padded

_LEVELS = " ▁▂▃▄▅▆▇█"
_WIDTHS = (8, 8, 13, 12, 9)


def engines(known: Known, width: int, height: int, now_s: float) -> Lines:
    """`height` lines of at most `width` cells."""
    view, gauges = known.view, known.view.gauges
    lines: Lines = []
    if gauges is None:
        lines.append(Text("no engine has been measured yet", DIM))
    elif gauges.engines:
        room = max(6, min(24, width - 64))
        words = ("running", "tok/s", "prompt tok/s", "prefix hits", "KV asked")
        heads = "".join(f"{word:>{wide}}" for word, wide in zip(words, _WIDTHS, strict=True))
        lines.append(Text(f"{'engine':<8}{'busy':<{room + 6}}{heads}", DIM))
        lines += [_engine(index, each, room) for index, each in enumerate(gauges.engines)]
    else:
        lines.append(Text(f"{gauges.generate_running} requests in flight, {gauges.tokens_per_s:,.0f} tokens a second"))
    lines += [Text(), *_curve(known, width, max(3, min(8, height - len(lines) - 6)))]
    if (step := known.latest) is not None and step.passes:
        lines += [Text(), Text("trainer   passes   busy   longest", DIM)]
        end_s = step.ended_s if step.ended_s is not None else known.moment_s(now_s)
        for worker, passes in sorted(step.passes.items()):
            longest = max(min(each.end_s, end_s) - each.start_s for each in passes.values())
            share = step.busy_s(worker, end_s) / max(1e-9, end_s - step.opened_s)
            text = f"{worker:<10}{len(passes):>6}{share:>7.0%}{span(longest):>10}"
            lines.append(Text().append("◆ ", PURPLE).append(text[2:] if worker > 9 else text))
    facts = Text.assemble(("policy ", DIM), (f"v{view.policy_version}", "bold"))
    if view.publish_s is not None:
        facts.append(f", published in {view.publish_s:.1f} s", DIM)
    if gauges is not None:
        facts.append(f"   {_late(gauges)}", YELLOW if _worst_ms(gauges) > 100 else DIM)
    return [padded(line, width) for line in [*lines, Text(), facts]][:height]


def _late(gauges: Gauges) -> str:
    if not gauges.loop_lag_max_ms:
        return f"event loop {gauges.loop_lag_ms:.1f} ms late"
    p50, p99 = gauges.loop_lag_p50_ms, gauges.loop_lag_p99_ms
    return f"event loop {p50:.1f} ms late, p99 {p99:.1f}, at worst {gauges.loop_lag_max_ms:.1f}"


def _worst_ms(gauges: Gauges) -> float:
    return max(gauges.loop_lag_ms, gauges.loop_lag_max_ms)


def _engine(index: int, gauge: EngineGauge, room: int) -> Text:
    line = Text().append(f"{index:<8}", "bold").append_text(bar(gauge.busy, room, SKY, "█", "░"))
    line.append(f" {gauge.busy:4.0%} ", f"bold {SKY}")
    asked = f"{gauge.kv_asked:.0%}" if gauge.kv_asked else "–"
    # Tokens are counted when their reply ends: none of the last minute is no speed of zero while some are sampled.
    speed = _many(gauge.tokens_per_s) if gauge.tokens_per_s or not gauge.running else "–"
    hits = f"{gauge.cached_share:.0%}" if gauge.prompt_tokens_per_s else "–"
    cells = (
        (f"{gauge.running}", ""), (speed, "bold"), (_many(gauge.prompt_tokens_per_s), ""), (hits, GREEN), (asked, ""),
    )  # fmt: skip
    for (cell, style), wide in zip(cells, _WIDTHS, strict=True):
        line.append(f"{cell:>{wide}}", style)
    return line


def _curve(known: Known, width: int, rows: int) -> Lines:
    """Tokens a second over the last minutes."""
    rates = [each.tokens_per_s for each in known.gauges if math.isfinite(each.tokens_per_s)][-(width - 8) :]
    if not rates:
        return []
    high = max(max(rates), 1.0)
    first, last = known.gauges[-len(rates)].at_s, known.gauges[-1].at_s
    lines = [
        Text()
        .append("tokens per second of the replies that ended in a minute", "bold")
        .append(f", the last {span(last - first)}", DIM)
    ]
    for row in range(rows - 1, -1, -1):
        label = _many(high) if row == rows - 1 else "0" if row == 0 else ""
        line = Text().append(f"{label:>6} ", DIM).append("┤" if label else "│", LINE)
        eighths = (round(rate / high * rows * 8) - row * 8 for rate in rates)
        lines.append(line.append("".join(_LEVELS[max(0, min(8, each))] for each in eighths), SKY))
    return lines


def _many(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ") if math.isfinite(number) else "–"
