"use strict";
/* The page's only script: light and dark, what a chart says under the pointer, and the timeline of a step.
   It reads the numbers that page.py and lanes.py wrote and sets text with textContent alone, never markup. */

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

/* ---- light and dark ---- */

const redraws = [];
function setTheme(theme) {
  root.dataset.theme = theme;
  redraws.forEach((redraw) => redraw());
}
const dark = matchMedia("(prefers-color-scheme: dark)");
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));

/* ---- charts: the values at the x nearest to the pointer ---- */

function placeTip(tip, x, y, within) {
  tip.hidden = false;
  const room = within.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = x + 14 + own.width > room.width ? x - 14 - own.width : x + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(y + 14, room.height - own.height - 4)) + "px";
}

for (const chart of document.querySelectorAll("svg.chart")) {
  const points = JSON.parse(chart.dataset.hover);
  const width = chart.viewBox.baseVal.width;
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", chart.dataset.top);
  cross.setAttribute("y2", chart.dataset.bottom);
  cross.style.display = "none";
  chart.append(cross);
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    const nearest = points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    cross.setAttribute("x1", nearest[0]);
    cross.setAttribute("x2", nearest[0]);
    cross.style.display = "";
    const tip = $("tip");
    tip.textContent = [nearest[1], ...nearest[2].map((row) => (row[1] ? row[1] + ": " : "") + row[2])].join("\n");
    placeTip(tip, event.clientX + scrollX, event.clientY + scrollY, document.body);
  });
  chart.addEventListener("pointerleave", () => { cross.style.display = "none"; $("tip").hidden = true; });
}

/* ---- timeline ---- */

const KINDS = ["prepare", "generate", "tool", "score", "queue", "backward", "retry", "teacher"];
const WORDS = {
  prepare: "sandbox made ready", generate: "generating", tool: "tool running", score: "checker running",
  queue: "waiting for the trainer", backward: "backward", retry: "pause before another attempt", teacher: "teacher scoring",
};

