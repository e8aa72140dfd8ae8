"use strict";
(() => {
  const root = document.documentElement;

  // ---- light and dark ----
  const theme = document.getElementById("theme");
  const kept = "memfit-theme";
  const apply = (value) => {
    if (value === "light" || value === "dark") root.dataset.theme = value;
    else delete root.dataset.theme;
  };
  let chosen = "auto";
  try { chosen = localStorage.getItem(kept) || "auto"; } catch { /* a file may have no storage */ }
  apply(chosen);
  theme.value = root.dataset.theme || "auto";
  theme.closest("label").hidden = false;
  theme.addEventListener("change", () => {
    apply(theme.value);
    try { localStorage.setItem(kept, theme.value); } catch { /* then for this time only */ }
  });

  // ---- what scrolls sideways is a stop for the keyboard, what does not is none ----
  const stops = () => {
    for (const box of document.querySelectorAll(".scroll")) {
      if (box.scrollWidth > box.clientWidth) {
        box.tabIndex = 0;
        box.setAttribute("role", "region");
      } else {
        box.removeAttribute("tabindex");
        box.removeAttribute("role");
      }
    }
  };
  // Buttons that need this script are hidden until it runs.
  const ready = () => {
    stops();
    for (const button of document.querySelectorAll(".copy")) button.hidden = false;
  };
  ready();
  window.addEventListener("resize", stops);

  // ---- copy buttons ----
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* a file, or a browser that asks first: the older way */ }
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".copy");
    if (!button || !(await copied(button.dataset.copy))) return;
    const word = button.dataset.word || button.textContent;
    button.dataset.word = word;
    button.textContent = button.dataset.done;
    setTimeout(() => { button.textContent = word; }, 1500);
  });

  // ---- the values of a curve under the pointer ----
  const read = new WeakMap();
  const made = (name, css, text) => {
    const element = document.createElement(name);
    if (css) element.className = css;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const drawn = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const short = (value) => String(Number(value.toPrecision(4)));
  let shown = null;
  const hide = () => {
    if (shown) for (const one of shown) one.remove();
    shown = null;
  };
  const heading = (figure, chart, x) => {
    const said = (word, value) => word.replace(/\{\w+\}/, short(value));
    const { step, epoch } = figure.dataset;
    if (chart.by_epoch) return said(epoch, x);
    const both = chart.epoch ? ` · ${said(epoch, Math.round((1000 * x) / chart.epoch) / 1000)}` : "";
    return step.replace(/\{\w+\}/, Math.round(x)) + both;
  };
  const point = (event) => {
    hide();
    const figure = event.target.closest?.("figure[data-hover]");
    const svg = figure?.querySelector("svg");
    if (!svg) return;
    if (!read.has(figure)) read.set(figure, JSON.parse(figure.dataset.hover));
    const chart = read.get(figure);
    const frame = svg.getBoundingClientRect();
    const scale = frame.width / svg.viewBox.baseVal.width;
    const [left, top, right, bottom] = chart.box;
    const at = [(event.clientX - frame.left) / scale, (event.clientY - frame.top) / scale];
    if (at[0] < left - 6 || at[0] > right + 6 || at[1] < top - 12 || at[1] > bottom + 12) return;
    const place = ([x, y]) => [
      left + ((x - chart.x[0]) / (chart.x[1] - chart.x[0])) * (right - left),
      bottom - ((y - chart.y[0]) / (chart.y[1] - chart.y[0])) * (bottom - top),
    ];
    const nearest = (points, x) => points.reduce(
      (best, one) => (Math.abs(place(one)[0] - x) < Math.abs(place(best)[0] - x) ? one : best));
    const found = chart.lines.map((line) => nearest(line.points, at[0]));
    const here = nearest(found, at[0]);
    const x = place(here)[0];
    const marks = drawn("g", { "pointer-events": "none" });
    marks.append(drawn("line", { x1: x, x2: x, y1: top, y2: bottom, stroke: "currentColor", "stroke-opacity": 0.5 }));
    const tip = made("div", "tip");
    tip.append(made("p", "", heading(figure, chart, here[0])));
    chart.lines.forEach((line, index) => {
      const [px, py] = place(found[index]);
      if (Math.abs(px - x) > 4) return;
      const colour = `var(--${line.css.split(" ")[0]})`;
      marks.append(drawn("circle", { cx: px, cy: py, r: 3, style: `fill: ${colour}` }));
      const row = made("p");
      row.append(made("span", `swatch ${line.css}`), `${line.name} `, made("b", "", `${short(found[index][1])} ${chart.unit}`.trim()));
      tip.append(row);
    });
    svg.append(marks);
    figure.append(tip);
    shown = [marks, tip];
    const offset = svg.offsetTop || frame.top - figure.getBoundingClientRect().top;
    const room = figure.clientWidth - tip.offsetWidth;
    const beside = x * scale + 12 > room ? x * scale - tip.offsetWidth - 12 : x * scale + 12;
    tip.style.left = `${Math.max(0, Math.min(beside, room))}px`;
    tip.style.top = `${offset + top * scale}px`;
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", hide, { passive: true });

  // ---- a sentence for the model ----
  const trial = document.getElementById("trial");
  if (trial) {
    const [answer, scores] = ["answer", "scores"].map((id) => document.getElementById(id));
    let loaded = false;
    trial.hidden = false;
    trial.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      trial.requestSubmit();
    });
    trial.addEventListener("submit", async (event) => {
      event.preventDefault();
      const button = trial.querySelector("button");
      button.disabled = true;
      scores.replaceChildren();
      answer.className = "";
      answer.textContent = loaded ? answer.dataset.asking : answer.dataset.loading;
      let said;
      try {
        const sent = await fetch(location.href, {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body: JSON.stringify(Object.fromEntries(new FormData(trial))),
        });
        said = await sent.json();
      } catch {
        said = { error: answer.dataset.gone };
      }
      button.disabled = false;
      if (said.error) {
        answer.className = "bad";
        answer.textContent = said.error;
        return;
      }
      loaded = true;
      answer.replaceChildren(made("b", "", said.label), ` ${said.by}`);
      for (const one of said.scores) {
        const row = made("li");
        const meter = made("meter");
        meter.value = one.value;
        row.append(made("span", "", one.name), meter, made("span", "", one.shown));
        scores.append(row);
      }
    });
  }

  // ---- while the run trains ----
  let refresh = Number(root.dataset.refresh);
  if (!refresh) return;
  let tag = "";
  let misses = 0;
  const parts = ["#state", "#contents", "#results", "#rest"];

  const swap = (fresh) => {
    // The waiting page has no box yet.
    if (fresh.getElementById("trial") && !trial) return location.reload();
    // A screen reader hears of the end, not of every step.
    const word = fresh.querySelector(".state").textContent;
    if (word !== document.querySelector(".state").textContent) {
      document.getElementById("said").textContent = word;
    }
    const open = [...document.querySelectorAll("details[open][id]")].map((one) => one.id);
    const focused = document.activeElement && document.activeElement.id;
    const top = window.scrollY;
    for (const part of parts) {
      const [here, there] = [document.querySelector(part), fresh.querySelector(part)];
      if (here && there && here.innerHTML !== there.innerHTML) here.replaceWith(there);
    }
    document.title = fresh.title;
    ready();
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    window.scrollTo({ top, behavior: "instant" });
    refresh = Number(fresh.documentElement.dataset.refresh);
    document.getElementById("updates").hidden = !refresh;
  };

  const look = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, {
          cache: "no-store",
          headers: tag ? { "If-None-Match": tag } : {},
        });
        misses = 0;
        if (answer.status === 200) {
          tag = answer.headers.get("ETag") || "";
          swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
        }
      } catch {
        misses += 1;
      }
    }
    if (misses > 4) {
      document.getElementById("updates").hidden = true;
      document.getElementById("gone").hidden = false;
    } else if (refresh) {
      setTimeout(look, refresh);
    }
  };
  setTimeout(look, refresh);
})();
