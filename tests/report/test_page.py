"""The page as a file: self-contained, bounded, escaped, and true to its run."""

import base64
import json
import re
import socket
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.monitor.fake_run import fake_run
from tests.report.made_run import MadeRun, make_run
from thundersync.monitor import events as e
from thundersync.report.command import write_own_report, write_report
from thundersync.report.environment import environment, write_environment
from thundersync.report.lanes import MOST_STEPS, packed, telling_steps
from thundersync.report.page import render
from thundersync.report.record import NoRun, RunRecord, read_run, step_events
from thundersync.report.timeline import step_timeline

HOSTILE = "</pre></script><script>alert(1)</script><img src=//x.invalid onerror=alert(2)>{{ 7 * 7 }}\x1b[31m"


class Markup(HTMLParser):
    """Tags with their attributes, and the text that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_refers_to_nothing_outside_itself(record: RunRecord) -> None:
    page = render([record])
    for tag, attributes in Markup(page).tags:
        assert tag not in ("link", "iframe", "img", "object", "embed"), tag
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page


def test_whatever_a_run_wrote_is_text(tmp_path: Path) -> None:
    page = render([read_run(make_run(tmp_path, MadeRun(steps=2, hostile=HOSTILE)))])
    tags = Markup(page).tags
    assert [attributes for tag, attributes in tags if tag == "script" and not attributes] == [{}]  # ours alone
    assert all(attributes.get("type") in (None, "text/plain") for tag, attributes in tags if tag == "script")
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert "&lt;script&gt;alert(1)" in page and "{{ 7 * 7 }}" in page
    assert "\x1b" not in page


def test_the_summary_says_what_was_measured(record: RunRecord) -> None:
    page = render([record])
    assert "made trained made/model for 6 steps of 32 rollouts (4 tasks x 8) with grpo, gradients streamed" in page
    assert "Reward on held-out tasks rose from 0.20 to 0.70 over 6 steps" in page
    assert "every token was trained on by the policy that sampled it" in page.lower()
    assert "each made good by another attempt" in page or "Nothing failed" in page


def test_a_lazy_runs_page_says_what_streaming_would_have_brought(tmp_path: Path) -> None:
    page = render([read_run(make_run(tmp_path, MadeRun(steps=2, mode="lazy")))])
    assert "nothing was learned while rollouts ran" in page
    assert "Had the trainer learned as rewards landed" in page and "streamed, forecast" in page


def test_a_page_stays_within_its_bytes_and_says_what_it_left_out(made: Path) -> None:
    record = read_run(made)
    whole, small = render([record]), render([record], most_bytes=4000)
    count = len(re.findall(r'class="tl-data"', whole))
    assert count == 6 and "left out to keep this file small" not in whole
    kept = re.findall(r'class="tl-data" data-run="0" data-step="(\d+)">([^<]*)<', small)
    assert 0 < len(kept) < 6 and sum(len(text) for _, text in kept) <= 4000
    assert f"{6 - len(kept)} of 6 steps are left out" in re.sub(r"\s+", " ", small)
    wanted = render([record], most_bytes=1, steps=[3])
    assert re.findall(r'class="tl-data" data-run="0" data-step="(\d+)"', wanted) == ["3"]


def test_of_many_steps_the_telling_ones_are_read_first() -> None:
    seconds = {step: 10.0 + step % 7 for step in range(1000)} | {321: 99.0, 123: 1.0}
    chosen = telling_steps(seconds, [500])
    assert chosen[:5] == [500, 999, 0, 321, 123] and len(chosen) == len(set(chosen)) == MOST_STEPS
    assert telling_steps({4: 1.0, 2: 2.0}) == [4, 2] and telling_steps({}) == []


def test_of_a_huge_step_whole_groups_are_drawn_and_the_others_counted(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path, MadeRun(steps=1, groups=30, size=40, evals=0, turns=(1, 1))))
    timeline = step_timeline(step_events(record, 0))
    assert timeline is not None
    told = json.loads(zlib.decompress(base64.b64decode(packed(timeline))))
    assert len(told["lanes"]) == 1000 and told["left_out"] == 200


def test_several_runs_share_a_page_with_what_differs_between_them(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path, MadeRun(steps=2, name=name, mode=name, learning_rate=rate)))
        for name, rate in (("stream", 1e-5), ("lazy", 2e-5))
    ]
    page = render(runs)
    settings = page[page.index('class="settings"') :]
    settings = settings[: settings.index("</table>")]
    assert "optim.lr" in settings and "stream.mode" in settings and "algo.type" not in settings
    assert "Reward by wall clock" in page
    with pytest.raises(NoRun, match="1 to 6 runs"):
        render(runs * 4)


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent, MadeRun(steps=1, evals=0)) for parent in ("first", "second")]
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert "first/made</h1>" in page and "second/made</h1>" in page


@pytest.mark.parametrize("kinds", [(e.RunStarted,), (e.RunStarted, e.EvalStarted, e.EvalFinished)])
def test_a_run_without_a_commit_has_a_page_too(kinds: tuple[type[e.Event], ...], tmp_path: Path) -> None:
    events = [event for event in fake_run(steps=1) if isinstance(event, kinds)]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(e.to_line, events)))
    page = render([read_run(tmp_path)])
    assert "<h1>" in page and "Timeline" not in page


def test_a_run_of_an_older_version_with_fewer_files_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(e.to_line, fake_run())))
    page = render([read_run(tmp_path)])
    assert "did not write down its environment" in page and "data-hover" in page


def test_a_run_writes_its_own_page_and_what_keeps_it_from_that_is_only_said(tmp_path: Path) -> None:
    said: list[str] = []
    folder = make_run(tmp_path, MadeRun(steps=1))
    write_own_report(folder, said.append, limit_s=60.0)
    assert said == [] and "<h1>made</h1>" in (folder / "report.html").read_text()
    write_own_report(tmp_path / "nothing", said.append, limit_s=60.0)
    write_own_report(folder, said.append, limit_s=-1.0)
    assert ["no report.html was written" in text for text in said] == [True, True]


def test_a_run_that_learned_nothing_writes_no_page(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(e.to_line(next(fake_run())))
    said: list[str] = []
    write_own_report(tmp_path, said.append, limit_s=60.0)
    assert said == [] and not (tmp_path / "report.html").exists()


def test_where_the_page_goes_can_be_chosen(made: Path, tmp_path: Path) -> None:
    assert write_report([made], tmp_path / "page.html") == tmp_path / "page.html"
    with pytest.raises(NoRun, match="--out"):
        write_report([made], tmp_path / "no" / "such" / "folder.html")


def test_the_environment_is_written_down_without_naming_anyone(tmp_path: Path) -> None:
    write_environment(tmp_path)
    found = environment()
    assert {"Python", "system", "processor", "memory", "GPUs", "torch"} <= found.keys()
    assert socket.gethostname() not in found.values()