function inWords(ms) {
  if (ms < 1000) return Math.round(ms) + " ms";
  if (ms < 60000) return (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + " s";
  return Math.floor(ms / 60000) + " min " + String(Math.floor(ms / 1000) % 60).padStart(2, "0") + " s";
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function spansOf(flat, texts) {
  const spans = [];
  for (let i = 0, at = 0; i < flat.length; i += 4) {
    const start = at + flat[i + 1];
    at = start + flat[i + 2];
    spans.push({ kind: KINDS[flat[i]], start, end: at, note: texts[flat[i + 3]] });
  }
  return spans;
}

function readStep(told) {
  const lanes = told.lanes.map(([group, id, reward, state, engine, attempts, own, backward, teacher]) => ({
    group, id, reward, state, engine, attempts,
    own: spansOf(own, told.texts), backward: spansOf(backward, told.texts), teacher: spansOf(teacher, told.texts),
  }));
  for (const lane of lanes) {
    const all = [...lane.own, ...lane.backward];
    lane.end = all.reduce((most, span) => Math.max(most, span.end), 0);
    const busy = lane.own.filter((span) => span.kind !== "queue");
    lane.crossed = lane.backward.some((b) => busy.some((s) => s.start < b.end && b.start < s.end));
  }
  const engines = told.engines.map(([name, flat]) => {
    const changes = [];
    for (let i = 0, at = 0; i < flat.length; i += 2) changes.push([(at += flat[i]), flat[i + 1]]);
    return { name, changes, most: changes.reduce((most, change) => Math.max(most, change[1]), 1) };
  });
  const workers = told.workers.map(([name, flat]) => {
    const passes = [];
    for (let i = 0, at = 0; i < flat.length; i += 4) {
      const start = at + flat[i];
      at = start + flat[i + 1];
      passes.push({ start, end: at, tokens: flat[i + 2], rollouts: flat[i + 3] });
    }
    return { name, passes };
  });
  return { ...told, lanes, engines, workers };
}

function timeline() {
  const data = [...document.querySelectorAll(".tl-data")];
  const box = $("tl"), scroll = $("tl-scroll"), head = $("tl-head"), body = $("tl-body"), tip = $("tl-tip");
  const LEFT = 150, RIGHT = 62, AXIS = 24, ENGINE = 40, WORKER = 24, ROW = 13;
  let step = null, order = [], from = 0, until = 1, drag = null, shown = 0;

  const run = () => ($("tl-run") ? $("tl-run").value : data[0].dataset.run);
  const across = (ms) => LEFT + ((ms - from) / (until - from)) * (box.clientWidth - LEFT - RIGHT);
  const timeAt = (x) => from + ((x - LEFT) / (box.clientWidth - LEFT - RIGHT)) * (until - from);
  const headHeight = () => AXIS + step.engines.length * ENGINE + step.workers.length * WORKER + 10;

  function canvas(element, width, height) {
    const scale = devicePixelRatio || 1;
    element.width = Math.round(width * scale);
    element.height = Math.round(height * scale);
    element.style.width = width + "px";
    element.style.height = height + "px";
    const pen = element.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = "12px " + getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    return pen;
  }

  function name(pen, text, y, bold) {
    pen.font = (bold ? "600 " : "") + "12px " + getComputedStyle(document.body).fontFamily;
    let cut = text;
    while (cut && pen.measureText(cut).width > LEFT - 20) cut = cut.slice(0, -2);
    pen.fillText(cut === text ? text : cut + "…", 10, y);
  }

  function bar(pen, start, end, y, height) {
    const x = Math.max(across(start), LEFT), right = Math.min(across(end), box.clientWidth - RIGHT);
    if (right > LEFT && x < box.clientWidth - RIGHT) pen.fillRect(x, y, Math.max(right - x, 0.75), height);
  }

  function marks(pen, height) {
    for (const [span, paint] of [[step.commit, colour("commit")], [step.publish, colour("commit")]]) {
      if (!span) continue;
      pen.globalAlpha = 0.13;
      pen.fillStyle = paint;
      bar(pen, span[0], span[1], 0, height);
      pen.globalAlpha = 1;
    }
  }

  function axis(pen, height) {
    const rough = (until - from) / Math.max(3, (box.clientWidth - LEFT - RIGHT) / 110);
    const size = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 15000, 30000, 60000, 120000, 300000, 600000, 1800000, 3600000]
      .find((candidate) => candidate >= rough) || 7200000;
    for (let at = Math.ceil(from / size) * size; at <= until; at += size) {
      const x = across(at);
      pen.fillStyle = colour("faint");
      pen.fillRect(x, AXIS, 1, height - AXIS);
      pen.fillStyle = colour("soft");
      pen.textAlign = "center";
      const decimals = size < 10 ? 3 : size < 100 ? 2 : size < 1000 ? 1 : 0;
      pen.fillText(at >= 60000 && size >= 1000 ? inWords(at).replace(" 00 s", "") : (at / 1000).toFixed(decimals) + " s", x, AXIS / 2);
    }
    pen.textAlign = "left";
  }

  function drawHead() {
    const height = headHeight(), pen = canvas(head, box.clientWidth, height);
    marks(pen, height);
    axis(pen, height);
    let y = AXIS;
    for (const engine of step.engines) {
      pen.fillStyle = colour("ink");
      name(pen, step.engines.length > 1 ? "engine " + engine.name : "engine", y + ENGINE / 2 - 7, true);
      pen.fillStyle = colour("soft");
      name(pen, "up to " + engine.most + (engine.most === 1 ? " turn" : " turns at once"), y + ENGINE / 2 + 8, false);
      pen.fillStyle = colour("generate");
      engine.changes.forEach(([at, count], index) => {
        const next = index + 1 < engine.changes.length ? engine.changes[index + 1][0] : at;
        const tall = (count / engine.most) * (ENGINE - 10);
        if (count) bar(pen, at, next, y + ENGINE - 4 - tall, tall);
      });
      y += ENGINE;
    }
    for (const worker of step.workers) {
      pen.fillStyle = colour("ink");
      name(pen, step.workers.length > 1 ? "trainer " + worker.name : "trainer", y + WORKER / 2, true);
      for (const pass of worker.passes) {
        pen.fillStyle = colour("backward");
        bar(pen, pass.start, pass.end - (across(pass.end) - across(pass.start) > 3 ? (until - from) / box.clientWidth : 0), y + 3, WORKER - 6);
      }
      pen.fillStyle = colour("commit");
      if (step.commit) bar(pen, step.commit[0], step.commit[1], y + 3, WORKER - 6);
      if (step.publish) bar(pen, step.publish[0], step.publish[1], y + WORKER / 2 - 2, 4);
      y += WORKER;
    }
  }

  function drawBody() {
    const height = Math.min(560, order.length * ROW + 10);
    $("tl-room").style.height = order.length * ROW + 10 + "px";
    const pen = canvas(body, scroll.clientWidth, height);
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 1), last = Math.min(order.length, first + Math.ceil(height / ROW) + 3);
    marks(pen, height);
    for (let index = first; index < last; index++) drawLane(pen, index, index * ROW + 5 - scroll.scrollTop);
  }

  function drawLane(pen, index, y) {
    const lane = order[index], grouped = $("tl-order").value === "group";
    const begins = index === 0 || order[index - 1].group !== lane.group;
    if (grouped && begins) {
      pen.fillStyle = colour("line");
      if (index) pen.fillRect(0, y - 1, box.clientWidth, 1);
    }
    pen.fillStyle = colour("ink");
    if (begins || !grouped) name(pen, step.groups[lane.group][1], y + ROW / 2, false);
    for (const span of lane.own) drawSpan(pen, span, y, lane.crossed);
    pen.fillStyle = colour("backward");
    for (const span of lane.backward) bar(pen, span.start, span.end, lane.crossed ? y + 7 : y + 1, lane.crossed ? 5 : ROW - 3);
    for (const span of lane.teacher) {
      pen.fillStyle = colour("commit");
      bar(pen, span.start, span.end, y + 1, 1.5);
    }
    pen.fillStyle = lane.state === "failed" ? colour("bad") : colour("soft");
    const text = lane.reward !== null ? String(+lane.reward.toPrecision(3)) : lane.state === "failed" ? "× failed" : "";
    pen.fillText(text, box.clientWidth - RIGHT + 6, y + ROW / 2);
    const x = across(lane.end);
    if (lane.state === "skipped" && x > LEFT && x < box.clientWidth - RIGHT) pen.fillText("=", x + 3, y + ROW / 2);
  }

  function drawSpan(pen, span, y, crossed) {
    const tall = crossed ? 6 : ROW - 3;
    switch (span.kind) {
      case "generate": pen.fillStyle = colour("generate"); bar(pen, span.start, span.end, y + 1, tall); break;
      case "tool": pen.fillStyle = colour("tool"); bar(pen, span.start, span.end, y + 1 + tall / 4, tall / 2); break;
      case "score": pen.fillStyle = colour("score"); bar(pen, span.start, span.end, y + 1, tall); break;
      case "retry": pen.fillStyle = colour("bad"); bar(pen, span.start, span.end, y + tall / 2, 2); break;
      default: {
        pen.strokeStyle = colour("wait");
        pen.setLineDash([2, 3]);
        pen.beginPath();
        const x = Math.max(across(span.start), LEFT), right = Math.min(across(span.end), box.clientWidth - RIGHT);
        if (right > x) { pen.moveTo(x, y + tall / 2 + 1); pen.lineTo(right, y + tall / 2 + 1); pen.stroke(); }
        pen.setLineDash([]);
      }
    }
  }

  function draw() {
    if (!step) return;
    drawHead();
    drawBody();
    if (drag && drag.to !== undefined && !drag.moves) {
      for (const element of [head, body]) {
        const pen = element.getContext("2d");
        pen.fillStyle = colour("ink");
        pen.globalAlpha = 0.12;
        pen.fillRect(Math.min(drag.x, drag.to), 0, Math.abs(drag.to - drag.x), element.clientHeight);
        pen.globalAlpha = 1;
      }
    }
  }

  function look(start, end) {
    const least = 20, whole = step.ms || 1;
    const length = Math.min(Math.max(end - start, least), whole);
    from = Math.min(Math.max(0, start), whole - length);
    until = from + length;
    draw();
  }
  const zoom = (factor, x) => {
    const middle = x === undefined ? (from + until) / 2 : timeAt(x);
    look(middle - (middle - from) * factor, middle + (until - middle) * factor);
  };

  function arrange() {
    const by = $("tl-order").value;
    order = [...step.lanes];
    if (by === "end") order.sort((a, b) => a.end - b.end);
    if (by === "reward") order.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    draw();
  }

  async function choose() {
    const mine = ++shown, wanted = $("tl-step").value;
    const found = data.find((each) => each.dataset.run === run() && each.dataset.step === wanted);
    if (!found) return;
    const told = readStep(await unpacked(found.textContent));
    if (mine !== shown) return; // another step was chosen meanwhile
    step = told;
    from = 0;
    until = step.ms || 1;
    scroll.scrollTop = 0;
    document.querySelector(".legend .teacher").hidden = !step.lanes.some((lane) => lane.teacher.length);
    const left = step.left_out ? `, ${step.left_out} more rollouts are not drawn` : "";
    $("tl-facts").textContent = `${step.committed ? "" : "never committed, "}${inWords(step.ms)}, policy version ${step.version}${left}`;
    box.dataset.step = wanted;
    arrange();
  }

  function listSteps() {
    const select = $("tl-step"), steps = data.filter((each) => each.dataset.run === run()).map((each) => each.dataset.step);
    select.replaceChildren(...steps.map((each) => new Option(Number(each) + 1, each)));
    select.value = steps[steps.length - 1];
    choose();
  }
  const stepBy = (offset) => {
    const select = $("tl-step"), index = select.selectedIndex + offset;
    if (index >= 0 && index < select.options.length) { select.selectedIndex = index; choose(); }
  };

  function under(event) {
    const place = box.getBoundingClientRect(), x = event.clientX - place.left, y = event.clientY - place.top;
    const at = timeAt(x), inside = (span) => span.start <= at && at <= span.end;
    if (y < headHeight()) {
      const row = Math.floor((y - AXIS - step.engines.length * ENGINE) / WORKER);
      const pass = y > AXIS && step.workers[row] ? step.workers[row].passes.find(inside) : null;
      if (pass) return `pass over ${pass.rollouts} rollout${pass.rollouts === 1 ? "" : "s"}, ${pass.tokens} tokens\n${inWords(pass.end - pass.start)} from ${inWords(pass.start)}`;
      const engine = step.engines[Math.floor((y - AXIS) / ENGINE)];
      if (engine && y > AXIS) {
        const before = engine.changes.filter((change) => change[0] <= at).pop();
        return `engine ${engine.name}: ${before ? before[1] : 0} turns being generated`;
      }
      return null;
    }
    const lane = order[Math.floor((y - headHeight() - 6 + scroll.scrollTop) / ROW)];
    if (!lane) return null;
    const group = step.groups[lane.group];
    const lines = [`${group[1]} · ${lane.id}${lane.reward !== null ? " · reward " + lane.reward : ""}${lane.attempts > 1 ? ` · ${lane.attempts} attempts` : ""}`];
    for (const span of [...lane.own, ...lane.backward, ...lane.teacher].filter(inside)) {
      lines.push(`${WORDS[span.kind]}, ${inWords(span.end - span.start)} from ${inWords(span.start)}`);
      if (span.note) lines.push(span.note);
    }
    if (lines.length === 1) lines.push(lane.state === "skipped" ? "no backward: its advantage is zero" : lane.state === "failed" ? "its world failed" : "");
    return lines.join("\n");
  }

  box.addEventListener("pointermove", (event) => {
    if (!step) return;
    const place = box.getBoundingClientRect(), x = event.clientX - place.left;
    if (drag) {
      drag.to = x;
      if (drag.moves) { const by = timeAt(drag.x) - timeAt(x); drag.x = x; look(from + by, until + by); } else draw();
      tip.hidden = true;
      return;
    }
    const text = under(event);
    tip.hidden = !text;
    if (text) { tip.textContent = text; placeTip(tip, x, event.clientY - place.top, box); }
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  box.addEventListener("pointerdown", (event) => {
    const x = event.clientX - box.getBoundingClientRect().left;
    if (event.button === 0 && event.pointerType === "mouse" && x < box.clientWidth - 16) drag = { x, moves: event.shiftKey };
  });
  addEventListener("pointerup", () => {
    const was = drag;
    drag = null;
    if (was && was.to !== undefined && !was.moves && Math.abs(was.to - was.x) > 6) {
      look(timeAt(Math.min(was.x, was.to)), timeAt(Math.max(was.x, was.to)));
    } else if (was) draw();
  });
  box.addEventListener("dblclick", () => look(0, step.ms));
  box.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, event.clientX - box.getBoundingClientRect().left);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const by = (event.deltaX / box.clientWidth) * (until - from);
      look(from + by, until + by);
    }
  }, { passive: false });
  box.addEventListener("keydown", (event) => {
    const by = (until - from) / 6;
    const keys = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => look(0, step.ms),
      ArrowLeft: () => look(from - by, until - by), ArrowRight: () => look(from + by, until + by),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  scroll.addEventListener("scroll", () => step && drawBody());
  addEventListener("resize", draw);
  $("tl-in").addEventListener("click", () => zoom(0.6));
  $("tl-out").addEventListener("click", () => zoom(1 / 0.6));
  $("tl-all").addEventListener("click", () => look(0, step.ms));
  $("tl-previous").addEventListener("click", () => stepBy(-1));
  $("tl-next").addEventListener("click", () => stepBy(1));
  $("tl-step").addEventListener("change", choose);
  $("tl-order").addEventListener("change", arrange);
  if ($("tl-run")) $("tl-run").addEventListener("change", listSteps);
  redraws.push(draw);
  listSteps();
}
if ($("tl")) timeline();
