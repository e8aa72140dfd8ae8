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
  stops();
  window.addEventListener("resize", stops);

  // ---- while the run trains ----
  let refresh = Number(root.dataset.refresh);
  if (!refresh) return;
  let tag = "";
  let misses = 0;
  const parts = ["#state", "#contents", "main"];

  const swap = (fresh) => {
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
    stops();
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
