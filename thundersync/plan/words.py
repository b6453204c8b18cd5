"""An outlook in sentences, each with its reason. Plain text; `report` prints it."""

from thundersync.forecast.memory import total
from thundersync.forecast.path import Part
from thundersync.forecast.split import Split
from thundersync.plan.model import Memory
from thundersync.plan.outlook import Outlook

NEAR = 0.02
"""Less than this is not worth moving a device for."""
_PARTS: dict[Part, str] = {
    "generating": "generation",
    "tools": "tools and checkers",
    "learning": "learning",
    "after": "commit and publish",
}

_ADVICE: dict[Part, str] = {
    "generating": "Generation is the longest part: more or faster engines, or shorter replies, help most.",
    "tools": "Tools and checkers are the longest part, and no GPU makes them faster: shorter commands help, or more "
    "prompts in a step, whose work fills the wait.",
    "learning": "Learning is the longest part: more trainers, or fewer and shorter rollouts, help most.",
    "after": "Commit and publish are the longest part: more prompts in a step share one commit.",
}


def sentences(outlook: Outlook) -> list[str]:
    """What was measured, how near that is to what could be, what limits it, and what would change it."""
    return [
        *_steps(outlook),
        _measured(outlook),
        _streaming(outlook),
        _limit(outlook),
        *_split(outlook),
        *[_more(outlook, split) for split in outlook.more],
        *[
            f"With {each.change}: {seconds(each.step_s)} a step, stream {each.speedup:.2f} x as fast as lazy."
            for each in outlook.what_ifs
        ],
    ]


def seconds(value: float) -> str:
    """Three figures, so that steps of seconds and of minutes both read well."""
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def devices(outlook: Outlook, split: Split) -> str:
    """In words, for people."""
    return _side_by_side(outlook, split.engines, split.trainers)


def split_memory(outlook: Outlook, memory: Memory, *, need_gib: float, room_gib: float) -> str:
    """Of the split that is recommended: what it holds, and whether that fits. `need_gib` and `room_gib`: of the fullest
    GPU, on a CPU of all processes together; a room of 0 is not known."""
    best, where = outlook.splits[0], "a GPU" if outlook.on_gpus else "the machine"
    each = "trainer GPU" if outlook.on_gpus else "trainer worker"
    text = f"Memory at {devices(outlook, best)}: {total(memory.trainer) / 2**30:.2f} GiB for each {each}"
    text += "" if outlook.on_gpus else f", {need_gib:.2f} GiB with all of them and the engines"
    if not room_gib:
        return f"{text}; what {where} of the run has is not written down."
    if need_gib > room_gib:
        return f"{text}. It does not fit: {need_gib:.2f} GiB are needed, {where} of the run has {room_gib:.0f} GiB."
    return f"{text}; {where} of the run has {room_gib:.0f} GiB."


def _steps(outlook: Outlook) -> list[str]:
    text = f"{outlook.steps} step{'s' * (outlook.steps != 1)} of {outlook.run}"
    text += f", evenly spread over its {outlook.usable}" if outlook.steps < outlook.usable else ""
    text += f", without {outlook.warmup} of warm-up" if outlook.warmup else ""
    found = [f"{text}, run as `{outlook.mode}` on {_now(outlook)}."]
    if outlook.left_out:
        more = f" and {len(outlook.left_out) - 2} more" if len(outlook.left_out) > 2 else ""
        found.append(f"Left out: {'; '.join(outlook.left_out[:2])}{more}.")
    if outlook.sampled < outlook.steps:
        found.append(f"What would change it is told from {outlook.sampled} of these steps, evenly spread.")
    return found


def _measured(outlook: Outlook) -> str:
    way = "behind" if outlook.behind >= 0 else "ahead of"
    return (
        f"A step took {seconds(outlook.measured_s)}, {abs(outlook.behind):.1%} {way} its forecast of "
        f"{seconds(outlook.forecast_s)} (mean error over steps {outlook.error:.1%} from what its own passes cost, "
        f"{outlook.even_error:.1%} from one cost per token). No order of its work can beat {seconds(outlook.bound_s)} "
        "with these releases."
    )


def _streaming(outlook: Outlook) -> str:
    stream, lazy = outlook.arms["stream"], outlook.arms["lazy"]
    text = (
        f"Streaming takes {seconds(stream.step_s)} where lazy takes {seconds(lazy.step_s)}: {stream.speedup:.2f} x. "
        f"Lazy leaves trainers idle {1 - lazy.trainer_busy:.0%} of the step, stream {1 - stream.trainer_busy:.0%}."
    )
    if stream.speedup < 1.0:
        text += (
            " Streaming is slower here: pieces that come one by one share no passes, were worked for groups that "
            "turned out flat, or left a long one for the end of one worker."
        )
    return text


def _limit(outlook: Outlook) -> str:
    parts = sorted(outlook.path.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{seconds(spent)} {_PARTS[part]}" for part, spent in parts)
    return f"What a step waits for, one after the other: {listed}. {_ADVICE[outlook.limit]}"


def recommended(outlook: Outlook) -> Split | None:
    """The split that is worth moving devices for; None: the one they have, or it cannot be told."""
    now = _split_now(outlook)
    if now is None or len(outlook.splits) < 2:
        return None
    best = outlook.splits[0]
    return None if best is now or best.step_s > (1.0 - NEAR) * now.step_s else best


def _split_now(outlook: Outlook) -> Split | None:
    return next((s for s in outlook.splits if (s.engines, s.trainers) == (outlook.engines, outlook.trainers)), None)


def _split(outlook: Outlook) -> list[str]:
    now, best = _split_now(outlook), recommended(outlook)
    if now is None or len(outlook.splits) < 2:
        return []
    if best is None:
        return [
            f"No split of them is better than {devices(outlook, now)} by {NEAR:.0%} or more: "
            f"engines generate {now.engine_busy:.0%} of the step, trainers work {now.trainer_busy:.0%}."
        ]
    return [
        f"{devices(outlook, best)}: {seconds(best.step_s)} a step instead of {seconds(now.step_s)}. "
        f"Now engines generate {now.engine_busy:.0%} of the step and trainers work {now.trainer_busy:.0%}; "
        f"then {best.engine_busy:.0%} and {best.trainer_busy:.0%}."
    ]


def _more(outlook: Outlook, split: Split) -> str:
    return f"One more, {devices(outlook, split)}: {seconds(split.step_s)} a step."


def _now(outlook: Outlook) -> str:
    return _side_by_side(outlook, outlook.engines, outlook.trainers)


def _side_by_side(outlook: Outlook, engines: int, trainers: int) -> str:
    engine, trainer = ("engine GPU", "trainer GPU") if outlook.on_gpus else ("engine core", "trainer worker")
    return f"{engines} {engine}{'s' * (engines != 1)} + {trainers} {trainer}{'s' * (trainers != 1)}"
